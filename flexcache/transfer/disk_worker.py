"""Disk worker: executes DISK2H, H2DISK and COMMIT in its own process.

The server runs it as ``python -m flexcache.transfer.disk_worker``, passes descriptors to it,
supervises it and restarts it if it dies. It keeps no state that matters: each op brings the places
of its blocks and their checksums.

Blocks that are written with their names are recorded in the pool's index, and their op is done when
the record is durable (`GroupCommit`). Those of a COMMIT were written by a rank, past this process.
Ops that are written while one group is being committed form the next; reads never wait for either.

`DiskWorker` is the logic, without sockets or processes; `main` is the shell around it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.block_io import QUEUE_DEPTH, Direction, open_block_io
from flexcache.storage.compression import Codec
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.storage.pool_directory import (
    data_file_bytes,
    index_file_bytes,
    record_id,
    reserve_space,
)
from flexcache.storage.slot_index import (
    FORM,
    Records,
    SlotIds,
    SlotIndex,
    locate_slot,
    make_records,
    next_generation,
    older,
)
from flexcache.storage.slot_io import SlotIO, SlotMove
from flexcache.transfer.block_op import BlockOp, BlockOpQueue
from flexcache.transfer.messages import Done, Drop, Execute
from flexcache.transfer.worker_process import (
    WorkerConfig,
    map_segments,
    serve,
    start_worker_process,
)

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# Makes groups of written slots durable, off the disk worker's thread.
#
# For each directory: the slots' bytes are on the device before their records are written, and the
# records are on the device before the group is done. Directories are independent of each other, so
# each is committed on its own thread.
#
#     group   fdatasync data -> write records -> fdatasync index      survives a power cut
#     none                      write records                         survives a kill, as the kernel
#                                                                     has the bytes, not a power cut


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Result of a group's commit: all of it is durable, or there is an error and no guarantee.

    After a failed sync all other writes before it are in doubt too: the kernel reports an error
    once, and the next sync succeeds without the lost data.
    """

    error: str | None


class GroupCommit:
    """Commits one group at a time. `fileno` becomes readable when a directory is finished.

    Args:
        data_fds: Data files of the pool's directories; slot `s` is in directory `s % n`.
        index_fds: Index files, likewise.
        sync: As `CacheConfig.ssd_sync`.
        files: Has the calls of `os` that write and sync.
        executor: Runs the directories' commits, instead of one thread each.
    """

    def __init__(
        self,
        data_fds: Sequence[int],
        index_fds: Sequence[int],
        index: SlotIndex,
        sync: str,
        files: Any = os,
        executor: Executor | None = None,
    ) -> None:
        self._fds = list(zip(data_fds, index_fds, strict=True))
        self._index = index
        self._syncs = sync == "group"
        self._files = files
        self._executor = executor or ThreadPoolExecutor(
            len(self._fds), thread_name_prefix="flexcache-commit"
        )
        self._parts: list[Future[None]] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, slots: SlotIds, records: Records) -> None:
        """Commit slots whose bytes have been written. The previous group must have been reaped."""
        directories = slots % len(self._fds)
        for directory, (data_fd, index_fd) in enumerate(self._fds):
            here = directories == directory
            if here.any():
                part = (data_fd, index_fd, slots[here], records[here])
                self._parts.append(self._executor.submit(self._commit, *part))
        for running in self._parts:
            running.add_done_callback(lambda _: os.eventfd_write(self._event, 1))

    def _commit(self, data_fd: int, index_fd: int, slots: SlotIds, records: Records) -> None:
        if self._syncs:
            with _naming("sync of the data file"):
                self._files.fdatasync(data_fd)
        with _naming("write of the records"):
            self._index.write(slots, records)
        if self._syncs:
            with _naming("sync of the index file"):
                self._files.fdatasync(index_fd)

    def reap(self) -> CommitResult | None:
        """Return the group's result, once; None while it is running or if there is no group."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if not self._parts or not all(part.done() for part in self._parts):
            return None
        parts, self._parts = self._parts, []
        try:
            for part in parts:
                part.result()
        except Exception as error:
            return CommitResult(getattr(error, "strerror", None) or f"{error!r}")
        return CommitResult(None)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `reap` may have something to return."""
        return self._event

    def close(self) -> None:
        """Wait for the running group. Idempotent."""
        if self._event >= 0:
            self._executor.shutdown(wait=True)
            os.close(self._event)
            self._event = -1


