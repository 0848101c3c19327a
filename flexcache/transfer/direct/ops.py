"""Direct ops: DISK2D and D2DISK of one rank, executed block by block, past the host pool.

    op --compute is done--> queue --begin--> DirectIO --read: verified, written: summed--> Done

Part of `DeviceWorker`, which keeps ops behind their gates. A block that was not moved ends the
useful part of its op, as in the disk worker; it is called bad only if the file is at fault.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from flexcache.errors import InternalError, NoDirectPathError, TaskRevokedError
from flexcache.storage.block_io import Completion, Direction, Request, ThreadedBlockIO
from flexcache.storage.layout import BlockLayout
from flexcache.storage.pieces import address_of, checksum
from flexcache.transfer.block_op import BlockOp, BlockOpQueue
from flexcache.transfer.copier import Addresses, ComputePoint, Copier, CopyPermit
from flexcache.transfer.cpu_copier import load_copy_runs
from flexcache.transfer.messages import Done, Execute

BAD_BLOCK_ERRORS = frozenset(
    {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ}
)
"""Errors of a read by which Linux says that the medium or the file system has lost the bytes."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A rank's part of a block: consecutive bytes of a file, scattered over KV tensors; and how it
    ended.

    Ended without an ``error`` all of it was moved, and bytes that were read have the expected
    checksum and are in the KV tensors.

    Attributes:
        token: What the caller knows it by.
        task_id: Its task, for the permit.
        offset: Where it begins in the file; in whole pages, as is ``length``.
        addresses: Its runs in the KV tensors, in the order of the bytes in the file.
        sizes: Theirs. What follows them up to ``length`` is padding: zeros when written.
        expected: Checksum of the ``length`` bytes to be read; 0 for a write.
        place: Where it is in the buffer, while it is on its way.
        checksum: That of the bytes written.
        is_bad: Whether what the file holds is at fault, not the way there.
    """

    token: Any
    task_id: int
    direction: Direction
    fd: int
    offset: int
    length: int
    addresses: Addresses
    sizes: Addresses
    expected: int = 0
    place: int = 0
    checksum: int = 0
    error: str | None = None
    is_bad: bool = False

    def fail(self, error: str, is_bad: bool = False) -> None:
        self.error, self.is_bad = error, is_bad


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

    def reap(self) -> list[Transfer]:
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
        return CpuDirectIO(block_bytes, depth, permit)
    if device.type == "cuda":
        from flexcache.transfer.cuda_copier import CudaCopier
        from flexcache.transfer.direct.cuda import CudaDirectIO

        assert isinstance(copier, CudaCopier)
        return CudaDirectIO(device, copier, fds, block_bytes, depth, permit)
    raise NoDirectPathError(f"blocks on {device.type} cannot go past DRAM")


class CpuDirectIO:
    """Direct I/O for KV tensors in host memory, on threads.

    A block goes through a page-aligned buffer, as direct I/O demands. So no byte of it reaches the
    KV tensors before it is verified, and none after its task was revoked.

    Args:
        block_bytes: The most that a transfer moves.
        permit: Checked before bytes are copied into KV tensors.
    """

    def __init__(self, block_bytes: int, depth: int, permit: CopyPermit) -> None:
        self.depth = depth
        self.through_host = ""  # there is no other memory
        self._permit = permit
        self._io = ThreadedBlockIO(depth)
        self._copy = load_copy_runs()
        memory = mmap.mmap(-1, depth * block_bytes, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)  # a write by the parent would move pages in mid-read
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # a device takes one large piece faster than many
        self._buffer = memoryview(memory)
        self._address = address_of(self._buffer)
        self._free = list(range(0, depth * block_bytes, block_bytes))
        self._ended: list[Transfer] = []

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.place = self._free.pop()
            try:
                self._start(transfer)
            except TaskRevokedError as error:
                transfer.fail(str(error))
                self._end(transfer)

    def _start(self, transfer: Transfer) -> None:
        self._require_permit(transfer)
        room = self._room(transfer)
        if transfer.direction is Direction.WRITE:
            runs = self._runs_in_buffer(transfer)
            self._copy(runs, transfer.addresses, transfer.sizes, self._permit)
            num_used = int(transfer.sizes.sum())
            room[num_used:] = bytes(transfer.length - num_used)
        request = Request(transfer, transfer.direction, transfer.fd, transfer.offset, [room])
        self._io.submit([request])

    def reap(self) -> list[Transfer]:
        for completion in self._io.reap():
            transfer: Transfer = completion.token
            try:
                self._judge(transfer, completion)
            except TaskRevokedError as error:
                transfer.fail(str(error))
            finally:
                self._end(transfer)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, transfer: Transfer) -> None:
        self._free.append(transfer.place)
        self._ended.append(transfer)

    def _judge(self, transfer: Transfer, completion: Completion) -> None:
        problem, result = completion.problem(transfer.length), completion.result
        if problem is not None:
            # A read that ended early has found the file too short.
            transfer.fail(problem, is_bad=result >= 0 or -result in BAD_BLOCK_ERRORS)
            return
        found = checksum([self._room(transfer)])
        if transfer.direction is Direction.WRITE:
            transfer.checksum = found
        elif found != transfer.expected:
            transfer.fail("checksum mismatch", is_bad=True)
        else:
            # Again, as its task may have been revoked while it was on its way.
            self._require_permit(transfer)
            runs = self._runs_in_buffer(transfer)
            self._copy(transfer.addresses, runs, transfer.sizes, self._permit)

    def _require_permit(self, transfer: Transfer) -> None:
        self._permit.task_id = transfer.task_id
        self._permit.check()

    def _room(self, transfer: Transfer) -> memoryview:
        """Return the memory that the file's bytes are read into or written from."""
        return self._buffer[transfer.place : transfer.place + transfer.length]

    def _runs_in_buffer(self, transfer: Transfer) -> Addresses:
        """Return where each run is in the buffer."""
        ends = self._address + transfer.place + np.cumsum(transfer.sizes)
        places: Addresses = ends - transfer.sizes
        return places

    def close(self) -> None:
        self._io.close()


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
        self._behind: list[tuple[BlockOp, ComputePoint]] = []
        """Ops whose blocks the engine's compute may still use."""
        self._queue = BlockOpQueue()
        self._ops: dict[int, BlockOp] = {}
        self._num_in_flight = 0

    @property
    def op_ids(self) -> list[int]:
        """Ops that have not ended."""
        return [*self._ops, *(done.op_id for done in self._refused)]

    def execute(self, message: Execute, after: ComputePoint | None) -> None:
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
            op, position = ended.token
            self._num_in_flight -= 1
            op.checksums[position] = ended.checksum
            self._end(op, position, ended)
        self._release()
        self._fill()

    def _end(self, op: BlockOp, position: int, ended: Transfer) -> None:
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
            # One that was dropped touches no block: it need not wait.
            if op.dropped or after.query():
                self._queue.add(op)
            else:
                self._behind.append((op, after))

    def _fill(self) -> None:
        transfers = []
        while self._num_in_flight < self._io.depth and (op := self._queue.next()) is not None:
            self._num_in_flight += 1
            transfers.append(self._transfer(op, op.begin_next()))
        if transfers:
            self._io.submit(transfers)

    def _transfer(self, op: BlockOp, position: int) -> Transfer:
        fd, offset = self._locate(int(op.slots[position]))
        [addresses] = self._layout.gpu_addresses(op.blocks[position : position + 1])
        is_read = op.direction is Direction.READ
        return Transfer(
            (op, position), op.task_id, op.direction, fd, offset, self._length,
            addresses, self._layout.sizes, int(op.expected[position]) if is_read else 0,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for blocks in flight; no more will start."""
        self._io.close()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        counted = sum(op.in_flight for op in self._ops.values())
        if counted != self._num_in_flight or counted > self._io.depth:
            raise InternalError(
                f"{self._num_in_flight} blocks in flight, of {counted}, at most {self._io.depth}"
            )
