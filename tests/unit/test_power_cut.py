"""Power cuts at any moment: promised blocks are there, and no block is ever wrong.

The real disk worker writes to a device that only simulates: it writes down when each write and each
sync began and ended. A cut at a point of that log leaves in each file what had been written before
its last completed sync began; of later writes any sector, in any order, may be there or not. Then a
pool is opened on such files and its tier restored.

One thread does it all, in an order that a seed decides, so every round can be had again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.restore import restore_tier
from flexcache.cache.tier import Lease, Tier
from flexcache.ids import OpKind, RootId, TierName
from flexcache.storage.block_io import BlockIO, Completion, Direction, Request
from flexcache.storage.compression import Codec
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.storage.pool_directory import (
    DATA_FILE,
    INDEX_FILE,
    data_file_bytes,
    index_file_bytes,
)
from flexcache.storage.slot_index import FORM, SlotIndex, locate_slot
from flexcache.storage.slot_io import SlotIO, SlotPacker, filled_bytes
from flexcache.transfer.disk_worker import DiskWorker, GroupCommit
from flexcache.transfer.messages import BlockNames, Done, Execute, pack_ids

pytestmark = pytest.mark.whole


ROOT = RootId(b"root of a model!")
NUM_SLOTS, SLOT_BYTES, NUM_HOST_BLOCKS = 24, 8192, 16
SECTOR = 512
NUM_ROUNDS = settings().max_examples * 3


@cache
def content(key: bytes) -> bytes:
    """Return a block's bytes; those of some blocks repeat, so that they can be packed."""
    num_repeats = 4 if sum(key) % 3 else 1
    return random.Random(key).randbytes(SLOT_BYTES // num_repeats) * num_repeats


@dataclass(frozen=True)
class Event:
    """``what``: "write" and then "written" or "failed", "sync" and "synced" or "lost", which
    ``number`` pairs; or "promised"."""

    what: str
    number: int = 0
    fd: int = -1
    offset: int = 0
    data: bytes = b""
    promised: dict[bytes, int] = field(default_factory=dict)


class Device:
    """Files whose content is undecided until a sync. Calls fail if ``may_fail`` says so."""

    def __init__(self, images: dict[int, bytes]) -> None:
        self.images = images
        self.log: list[Event] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.may_fail: Callable[[], bool] = lambda: False
        self._numbers = iter(range(10**9))

    def begin(self, fd: int, offset: int, data: bytes) -> int:
        number = next(self._numbers)
        self.log.append(Event("write", number, fd, offset, data))
        return number

    def end(self, number: int, what: str = "written") -> None:
        self.log.append(Event(what, number))

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        number = self.begin(fd, offset, data)
        if self.may_fail():
            self.end(number, "failed")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.end(number)
        return len(data)

    def fdatasync(self, fd: int) -> None:
        number = next(self._numbers)
        self.log.append(Event("sync", number, fd))
        self.meanwhile()
        if self.may_fail():
            self.log.append(Event("lost", number, fd))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.log.append(Event("synced", number, fd))

    def after_a_cut(self, at: int, rng: random.Random) -> dict[int, bytes]:
        """Return what the files may hold if the power fails after the first ``at`` events."""
        log = self.log[:at]
        ends = ("written", "failed", "synced")
        ended = {e.number: i for i, e in enumerate(log) if e.what in ends}
        failed = {e.number for e in log if e.what == "failed"}
        images = {}
        for fd, image in self.images.items():
            syncs = [i for i, e in enumerate(log) if e.what == "sync" and e.fd == fd]
            completed = [i for i in syncs if log[i].number in ended]
            last_sync = max(completed, key=lambda i: ended[log[i].number], default=-1)
            failed |= self._lost(log, fd, completed, ended)
            durable, pending = bytearray(image), []
            for event in log:
                if event.what == "write" and event.fd == fd:
                    if ended.get(event.number, at) >= last_sync:
                        pending.append(event)
                    elif event.number in failed:
                        _put_some_sectors(durable, event, rng)
                    else:
                        _put(durable, event.offset, event.data)
            for event in rng.sample(pending, len(pending)):
                _put_some_sectors(durable, event, rng)
            images[fd] = bytes(durable)
        return images

    def _lost(self, log: list[Event], fd: int, syncs: list[int], ended: dict[int, int]) -> set[int]:
        """Writes that a failed sync was to make durable. The failure is reported once, and no later
        sync brings them back."""
        lost = set()
        for at, event in enumerate(log):
            if event.what == "lost" and event.fd == fd:
                last_sync = max((i for i in syncs if ended[log[i].number] < at), default=-1)
                writes = (e.number for e in log[:at] if e.what == "write" and e.fd == fd)
                lost |= {number for number in writes if ended.get(number, at) >= last_sync}
        return lost


def _put(image: bytearray, offset: int, data: bytes) -> None:
    image[offset : offset + len(data)] = data


def _put_some_sectors(image: bytearray, event: Event, rng: random.Random) -> None:
    share, end = rng.choice([0.0, 0.5, 1.0]), event.offset + len(event.data)
    start = event.offset
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        if rng.random() < share:
            _put(image, start, event.data[start - event.offset : stop - event.offset])
        start = stop


class DeviceIO(BlockIO):
    """Writes blocks to the device; each ends when the test says so."""

    name, depth = "device", 4

    def __init__(self, device: Device) -> None:
        self.device = device
        self.in_flight: list[tuple[int, int, int]] = []
        self.completions: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.direction is Direction.WRITE
            data = b"".join(request.pieces)
            number = self.device.begin(request.fd, request.offset, data)
            self.in_flight.append((request.token, number, len(data)))

    def complete(self, rng: random.Random) -> None:
        token, number, num_bytes = self.in_flight.pop(rng.randrange(len(self.in_flight)))
        failed = self.device.may_fail()
        self.device.end(number, "failed" if failed else "written")
        self.completions.append(Completion(token, -errno.EIO if failed else num_bytes))

    def reap(self) -> list[Completion]:
        reaped, self.completions = self.completions, []
        return reaped

    def fileno(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass


class SteppedExecutor(Executor):
    """An executor that runs jobs when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except OSError as error:
                future.set_exception(error)

        self.waiting.append(run)
        return future

    def step(self) -> None:
        self.waiting.pop(0)()


class Machine:
    """A tier and its disk worker over a simulated device, with as much activity as possible."""

    def __init__(
        self, pool_id: bytes, images: dict[int, bytes], segment: HostSegment, sync: str,
        rng: random.Random, codec: Codec,
    ) -> None:  # fmt: skip
        self.rng = rng
        self.segment = segment
        self.device = Device(images)
        self.io = DeviceIO(self.device)
        self.executor = SteppedExecutor()
        self.tier = Tier(TierName.SSD, NUM_SLOTS)
        fds = sorted(images)
        data_fds, index_fds = fds[: len(fds) // 2], fds[len(fds) // 2 :]
        index = SlotIndex(index_fds, pool_id, self.device)
        self.commit = GroupCommit(data_fds, index_fds, index, sync, self.device, self.executor)
        self.packing = SteppedExecutor()
        self.slots = SlotIO(
            self.io, lambda s: locate_slot(s, data_fds, SLOT_BYTES), SLOT_BYTES,
            np.zeros(NUM_SLOTS, FORM), codec, self.packing,
        )  # fmt: skip
        self.worker = DiskWorker(self.slots, [segment], index, self.commit)
        self.leases: dict[int, tuple[Lease, list[int]]] = {}
        self.free_host_blocks = list(range(NUM_HOST_BLOCKS))
        self.num_ops = 0
        self.device.meanwhile = self.step

    def run(self, num_ops: int) -> None:
        while self.num_ops < num_ops:
            self.step()
        self.commit.close()
        self.slots.close()

    def step(self) -> None:
        steps = [self.start_op, self.answer]
        if self.io.in_flight:
            steps += [lambda: self.io.complete(self.rng)] * 3
        for executor in (self.executor, self.packing):
            if executor.waiting:
                steps.append(executor.step)
        self.rng.choice(steps)()

    def start_op(self) -> None:
        """Write the blocks of some prompt that the tier lacks."""
        word = bytes(self.rng.choices(b"abc", k=self.rng.randint(1, 6)))
        keys = EngineBlockKeys(ROOT, [word[:stop] for stop in range(1, len(word) + 1)], len(word))
        start = self.tier.match(keys).num_blocks
        start += self.tier.num_in_flight(keys, start, len(word))
        room = min(len(word) - start, len(self.free_host_blocks))
        if room <= 0:
            return
        lease = self.tier.reserve(keys, start, start + room)
        self.promise()  # what was evicted is promised no more
        host_blocks = [self.free_host_blocks.pop() for _ in range(len(lease))]
        if not host_blocks:
            self.tier.release(lease)
            return
        for block, key in zip(host_blocks, lease.keys, strict=True):
            self.segment.block(block)[:] = content(key)
        self.num_ops += 1
        self.leases[self.num_ops] = (lease, host_blocks)
        names = BlockNames(ROOT, start, lease.parent_key or b"", list(lease.keys))
        src, dst = pack_ids(np.array(host_blocks)), pack_ids(lease.blocks)
        self.worker.take(Execute(self.num_ops, OpKind.H2DISK, src, dst, 1, names=names))

    def answer(self) -> None:
        for done in self.worker.advance():
            self.done(done)

    def done(self, done: Done) -> None:
        lease, host_blocks = self.leases.pop(done.op_id)
        self.tier.publish(lease, done.num_ok)
        self.tier.release(lease)
        self.free_host_blocks += host_blocks
        self.promise()

    def promise(self) -> None:
        """Record that a caller asking now gets these keys in these slots."""
        found = {}
        for run in self.tier.index._runs.values():
            found.update(zip(run.keys, run.blocks.tolist(), strict=True))
        self.device.log.append(Event("promised", promised=dict(found)))


@dataclass
class Template:
    """A new pool's files, to be written out again and again."""

    paths: list[Path]
    pool_id: bytes
    images: dict[int, bytes]
    """By made-up descriptors: the data files', then the index files'."""

    @classmethod
    def make(cls, paths: list[Path]) -> Template:
        pool = DiskPool([str(path) for path in paths], SLOT_BYTES, NUM_SLOTS, direct_io=False)
        names = [path / name for name in (DATA_FILE, INDEX_FILE) for path in paths]
        rows = NUM_SLOTS // len(paths)
        sizes = [data_file_bytes(rows, SLOT_BYTES), index_file_bytes(rows)]
        images = {
            fd: name.read_bytes().ljust(sizes[fd // len(paths)], b"\0")
            for fd, name in enumerate(names)
        }
        pool.close()
        return cls(paths, pool.record_id, images)

    def reopen(self, images: dict[int, bytes]) -> DiskPool:
        names = [path / name for name in (DATA_FILE, INDEX_FILE) for path in self.paths]
        for fd, name in enumerate(names):
            name.write_bytes(images[fd])
        return DiskPool([str(path) for path in self.paths], SLOT_BYTES, NUM_SLOTS, direct_io=False)


@dataclass
class Survivors:
    """What a server finds after the cut: blocks whose bytes pass, how many of them were packed, and
    how many do not pass."""

    served: dict[bytes, bytes]
    num_packed: int = 0
    num_bad: int = 0


def survivors(pool: DiskPool) -> Survivors:
    records = pool.load()
    tier = Tier(TierName.SSD, NUM_SLOTS)
    restore_tier(tier, records)
    tier.check()
    by_slot = {int(record["slot"]): record for record in records}
    found = Survivors({})
    for run in tier.index._runs.values():
        for key, slot in zip(run.keys, run.blocks.tolist(), strict=True):
            fd, offset = locate_slot(slot, pool.data_fds, SLOT_BYTES)
            data = block_of(os.pread(fd, SLOT_BYTES, offset), by_slot[slot])
            if checksum([memoryview(data)]) == by_slot[slot]["checksum"]:
                found.served[key] = data
                found.num_packed += bool(by_slot[slot]["filled"])
            else:
                found.num_bad += 1
    return found


def block_of(slot: bytes, record: Any) -> bytes:
    """Return a slot's block; nothing if it cannot be unpacked."""
    if not record["filled"]:
        return slot
    block = bytearray(SLOT_BYTES)
    with contextlib.suppress(ValueError):
        packed = memoryview(slot)[: filled_bytes(int(record["filled"]), SLOT_BYTES)]
        SlotPacker(Codec(record["codec"]), SLOT_BYTES).unpack(packed, [memoryview(block)])
    return bytes(block)


def one_round(
    seed: int, template: Template, segment: HostSegment, sync: str, with_faults: bool,
    codec: Codec = Codec.NONE,
) -> tuple[Survivors, dict[bytes, int]]:  # fmt: skip
    """Write, cut, start again; return what is there and what was promised."""
    rng = random.Random(seed)
    machine = Machine(template.pool_id, template.images, segment, sync, rng, codec)
    if with_faults:
        machine.device.may_fail = lambda: rng.random() < 0.08
    machine.run(num_ops=rng.randint(1, 30))
    log = machine.device.log
    cut = rng.randint(0, len(log))
    promised: dict[bytes, int] = {}
    for event in log[:cut]:
        if event.what == "promised":
            promised = event.promised
    pool = template.reopen(machine.device.after_a_cut(cut, rng))
    try:
        return survivors(pool), promised
    finally:
        pool.close()


@pytest.fixture
def templates(tmp_path: Path) -> list[Template]:
    return [Template.make([tmp_path / f"{n}-{i}" for i in range(n)]) for n in (1, 2, 3)]


@pytest.fixture
def segment() -> Any:
    made = HostSegment.create(SLOT_BYTES, NUM_HOST_BLOCKS)
    made.map()
    yield made
    made.close()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("with_faults", [False, True])
def test_after_any_cut_what_was_promised_is_there_and_nothing_is_wrong(
    codec: Codec, with_faults: bool, templates: list[Template], segment: HostSegment
) -> None:
    num_promised = num_packed = 0
    for seed in range(NUM_ROUNDS):
        template = templates[seed % len(templates)]
        found, promised = one_round(seed, template, segment, "group", with_faults, codec)
        for key, data in found.served.items():
            assert data == content(key), f"seed {seed}: wrong bytes for {key!r}"
        lost = promised.keys() - found.served.keys()
        assert not lost, f"seed {seed}: {sorted(lost)} had been promised"
        num_promised += len(promised)
        num_packed += found.num_packed
    assert num_promised > NUM_ROUNDS  # the rounds were about something
    assert bool(num_packed) == (codec is not Codec.NONE)


def test_without_syncs_a_cut_loses_blocks_but_never_serves_wrong_ones(
    templates: list[Template], segment: HostSegment
) -> None:
    num_lost = num_bad = 0
    for seed in range(NUM_ROUNDS // 4):
        found, promised = one_round(seed, templates[0], segment, "none", with_faults=False)
        assert all(data == content(key) for key, data in found.served.items())
        num_lost += len(promised.keys() - found.served.keys())
        num_bad += found.num_bad
    assert num_lost > 0
    assert num_bad > 0  # the simulation tears what it may tear