@contextlib.contextmanager
def _naming(step: str) -> Iterator[None]:
    """Name the failed step in an error."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{step}: {error.strerror or error}") from error


class DiskWorker:
    """Keeps the device busy with the blocks of the current ops.

    A block that cannot be read, or whose checksum differs, ends the useful part of its op: the
    blocks after it could not be used. Not thread-safe.

    Args:
        slots: Reads and writes the slots.
        index: Records the blocks.
        commit: Makes blocks and records durable.
        last_generation: The highest generation in the index.
        pool_id: Identifies the pool.
        era: The pool's, as far as is known; ops may be of a later one.
    """

    def __init__(
        self,
        slots: SlotIO,
        segments: Sequence[HostSegment],
        index: SlotIndex,
        commit: GroupCommit,
        last_generation: int = 0,
        pool_id: bytes = b"",
        era: int = 0,
    ) -> None:
        self._pool_id = pool_id
        self._era = era
        self._slots = slots
        self._segments = segments
        self._index = index
        self._commit = commit
        self._last_generation = last_generation
        self._refused: list[Done] = []
        self._moving: dict[int, BlockOp] = {}
        self._written: list[BlockOp] = []
        self._group: list[BlockOp] = []
        self._queue = BlockOpQueue()
        self._num_in_flight = 0

    @property
    def is_idle(self) -> bool:
        return not (self._refused or self._moving or self._written or self._group)

    def filenos(self) -> list[int]:
        return [*self._slots.filenos(), self._commit.fileno()]

    def take(self, message: Execute | Drop) -> None:
        """Start an op, or drop one."""
        if isinstance(message, Drop):
            if message.op_id in self._moving:
                self._moving[message.op_id].dropped = True
            return
        try:
            op = _op_of(message)
            op.check("host", self._segments[0].num_blocks)
            self._slots.check(op.slots)
        except ValueError as error:
            self._refused.append(Done(message.op_id, 0, error=f"malformed op: {error}"))
            return
        if message.kind is OpKind.COMMIT:
            self._slots.make_plain(op.slots)
        self._moving[op.op_id] = op
        self._queue.add(op)
        if op.direction is Direction.WRITE and op.has_more:
            self._forget(op.slots)

    def advance(self) -> list[Done]:
        """Process completions and start more I/O; return the ops that ended."""
        blocks_read = self._take_in()
        over = self._take_committed()
        self._fill()
        # While the device is busy with the next blocks: else it was idle for 5 of 45 ms.
        for op, position in blocks_read:
            self._verify(op, position)
        for op in [op for op in self._moving.values() if op.is_over]:
            del self._moving[op.op_id]
            (self._written if _is_to_be_recorded(op) else over).append(op)
        over += self._commit_written()
        refused, self._refused = self._refused, []
        return refused + [op.done() for op in over]

    def _commit_written(self) -> list[BlockOp]:
        """Commit the next group unless one is in progress; return ops that are not recorded."""
        refused: list[BlockOp] = []
        if self._group or not self._written:
            return refused
        slots, records = [], []
        era = max(op.names.era for op in self._written if op.names is not None)
        if era > self._era:  # the pool was reset; no group is being written
            self._era, self._index.pool_id = era, record_id(self._pool_id, era)
        for op in self._written:
            if op.names is not None and op.names.era < self._era:
                refused.append(op)  # what it wrote is void: it ends without a record
                continue
            try:
                records.append(self._records_of(op))
            except ValueError as error:
                op.fail(str(error))
                refused.append(op)
                continue
            slots.append(op.slots[: op.num_ok])
            self._group.append(op)
        self._written = []
        if self._group:
            together = np.concatenate(records)
            first = next_generation(self._last_generation, time.time())
            self._last_generation = first + len(together) - 1
            rising = np.arange(first, first + len(together))
            together["generation"] = older(rising, _ages_s(self._group))
            self._commit.start(np.concatenate(slots), together)
        return refused

    def _take_committed(self) -> list[BlockOp]:
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

    def _writes_under_way(self) -> list[BlockOp]:
        writes = (op for op in self._moving.values() if op.direction is Direction.WRITE)
        return [op for op in writes if op.next_block > 0]

    def _forget(self, slots: npt.NDArray[np.int64]) -> None:
        """Erase the records of slots whose bytes are bad or about to change.

        Only an optimisation for the next restart: the checksums would detect such slots too.
        """
        with contextlib.suppress(OSError):
            self._index.erase(slots)

    def _fill(self) -> None:
        started = []
        while self._num_in_flight < self._slots.depth and (op := self._queue.next()) is not None:
            position = op.begin_next()
            slot, pieces = int(op.slots[position]), self._pieces(op, position)
            # What is not recorded is plain, so that a new worker can read it.
            may_pack = op.names is not None
            started.append(SlotMove((op, position), op.direction, slot, pieces, may_pack))
            self._num_in_flight += 1
        self._slots.submit(started)
        for move in started:  # checksum while the device is busy writing
            if move.direction is Direction.WRITE:
                op, position = move.token
                op.checksums[position] = checksum(move.pieces)

    def _pieces(self, op: BlockOp, position: int) -> list[memoryview]:
        block = int(op.blocks[position])
        return [segment.block(block) for segment in self._segments]

    def _take_in(self) -> list[tuple[BlockOp, int]]:
        """Process completions; return the blocks that were read and must still be verified."""
        blocks_read = []
        for move in self._slots.reap():
            op, position = move.token
            self._num_in_flight -= 1
            op.device_bytes += move.num_bytes
            if move.problem is None and op.direction is Direction.READ:
                blocks_read.append((op, position))
            else:
                self._end(op, position, move.problem)
        return blocks_read

    def _records_of(self, op: BlockOp) -> Records:
        names, count = op.names, op.num_ok
        assert names is not None
        records = make_records(
            names.root, names.first, names.parent, names.keys[:count], op.checksums[:count]
        )
        forms = self._slots.forms_of(op.slots[:count])
        if forms is not None:
            records[list(FORM.names or ())] = forms
        return records

    def _verify(self, op: BlockOp, position: int) -> None:
        # So a swapped or stale slot is found. A generation checked after the read would find no
        # more: a slot is pinned while it is read, and other bytes have another checksum.
        is_right = checksum(self._pieces(op, position)) == int(op.expected[position])
        self._end(op, position, None if is_right else "checksum mismatch")

    def _end(self, op: BlockOp, position: int, problem: str | None = None) -> None:
        """Record that a block of the op was moved, or could not be."""
        op.end(position, problem)
        if problem is not None and op.direction is Direction.READ:
            self._forget(op.slots[position : position + 1])


def _op_of(message: Execute) -> BlockOp:
    """Make an op; a rank has written the blocks of a COMMIT already, and knows their checksums."""
    # Only the rank reaches its tensors, and only one process may write the index. So a put past
    # DRAM is two ops: the first gives the engine its slots back, this one lets the block be found.
    op = BlockOp.of(message)
    if message.kind is OpKind.COMMIT:
        if len(op.expected) != len(op.slots):
            raise ValueError(f"{len(op.slots)} slots, {len(op.expected)} checksums")
        op.blocks, op.checksums = np.zeros_like(op.slots), op.expected
        op.ok, op.next_block = np.ones(len(op.slots), dtype=np.bool_), len(op.slots)
    return op


def _is_to_be_recorded(op: BlockOp) -> bool:
    return op.direction is Direction.WRITE and op.names is not None and op.num_ok > 0


def _ages_s(ops: Sequence[BlockOp]) -> npt.NDArray[np.float64]:
    """Return how long ago each block that the ops have written was last used."""
    now, ages = time.monotonic(), []
    for op in ops:
        used_s = None if op.names is None else op.names.used_s
        ages.append(np.full(op.num_ok, 0.0 if used_s is None else max(0.0, now - used_s)))
    return np.concatenate(ages)


class DiskWorkerConfig(WorkerConfig, frozen=True):
    """The configuration of the process, on the first line of its standard input."""

    data_fds: list[int]
    index_fds: list[int]
    pool_id: bytes
    era: int
    slot_bytes: int
    num_slots: int
    io_engine: str
    sync: str = "group"
    compression: str = "none"


def main() -> None:
    """Serve until a `Stop` message arrives or the parent closes its end of standard input."""
    config = start_worker_process(DiskWorkerConfig)
    _reserve_files(config)
    io = open_block_io(config.io_engine, QUEUE_DEPTH)
    segments = map_segments(config)
    index = SlotIndex(config.index_fds, record_id(config.pool_id, config.era))
    commit = GroupCommit(config.data_fds, config.index_fds, index, config.sync)

    def locate(slot: int) -> tuple[int, int]:
        return locate_slot(slot, config.data_fds, config.slot_bytes)

    survey = index.survey(config.num_slots)
    codec = Codec.of(config.compression)
    slots = SlotIO(io, locate, config.slot_bytes, survey.forms, codec)
    worker = DiskWorker(
        slots, segments, index, commit, survey.last_generation, config.pool_id, config.era
    )
    serve(
        config,
        f"{io.name}, depth {slots.depth}, compression {config.compression}",
        Execute | Drop,
        worker,
    )
    slots.close()
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
