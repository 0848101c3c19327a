"""Ways of copying on a GPU: the self-test of each, and the choice between them by measured cost.

No fixed threshold would do: the crossover depends on the GPU, its link, the driver and the number
of copies. So both are timed when a rank attaches, for some tens of milliseconds, and an op uses the
one that should finish sooner. They take turns, since an engine may be using the GPU meanwhile. The
kernel must be clearly quicker, because it takes multiprocessors from the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_uint8
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import DeviceLostError, StorageError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import Runs
from flexcache.transfer.cuda_driver import CudaDriver, PinnedSegment

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


# ------------------------------------------------------------------------------------------------
# Self-test of the ways of copying: each must move a pattern byte for byte, in both directions.
#
# Runs when a rank attaches, in milliseconds, on scratch memory: the host pool may hold blocks of
# other engines, and the KV tensors belong to the engine. The scratch memory is of the same kinds: a
# segment like the pool's, pinned if the pool is, and a torch tensor.
#
# It proves that this driver, this GPU and our calls move all the bytes asked for and no others, for
# one run and for many. It does not prove that every address of the pool works like the scratch
# memory (reserved huge pages, for example), that copies stay ordered after the model's work, or
# that the device will not fail later.

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[Runs, OpKind], object]

_KINDS = (OpKind.H2D, OpKind.D2H)
_RUN_COUNTS = (1, 77)  # 77: a kernel's program gets several, and the last tile is not full
_NUM_SLOTS = 128
_SLOT_BYTES = 8 << 10
_WORD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one way of copying.

    Attributes:
        missing: Why it could not be tested; "" if it was.
        failures: The failure in each direction that failed.
    """

    way: CopyWay
    missing: str = ""
    failures: Mapping[OpKind, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.missing and not self.failures

    def __str__(self) -> str:
        if self.missing:
            return f"{self.way.value} not available: {self.missing}"
        said = (f"{kind.name} {self.failures.get(kind, 'passed')}" for kind in _KINDS)
        return f"{self.way.value}: {', '.join(said)}"


@dataclass(frozen=True, slots=True)
class ScratchMemory:
    """Our own memory on the host and on the device, `PROBE_BYTES` each.

    Attributes:
        is_reachable: Whether a kernel may use the host's addresses.
    """

    host: Bytes
    device: torch.Tensor
    is_reachable: bool

    def runs(
        self, kind: OpKind,
        to: npt.NDArray[np.int64], start: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64],
    ) -> Runs:  # fmt: skip
        """Turn offsets into the addresses of copies."""
        host, device = self.host.ctypes.data, self.device.data_ptr()
        target, source = (device, host) if kind is OpKind.H2D else (host, device)
        return Runs(target + to, source + start, sizes)


@contextmanager
def open_scratch(
    driver: CudaDriver, device: torch.device, *, pinned: bool
) -> Iterator[ScratchMemory]:
    """Make scratch memory for use on the calling thread's current stream. Copies must have ended
    before the context exits."""
    with HostSegment.create(PROBE_BYTES, 1) as segment:
        segment.map()
        pin = PinnedSegment(driver, segment, PROBE_BYTES) if pinned else None
        try:
            memory = (c_uint8 * PROBE_BYTES).from_address(segment.address)
            on_device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
            is_reachable = pin is not None and pin.is_reachable
            yield ScratchMemory(np.ctypeslib.as_array(memory), on_device, is_reachable)
        finally:
            if pin is not None:
                pin.close()


def check_way(way: CopyWay, copy: Copy, scratch: ScratchMemory) -> Verdict:
    """Copy patterns in one way.

    Args:
        copy: Makes the copies and waits until they have landed.

    Raises:
        DeviceLostError: The device no longer works.
    """
    failures = {}
    for kind in _KINDS:
        for count in _RUN_COUNTS:
            try:
                fault = _find_fault(copy, scratch, kind, count)
            except DeviceLostError as error:
                raise DeviceLostError(f"{way.value}, {kind.name}: {error}") from error
            except Exception as error:  # the driver's, Triton's, a compiler's
                fault = describe(error)
            if fault:
                failures[kind] = f"failed (runs: {count}): {fault}"
                break
    return Verdict(way, failures=failures)


def passed_ways(verdicts: Sequence[Verdict], device: torch.device) -> list[CopyWay]:
    """Return the ways that passed.

    Raises:
        StorageError: There is none; the message has all results.
    """
    passed = [verdict.way for verdict in verdicts if verdict.passed]
    if not passed:
        said = "; ".join(map(str, verdicts))
        raise StorageError(f"no way of copying to {device} and back works: {said}")
    return passed


def describe(error: Exception) -> str:
    """Put an error on one line, with its class unless it is a plain `RuntimeError`."""
    text = " ".join(str(error).split())
    return text if type(error) is RuntimeError else f"{type(error).__name__}: {text}"


def _find_fault(copy: Copy, scratch: ScratchMemory, kind: OpKind, count: int) -> str:
    """Copy ``count`` runs and describe what is wrong afterwards; "" if nothing is."""
    random = np.random.default_rng(count)
    size = _NUM_SLOTS * _SLOT_BYTES
    pattern = np.frombuffer(random.bytes(size), np.uint8).copy()
    expected = ~pattern
    to, start = (random.permutation(_NUM_SLOTS)[:count] * _SLOT_BYTES for _ in range(2))
    sizes = random.integers(1, _SLOT_BYTES // _WORD_BYTES, count) * _WORD_BYTES
    on_host, on_device = (pattern, expected) if kind is OpKind.H2D else (expected, pattern)
    host, device = scratch.host[:size], scratch.device[:size]
    host[:] = on_host
    device.copy_(torch.from_numpy(on_device))  # torch's own copy, which is not under test
    copy(scratch.runs(kind, to, start, sizes), kind)
    for first, source, length in zip(to.tolist(), start.tolist(), sizes.tolist(), strict=True):
        expected[first : first + length] = pattern[source : source + length]
    found = device.cpu().numpy() if kind is OpKind.H2D else host
    num_wrong = int((found != expected).sum())
    return f"{num_wrong:,} bytes differ" if num_wrong else ""
