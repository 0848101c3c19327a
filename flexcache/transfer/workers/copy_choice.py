"""Whether the copy engine or the kernel is to carry out an op: by what either was seen to take.

No threshold would hold everywhere: where the two cross depends on the GPU, its link, the driver and
the number of copies. So both are timed when a rank attaches, for some milliseconds, and an op goes
where it should end sooner. The kernel has to be clearly quicker, as it takes multiprocessors from
the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

# Copies and bytes of each: what starting takes, then what a copy takes, then what a byte takes.
PROBES = ((1, 4 << 10), (256, 4 << 10), (64, 64 << 10))
PROBE_BYTES = max(count * size for count, size in PROBES)
_ROUNDS = 5
_CLEARLY_QUICKER = 0.8


class CopyWay(Enum):
    """What carries out an op's copies: a copy engine, given all at once or each alone; a kernel."""

    BATCH = "batched copy"
    SINGLE = "single copies"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds that a list of copies takes: ``start + copies * run + bytes * byte``."""

    start_s: float
    run_s: float
    byte_s: float

    def estimate(self, num_runs: int, num_bytes: int) -> float:
        return self.start_s + num_runs * self.run_s + num_bytes * self.byte_s

    @classmethod
    def fit(cls, seconds: tuple[float, float, float]) -> CopyCost:
        """The cost that explains what the three `PROBES` took; no part of it is negative."""
        parts = [[1, count, count * size] for count, size in PROBES]
        fitted = np.linalg.solve(np.array(parts, np.float64), np.array(seconds))
        start_s, run_s, byte_s = np.maximum(fitted, 0).tolist()
        return cls(start_s, run_s, byte_s)


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """What the two take in one direction."""

    engine: CopyCost
    kernel: CopyCost

    def prefers_kernel(self, num_runs: int, num_bytes: int) -> bool:
        """Whether the kernel is clearly quicker."""
        engine_s = self.engine.estimate(num_runs, num_bytes)
        kernel_s = self.kernel.estimate(num_runs, num_bytes)
        return kernel_s < _CLEARLY_QUICKER * engine_s


def measure_cost(
    copy: Callable[[int, int], object], clock: Callable[[], float] = time.perf_counter
) -> CopyCost:
    """Time a way of copying on the `PROBES`.

    Args:
        copy: Makes so many copies of so many bytes and waits until they have landed.
    """
    best: list[float] = []
    for count, size in PROBES:
        times: list[float] = []
        copy(count, size)  # the first may compile, allocate or wake something
        for _ in range(_ROUNDS):
            started = clock()
            copy(count, size)
            times.append(clock() - started)
        best.append(min(times))
    return CopyCost.fit((best[0], best[1], best[2]))
