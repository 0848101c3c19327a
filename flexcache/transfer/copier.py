"""Copiers, which move bytes between KV tensors and the host pool: interface and common parts.

Each implementation satisfies `Copier` structurally, and is imported by `open_copier` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import TaskRevokedError, UnsupportedLayoutError
from flexcache.ids import NUM_WORDS, WORD_BYTES, OpKind
from flexcache.storage.host_pool import HostSegment

if TYPE_CHECKING:
    from flexcache.transfer.cpu_copier import CopyQueue

PIECE_BYTES = 4 << 20
"""Bytes that may be copied between two checks of the words."""
PIECE_RUNS = 128 << 10
"""Most copies of a piece of an op: of some hundred bytes each, if heads are stored apart."""
NEVER_REVOKED = (1 << 64) - 1
"""In place of the task of a promised load; no word reaches it."""


class CopyPermit:
    """Whether a rank may still copy for a task. Used by the thread that drives the rank; compiled
    code looks at its words.

    A rank that hangs or is stopped cannot be asked to release GPU slots; its engine is answered all
    the same and reuses them. So the task is revoked before the answer is sent, in memory that rank,
    server and scheduler share (`protocol.fence`), and the rank checks it before each piece of a
    copy. If the rank resumes, only the pieces that it was copying land late: one of its own
    thread's, and one of each thread that makes queued copies (`cpu_copier`).

        | revoked by the server | revoked by the scheduler |      uint64 each; one writer per word

    A word is a task id: that task and all before it are revoked.

    Args:
        words: The shared words; without them no task is ever revoked.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        if words is None:
            words = memoryview(bytearray(NUM_WORDS * WORD_BYTES)).cast("Q")
        self._words = words
        self.address = int(np.frombuffer(words, np.uint64).ctypes.data)
        """Address of the words, for compiled code."""
        self.task_id = 1
        """The task of the current copy."""

    @property
    def is_revoked(self) -> bool:
        return self.task_id <= max(self._words)

    def check(self) -> None:
        """Raise `TaskRevokedError` if the copy must not continue."""
        if self.task_id <= max(self._words):
            raise TaskRevokedError


EAGER_LOADS = 3
"""Loads that start one after the other before a store has its turn."""


class CopyLane(str, Enum):
    """Ops that begin and are reported in their order, and do not wait for those of other lanes: in
    a queue or on the device."""

    LAYERS = "loads by layer"
    LOADS = "loads"
    STORES = "stores"

    @classmethod
    def of(cls, kind: OpKind, urgent: bool) -> CopyLane:
        if kind is OpKind.D2H:
            return cls.STORES
        return cls.LAYERS if urgent else cls.LOADS


Addresses = npt.NDArray[np.int64]

_NO_BREAKS = np.empty(0, np.int64)


class Runs(NamedTuple):
    """Copies to be made: where to, where from and how many bytes each; arrays of one length."""

    destinations: Addresses
    sources: Addresses
    sizes: Addresses

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def part(self, rows: slice | Addresses | npt.NDArray[np.bool_]) -> Runs:
        """Return some of the copies."""
        return Runs(self.destinations[rows], self.sources[rows], self.sizes[rows])

    def joined(self, breaks: Addresses = _NO_BREAKS) -> Runs:
        """Join copies into as few as their order allows.

        A copy joins the one before it in the list if it continues exactly where that one ends, on
        both sides. O(n), without a loop in Python.

        Args:
            breaks: Addresses, on either side, that no joined copy may cross.
        """
        # An engine that keeps all layers of a block together has one copy per block, and blocks of
        # one prompt are often neighbours both in its pool and in ours. With a tensor per layer
        # nothing can be joined, since our blocks keep layers together: the first line finds that.
        to, start, sizes = self
        joins = start[1:] == start[:-1] + sizes[:-1]
        if joins.any():
            joins &= to[1:] == to[:-1] + sizes[:-1]
        if len(breaks) and joins.any():
            joins &= ~(np.isin(to[1:], breaks) | np.isin(start[1:], breaks))
        if not joins.any():
            return self
        heads = np.flatnonzero(np.concatenate(([True], ~joins)))
        return Runs(to[heads], start[heads], np.add.reduceat(sizes, heads))


class ComputePoint(Protocol):
    """A point in the device's work. Satisfied by `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether everything before the point is done."""

    def wait(self) -> None:
        """Make the calling thread's later work on the device run after the point."""


class Copier(Protocol):
    """Moves bytes between address lists on one kind of device."""

    @property
    def numa_node(self) -> int | None:
        """The NUMA node next to the device; None if it is unknown or makes no difference."""

    @property
    def wakes(self) -> bool:
        """Whether the thread that starts copies is woken when they have landed; else it asks."""

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        """Prepare the host pool for copies. This may take long, with a sign of life at each step.

        If it raises, it has undone everything.

        Raises:
            FlexCacheError: No way of copying works here; the message says why.
        """

    def fence(self) -> ComputePoint | None:
        """Return the point that the engine's compute has reached: on the calling thread, if it is
        the engine's; or else on the stream that was current when the tensors were lent."""

    def start(
        self, runs: Runs, kind: OpKind, after: ComputePoint | None, urgent: bool = False,
        alone: bool = False,
    ) -> ComputePoint | None:  # fmt: skip
        """Start the copies; return the point at which they have landed, or None if they are done.

        Args:
            urgent: A load by layer, which does not queue behind other loads.
            alone: Nothing else is in flight, or about to be started.

        Raises:
            DeviceLostError: No copy will succeed any more.
            RuntimeError: These copies failed. None of them is in flight.
        """

    def may_start(self, kind: OpKind, after: ComputePoint | None) -> bool:
        """Whether `start` would not wait, on the calling thread, until ``after`` is past, and the
        copier takes more."""

    def queue(self, kind: OpKind) -> CopyQueue | None:
        """Return where `start` of a copy that is neither urgent nor alone would only put it, for a
        thread that needs no interpreter lock; None if it would not."""

    def close(self) -> None:
        """Wait for copies in flight and release the host pool. Never raises. Idempotent."""


def open_copier(
    device: torch.device,
    permit: CopyPermit | None = None,
    engine_stream: torch.Stream | None = None,
    landed: int | None = None,
) -> Copier:
    """Open the copier for a device's memory.

    Args:
        permit: Checked between pieces of a copy that a processor makes. Copies queued on a GPU
            cannot be recalled; they complete even if the process is stopped.
        engine_stream: The stream of a GPU that the engine computes on; None for its default stream.
        landed: An eventfd that a copier which `wakes` writes when queued copies have landed; None:
            none does.

    Raises:
        UnsupportedLayoutError: There is no copier for this device.
    """
    # Imported here: a process needs one of them, and each imports a compiler.
    if device.type == "cuda":
        from flexcache.transfer.cuda_copier import CudaCopier

        return CudaCopier(device, engine_stream)
    if device.type == "cpu":
        from flexcache.transfer.cpu_copier import CpuCopier

        return CpuCopier(permit, landed)
    raise UnsupportedLayoutError(f"KV tensors on {device} cannot be moved, only on cpu or cuda")
