"""The disk worker's logic over real files, on every I/O engine and on one that fails at will."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from disk_io import IO_KINDS, io_engine

from flexcache.ids import MAX_KEY_BYTES, OpKind
from flexcache.storage.block_io import (
    BlockIO,
    Completion,
    Direction,
    Request,
    open_block_io,
)
from flexcache.storage.compression import Codec
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.storage.pool_directory import data_file_bytes, index_file_bytes
from flexcache.storage.slot_index import SlotIndex
from flexcache.storage.slot_io import SlotIO
from flexcache.transfer.disk_worker import DiskWorker, GroupCommit
from flexcache.transfer.messages import BlockNames, Done, Drop, Execute, pack_ids, unpack_checksums

POOL_ID = b"one pool of many"
ROOT = b"sixteen byte key"
NUM_BLOCKS, BLOCK_BYTES, RANKS = 16, 4096, 2
SLOT_BYTES = RANKS * BLOCK_BYTES


@pytest.fixture
def segments() -> Iterator[list[HostSegment]]:
    made = [HostSegment.create(BLOCK_BYTES, NUM_BLOCKS) for _ in range(RANKS)]
    for rank, segment in enumerate(made):
        segment.map()
        for block in range(NUM_BLOCKS):
            content = np.random.default_rng((rank, block)).bytes(BLOCK_BYTES)
            segment.block(block)[:] = content
    yield made
    for segment in made:
        segment.close()


def blocks_of(segments: list[HostSegment], blocks: Sequence[int]) -> list[bytes]:
    return [bytes(segment.block(block)) for block in blocks for segment in segments]


def run(worker: DiskWorker, *messages: Execute) -> dict[int, Done]:
    for message in messages:
        worker.take(message)
    done: dict[int, Done] = {}
    while len(done) < len(messages):
        done.update({answer.op_id: answer for answer in worker.advance()})
    assert worker.is_idle
    return done


def order(
    op_id: int, kind: OpKind, src: Sequence[int], dst: Sequence[int], sums: bytes = b"",
    names: BlockNames | None = None,
) -> Execute:  # fmt: skip
    src, dst = pack_ids(np.array(src)), pack_ids(np.array(dst))  # type: ignore[assignment]
    return Execute(op_id, kind, src, dst, 1, checksums=sums, names=names)  # type: ignore[arg-type]


def store(op_id: int, blocks: Sequence[int], slots: Sequence[int], first: int = 0) -> Execute:
    """Write blocks under the names of their positions in one prompt."""
    keys = [b"block %d" % (first + i) for i in range(len(blocks))]
    names = BlockNames(ROOT, first, b"block %d" % (first - 1) if first else b"", keys)
    return order(op_id, OpKind.H2DISK, blocks, slots, names=names)


@pytest.fixture
def bad_slots() -> Iterator[dict[int, tuple[int, int]]]:
    """Slots that lie elsewhere: 13 is where reads fail, 14 where writes do."""
    unreadable = os.open("/proc/self/mem", os.O_RDONLY)  # nothing is mapped at its beginning
    full = os.open("/dev/full", os.O_RDWR)
    yield {13: (unreadable, 0), 14: (full, 0)}
    os.close(unreadable)
    os.close(full)


@pytest.fixture(params=IO_KINDS)
def worker(
    request: pytest.FixtureRequest, segments: list[HostSegment], tmp_path: Path,
    bad_slots: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch,
) -> Iterator[DiskWorker]:  # fmt: skip
    engine = io_engine(request.param, monkeypatch)
    data, index_fd = (
        os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("data", "index")
    )
    os.ftruncate(data, data_file_bytes(NUM_BLOCKS, SLOT_BYTES))
    os.ftruncate(index_fd, index_file_bytes(NUM_BLOCKS))
    index = SlotIndex([index_fd], POOL_ID)
    commit = GroupCommit([data], [index_fd], index, "group")
    io = open_block_io(engine, 4)
    assert io.name == engine

    def locate(slot: int) -> tuple[int, int]:
        return bad_slots.get(slot, (data, slot * SLOT_BYTES))

    slots = SlotIO(io, locate, SLOT_BYTES)
    yield DiskWorker(slots, segments, index, commit)
    for closing in (slots, slots, commit, commit):
        closing.close()
    os.close(data)
    os.close(index_fd)


def test_blocks_of_all_ranks_go_out_and_come_back(
    worker: DiskWorker, segments: list[HostSegment]
) -> None:
    source, slots, target = [3, 1, 7, 0, 5, 9], [2, 9, 4, 15, 0, 7], [10, 11, 12, 13, 14, 15]
    expected = blocks_of(segments, source)
    written = run(worker, order(1, OpKind.H2DISK, source, slots))[1]
    assert written.num_ok == 6
    read = run(worker, order(2, OpKind.DISK2H, slots, target, written.checksums))[2]
    assert (read.num_ok, read.error) == (6, None)
    assert blocks_of(segments, target) == expected


def test_a_block_that_cannot_be_read_ends_its_op_and_the_others_go_on(
    worker: DiskWorker, segments: list[HostSegment]
) -> None:
    expected = blocks_of(segments, [0, 1, 2])
    written = run(worker, order(1, OpKind.H2DISK, [0, 1, 2], [0, 1, 2]))[1]
    sums = written.checksums
    done = run(
        worker,
        order(2, OpKind.DISK2H, [0, 13, 2], [8, 9, 10], sums),
        order(3, OpKind.DISK2H, [0, 1, 2], [11, 12, 13], sums),
    )
    assert (done[2].num_ok, done[2].bad_block) == (1, True)
    assert "Input/output error" in (done[2].error or "")
    assert (done[3].num_ok, done[3].error) == (3, None)
    assert blocks_of(segments, [11, 12, 13]) == expected


def test_a_block_that_finds_no_room_ends_its_op_and_the_others_go_on(worker: DiskWorker) -> None:
    done = run(worker, store(1, [0, 1, 2], [0, 14, 2]), store(2, [3, 4], [3, 4]))
    assert done[1].num_ok == 1
    assert "No space left" in (done[1].error or "")
    assert (done[2].num_ok, done[2].error) == (2, None)


@dataclass
class PackingPool:
    """Files of a pool, and disk workers on them, one after the other."""

    data: int
    index_fd: int
    segments: list[HostSegment]

    @contextmanager
    def worker(self, codec: Codec) -> Iterator[DiskWorker]:
        index = SlotIndex([self.index_fd], POOL_ID)
        survey = index.survey(NUM_BLOCKS)
        commit = GroupCommit([self.data], [self.index_fd], index, "group")
        io = open_block_io("threads", 4)
        slots = SlotIO(io, lambda s: (self.data, s * SLOT_BYTES), SLOT_BYTES, survey.forms, codec)
        yield DiskWorker(slots, self.segments, index, commit, survey.last_generation)
        slots.close()
        commit.close()

    def generations(self) -> list[int]:
        records = SlotIndex([self.index_fd], POOL_ID).load(4).records
        generations: list[int] = np.sort(records, order="slot")["generation"].tolist()
        return generations

    def forms(self) -> list[tuple[int, int]]:
        forms: list[tuple[int, int]] = SlotIndex([self.index_fd], POOL_ID).survey(4).forms.tolist()
        return forms


@pytest.fixture
def packing_pool(segments: list[HostSegment], tmp_path: Path) -> Iterator[PackingPool]:
    data, index_fd = (
        os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("data", "index")
    )
    os.ftruncate(data, data_file_bytes(NUM_BLOCKS, SLOT_BYTES))
    os.ftruncate(index_fd, index_file_bytes(NUM_BLOCKS))
    for block in range(4):  # all but block 2 can be packed
        if block != 2:
            segments[0].block(block)[:] = bytes([block]) * BLOCK_BYTES
            segments[1].block(block)[:] = bytes(BLOCK_BYTES)
    yield PackingPool(data, index_fd, segments)
    os.close(data)
    os.close(index_fd)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.LZ4])
def test_packed_blocks_are_recorded_with_their_form_and_read_by_the_next_worker(
    packing_pool: PackingPool, segments: list[HostSegment], codec: Codec
) -> None:
    expected = blocks_of(segments, range(4))
    with packing_pool.worker(codec) as worker:
        written = run(worker, store(1, range(4), range(4)))[1]
    assert written.num_ok == 4
    assert written.device_bytes == 3 * 4096 + SLOT_BYTES
    forms = packing_pool.forms()
    assert [number for number, _ in forms] == [codec, codec, 0, codec]
    assert [filled > 0 for _, filled in forms] == [True, True, False, True]
    with packing_pool.worker(Codec.NONE) as worker:
        order_back = order(2, OpKind.DISK2H, range(4), range(8, 12), written.checksums)
        read = run(worker, order_back)[2]
    assert (read.num_ok, read.error, read.device_bytes) == (4, None, written.device_bytes)
    assert blocks_of(segments, range(8, 12)) == expected


def test_blocks_without_a_name_are_not_packed_since_no_record_would_say_so(
    packing_pool: PackingPool, segments: list[HostSegment]
) -> None:
    with packing_pool.worker(Codec.ZSTD) as worker:
        written = run(worker, order(1, OpKind.H2DISK, [0], [0]))[1]
    with packing_pool.worker(Codec.ZSTD) as worker:
        read = run(worker, order(2, OpKind.DISK2H, [0], [8], written.checksums))[2]
    assert (read.num_ok, read.error) == (1, None)
    assert blocks_of(segments, [8]) == blocks_of(segments, [0])


def test_a_block_that_a_rank_wrote_over_a_packed_one_is_plain(
    packing_pool: PackingPool, segments: list[HostSegment]
) -> None:
    with packing_pool.worker(Codec.ZSTD) as worker:
        run(worker, store(1, [0], [3]))
        os.pwrite(packing_pool.data, b"".join(blocks_of(segments, [2])), 3 * SLOT_BYTES)
        sums = np.array([checksum(map(memoryview, blocks_of(segments, [2])))], np.uint64).tobytes()
        names = BlockNames(ROOT, 0, b"", [b"other"])
        assert run(worker, order(2, OpKind.COMMIT, [3], [3], sums, names))[2].num_ok == 1
        assert packing_pool.forms()[3] == (0, 0)
        assert run(worker, order(3, OpKind.DISK2H, [3], [9], sums))[3].num_ok == 1
    assert blocks_of(segments, [9]) == blocks_of(segments, [2])


def test_a_flipped_byte_of_a_packed_block_is_found_and_its_record_erased(
    packing_pool: PackingPool,
) -> None:
    with packing_pool.worker(Codec.ZSTD) as worker:
        sums = run(worker, store(1, [0, 1], [0, 1]))[1].checksums
        packed = bytearray(os.pread(packing_pool.data, 64, SLOT_BYTES))
        packed[12] ^= 1
        os.pwrite(packing_pool.data, packed, SLOT_BYTES)
        read = run(worker, order(2, OpKind.DISK2H, [0, 1], [8, 9], sums))[2]
    assert (read.num_ok, read.bad_block) == (1, True)
    assert [codec for codec, _ in packing_pool.forms()] == [Codec.ZSTD, 0, 0, 0]


def test_a_slot_that_the_pool_does_not_have_is_refused(packing_pool: PackingPool) -> None:
    with packing_pool.worker(Codec.ZSTD) as worker:
        done = run(worker, store(1, [0], [NUM_BLOCKS]), store(2, [1], [1]))
    assert "malformed op" in (done[1].error or "")
    assert done[2].num_ok == 1


def test_blocks_are_recorded_with_the_time_of_their_last_use(packing_pool: PackingPool) -> None:
    names = BlockNames(ROOT, 0, b"", [b"block 0", b"block 1"], time.monotonic() - 500.0)
    with packing_pool.worker(Codec.NONE) as worker:
        before_s = time.time()
        run(worker, order(1, OpKind.H2DISK, [0, 1], [0, 1], names=names), store(2, [2], [2]))
        after_s = time.time()
    old, old_too, new = (generation / 1e6 for generation in packing_pool.generations())
    assert before_s - 501.0 <= old <= after_s - 500.0
    assert before_s - 501.0 <= old_too <= after_s - 500.0
    assert before_s <= new <= after_s + 1.0


MALFORMED = [
    order(1, OpKind.H2DISK, [0, 1], [0]),
    order(1, OpKind.H2DISK, [NUM_BLOCKS], [0]),
    order(1, OpKind.H2DISK, [-1], [0]),
    order(1, OpKind.H2DISK, [0], [-1]),
    order(1, OpKind.H2DISK, [0, 1], [0, 1], names=BlockNames(ROOT, 0, b"", [b"key"])),
    order(1, OpKind.DISK2H, [0, 1], [0, 1], bytes(8)),
    order(1, OpKind.DISK2H, [0], [0], b"odd"),
    Execute(1, OpKind.H2DISK, b"odd", b"odd", 1),
]


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_op_is_refused_and_the_others_go_on(bench: Bench, malformed: Execute) -> None:
    bench.worker.take(malformed)
    bench.worker.take(store(2, [0], [0]))
    done = bench.finish()
    assert (done[1].num_ok, done[1].bad_block) == (0, False)
    assert "malformed op" in (done[1].error or "")
    assert done[2].num_ok == 1


def test_a_wrong_checksum_ends_the_useful_prefix(
    worker: DiskWorker, segments: list[HostSegment]
) -> None:
    written = run(worker, order(1, OpKind.H2DISK, [0, 1, 2, 3], [0, 1, 2, 3]))[1]
    sums = unpack_checksums(written.checksums).copy()
    sums[2] ^= np.uint64(1)
    read = run(worker, order(2, OpKind.DISK2H, [0, 1, 2, 3], [8, 9, 10, 11], sums.tobytes()))[2]
    assert (read.num_ok, read.bad_block) == (2, True)
    assert "checksum mismatch" in (read.error or "")


def test_many_ops_at_once_each_end_once(worker: DiskWorker) -> None:
    first = run(worker, order(0, OpKind.H2DISK, range(16), range(16)))[0]
    sums = unpack_checksums(first.checksums)
    messages = [
        order(i, OpKind.DISK2H, [i], [15 - i], sums[[i]].tobytes())
        if i % 2
        else order(i, OpKind.H2DISK, [i], [i])
        for i in range(8)
    ]
    done = run(worker, *messages)
    assert all(answer.num_ok == 1 for answer in done.values())


class ScriptedIO(BlockIO):
    """Completes the requests that the test names, with the results that it names."""

    name, depth = "scripted", 3

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.completed: set[int] = set()
        self.completions: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted.extend(requests)

    def reap(self) -> list[Completion]:
        reaped, self.completions = self.completions, []
        return reaped

    def fileno(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def complete(self, position: int, result: int = SLOT_BYTES) -> None:
        self.completed.add(position)
        self.completions.append(Completion(self.submitted[position].token, result))

    def complete_all(self) -> None:
        for position in range(len(self.submitted)):
            if position not in self.completed:
                self.complete(position)


@dataclass
class ScriptedFiles:
    """Keeps an index in memory, fails on request, and records each call."""

    content: bytearray = field(default_factory=lambda: bytearray(index_file_bytes(NUM_BLOCKS)))
    calls: list[tuple[str, int]] = field(default_factory=list)
    failing: dict[tuple[str, int], OSError] = field(default_factory=dict)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return bytes(self.content[offset : offset + length])

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if any(data):  # what is erased is of no interest here
            self._called("write", fd)
        self.content[offset : offset + len(data)] = data
        return len(data)

    def fdatasync(self, fd: int) -> None:
        self._called("sync", fd)

    def _called(self, call: str, fd: int) -> None:
        self.calls.append((call, fd))
        if (call, fd) in self.failing:
            raise self.failing.pop((call, fd))


DATA, INDEX = 7, 8


@dataclass
class Bench:
    """A worker over scripted I/O and files."""

    worker: DiskWorker
    io: ScriptedIO
    files: ScriptedFiles
    commit: GroupCommit

    def finish(self) -> dict[int, Done]:
        """Complete all I/O that was submitted, and wait for all commits."""
        done: dict[int, Done] = {}
        while not self.worker.is_idle:
            self.io.complete_all()
            done.update({answer.op_id: answer for answer in self.worker.advance()})
            if len(self.io.completed) == len(self.io.submitted) and not self.worker.is_idle:
                select.select([self.commit.fileno()], [], [], 30)
        return done


@pytest.fixture
def bench(segments: list[HostSegment], request: pytest.FixtureRequest) -> Iterator[Bench]:
    io, files = ScriptedIO(), ScriptedFiles()
    index = SlotIndex([INDEX], POOL_ID, files)
    commit = GroupCommit([DATA], [INDEX], index, getattr(request, "param", "group"), files)
    slots = SlotIO(io, lambda slot: (DATA, slot * SLOT_BYTES), SLOT_BYTES)
    worker = DiskWorker(slots, segments, index, commit)
    yield Bench(worker, io, files, commit)
    commit.close()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (-errno.EIO, "Input/output error"),
        (-errno.ENOSPC, "No space left"),
        (SLOT_BYTES - 512, "bytes moved"),
        (0, "0 of"),
    ],
)
def test_an_error_or_a_short_count_fails_the_op_at_that_block(
    bench: Bench, result: int, text: str
) -> None:
    worker, io = bench.worker, bench.io
    worker.take(order(1, OpKind.H2DISK, range(5), range(5)))
    assert worker.advance() == []
    io.complete(2)
    io.complete(1, result)
    assert worker.advance() == []  # block 0 is still on its way
    assert len(io.submitted) == 3  # and nothing behind the gap is started any more
    io.complete(0)
    (done,) = worker.advance()
    assert (done.num_ok, done.bad_block) == (1, True)
    assert text in (done.error or "")


def test_the_queue_is_kept_full_and_reads_go_first(bench: Bench) -> None:
    worker, io = bench.worker, bench.io
    worker.take(order(1, OpKind.H2DISK, range(8), range(8)))
    worker.advance()
    assert [r.direction for r in io.submitted] == [Direction.WRITE] * 3
    worker.take(order(2, OpKind.DISK2H, range(8), range(8), bytes(64)))
    for position in range(3):
        io.complete(position)
    worker.advance()
    assert len(io.submitted) == 6
    assert [r.direction for r in io.submitted[3:]] == [Direction.READ] * 3
    for position in range(3, 6):
        io.complete(position, -errno.EIO)
    worker.advance()
    assert Direction.WRITE in [r.direction for r in io.submitted[6:]]  # not starved


def test_a_dropped_op_ends_with_what_had_been_started(bench: Bench) -> None:
    worker, io = bench.worker, bench.io
    worker.take(order(1, OpKind.H2DISK, range(8), range(8)))
    worker.advance()
    worker.take(Drop(1))
    worker.take(Drop(99))
    for position in range(3):
        io.complete(position)
    (done,) = worker.advance()
    assert done.num_ok == 3
    assert len(io.submitted) == 3
    assert worker.is_idle


def test_records_are_written_between_the_two_syncs(bench: Bench) -> None:
    bench.worker.take(store(1, [0, 1, 2], [4, 5, 6]))
    assert bench.finish()[1].num_ok == 3
    assert bench.files.calls == [("sync", DATA), ("write", INDEX), ("sync", INDEX)]


@pytest.mark.parametrize("bench", ["none"], indirect=True)
def test_without_syncing_records_are_written_once_the_bytes_are(bench: Bench) -> None:
    bench.worker.take(store(1, [0, 1], [4, 5]))
    bench.worker.advance()
    bench.io.complete(0)
    bench.worker.advance()
    assert bench.files.calls == []  # the other block is still on its way
    assert bench.finish()[1].num_ok == 2
    assert bench.files.calls == [("write", INDEX)]


def test_nothing_is_done_before_it_is_durable_and_reads_do_not_wait(bench: Bench) -> None:
    entered, proceed = threading.Event(), threading.Event()
    sync = bench.files.fdatasync

    def gated_sync(fd: int) -> None:
        entered.set()
        assert proceed.wait(60)
        sync(fd)

    bench.files.fdatasync = gated_sync  # type: ignore[method-assign]
    worker, io = bench.worker, bench.io
    worker.take(store(1, [0], [0]))
    worker.advance()
    io.complete(0)
    assert worker.advance() == []
    assert entered.wait(60)
    worker.take(order(2, OpKind.DISK2H, [3], [3], bytes(8)))
    worker.take(store(3, [1], [1]))
    worker.take(store(4, [2], [2], first=1))
    worker.advance()
    assert len(io.submitted) == 4
    for position in (1, 2, 3):
        io.complete(position, SLOT_BYTES if position != 1 else -errno.EIO)
    assert [done.op_id for done in worker.advance()] == [2]
    assert not worker.is_idle
    proceed.set()
    done = bench.finish()
    assert sorted(done) == [1, 3, 4]
    # what was written meanwhile was committed together
    assert bench.files.calls.count(("sync", DATA)) == 2


STEPS = {
    ("sync", DATA): "sync of the data file",
    ("write", INDEX): "write of the records",
    ("sync", INDEX): "sync of the index file",
}


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_commit_fails_its_group_and_not_the_next(
    bench: Bench, call: tuple[str, int], code: int
) -> None:
    bench.files.failing[call] = OSError(code, os.strerror(code))
    bench.worker.take(store(1, [0, 1], [0, 1]))
    failed = bench.finish()[1]
    assert (failed.num_ok, failed.bad_block) == (0, False)
    assert os.strerror(code) in (failed.error or "")
    assert STEPS[call] in (failed.error or "")
    if call == ("sync", DATA):
        assert ("write", INDEX) not in bench.files.calls
    bench.worker.take(store(2, [0, 1], [0, 1]))
    assert bench.finish()[2].num_ok == 2


def test_a_failed_sync_fails_all_that_was_written_before_it_was_known(
    bench: Bench, tmp_path: Path
) -> None:
    """Linux reports a failed sync once: the next one would succeed without their bytes."""
    entered, proceed = threading.Event(), threading.Event()
    sync = bench.files.fdatasync

    def gated_sync(fd: int) -> None:
        entered.set()
        assert proceed.wait(60)
        sync(fd)

    bench.files.fdatasync = gated_sync  # type: ignore[method-assign]
    bench.files.failing["sync", DATA] = OSError(errno.EIO, os.strerror(errno.EIO))
    worker, io = bench.worker, bench.io
    worker.take(store(1, [0], [0]))
    worker.advance()
    io.complete(0)
    worker.advance()
    assert entered.wait(60)
    worker.take(store(2, [1], [1]))  # will have been written
    worker.take(store(3, [2, 3, 4, 5], [2, 3, 4, 5]))  # is being written
    worker.take(order(4, OpKind.DISK2H, [6], [6], bytes(8)))
    worker.take(store(5, [7], [7]))  # has not been begun
    worker.advance()
    io.complete_all()
    worker.advance()
    assert len(io.submitted) == 1 + 1 + 1 + 4
    proceed.set()
    done: dict[int, Done] = {}
    while 1 not in done:
        select.select([bench.commit.fileno()], [], [], 30)
        done.update({answer.op_id: answer for answer in worker.advance()})
    assert (done[1].num_ok, done[2].num_ok) == (0, 0)
    assert "sync of the data file" in (done[2].error or "")
    done |= bench.finish()
    assert {op_id: done[op_id].num_ok for op_id in (1, 2, 3, 5)} == {1: 0, 2: 0, 3: 0, 5: 1}
    assert "sync of the data file" in (done[3].error or "")
    assert sorted(recorded(bench, tmp_path)) == [7]


def test_only_what_was_written_without_a_gap_is_recorded(bench: Bench, tmp_path: Path) -> None:
    bench.worker.take(store(1, [0, 1, 2], [0, 1, 2]))
    bench.worker.advance()
    bench.io.complete(0)
    bench.io.complete(1, -errno.EIO)
    bench.io.complete(2)
    assert bench.finish()[1].num_ok == 1
    assert recorded(bench, tmp_path) == {0: b"block 0"}


def recorded(bench: Bench, tmp_path: Path) -> dict[int, bytes]:
    """Return the slots and keys that the next start would find."""
    (tmp_path / "index").write_bytes(bench.files.content)
    with (tmp_path / "index").open("rb") as file:
        contents = SlotIndex([file.fileno()], POOL_ID).load(NUM_BLOCKS)
    assert not len(contents.torn)
    return {
        int(record["slot"]): bytes(record["key"])[: record["key_bytes"]]
        for record in contents.records
    }


def test_a_slot_is_forgotten_when_it_is_to_be_overwritten_or_turns_out_bad(
    bench: Bench, tmp_path: Path
) -> None:
    bench.worker.take(store(1, [0, 1, 2, 3], [0, 1, 2, 3]))
    bench.finish()
    assert sorted(recorded(bench, tmp_path)) == [0, 1, 2, 3]
    bench.worker.take(store(2, [4], [2]))
    assert sorted(recorded(bench, tmp_path)) == [0, 1, 3]
    bench.worker.take(order(3, OpKind.DISK2H, [1], [9], bytes(8)))
    bench.finish()
    assert sorted(recorded(bench, tmp_path)) == [0, 2, 3]


@pytest.mark.parametrize(
    "names",
    [
        BlockNames(b"short", 0, b"", [b"key"]),
        BlockNames(ROOT, 0, b"", [b"k" * (MAX_KEY_BYTES + 1)]),
        BlockNames(ROOT, 0, b"", [b""]),
        BlockNames(ROOT, 3, b"", [b"key"]),
    ],
)
def test_names_that_do_not_fit_a_record_fail_their_op_alone(
    bench: Bench, names: BlockNames
) -> None:
    bench.worker.take(order(1, OpKind.H2DISK, [0], [0], names=names))
    bench.worker.take(store(2, [1], [1]))
    done = bench.finish()
    assert done[1].num_ok == 0
    assert done[1].error
    assert done[2].num_ok == 1
