"""Direct ops of a rank on a real file: bytes, checksums, faults, fences, revoked tasks."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout, describe_kv_caches
from flexcache.storage.pieces import PAGE_BYTES, align_up
from flexcache.transfer.copier import CopyPermit
from flexcache.transfer.cpu_copier import CpuCopier
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.direct.ops import CpuDirectIO, DirectOps
from flexcache.transfer.messages import (
    Done,
    Execute,
    pack_checksums,
    pack_ids,
    unpack_checksums,
)

NUM_BLOCKS, NUM_SLOTS, LAYERS, DEPTH = 24, 16, 3, 4


class Gate:
    """A fence of the engine's compute."""

    def __init__(self) -> None:
        self.is_open = False

    def query(self) -> bool:
        return self.is_open

    def wait(self) -> None:
        raise AssertionError("the host looks; nothing waits on a device")


class World:
    """A rank's KV tensors, a file of slots, and the ops between them.

    Args:
        run_bytes: Of each of a block's runs.
    """

    def __init__(self, path: Path, run_bytes: int, direct_io: bool = False) -> None:
        self.memory = mmap.mmap(-1, LAYERS * NUM_BLOCKS * run_bytes)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.kv = whole.view(LAYERS, NUM_BLOCKS, run_bytes)
        layers = {f"layer.{i}": self.kv[i] for i in range(LAYERS)}
        self.layout: BlockLayout = describe_kv_caches(layers, LAYERS * run_bytes)
        self.length = align_up(LAYERS * run_bytes)
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct_io else 0)
        self.fd = os.open(path, flags, 0o600)
        os.ftruncate(self.fd, NUM_SLOTS * self.length)
        self.words = memoryview(bytearray(16)).cast("Q")
        permit = CopyPermit(self.words)
        self.io = CpuDirectIO(self.length, DEPTH, permit)
        self.ops = DirectOps(self.layout, self.locate, self.length, self.io, permit)
        self._next_op = 0

    def locate(self, slot: int) -> tuple[int, int]:
        return self.fd, slot * self.length

    def close(self) -> None:
        self.ops.close()
        os.close(self.fd)

    def fill(self, seed: int) -> None:
        self.kv.copy_(torch.from_numpy(np.random.default_rng(seed).integers(
            0, 256, self.kv.shape, np.uint8)))  # fmt: skip

    def block(self, block: int) -> bytes:
        return self.kv[:, block].contiguous().numpy().tobytes()

    def slot(self, slot: int) -> bytes:
        with mmap.mmap(-1, self.length) as page:  # aligned
            os.preadv(self.fd, [page], slot * self.length)
            return page[:]

    def execute(
        self, kind: OpKind, src: list[int], dst: list[int], sums: list[int] | None = None,
        after: Gate | None = None, task_id: int = 7,
    ) -> int:  # fmt: skip
        self._next_op += 1
        packed = pack_checksums(np.array(sums or [], np.uint64))
        blocks = [pack_ids(np.array(ids, np.int64)) for ids in (src, dst)]
        self.ops.execute(Execute(self._next_op, kind, *blocks, task_id, checksums=packed), after)
        return self._next_op

    def finish(self) -> dict[int, Done]:
        """Let all ops end that can."""
        done: dict[int, Done] = {}
        while self.ops.op_ids:
            done |= {each.op_id: each for each in self.ops.advance()}
            self.ops.check()
        return done

    def write(self, blocks: list[int], slots: list[int]) -> list[int]:
        """Write blocks; return the checksums that the rank reports."""
        done = self.finish_one(self.execute(OpKind.D2DISK, blocks, slots))
        assert (done.num_ok, done.error) == (len(slots), None)
        return unpack_checksums(done.checksums).tolist()

    def finish_one(self, op_id: int) -> Done:
        return self.finish()[op_id]


@pytest.fixture(params=[4096, 8192, 1000, 6144], ids=lambda size: f"runs of {size}")
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "slots", request.param)
    world.fill(1)
    yield world
    world.close()


