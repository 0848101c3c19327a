"""The disk worker: executes DISK2H and H2DISK in its own process.

The server runs it as ``python -m flexcache.transfer.workers.disk``, passes descriptors to it,
supervises it and restarts it if it dies. It keeps no state that matters: each op brings the places
of its blocks and their checksums.

Blocks that are written with their names are recorded in the pool's index, and their op is done when
the record is durable (`commit`). Ops that are written while one group is being committed form the
next; reads never wait for either.

`DiskWorker` is the logic, without sockets or processes; `main` is the shell around it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.block_io import BlockIO, Direction, Request, open_block_io
from flexcache.storage.checksum import checksum
from flexcache.storage.disk_pool import locate_slot
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import data_file_bytes, index_file_bytes, reserve_space
from flexcache.storage.slot_index import Records, SlotIndex, make_records
from flexcache.transfer.messages import (
    BlockNames,
    Done,
    Drop,
    Execute,
    pack_checksums,
    unpack_checksums,
    unpack_ids,
)
from flexcache.transfer.workers.commit import GroupCommit
from flexcache.transfer.workers.process import (
    WorkerConfig,
    map_segments,
    serve,
    start_worker_process,
)

logger = logging.getLogger(__name__)

_EAGER_READS = 3  # reads go first, but a write gets every fourth turn


@dataclass(slots=True, eq=False)
class _DiskOp:
    op_id: int
    direction: Direction
    slots: npt.NDArray[np.int64]
    host_blocks: npt.NDArray[np.int64]
    expected: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    ok: npt.NDArray[np.bool_]
    names: BlockNames | None
    next_block: int = 0
    in_flight: int = 0
    dropped: bool = False
    is_void: bool = False
    bad_block: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, message: Execute) -> _DiskOp:
        is_read = message.kind is OpKind.DISK2H
        src, dst = unpack_ids(message.src), unpack_ids(message.dst)
        return cls(
            message.op_id,
            Direction.READ if is_read else Direction.WRITE,
            slots=src if is_read else dst,
            host_blocks=dst if is_read else src,
            expected=unpack_checksums(message.checksums),
            checksums=np.zeros(len(src), dtype=np.uint64),
            ok=np.zeros(len(src), dtype=np.bool_),
            names=message.names,
        )

    def check(self, num_host_blocks: int) -> None:
        """Refuse an op that would fail midway.

        Raises:
            ValueError: The op is malformed; the message says how.
        """
        if len(self.host_blocks) != len(self.slots):
            raise ValueError(f"{len(self.slots)} slots, {len(self.host_blocks)} host blocks")
        if self.direction is Direction.READ and len(self.expected) != len(self.slots):
            raise ValueError(f"{len(self.slots)} slots, {len(self.expected)} checksums")
        if self.names is not None and len(self.names.keys) != len(self.slots):
            raise ValueError(f"{len(self.slots)} slots, {len(self.names.keys)} keys")
        if (self.slots < 0).any():
            raise ValueError("a slot is negative")
        if ((self.host_blocks < 0) | (self.host_blocks >= num_host_blocks)).any():
            raise ValueError(f"a host block is not one of {num_host_blocks}")

    @property
    def is_over(self) -> bool:
        return self.in_flight == 0 and (self.dropped or self.next_block == len(self.slots))

    @property
    def num_ok(self) -> int:
        """Number of blocks moved, contiguously from the first on."""
        if self.is_void:
            return 0
        return len(self.ok) if self.ok.all() else int(self.ok.argmin())

    @property
    def is_to_be_recorded(self) -> bool:
        return self.direction is Direction.WRITE and self.names is not None and self.num_ok > 0

    def fail(self, error: str) -> None:
        """Fail the op: none of its blocks counts as moved, even if I/O in flight succeeds."""
        self.is_void = self.dropped = True
        self.error = error

    def records(self) -> Records:
        names, count = self.names, self.num_ok
        assert names is not None
        return make_records(
            names.root, names.first, names.parent, names.keys[:count], self.checksums[:count]
        )

    def done(self) -> Done:
        num_ok = self.num_ok
        return Done(
            self.op_id,
            num_ok,
            error=self.error,
            bad_block=self.bad_block == num_ok,
            checksums=b"" if self.direction is Direction.READ else pack_checksums(self.checksums),
        )


@dataclass(slots=True)
class _Queue:
    reads: deque[_DiskOp] = field(default_factory=deque)
    writes: deque[_DiskOp] = field(default_factory=deque)
    reads_since_write: int = 0

    def next(self) -> _DiskOp | None:
        """Return the op whose next block should be moved."""
        write_first = self.writes and self.reads_since_write >= _EAGER_READS
        for queue in (self.writes, self.reads) if write_first else (self.reads, self.writes):
            while queue and (queue[0].dropped or queue[0].next_block == len(queue[0].slots)):
                queue.popleft()
            if queue:
                self.reads_since_write = self.reads_since_write + 1 if queue is self.reads else 0
                return queue[0]
        return None


class DiskWorker:
    """Keeps a block I/O engine full with the blocks of the current ops.

    A block that cannot be read, or whose checksum differs, ends the useful part of its op: the
    blocks after it could not be used. Not thread-safe.

    Args:
        locate: Returns the data file and offset of a slot.
        index: Records the blocks.
        commit: Makes blocks and records durable.
        last_generation: The highest generation in the index.
    """

    def __init__(
        self,
        io: BlockIO,
        segments: Sequence[HostSegment],
        locate: Callable[[int], tuple[int, int]],
        index: SlotIndex,
        commit: GroupCommit,
        last_generation: int = 0,
    ) -> None:
        self._io = io
        self._segments = segments
        self._locate = locate
        self._index = index
        self._commit = commit
        self._last_generation = last_generation
        self._refused: list[Done] = []
        self._moving: dict[int, _DiskOp] = {}
        self._written: list[_DiskOp] = []
        self._group: list[_DiskOp] = []
        self._queue = _Queue()
        self._tokens = count()
        self._in_flight: dict[int, tuple[_DiskOp, int]] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._refused or self._moving or self._written or self._group)

    def take(self, message: Execute | Drop) -> None:
        """Start an op, or drop one."""
        if isinstance(message, Execute):
            self.execute(message)
        else:
            self.drop(message.op_id)

    def execute(self, message: Execute) -> None:
        try:
            op = _DiskOp.of(message)
            op.check(self._segments[0].num_blocks)
        except ValueError as error:
            self._refused.append(Done(message.op_id, 0, error=f"malformed op: {error}"))
            return
        self._moving[op.op_id] = op
        is_read = op.direction is Direction.READ
        (self._queue.reads if is_read else self._queue.writes).append(op)
        if not is_read:
            self._forget(op.slots)

    def drop(self, op_id: int) -> None:
        if op_id in self._moving:
            self._moving[op_id].dropped = True

    def advance(self) -> list[Done]:
        """Process completions and start more I/O; return the ops that ended."""
        blocks_read = self._take_in()
        over = self._take_committed()
        self._fill()
        for op, position in blocks_read:  # while the device is busy with the next blocks
            self._verify(op, position)
        for op in [op for op in self._moving.values() if op.is_over]:
            del self._moving[op.op_id]
            (self._written if op.is_to_be_recorded else over).append(op)
        over += self._commit_written()
        refused, self._refused = self._refused, []
        return refused + [op.done() for op in over]

    def _commit_written(self) -> list[_DiskOp]:
        """Commit the next group unless one is in progress; return ops that cannot be recorded."""
        refused: list[_DiskOp] = []
        if self._group or not self._written:
            return refused
        slots, records = [], []
        for op in self._written:
            try:
                records.append(op.records())
            except ValueError as error:
                op.fail(str(error))
                refused.append(op)
                continue
            slots.append(op.slots[: op.num_ok])
            self._group.append(op)
        self._written = []
        if self._group:
            together = np.concatenate(records)
            first = self._last_generation + 1
            self._last_generation += len(together)
            together["generation"] = np.arange(first, first + len(together))
            self._commit.start(np.concatenate(slots), together)
        return refused

    def _take_committed(self) -> list[_DiskOp]:
        result = self._commit.reap()
        if result is None:
            return []
        group, self._group = self._group, []
        if result.error is None:
            return group
        # Later writes may be lost as well, and no later sync would report it.
        written, self._written = self._written, []
        for op in [*group, *written, *self._writes_under_way()]:
            op.fail(f"commit to SSD: {result.error}")
        return group + written

    def _writes_under_way(self) -> list[_DiskOp]:
        writes = (op for op in self._moving.values() if op.direction is Direction.WRITE)
        return [op for op in writes if op.next_block > 0]

    def _forget(self, slots: npt.NDArray[np.int64]) -> None:
        """Erase the records of slots whose bytes are bad or about to change.

        Only an optimisation for the next restart: the checksums would detect such slots too.
        """
        with contextlib.suppress(OSError):
            self._index.erase(slots)

    def _fill(self) -> None:
        started: list[tuple[_DiskOp, int, Request]] = []
        while len(self._in_flight) < self._io.depth:
            op = self._queue.next()
            if op is None:
                break
            position, token = op.next_block, next(self._tokens)
            op.next_block += 1
            op.in_flight += 1
            fd, offset = self._locate(int(op.slots[position]))
            request = Request(token, op.direction, fd, offset, self._pieces(op, position))
            self._in_flight[token] = (op, position)
            started.append((op, position, request))
        self._io.submit([request for _, _, request in started])
        for op, position, request in started:  # checksum while the device is busy writing
            if op.direction is Direction.WRITE:
                op.checksums[position] = checksum(request.pieces)

    def _pieces(self, op: _DiskOp, position: int) -> list[memoryview]:
        block = int(op.host_blocks[position])
        return [segment.block(block) for segment in self._segments]

    def _take_in(self) -> list[tuple[_DiskOp, int]]:
        """Process completions; return the blocks that were read and must still be verified."""
        blocks_read = []
        size = sum(segment.stride for segment in self._segments)
        for completion in self._io.reap():
            op, position = self._in_flight.pop(completion.token)
            if completion.result < 0:
                self._end(op, position, os.strerror(-completion.result))
            elif completion.result != size:
                self._end(op, position, f"{completion.result} of {size} bytes moved")
            elif op.direction is Direction.READ:
                blocks_read.append((op, position))
            else:
                self._end(op, position)
        return blocks_read

    def _verify(self, op: _DiskOp, position: int) -> None:
        is_right = checksum(self._pieces(op, position)) == int(op.expected[position])
        self._end(op, position, None if is_right else "checksum mismatch")

    def _end(self, op: _DiskOp, position: int, problem: str | None = None) -> None:
        """Record that a block of the op was moved, or could not be."""
        op.in_flight -= 1
        if problem is None:
            op.ok[position] = True
            return
        if op.direction is Direction.READ:
            self._forget(op.slots[position : position + 1])
        op.error = op.error or f"{op.direction.value} of slot {op.slots[position]}: {problem}"
        if op.bad_block is None or position < op.bad_block:
            op.bad_block = position
        op.dropped = True  # nothing after the gap is useful


class DiskWorkerConfig(WorkerConfig, frozen=True):
    """The configuration of the process, on the first line of its standard input."""

    data_fds: list[int]
    index_fds: list[int]
    pool_id: bytes
    slot_bytes: int
    num_slots: int
    io_engine: str
    queue_depth: int
    sync: str = "group"


def main() -> None:
    """Serve until a `Stop` message arrives or the parent closes its end of standard input."""
    config = start_worker_process(DiskWorkerConfig)
    _reserve_files(config)
    io = open_block_io(config.io_engine, config.queue_depth)
    segments = map_segments(config)
    index = SlotIndex(config.index_fds, config.pool_id)
    commit = GroupCommit(config.data_fds, config.index_fds, index, config.sync)

    def locate(slot: int) -> tuple[int, int]:
        return locate_slot(slot, config.data_fds, config.slot_bytes)

    generation = index.last_generation(config.num_slots)
    worker = DiskWorker(io, segments, locate, index, commit, generation)
    serve(
        config,
        f"{io.name}, depth {io.depth}",
        Execute | Drop,
        worker.take,
        worker.advance,
        lambda: worker.is_idle,
        [io.fileno(), commit.fileno()],
    )
    io.close()
    commit.close()


def _reserve_files(config: DiskWorkerConfig) -> None:
    num_rows = -(-config.num_slots // len(config.data_fds))
    wanted = [(fd, index_file_bytes(num_rows)) for fd in config.index_fds]
    wanted += [(fd, data_file_bytes(num_rows, config.slot_bytes)) for fd in config.data_fds]
    problems = [reserve_space(fd, size) for fd, size in wanted]
    for problem in dict.fromkeys(filter(None, problems)):
        log_event(
            logger, logging.WARNING, "ssd_space_not_reserved", problem=problem,
            effect="writes may fail later",
        )  # fmt: skip


if __name__ == "__main__":
    main()
