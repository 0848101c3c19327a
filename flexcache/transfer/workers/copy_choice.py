"""Chooses between the copy engine and the kernel for an op, by the measured cost of each.

No fixed threshold would do: the crossover depends on the GPU, its link, the driver and the number
of copies. So both are timed when a rank attaches, for some milliseconds, and an op uses the one
that should finish sooner. They take turns, since an engine may be using the GPU meanwhile. The
kernel must be clearly quicker, because it takes multiprocessors from the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np

# (copies, bytes of each), chosen to separate the cost of starting, of a copy, and of a byte. On an
# H200 a last probe of 4 MiB took 0.1 ms, and its noise decided how copies of 64 KiB were made.
PROBES = ((1, 4 << 10), (256, 4 << 10), (256, 64 << 10))
PROBE_BYTES = max(count * size for count, size in PROBES)
_ROUNDS = 9
_CLEARLY_QUICKER = 0.9
"""On an H200 four programs, of 132 multiprocessors, copy runs of 64 KiB at 51 GB/s; the engine at
40. At 128 KiB it is 51 to 46, and the engine is left to it."""
_NEARLY_AS_QUICK = 1.1


Way = TypeVar("Way")


class CopyWay(Enum):
    """How an op is copied: by a copy engine, in one batch or copy by copy, or by a kernel."""

    BATCH = "batched copy"
    SINGLE = "single copies"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of a list of copies, in seconds: ``start + copies * run + bytes * byte``."""

    start_s: float
    run_s: float
    byte_s: float

    def estimate(self, num_runs: int, num_bytes: int) -> float:
        return self.start_s + num_runs * self.run_s + num_bytes * self.byte_s

    @classmethod
    def fit(cls, seconds: tuple[float, float, float]) -> CopyCost:
        """Fit the cost to the times of the three `PROBES`; no part of it is negative."""
        parts = [[1, count, count * size] for count, size in PROBES]
        fitted = np.linalg.solve(np.array(parts, np.float64), np.array(seconds))
        start_s, run_s, byte_s = np.maximum(fitted, 0).tolist()
        return cls(start_s, run_s, byte_s)


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
        """Choose the fewest programs that are nearly as quick as the quickest, by the cost of the
        largest probe."""
        count, size = max(PROBES, key=lambda probe: probe[0] * probe[1])
        seconds = {
            programs: cost.estimate(count, count * size) for programs, cost in kernels.items()
        }
        enough = min(seconds.values()) * _NEARLY_AS_QUICK
        programs = min(number for number, each in seconds.items() if each <= enough)
        return cls(engine, kernels[programs], programs)

    def prefers_kernel(self, num_runs: int, num_bytes: int) -> bool:
        """Whether the kernel is clearly quicker."""
        engine_s = self.engine.estimate(num_runs, num_bytes)
        kernel_s = self.kernel.estimate(num_runs, num_bytes)
        return kernel_s < _CLEARLY_QUICKER * engine_s


def measure_costs(
    ways: Mapping[Way, Callable[[int, int], object]],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Way, CopyCost]:
    """Time ways of copying on the `PROBES`, in turns.

    Args:
        ways: Each makes this many copies of this many bytes and waits until they have landed.
    """
    best: dict[Way, list[float]] = {way: [] for way in ways}
    for count, size in PROBES:
        times: dict[Way, list[float]] = {way: [] for way in ways}
        for copy in ways.values():
            copy(count, size)  # the first call may compile, allocate or wake something
        for _ in range(_ROUNDS):
            for way, copy in ways.items():
                started = clock()
                copy(count, size)
                times[way].append(clock() - started)
        for way, each in times.items():
            best[way].append(min(each))
    return {
        way: CopyCost.fit((first, second, third)) for way, (first, second, third) in best.items()
    }