def test_blocks_go_to_slots_and_come_back_to_other_blocks(world: World) -> None:
    before = [world.block(block) for block in range(8)]
    sums = world.write(list(range(8)), list(range(8, 16)))
    for index, slot in enumerate(range(8, 16)):
        padding = bytes(world.length - len(before[index]))
        assert world.slot(slot) == before[index] + padding
        assert sums[index] == xxhash.xxh3_64_intdigest(world.slot(slot))
    untouched = [world.block(block) for block in range(16)]
    op = world.execute(OpKind.DISK2D, list(range(8, 16)), list(range(16, 24)), sums)
    assert world.finish_one(op) == Done(op, 8)
    assert [world.block(block) for block in range(16, 24)] == before
    assert [world.block(block) for block in range(16)] == untouched


def test_a_flipped_byte_ends_the_useful_part_of_a_load(world: World) -> None:
    sums = world.write([0, 1, 2, 3], [0, 1, 2, 3])
    page = bytearray(world.slot(2))
    page[777] ^= 1
    os.pwrite(world.fd, page, 2 * world.length)
    before = world.block(12)
    op = world.execute(OpKind.DISK2D, [0, 1, 2, 3], [10, 11, 12, 13], sums)
    done = world.finish_one(op)
    assert world.block(12) == before
    assert (done.num_ok, done.bad_block) == (2, True)
    assert done.error == "read of slot 2: checksum mismatch"
    assert [world.block(b) for b in (10, 11)] == [world.block(b) for b in (0, 1)]


