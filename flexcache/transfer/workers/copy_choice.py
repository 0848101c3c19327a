"""Chooses between the copy engine and the kernel for an op, by the measured cost of each.

No fixed threshold would do: the crossover depends on the GPU, its link, the driver and the number
of copies. So both are timed when a rank attaches, for some tens of milliseconds, and an op uses the
one that should finish sooner. They take turns, since an engine may be using the GPU meanwhile. The
kernel must be clearly quicker, because it takes multiprocessors from the model.

An engine that attaches has not begun to serve, so what was found then is looked at once more, on
ops that are to be made anyway (`CopyReview`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import TypeVar

import numpy as np

# (copies, bytes of each). The first is for the cost of starting; the others for that of a copy, by
# its size. No line through two sizes tells it: on an H200 the engine takes 3.3 us for a copy of
# 16 KiB, 1.1 for one of 32, and 1.6 for one of 64. Probes of 4 MiB took 0.1 ms, which was noise.
PROBES = ((1, 4 << 10), (2048, 4 << 10), (1024, 16 << 10), (256, 64 << 10), (64, 256 << 10))
SIZES = tuple(size for _, size in PROBES[1:])
PROBE_BYTES = max(count * size for count, size in PROBES)
_ROUNDS = 5
_WARM_UP_S = 0.02  # of copies: an idle link sleeps, and idle clocks are low
_CLEARLY_QUICKER = 0.9
"""On an H200 four programs, of 132 multiprocessors, copy runs of 64 KiB at 51 GB/s; the engine at
40. At 128 KiB it is 51 to 46, and the engine is left to it."""
_NEARLY_AS_QUICK = 1.1
_REVIEW_AFTER_S = 1.0
_REVIEW_OPS = 8


Way = TypeVar("Way")


class CopyWay(Enum):
    """How an op is copied: by a copy engine, in one batch or copy by copy, or by a kernel."""

    BATCH = "batched copy"
    SINGLE = "single copies"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of a list of copies, in seconds: that of starting, and that of each copy by its size.

    Attributes:
        run_s: For each of the `SIZES`. In between it lies on a line; a larger copy costs as much
            for each byte, and a smaller one as much.
    """

    start_s: float
    run_s: tuple[float, ...]

    def estimate(self, num_runs: int, num_bytes: int) -> float:
        size = num_bytes / num_runs
        run_s = float(np.interp(size, SIZES, self.run_s))
        return self.start_s + num_runs * run_s * max(1.0, size / SIZES[-1])

    def scaled(self, factor: float) -> CopyCost:
        return CopyCost(self.start_s * factor, tuple(each * factor for each in self.run_s))

    @classmethod
    def fit(cls, seconds: tuple[float, ...]) -> CopyCost:
        """Fit the cost to the times of the `PROBES`; no part of it is negative."""
        one_s, *many_s = seconds
        counts = [count for count, _ in PROBES[1:]]
        start_s = max(0.0, one_s - many_s[0] / counts[0])
        run_s = (max(0.0, each - start_s) / n for each, n in zip(many_s, counts, strict=True))
        return cls(start_s, tuple(run_s))


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """Costs of copy engine and kernel in one direction.

    Attributes:
        programs: Number of the kernel's programs, each of which takes a multiprocessor.
    """

    engine: CopyCost
    kernel: CopyCost
    programs: int = 1

    @classmethod
    def of(cls, engine: CopyCost, kernels: Mapping[int, CopyCost]) -> CopyChoice:
        """Choose the fewest programs that are nearly as quick as the quickest, with as many bytes
        in copies of each size."""

        def seconds(cost: CopyCost) -> float:
            return sum(cost.estimate(PROBE_BYTES // size, PROBE_BYTES) for size in SIZES)

        enough = min(map(seconds, kernels.values())) * _NEARLY_AS_QUICK
        programs = min(number for number, cost in kernels.items() if seconds(cost) <= enough)
        return cls(engine, kernels[programs], programs)

    def prefers_kernel(self, num_runs: int, num_bytes: int) -> bool:
        """Whether the kernel is clearly quicker."""
        engine_s = self.engine.estimate(num_runs, num_bytes)
        kernel_s = self.kernel.estimate(num_runs, num_bytes)
        return kernel_s < _CLEARLY_QUICKER * engine_s


@dataclass(slots=True)
class CopyReview:
    """A choice in one direction that is corrected once, by ops that are to be made anyway.

    When these have taken a second, some are made in each way in turns, and timed by the device.
    Both ways are right, so no copy is made for it, and none of the scratch memory is needed.
    """

    choice: CopyChoice
    _estimated_s: float = 0.0
    """How long the ops so far should have taken."""
    _num_tried: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Ops that were to be timed: by the kernel, and by the engine."""
    _factors: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """How many times as long as estimated each of them took."""

    @property
    def is_trying(self) -> bool:
        """Whether the next op is to be timed, in the way that `choose` returns."""
        is_due = self._estimated_s >= _REVIEW_AFTER_S
        return is_due and min(self._num_tried.values()) < _REVIEW_OPS

    def choose(self, num_runs: int, num_bytes: int) -> bool:
        """Choose the way of an op that is made now; return whether it is the kernel."""
        by_kernel = self.choice.prefers_kernel(num_runs, num_bytes)
        if self.is_trying:
            by_kernel = self._num_tried[True] <= self._num_tried[False]
            self._num_tried[by_kernel] += 1
        self._estimated_s += self._cost(by_kernel).estimate(num_runs, num_bytes)
        return by_kernel

    def took(self, by_kernel: bool, num_runs: int, num_bytes: int, seconds: float) -> bool:
        """Record how long the device took for an op. Returns whether this was the last one: then
        the choice is corrected."""
        estimated_s = self._cost(by_kernel).estimate(num_runs, num_bytes)
        self._factors[by_kernel].append(seconds / estimated_s)
        if sum(map(len, self._factors.values())) < 2 * _REVIEW_OPS:
            return False
        engine = self.choice.engine.scaled(median(self._factors[False]))
        kernel = self.choice.kernel.scaled(median(self._factors[True]))
        self.choice = replace(self.choice, engine=engine, kernel=kernel)
        return True

    def _cost(self, by_kernel: bool) -> CopyCost:
        return self.choice.kernel if by_kernel else self.choice.engine


def measure_costs(
    ways: Mapping[Way, Callable[[int, int], object]],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Way, CopyCost]:
    """Time ways of copying on the `PROBES`, in turns, once the device is awake.

    Args:
        ways: Each makes this many copies of this many bytes and waits until they have landed.
    """
    for copy in ways.values():
        for probe in PROBES:
            copy(*probe)  # the first call may compile or allocate something
    began = clock()
    while clock() - began < _WARM_UP_S:
        for copy in ways.values():
            copy(*PROBES[-1])
    best: dict[Way, list[float]] = {way: [] for way in ways}
    for probe in PROBES:
        times: dict[Way, list[float]] = {way: [] for way in ways}
        for _ in range(_ROUNDS):
            for way, copy in ways.items():
                started = clock()
                copy(*probe)
                times[way].append(clock() - started)
        for way, each in times.items():
            best[way].append(min(each))
    return {way: CopyCost.fit(tuple(seconds)) for way, seconds in best.items()}
