"""DirectOps: executes DISK2D and D2DISK of one rank, block by block, past the host pool.

    op --compute is done--> queue --begin--> DirectIO --read: verified, written: summed--> Done

Part of `DeviceWorker`, which keeps ops behind their gates. A block that was not moved ends the
useful part of its op, as in the disk worker; it is called bad only if the file is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from flexcache.errors import InternalError
from flexcache.storage.block_io import Direction
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.messages import Done, Execute
from flexcache.transfer.workers.block_op import BlockOp, BlockOpQueue
from flexcache.transfer.workers.copier import Fence
from flexcache.transfer.workers.direct_io import DirectIO
from flexcache.transfer.workers.direct_transfer import Transfer, Transferred
from flexcache.transfer.workers.permit import CopyPermit


class DirectOps:
    """Keeps direct I/O full with the blocks of the current ops. Used by the rank's thread.

    Every op given to `execute` yields exactly one `Done`, from `advance`, unless the worker that it
    is part of is abandoned.

    Args:
        layout: Of the rank's blocks.
        locate: Returns the file and the offset of the rank's part of a slot.
        length: Bytes of that part.

    Attributes:
        failure: Why it is unknown what has landed, if it is. Nothing may follow but `close`.
    """

    def __init__(
        self,
        layout: BlockLayout,
        locate: Callable[[int], tuple[int, int]],
        length: int,
        io: DirectIO,
        permit: CopyPermit,
    ) -> None:
        self._layout = layout
        self._locate = locate
        self._length = length
        self._io = io
        self._permit = permit
        self.failure: str | None = None
        self._refused: list[Done] = []
        self._behind: list[tuple[BlockOp, Fence]] = []
        """Ops whose blocks the engine's compute may still use."""
        self._queue = BlockOpQueue()
        self._ops: dict[int, BlockOp] = {}
        self._tokens = count()
        self._in_flight: dict[int, tuple[BlockOp, int]] = {}

    @property
    def op_ids(self) -> list[int]:
        """Ops that have not ended."""
        return [*self._ops, *(done.op_id for done in self._refused)]

    def execute(self, message: Execute, after: Fence | None) -> None:
        """Take an op, which starts when the engine's compute has passed ``after``."""
        op = BlockOp.of(message)
        try:
            op.check("GPU", self._layout.num_blocks)
        except ValueError as error:
            self.refuse(op.op_id, f"malformed op: {error}")
            return
        self._ops[op.op_id] = op
        if after is None:
            self._queue.add(op)
        else:
            self._behind.append((op, after))

    def refuse(self, op_id: int, reason: str) -> None:
        """End an op that was not taken, with nothing moved."""
        self._refused.append(Done(op_id, 0, error=reason))

    def drop(self, op_ids: Iterable[int]) -> None:
        """Move no more blocks of these ops. What is in flight ends first."""
        for op_id in op_ids:
            if op_id in self._ops:
                self._ops[op_id].dropped = True

    def fail_all(self, reason: str) -> None:
        """Fail the ops that have not ended, once what is in flight has."""
        for op in self._ops.values():
            op.fail(reason)

    @property
    def is_failing(self) -> bool:
        """Whether some are still in flight after that."""
        return any(op.is_void for op in self._ops.values())

    def advance(self) -> list[Done]:
        """Process what has ended and start more; return the ops that ended. Never blocks."""
        try:
            self._move()
        except Exception as error:  # the driver or its wrapper may raise any class
            self.failure = f"{type(error).__name__}: {error}"
            return []
        done, self._refused = self._refused, []
        for op in [op for op in self._ops.values() if op.is_over]:
            del self._ops[op.op_id]
            done.append(op.done())
        return done

    def _move(self) -> None:
        for ended in self._io.reap():
            op, position = self._in_flight.pop(ended.token)
            op.checksums[position] = ended.checksum
            self._end(op, position, ended)
        self._release()
        self._fill()

    def _end(self, op: BlockOp, position: int, ended: Transferred) -> None:
        op.end(position, ended.error, ended.is_bad)
        is_suspect = ended.error is not None or op.direction is Direction.WRITE
        if is_suspect and self._is_revoked(op):
            # What was written may have been gathered too late.
            op.fail(ended.error or "its task was revoked")

    def _is_revoked(self, op: BlockOp) -> bool:
        self._permit.task_id = op.task_id
        return self._permit.is_revoked

    def _release(self) -> None:
        """Queue the ops whose blocks are no longer used by the engine's compute."""
        behind, self._behind = self._behind, []
        for op, after in behind:
            if op.dropped or after.query():
                self._queue.add(op)
            else:
                self._behind.append((op, after))

    def _fill(self) -> None:
        transfers = []
        while len(self._in_flight) < self._io.depth and (op := self._queue.next()) is not None:
            position, token = op.begin_next(), next(self._tokens)
            self._in_flight[token] = op, position
            transfers.append(self._transfer(token, op, position))
        if transfers:
            self._io.submit(transfers)

    def _transfer(self, token: int, op: BlockOp, position: int) -> Transfer:
        fd, offset = self._locate(int(op.slots[position]))
        [addresses] = self._layout.gpu_addresses(op.blocks[position : position + 1])
        is_read = op.direction is Direction.READ
        return Transfer(
            token, op.task_id, op.direction, fd, offset, self._length,
            addresses, self._layout.sizes, int(op.expected[position]) if is_read else 0,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for blocks in flight; no more will start."""
        self._io.close()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if len(self._in_flight) > self._io.depth:
            raise InternalError(f"{len(self._in_flight)} blocks in flight, of {self._io.depth}")
        for op in self._ops.values():
            in_flight = sum(op is other for other, _ in self._in_flight.values())
            if op.in_flight != in_flight:
                raise InternalError(f"op {op.op_id}: {op.in_flight} in flight, not {in_flight}")