def test_a_truncated_file_is_a_bad_block_and_a_failing_write_no_bad_memory(world: World) -> None:
    sums = world.write([0, 1], [0, 1])
    os.ftruncate(world.fd, world.length + PAGE_BYTES // 2)
    done = world.finish_one(world.execute(OpKind.DISK2D, [0, 1], [2, 3], sums))
    assert (done.num_ok, done.bad_block) == (1, True)
    assert "bytes moved" in (done.error or "")
    os.close(world.fd)
    world.fd = os.open(os.devnull, os.O_RDONLY)
    done = world.finish_one(world.execute(OpKind.D2DISK, [0], [0]))
    assert done.num_ok == 0
    assert done.error == "write of slot 0: Bad file descriptor"


def test_a_read_that_fails_on_its_way_blames_no_block_and_keeps_those_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = world.write([0, 1, 2], [0, 1, 2])
    unreadable = os.open(os.devnull, os.O_WRONLY)
    locate = world.locate
    monkeypatch.setattr(
        world.ops, "_locate", lambda slot: (unreadable, 0) if slot == 1 else locate(slot)
    )
    done = world.finish_one(world.execute(OpKind.DISK2D, [0, 1, 2], [3, 4, 5], sums))
    assert (done.num_ok, done.bad_block) == (1, False)
    assert done.error == "read of slot 1: Bad file descriptor"
    assert world.block(3) == world.block(0)
    os.close(unreadable)


def test_an_op_waits_until_compute_is_done_with_its_blocks(world: World) -> None:
    gate = Gate()
    late = world.execute(OpKind.D2DISK, [0], [0], after=gate)
    early = world.execute(OpKind.D2DISK, [1], [1])
    done: list[Done] = []
    while not done:
        done += world.ops.advance()
    assert [each.op_id for each in done] == [early]
    world.fill(2)  # what compute was still writing
    gate.is_open = True
    assert world.finish_one(late).num_ok == 1
    assert world.slot(0).startswith(world.block(0))


def test_a_revoked_task_moves_nothing_and_blames_no_block(world: World) -> None:
    sums = world.write([0], [0])
    before = world.block(5)
    world.words[0] = 7
    done = world.finish_one(world.execute(OpKind.DISK2D, [0], [5], sums, task_id=7))
    assert (done.num_ok, done.bad_block) == (0, False)
    assert "revoked" in (done.error or "")
    assert world.block(5) == before
    assert world.finish_one(world.execute(OpKind.DISK2D, [0], [5], sums, task_id=8)).num_ok == 1


def test_a_task_that_is_revoked_while_its_bytes_are_read_gets_none_of_them(world: World) -> None:
    sums = world.write([0], [0])
    before = world.block(5)
    op = world.execute(OpKind.DISK2D, [0], [5], sums, task_id=7)
    assert world.ops.advance() == []  # the read has begun
    world.words[0] = 7
    done = world.finish_one(op)
    assert (done.num_ok, done.bad_block) == (0, False)
    assert world.block(5) == before


def test_a_store_whose_task_is_revoked_meanwhile_moved_nothing(world: World) -> None:
    """Its blocks may have been used otherwise while they were gathered."""
    op = world.execute(OpKind.D2DISK, [0], [0], task_id=7)
    assert world.ops.advance() == []  # the write has begun
    world.words[0] = 7
    done = world.finish_one(op)
    assert (done.num_ok, done.bad_block) == (0, False)
    assert "revoked" in (done.error or "")


def test_a_load_by_layer_that_would_come_past_dram_is_lost(world: World) -> None:
    sums = world.write([0], [0])
    before = world.block(5)
    with HostSegment.create(world.length, 1) as segment:
        segment.map()
        copier = CpuCopier(CopyPermit(world.words))
        worker = DeviceWorker([world.layout], segment, copier, direct=world.ops)
        load = worker.gates.load_by_layer(7, 1)
        ids = [pack_ids(np.array([each], np.int64)) for each in (0, 5)]
        packed = pack_checksums(np.array(sums, np.uint64))
        worker.execute(Execute(1, OpKind.DISK2D, *ids, 7, gated=True, checksums=packed))
        assert not load.wait_all(60)
        assert worker.has_work
        [done] = worker.advance()
        assert (done.op_id, done.num_ok) == (1, 0)
        assert "layers" in (done.error or "")
        assert not worker.has_work
        assert world.block(5) == before


def test_a_kernel_without_huge_pages_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    world = World(tmp_path / "slots", 4096)
    world.fill(1)
    sums = world.write([0], [0])
    op = world.execute(OpKind.DISK2D, [0], [5], sums)
    assert world.finish_one(op).num_ok == 1
    world.close()


def test_a_dropped_op_ends_with_what_was_moved(world: World) -> None:
    gate = Gate()
    op = world.execute(OpKind.D2DISK, [0, 1], [0, 1], after=gate)
    world.ops.drop([op])
    assert world.finish_one(op).num_ok == 0
    assert not any(world.slot(0))


@pytest.mark.parametrize(
    ("kind", "src", "dst", "sums"),
    [
        (OpKind.DISK2D, [0], [NUM_BLOCKS], [0]),
        (OpKind.DISK2D, [0, 1], [0], [0, 0]),
        (OpKind.DISK2D, [0], [0], []),
        (OpKind.DISK2D, [-1], [0], [0]),
        (OpKind.D2DISK, [-1], [0], []),
    ],
)
def test_a_malformed_op_is_refused(
    world: World, kind: OpKind, src: list[int], dst: list[int], sums: list[int]
) -> None:
    done = world.finish_one(world.execute(kind, src, dst, sums))
    assert done.num_ok == 0
    assert "malformed op" in (done.error or "")


def test_blocks_bypass_the_page_cache_whatever_their_runs(tmp_path: Path) -> None:
    try:
        world = World(tmp_path / "slots", 1000, direct_io=True)
    except OSError:
        pytest.skip("no direct I/O here")
    world.fill(1)
    sums = world.write([0, 1, 2], [0, 1, 2])
    op = world.execute(OpKind.DISK2D, [0, 1, 2], [3, 4, 5], sums)
    assert world.finish_one(op).num_ok == 3
    assert [world.block(b) for b in (3, 4, 5)] == [world.block(b) for b in (0, 1, 2)]
    world.close()


@settings(max_examples=30)
@given(st.data())
def test_any_mix_of_ops_moves_every_block_it_says_it_moved(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    world = World(tmp_path_factory.mktemp("mix") / "slots", 1000)
    world.fill(1)
    slots: dict[int, tuple[bytes, int]] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        free = sorted(set(range(NUM_SLOTS)) - slots.keys())
        blocks = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=6))
        if free and data.draw(st.booleans()):
            taken = free[: len(blocks)]
            expected = [world.block(block) for block in blocks[: len(taken)]]
            sums = world.write(blocks[: len(taken)], taken)
            slots |= dict(zip(taken, zip(expected, sums, strict=True), strict=True))
        elif slots:
            some = data.draw(st.lists(st.sampled_from(sorted(slots)), min_size=1, max_size=6))
            targets = list(range(12, 12 + len(some)))
            op = world.execute(OpKind.DISK2D, some, targets, [slots[slot][1] for slot in some])
            assert world.finish_one(op).num_ok == len(some)
            assert [world.block(block) for block in targets] == [slots[slot][0] for slot in some]
    world.close()
