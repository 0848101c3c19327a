"""Block ops: ops that read or write slots of the SSD tier, several of their blocks at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind
from flexcache.storage.block_io import Direction
from flexcache.transfer.messages import (
    BlockNames,
    Done,
    Execute,
    pack_checksums,
    unpack_checksums,
    unpack_ids,
)

_READS = (OpKind.DISK2H, OpKind.DISK2D)
_EAGER_READS = 3  # reads go first, but a write gets every fourth turn


@dataclass(slots=True, eq=False)
class BlockOp:
    """How far an op is.

    Attributes:
        blocks: Where the slots' bytes are or go to, outside of the SSD tier.
        expected: Checksums of the blocks to be read.
        checksums: Those of the blocks that were written.
        ok: Which blocks were moved.
        names: Names of the blocks, if they are to be recorded.
        device_bytes: What its I/O has moved on the device.
        bad_block: The first block at fault itself.
        is_void: Whether none of its blocks counts as moved, even if I/O in flight succeeds.
    """

    op_id: int
    task_id: int
    direction: Direction
    slots: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    expected: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    ok: npt.NDArray[np.bool_]
    names: BlockNames | None = None
    next_block: int = 0
    in_flight: int = 0
    device_bytes: int = 0
    dropped: bool = False
    bad_block: int | None = None
    is_void: bool = False
    error: str | None = None

    @classmethod
    def of(cls, message: Execute) -> BlockOp:
        """Make the op that a message asks for."""
        is_read = message.kind in _READS
        src, dst = unpack_ids(message.src), unpack_ids(message.dst)
        return cls(
            message.op_id,
            message.task_id,
            Direction.READ if is_read else Direction.WRITE,
            slots=src if is_read else dst,
            blocks=dst if is_read else src,
            expected=unpack_checksums(message.checksums),
            checksums=np.zeros(len(src), dtype=np.uint64),
            ok=np.zeros(len(src), dtype=np.bool_),
            names=message.names,
        )

    def check(self, place: str, num_blocks: int) -> None:
        """Refuse an op that would fail midway.

        Args:
            place: Where its ``blocks`` are; there are ``num_blocks`` of them.

        Raises:
            ValueError: The op is malformed; the message says how.
        """
        num_slots = len(self.slots)
        if len(self.blocks) != num_slots:
            raise ValueError(f"{num_slots} slots, {len(self.blocks)} {place} blocks")
        if self.direction is Direction.READ and len(self.expected) != num_slots:
            raise ValueError(f"{num_slots} slots, {len(self.expected)} checksums")
        if self.names is not None and len(self.names.keys) != num_slots:
            raise ValueError(f"{num_slots} slots, {len(self.names.keys)} keys")
        if (self.slots < 0).any():
            raise ValueError("a slot is negative")
        if ((self.blocks < 0) | (self.blocks >= num_blocks)).any():
            raise ValueError(f"a {place} block is not one of {num_blocks}")

    @property
    def has_more(self) -> bool:
        """Whether another block is to be moved."""
        return not self.dropped and self.next_block < len(self.slots)

    @property
    def is_over(self) -> bool:
        return self.in_flight == 0 and not self.has_more

    @property
    def num_ok(self) -> int:
        """Number of blocks moved, contiguously from the first on."""
        if self.is_void:
            return 0
        return len(self.ok) if self.ok.all() else int(self.ok.argmin())

    def fail(self, error: str) -> None:
        """Fail the op as a whole, whatever became of single blocks."""
        self.is_void = self.dropped = True
        self.error, self.bad_block = error, None

    def begin_next(self) -> int:
        """Begin to move the next block; return its position."""
        position = self.next_block
        self.next_block += 1
        self.in_flight += 1
        return position

    def end(self, position: int, problem: str | None = None, is_bad: bool = True) -> None:
        """Record that a block was moved, or could not be: it is bad, or the way there failed."""
        self.in_flight -= 1
        if problem is None:
            self.ok[position] = True
            return
        where = f"{self.direction.value} of slot {self.slots[position]}"
        self.error = self.error or f"{where}: {problem}"
        # I/O ends in any order: what counts is the first gap.
        if is_bad and (self.bad_block is None or position < self.bad_block):
            self.bad_block = position
        self.dropped = True  # nothing after the gap is useful

    def done(self) -> Done:
        num_ok = self.num_ok
        return Done(
            self.op_id,
            num_ok,
            error=self.error,
            bad_block=self.bad_block == num_ok,
            checksums=b"" if self.direction is Direction.READ else pack_checksums(self.checksums),
            device_bytes=self.device_bytes,
        )


@dataclass(slots=True)
class BlockOpQueue:
    """Ops that have blocks to be moved: reads before writes, which get a turn now and then."""

    reads: deque[BlockOp] = field(default_factory=deque)
    writes: deque[BlockOp] = field(default_factory=deque)
    reads_since_write: int = 0

    def add(self, op: BlockOp) -> None:
        (self.reads if op.direction is Direction.READ else self.writes).append(op)

    def next(self) -> BlockOp | None:
        """Return the op whose next block should be moved."""
        write_first = self.writes and self.reads_since_write >= _EAGER_READS
        for queue in (self.writes, self.reads) if write_first else (self.reads, self.writes):
            while queue and not queue[0].has_more:
                queue.popleft()
            if queue:
                self.reads_since_write = self.reads_since_write + 1 if queue is self.reads else 0
                return queue[0]
        return None
