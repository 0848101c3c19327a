"""What moves bytes between KV tensors and the host pool, on one kind of device.

The implementations do not import this module; each satisfies `Copier` by its shape.
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
        """Have what the calling thread queues from now on run behind the point."""


class Copier(Protocol):
    """Moves bytes between address lists on one kind of device."""

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        """Get the host pool ready for copies, which may take long: a sign of life meanwhile.

        If it raises, it has undone what it did.

        Raises:
            FlexCacheError: No way of copying works here; says why.
        """

    def fence(self) -> Fence | None:
        """The point that the engine's compute has reached. Called on the engine's thread."""

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: Fence | None,
    ) -> Fence | None:  # fmt: skip
        """Start the copies; None if they are done already.

        Raises:
            DeviceLostError: No copy will succeed any more.
            RuntimeError: These failed. None of them is under way.
        """

    def close(self) -> None:
        """Wait for copies under way and let go of the host pool. Never raises. Idempotent."""


def open_copier(device: torch.device, permit: CopyPermit | None = None) -> Copier:
    """The copier for a device's memory.

    Args:
        permit: Looked at between pieces by a copier whose `start` takes as long as the copy. What a
            GPU has been given cannot be called back, and ends although the process is stopped.

    Raises:
        UnsupportedLayoutError: There is none; names the device.
    """
    # Imported here: a process needs one of them, and each brings a compiler.
    if device.type == "cuda":
        from flexcache.transfer.workers.copy_cuda import CudaCopier

        return CudaCopier(device)
    if device.type == "cpu":
        from flexcache.transfer.workers.copy_cpu import CpuCopier

        return CpuCopier(permit)
    raise UnsupportedLayoutError(f"KV tensors on {device} cannot be moved, only on cpu or cuda")
