"""The disk worker's logic over real files, on every I/O engine; and over one that fails at will."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flexcache.ids import OpKind
from flexcache.storage.block_io import (
    BlockIO,
    Completion,
    Direction,
    Request,
    io_uring_problem,
    open_block_io,
)
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.messages import Done, Execute, pack_ids, unpack_checksums
from flexcache.transfer.workers.disk import DiskWorker

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
        worker.execute(message)
    done: dict[int, Done] = {}
    while len(done) < len(messages):
        done.update({answer.op_id: answer for answer in worker.advance()})
    assert worker.is_idle
    return done


def order(op_id: int, kind: OpKind, src: Sequence[int], dst: Sequence[int], sums: bytes = b""):  # type: ignore[no-untyped-def]
    return Execute(op_id, kind, pack_ids(np.array(src)), pack_ids(np.array(dst)), 1, checksums=sums)


def engines() -> list[str]:
    return ["threads"] if io_uring_problem() else ["threads", "io_uring"]


@pytest.fixture(params=engines())
def worker(
    request: pytest.FixtureRequest, segments: list[HostSegment], tmp_path: Path
) -> Iterator[DiskWorker]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, NUM_BLOCKS * SLOT_BYTES)
    io = open_block_io(request.param, 4)
    assert io.name == request.param
    yield DiskWorker(io, segments, lambda slot: (fd, slot * SLOT_BYTES))
    io.close()
    io.close()
    os.close(fd)


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
    """Completes what it is told to, as it is told to."""

    name, depth = "scripted", 3

    def __init__(self) -> None:
        self.submitted: list[Request] = []
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
        self.completions.append(Completion(self.submitted[position].token, result))


def scripted(segments: list[HostSegment]) -> tuple[DiskWorker, ScriptedIO]:
    io = ScriptedIO()
    return DiskWorker(io, segments, lambda slot: (7, slot * SLOT_BYTES)), io


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (-errno.EIO, "Input/output error"),
        (-errno.ENOSPC, "No space left"),
        (SLOT_BYTES - 512, "bytes moved"),
        (0, "0 of"),
    ],
)
def test_an_error_or_a_short_count_is_that_blocks_end(
    segments: list[HostSegment], result: int, text: str
) -> None:
    worker, io = scripted(segments)
    worker.execute(order(1, OpKind.H2DISK, range(5), range(5)))
    assert worker.advance() == []
    io.complete(2)
    io.complete(1, result)
    assert worker.advance() == []  # block 0 is still on its way
    assert len(io.submitted) == 3  # and nothing behind the gap is started any more
    io.complete(0)
    (done,) = worker.advance()
    assert (done.num_ok, done.bad_block) == (1, True)
    assert text in (done.error or "")


def test_the_queue_is_kept_full_and_reads_go_first(segments: list[HostSegment]) -> None:
    worker, io = scripted(segments)
    worker.execute(order(1, OpKind.H2DISK, range(8), range(8)))
    worker.advance()
    assert [r.direction for r in io.submitted] == [Direction.WRITE] * 3
    worker.execute(order(2, OpKind.DISK2H, range(8), range(8), bytes(64)))
    for position in range(3):
        io.complete(position)
    worker.advance()
    assert len(io.submitted) == 6
    assert [r.direction for r in io.submitted[3:]] == [Direction.READ] * 3
    for position in range(3, 6):
        io.complete(position, -errno.EIO)
    worker.advance()
    assert Direction.WRITE in [r.direction for r in io.submitted[6:]]  # not starved


def test_a_dropped_op_ends_with_what_had_been_started(segments: list[HostSegment]) -> None:
    worker, io = scripted(segments)
    worker.execute(order(1, OpKind.H2DISK, range(8), range(8)))
    worker.advance()
    worker.drop(1)
    worker.drop(99)
    for position in range(3):
        io.complete(position)
    (done,) = worker.advance()
    assert done.num_ok == 3
    assert len(io.submitted) == 3
    assert worker.is_idle
