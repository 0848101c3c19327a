"""Costs fitted to the times of a device with known speed."""

from __future__ import annotations

import pytest

from flexcache.transfer import copy_ways
from flexcache.transfer.copy_ways import PROBES, SIZES, CopyChoice, CopyCost


def linear(start_s: float, run_s: float, byte_s: float) -> CopyCost:
    return CopyCost(start_s, tuple(run_s + size * byte_s for size in SIZES))


ENGINE = linear(start_s=8e-6, run_s=0.6e-6, byte_s=1 / 55e9)
KERNEL = linear(start_s=40e-6, run_s=0.01e-6, byte_s=1 / 50e9)


def of_speeds(start_s: float, *gb_per_s: float) -> CopyCost:
    """Return the cost of copies of 4, 16, 64 and 256 KiB."""
    each = zip(SIZES, gb_per_s, strict=True)
    return CopyCost(start_s, tuple(size / speed / 1e9 for size, speed in each))


H200_ENGINE = of_speeds(8e-6, 3, 4.9, 40.3, 50.3)
H200_KERNEL = of_speeds(12e-6, 47.4, 50.5, 50.8, 50.8)


class Device:
    """A device that takes exactly its configured time, longer the first time, and ten times as
    long until it has copied for ``sleepy_s``."""

    def __init__(self, cost: CopyCost, sleepy_s: float = 0.0) -> None:
        self.cost = cost
        self.sleepy_s = sleepy_s
        self.now = 100.0
        self.seen: set[tuple[int, int]] = set()

    def copy(self, count: int, size: int) -> None:
        if (count, size) not in self.seen:
            self.now += 3.0
        self.seen.add((count, size))
        took = self.cost.estimate(count, count * size)
        if self.sleepy_s > 0:
            took *= 10
            self.sleepy_s -= took
        self.now += took


@pytest.mark.parametrize("cost", [ENGINE, KERNEL, H200_ENGINE])
@pytest.mark.parametrize("sleepy_s", [0.0, 0.02])
def test_the_cost_of_a_device_is_measured_once_it_is_awake(cost: CopyCost, sleepy_s: float) -> None:
    device = Device(cost, sleepy_s)
    found = copy_ways.measure_costs({"only": device.copy}, lambda: device.now)["only"]
    assert (found.start_s, *found.run_s) == pytest.approx((cost.start_s, *cost.run_s), rel=1e-2)


@pytest.mark.parametrize("busy", [(0.0, 0.001), (0.002, 0.02), (0.022, 0.05)])
def test_an_engine_that_uses_the_gpu_meanwhile_favours_no_way(busy: tuple[float, float]) -> None:
    """Everything takes ten times as long for a while."""
    now = 100.0

    def copy(count: int, size: int) -> None:
        nonlocal now
        took = ENGINE.estimate(count, count * size)
        now += 10 * took if busy[0] <= now - 100 < busy[1] else took

    costs = copy_ways.measure_costs({"a": copy, "b": copy}, lambda: now)
    assert now > 100 + busy[0]
    for count, size in PROBES:
        one, other = (cost.estimate(count, count * size) for cost in costs.values())
        assert one == pytest.approx(other, rel=0.01)


def test_a_cost_is_never_negative_however_noisy_the_times() -> None:
    cost = CopyCost.fit((90e-6, 10e-6, 5e-6, 80e-6, 1e-6))
    assert min(cost.start_s, *cost.run_s) >= 0


@pytest.mark.parametrize(
    ("size", "by_kernel"),
    [(2 << 10, True), (16 << 10, True), (64 << 10, True), (128 << 10, False), (2 << 20, False)],
)
def test_on_an_h200_the_kernel_gets_copies_up_to_64_kib(size: int, by_kernel: bool) -> None:
    choice = CopyChoice(H200_ENGINE, H200_KERNEL)
    assert choice.prefers_kernel(2048, 2048 * size) is by_kernel


@pytest.mark.parametrize(
    ("num_runs", "size", "by_kernel"),
    [
        (1, 4096, False),  # starting a kernel takes longer
        (32, 4096, False),
        (512, 4096, True),  # handing over so many takes longer
        (4096, 16 << 10, True),
        (4096, 256 << 10, False),  # the link is what takes the time
        (32, 4 << 20, False),
    ],
)
def test_the_kernel_gets_many_small_copies_and_the_engine_the_rest(
    num_runs: int, size: int, by_kernel: bool
) -> None:
    assert CopyChoice(ENGINE, KERNEL).prefers_kernel(num_runs, num_runs * size) is by_kernel


def test_a_kernel_that_is_hardly_quicker_is_not_worth_its_multiprocessors() -> None:
    quicker = CopyCost(0.9 * ENGINE.start_s, tuple(0.9 * each for each in ENGINE.run_s))
    assert not CopyChoice(ENGINE, quicker).prefers_kernel(4096, 4096 * 4096)


def test_a_driver_that_takes_copies_one_by_one_leaves_more_to_the_kernel() -> None:
    one_by_one = linear(8e-6, 6e-6, 1 / 55e9)
    assert not CopyChoice(ENGINE, KERNEL).prefers_kernel(1000, 1000 * 256 << 10)
    assert CopyChoice(one_by_one, KERNEL).prefers_kernel(1000, 1000 * 256 << 10)


@pytest.mark.parametrize(
    ("speeds", "programs"),
    [({4: 20, 8: 40, 12: 54}, 12), ({4: 30, 8: 50, 12: 52}, 8), ({4: 54, 8: 55, 12: 55}, 4)],
)
def test_the_kernel_gets_no_more_programs_than_it_needs(
    speeds: dict[int, int], programs: int
) -> None:
    kernels = {n: linear(0.0, 0.0, 1 / (speed * 1e9)) for n, speed in speeds.items()}
    choice = CopyChoice.of(ENGINE, kernels)
    assert (choice.programs, choice.kernel) == (programs, kernels[programs])
