"""Disk worker driven without messages and processes, with a pool of its own."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexcache.bench.ssd import BLOCK_BYTES, beside_raw, raw_disks
from flexcache.bench.suite import Case, Result
from flexcache.ids import OpKind
from flexcache.storage.block_io import QUEUE_DEPTH, BlockIO, Direction, open_block_io
from flexcache.storage.compression import Codec
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import data_file_bytes, index_file_bytes, reserve_space
from flexcache.storage.slot_index import SlotIndex, locate_slot
from flexcache.storage.slot_io import SlotIO
from flexcache.transfer.disk_worker import DiskWorker, GroupCommit
from flexcache.transfer.messages import BlockNames, Execute, pack_ids, unpack_checksums

OP_BLOCKS, OPS_AT_ONCE = 8, 32
ROOT = b"root of a model!"


class DrivenWorker:
    """A disk worker with its own pool, which receives ops as from a server.

    Attributes:
        device_bytes: What it has moved on the device.
    """

    def __init__(
        self, pool: DiskPool, io: BlockIO, segment: HostSegment, sync: str,
        codec: Codec = Codec.NONE,
    ) -> None:  # fmt: skip
        self.device_bytes = 0
        self._pool, self._segment = pool, segment
        self._sums = np.zeros(pool.num_slots, np.uint64)
        self._next_key = 0
        index = SlotIndex(pool.index_fds, pool.record_id)
        self._commit = GroupCommit(pool.data_fds, pool.index_fds, index, sync)

        def locate(slot: int) -> tuple[int, int]:
            return locate_slot(slot, pool.data_fds, pool.slot_bytes)

        forms = index.survey(pool.num_slots).forms
        self._slots = SlotIO(io, locate, pool.slot_bytes, forms, codec)
        self._worker = DiskWorker(self._slots, [segment], index, self._commit)

    def run(self, direction: Direction) -> float:
        """Write, or read, every slot once; return GB/s."""
        kind = OpKind.H2DISK if direction is Direction.WRITE else OpKind.DISK2H
        starts = deque(range(0, self._pool.num_slots, OP_BLOCKS))
        open_ops: dict[int, npt.NDArray[np.int64]] = {}
        started = time.perf_counter()
        while starts or open_ops:
            while starts and len(open_ops) < OPS_AT_ONCE:
                start = starts.popleft()
                slots = np.arange(start, min(start + OP_BLOCKS, self._pool.num_slots))
                open_ops[start] = slots
                self._worker.take(self._order(kind, start, slots))
            for done in self._worker.advance():
                slots = open_ops.pop(done.op_id)
                if done.num_ok != len(slots):
                    raise AssertionError(done.error)
                self.device_bytes += done.device_bytes
                if kind is OpKind.H2DISK:
                    self._sums[slots] = unpack_checksums(done.checksums)
            if open_ops and (len(open_ops) == OPS_AT_ONCE or not starts):
                select.select([*self._slots.filenos(), self._commit.fileno()], [], [], 0.1)
        took = time.perf_counter() - started
        return self._pool.num_slots * self._pool.slot_bytes / took / 1e9

    def check(self) -> None:
        """Raise unless all bytes can be read back as written."""
        used = range(min(self._segment.num_blocks, self._pool.num_slots))
        for block in used:
            self._segment.block(block)[:] = bytes(self._segment.stride)
        self.run(Direction.READ)  # compares checksums
        if not all(any(self._segment.block(block)[:64]) for block in used):
            raise AssertionError("some blocks were not read")

    def _order(self, kind: OpKind, op_id: int, slots: npt.NDArray[np.int64]) -> Execute:
        host = pack_ids(slots % self._segment.num_blocks)
        if kind is OpKind.DISK2H:
            sums = self._sums[slots].tobytes()
            return Execute(op_id, kind, pack_ids(slots), host, 1, checksums=sums)
        keys = [(self._next_key + i).to_bytes(32, "big") for i in range(len(slots))]
        self._next_key += len(slots)
        names = BlockNames(ROOT, 0, b"", keys)
        return Execute(op_id, kind, host, pack_ids(slots), 1, names=names)

    def close(self) -> None:
        self._commit.close()
        self._pool.close()


@contextmanager
def driven_workers(
    path: Path, size: int, io: BlockIO, seed: int, syncs: Sequence[str]
) -> Iterator[dict[str, DrivenWorker]]:
    """Yield a worker per sync policy; all slots of its pool have been written and read once."""
    num_slots = size // BLOCK_BYTES
    with ExitStack() as stack:
        segment = HostSegment.create(BLOCK_BYTES, OPS_AT_ONCE * OP_BLOCKS)
        stack.callback(segment.close)
        segment.map()
        made = {}
        for sync in syncs:
            rng = np.random.default_rng(seed)
            for block in range(segment.num_blocks):
                segment.block(block)[:] = rng.bytes(BLOCK_BYTES)
            pool = DiskPool([str(path / sync)], BLOCK_BYTES, num_slots, direct_io=True)
            reserve_space(pool.index_fds[0], index_file_bytes(num_slots))
            reserve_space(pool.data_fds[0], data_file_bytes(num_slots, BLOCK_BYTES))
            made[sync] = DrivenWorker(pool, io, segment, sync)
            stack.callback(made[sync].close)
            made[sync].run(Direction.WRITE)
            made[sync].check()
        yield made


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    size, rounds = (2 << 30, 10) if thorough else (3 << 28, 3)
    return [Case("2 MiB blocks", partial(beside_fio, directory, size, rounds, seed))]


def beside_fio(path: Path, size: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure the disk worker beside fio, which syncs once."""
    with ExitStack() as stack:
        io = open_block_io("auto", QUEUE_DEPTH)
        stack.callback(io.close)
        workers = stack.enter_context(driven_workers(path, size, io, seed, ("group",)))
        raw = raw_disks(path, size, BLOCK_BYTES, io, syncs=True)
        yield from beside_raw({"disk worker": workers["group"].run}, raw, rounds)
