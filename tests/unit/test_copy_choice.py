"""Costs fitted to the times of a device with known speed."""

from __future__ import annotations

from functools import partial

import pytest

from flexcache.transfer.workers.copy_choice import (
    PROBES,
    CopyChoice,
    CopyCost,
    measure_costs,
)

ENGINE = CopyCost(start_s=8e-6, run_s=0.6e-6, byte_s=1 / 55e9)
KERNEL = CopyCost(start_s=40e-6, run_s=0.01e-6, byte_s=1 / 50e9)


class Device:
    """A device that takes exactly its configured time, and longer the first time."""

    def __init__(self, cost: CopyCost) -> None:
        self.cost = cost
        self.now = 100.0
        self.seen: set[tuple[int, int]] = set()

    def copy(self, count: int, size: int) -> None:
        if (count, size) not in self.seen:
            self.now += 3.0
        self.seen.add((count, size))
        self.now += self.cost.estimate(count, count * size)


@pytest.mark.parametrize("cost", [ENGINE, KERNEL])
def test_the_cost_of_a_device_is_measured_without_its_first_run(cost: CopyCost) -> None:
    device = Device(cost)
    found = measure_costs({"only": device.copy}, lambda: device.now)["only"]
    for part in ("start_s", "run_s", "byte_s"):
        assert getattr(found, part) == pytest.approx(getattr(cost, part), rel=1e-3)


@pytest.mark.parametrize("busy", [(100.0, 100.001), (100.002, 100.02), (100.004, 100.05)])
def test_an_engine_that_uses_the_gpu_meanwhile_favours_no_way(busy: tuple[float, float]) -> None:
    """Everything takes ten times as long for a while."""
    first, second = (Device(ENGINE) for _ in range(2))
    first.seen = second.seen = set(PROBES)
    now = 100.0

    def copy(device: Device, count: int, size: int) -> None:
        nonlocal now
        took = device.cost.estimate(count, count * size)
        now += 10 * took if busy[0] <= now < busy[1] else took

    ways = {name: partial(copy, device) for name, device in {"a": first, "b": second}.items()}
    costs = measure_costs(ways, lambda: now)
    assert now > busy[0] + 0.001
    for count, size in PROBES:
        one, other = (cost.estimate(count, count * size) for cost in costs.values())
        assert one == pytest.approx(other, rel=0.01)


def test_a_cost_is_never_negative_however_noisy_the_times() -> None:
    cost = CopyCost.fit((90e-6, 10e-6, 5e-6))
    assert min(cost.start_s, cost.run_s, cost.byte_s) >= 0
    assert len(PROBES) == 3


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
    quicker = CopyCost(ENGINE.start_s * 0.9, ENGINE.run_s * 0.9, ENGINE.byte_s * 0.9)
    assert not CopyChoice(ENGINE, quicker).prefers_kernel(4096, 4096 * 4096)


def test_a_driver_that_takes_copies_one_by_one_leaves_more_to_the_kernel() -> None:
    one_by_one = CopyCost(8e-6, 6e-6, 1 / 55e9)
    assert not CopyChoice(ENGINE, KERNEL).prefers_kernel(1000, 1000 * 256 << 10)
    assert CopyChoice(one_by_one, KERNEL).prefers_kernel(1000, 1000 * 256 << 10)


@pytest.mark.parametrize(
    ("speeds", "programs"),
    [({4: 20, 8: 40, 12: 54}, 12), ({4: 30, 8: 50, 12: 52}, 8), ({4: 54, 8: 55, 12: 55}, 4)],
)
def test_the_kernel_gets_no_more_programs_than_it_needs(
    speeds: dict[int, int], programs: int
) -> None:
    kernels = {n: CopyCost(0.0, 0.0, 1 / (speed * 1e9)) for n, speed in speeds.items()}
    choice = CopyChoice.of(ENGINE, kernels)
    assert (choice.programs, choice.kernel) == (programs, kernels[programs])
