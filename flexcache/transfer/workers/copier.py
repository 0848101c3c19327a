"""Interface of copiers, which move bytes between KV tensors and the host pool on one device kind.

The implementations do not import this module; each satisfies `Copier` structurally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import UnsupportedLayoutError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.permit import CopyPermit

Addresses = npt.NDArray[np.int64]


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
        from flexcache.transfer.workers.copy_cuda import CudaCopier

        return CudaCopier(device, engine_stream)
    if device.type == "cpu":
        from flexcache.transfer.workers.copy_cpu import CpuCopier

        return CpuCopier(permit, landed)
    raise UnsupportedLayoutError(f"KV tensors on {device} cannot be moved, only on cpu or cuda")
