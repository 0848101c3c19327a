"""Interface of copiers, which move bytes between KV tensors and the host pool on one device kind.

The implementations do not import this module; each satisfies `Copier` structurally.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import TaskRevokedError, UnsupportedLayoutError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment

# ------------------------------------------------------------------------------------------------
# CopyPermit: whether a rank may still copy for a task.
#
# A rank that hangs or is stopped cannot be asked to release GPU slots; its engine is answered all
# the same and reuses them. So the task is revoked before the answer is sent, in memory that rank,
# server and scheduler share (`protocol.fence`), and the rank checks it before each piece of a copy.
# If the rank resumes, only the pieces that it was copying land late: one of its own thread's, and
# one of each thread that makes queued copies (`cpu_copier`).
#
#     | revoked by the server | revoked by the scheduler |      uint64 each; one writer per word
#
# A word is a task id: that task and all before it are revoked.

PIECE_BYTES = 4 << 20
"""Bytes that may be copied between two checks of the words."""
NEVER_REVOKED = (1 << 64) - 1
"""In place of the task of a promised load; no word reaches it."""
NUM_WORDS = 2
WORD_BYTES = 8


class CopyPermit:
    """One rank's permit. Used by the thread that drives the rank; compiled code looks at its words.

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
        if self.is_revoked:
            raise TaskRevokedError


# ------------------------------------------------------------------------------------------------
# Lanes: what keeps the order in which copies begin on a rank's device.
#
# Stores, loads, and loads by layer do not come behind each other, in a queue or on the device.

EAGER_LOADS = 3
"""Loads that start one after the other before a store has its turn."""


class Lane(str, Enum):
    """Ops that begin and are reported in their order, and do not wait for those of other lanes."""

    LAYERS = "loads by layer"
    LOADS = "loads"
    STORES = "stores"

    @classmethod
    def of(cls, kind: OpKind, urgent: bool) -> Lane:
        if kind is OpKind.D2H:
            return cls.STORES
        return cls.LAYERS if urgent else cls.LOADS


# ------------------------------------------------------------------------------------------------
# Joins neighbours in a list of copies into fewer, larger ones, for all ways of copying.
#
# An engine that keeps all layers of a block together has one copy per block, and blocks of one
# prompt are often neighbours both in its pool and in ours. With a tensor per layer nothing can be
# joined, since our blocks keep layers together; detecting that takes three comparisons per copy.

Addresses = npt.NDArray[np.int64]

_NO_BREAKS = np.empty(0, np.int64)


def merge_runs(
    destinations: Addresses, sources: Addresses, sizes: Addresses, breaks: Addresses = _NO_BREAKS
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge copies into as few runs as their order allows: ``(destinations, sources, sizes)``.

    A copy joins the one before it in the list if it continues exactly where that one ends, on both
    sides. O(n), without a loop in Python.

    Args:
        breaks: Addresses, on either side, that no joined run may cross.
    """
    joined = sources[1:] == sources[:-1] + sizes[:-1]
    if joined.any():  # often not: an engine's layers are apart
        joined &= destinations[1:] == destinations[:-1] + sizes[:-1]
    if len(breaks) and joined.any():
        joined &= ~(np.isin(destinations[1:], breaks) | np.isin(sources[1:], breaks))
    if not joined.any():
        return destinations, sources, sizes
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return destinations[heads], sources[heads], np.add.reduceat(sizes, heads)


class Fence(Protocol):
    """A point in the device's work. Satisfied by `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether everything before the point is done."""

    def wait(self) -> None:
        """Make the calling thread's later work on the device run after the point."""


class Queue(Protocol):
    """Copies that other threads make."""

    def settle(self) -> None:
        """Wait until all have ended, those included of which an interrupted call left no record."""


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

    def fence(self) -> Fence | None:
        """Return the point that the engine's compute has reached: on the calling thread, if it is
        the engine's; or else on the stream that was current when the tensors were lent."""

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: Fence | None, urgent: bool = False, alone: bool = False,
    ) -> Fence | None:  # fmt: skip
        """Start the copies; return the point at which they have landed, or None if they are done.

        Args:
            urgent: A load by layer, which does not queue behind other loads.
            alone: Nothing else is in flight, or about to be started.

        Raises:
            DeviceLostError: No copy will succeed any more.
            RuntimeError: These copies failed. None of them is in flight.
        """

    def may_start(self, kind: OpKind, after: Fence | None) -> bool:
        """Whether `start` would not wait, on the calling thread, until ``after`` is past, and the
        copier takes more."""

    def queue(self, kind: OpKind) -> Queue | None:
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
