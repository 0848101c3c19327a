"""Self-test of the ways of copying: each must move a pattern byte for byte, in both directions.

Runs when a rank attaches, in milliseconds, on scratch memory: the host pool may hold blocks of
other engines, and the KV tensors belong to the engine. The scratch memory is of the same kinds: a
segment like the pool's, pinned if the pool is, and a torch tensor.

It proves that this driver, this GPU and our calls move all the bytes asked for and no others, for
one run and for many. It does not prove that every address of the pool works like the scratch memory
(reserved huge pages, for example), that copies stay ordered after the model's work, or that the
device will not fail later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_uint8
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import DeviceLostError, StorageError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_choice import PROBE_BYTES, CopyWay
from flexcache.transfer.workers.copy_driver import CudaDriver
from flexcache.transfer.workers.copy_pin import PinnedSegment

Bytes = npt.NDArray[np.uint8]
Runs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
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
class Scratch:
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
        return target + to, source + start, sizes


@contextmanager
def open_scratch(driver: CudaDriver, device: torch.device, *, pinned: bool) -> Iterator[Scratch]:
    """Make scratch memory for use on the calling thread's current stream. Copies must have ended
    before the context exits."""
    with HostSegment.create(PROBE_BYTES, 1) as segment:
        segment.map()
        pin = PinnedSegment(driver, segment, PROBE_BYTES) if pinned else None
        try:
            memory = (c_uint8 * PROBE_BYTES).from_address(segment.address)
            on_device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
            is_reachable = pin is not None and pin.is_reachable
            yield Scratch(np.ctypeslib.as_array(memory), on_device, is_reachable)
        finally:
            if pin is not None:
                pin.close()


def check_way(way: CopyWay, copy: Copy, scratch: Scratch) -> Verdict:
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


def _find_fault(copy: Copy, scratch: Scratch, kind: OpKind, count: int) -> str:
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
