"""Checksums of the blocks in the SSD tier's slots: what a read from there is verified against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexcache.cache.restore import Records
from flexcache.ids import OpKind
from flexcache.transfer.scheduler import TransferOp

Checksums = npt.NDArray[np.uint64]

_READ_OR_RECORDED = (OpKind.DISK2H, OpKind.DISK2D, OpKind.COMMIT)
_WRITTEN = (OpKind.H2DISK, OpKind.D2DISK)


class SlotChecksums:
    """One checksum per slot, as reported by the write that filled the slot."""

    def __init__(self, num_slots: int) -> None:
        self._by_slot: Checksums = np.zeros(num_slots, dtype=np.uint64)

    def expected(self, op: TransferOp) -> Checksums | None:
        """What the blocks that an op reads or records must add up to; None for other ops."""
        if op.kind in _READ_OR_RECORDED and op.src is not None:
            return self._by_slot[op.src]
        return None

    def record(self, op: TransferOp, checksums: Checksums) -> int | None:
        """Keep what a write reported; how many of its blocks that covers, None if no SSD write."""
        if op.kind not in _WRITTEN or op.dst is None:
            return None
        count = min(len(checksums), len(op.dst))
        self._by_slot[op.dst[:count]] = checksums[:count]
        return count

    def restore(self, records: Records) -> None:
        """Take over the checksums of slots that an earlier process has filled."""
        self._by_slot[records["slot"]] = records["checksum"]
