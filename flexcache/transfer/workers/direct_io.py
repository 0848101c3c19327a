"""Interface of direct I/O: bytes between a rank's KV tensors and files, past the host pool.

The implementations do not import this module; each satisfies `DirectIO` structurally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from flexcache.errors import NoDirectPathError
from flexcache.transfer.workers.copier import Copier
from flexcache.transfer.workers.direct_transfer import Transfer, Transferred
from flexcache.transfer.workers.permit import CopyPermit

_MAX_IN_FLIGHT = 32
_MAX_BYTES = 16 << 20  # in flight: enough to keep an SSD busy, in the engine's own process


class DirectIO(Protocol):
    """Moves blocks, up to ``depth`` at once. Used by one thread.

    Attributes:
        through_host: Why the bytes go through host memory all the same; "" if they do not.
    """

    depth: int
    through_host: str

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers. The caller keeps no more than ``depth`` unfinished, and starts them only
        when the engine's compute is done with their blocks."""

    def reap(self) -> list[Transferred]:
        """Return what has ended since the last call. Never blocks."""

    def close(self) -> None:
        """Wait for transfers in flight and release everything. Never raises. Idempotent."""


def open_direct_io(
    device: torch.device, copier: Copier, fds: Sequence[int], block_bytes: int, permit: CopyPermit
) -> DirectIO:
    """Open direct I/O for a device's memory.

    Args:
        copier: The attached copier of the device.
        fds: The files that transfers will name.
        block_bytes: The length of a transfer.
        permit: To be checked, for a transfer's task, before its bytes are put into KV tensors.

    Raises:
        NoDirectPathError: There is none on this machine, or not for this device.
    """
    depth = max(2, min(_MAX_IN_FLIGHT, _MAX_BYTES // block_bytes))
    if device.type == "cpu":
        from flexcache.transfer.workers.direct_cpu import CpuDirectIO

        return CpuDirectIO(block_bytes, depth, permit)
    if device.type == "cuda":
        from flexcache.transfer.workers.copy_cuda import CudaCopier
        from flexcache.transfer.workers.direct_cuda import CudaDirectIO

        assert isinstance(copier, CudaCopier)
        return CudaDirectIO(device, copier, fds, block_bytes, depth, permit)
    raise NoDirectPathError(f"blocks on {device.type} cannot go past DRAM")
