"""The contract of remote stores: the same tests for memory, a directory, a store of the
user's own, S3 and Mooncake."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from urllib.parse import parse_qs

import numpy as np
import pytest
import xxhash
from ports import free_port
from stores import (
    StoreServer,
    missing,
    mooncake_master,
    mooncake_segment,
    s3_server,
)

from flexcache.errors import ConfigError
from flexcache.storage.compression import PACKAGES
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.remote import RemoteStore, open_remote_store
from flexcache.storage.remote.base import Presence, Status, StoreUnavailableError
from flexcache.storage.remote.memory import MemoryStore
from flexcache.storage.remote.objects import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BlockCodec,
    BlockMover,
    BlocksMoved,
    note_layout,
    object_name,
)

BLOCK_BYTES, NUM_BLOCKS = 256 << 10, 64
CALL_BYTES = 100 * BLOCK_BYTES
TIMEOUT_S = 20.0
NEEDS = {
    "memory": (),
    "file": (),
    "sqlite": (),
    "s3": ("obstore", "weed"),
    "mooncake": ("mooncake", "mooncake_master"),
}


@contextmanager
def opener(kind: str, directory: str) -> Iterator[Callable[..., RemoteStore]]:
    """Return a function that opens stores, all of the same place."""
    with ExitStack() as stack:
        if kind == "memory":
            shared = MemoryStore()
            yield lambda **_: shared
            return
        if kind == "file":
            url = f"file://{directory}"
        elif kind == "sqlite":  # of the user's own module
            url = f"outside.sqlite_store://{directory}/objects.db"
        elif kind == "s3":
            url = stack.enter_context(s3_server()).url
        else:
            master = stack.enter_context(mooncake_master(segment_gb=0.25))
            stack.enter_context(mooncake_segment(master.url))
            url = master.url.partition("?")[0]
        yield lambda **settings: open_remote_store(url, **settings)


@pytest.fixture(scope="module", params=NEEDS)
def open_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RemoteStore]]:
    reason = missing(*NEEDS[request.param]) if NEEDS[request.param] else None
    if reason:
        pytest.skip(reason)
    with opener(request.param, str(tmp_path_factory.mktemp("store"))) as made:
        yield made


class Memory:
    """Blocks of a host pool, from which parts are made."""

    def __init__(self) -> None:
        self.segment = HostSegment.create(BLOCK_BYTES, NUM_BLOCKS)
        self.segment.map()

    def filled(self, block: int, *sizes: int) -> list[memoryview]:
        """Return parts with gaps between them, filled with bytes that occur nowhere else."""
        parts = self.cleared(block, *sizes)
        for part in parts:
            part[:] = os.urandom(len(part))
        return parts

    def cleared(self, block: int, *sizes: int) -> list[memoryview]:
        view, parts = self.segment.block(block), []
        for size in sizes:
            parts.append(view[:size])
            view = view[size + 64 :]
        for part in parts:
            part[:] = bytes(len(part))
        return parts


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.segment.close()


@pytest.fixture
def store(open_store: Callable[..., RemoteStore], memory: Memory) -> Iterator[RemoteStore]:
    made = open_store(call_bytes=CALL_BYTES, timeout_s=TIMEOUT_S)
    yield made
    made.close()
    made.close()


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def fresh(count: int) -> list[str]:
    """Return names that no other test uses."""
    stem = os.urandom(8).hex()
    return [f"v1/{stem}/{i:02x}/{stem}{i}" for i in range(count)]


def statuses(outcomes: list) -> list[Status]:  # type: ignore[type-arg]
    return [outcome.status for outcome in outcomes]


def joined(parts: list[memoryview]) -> bytes:
    return b"".join(parts)


def test_the_first_of_some_names_is_found(store: RemoteStore, memory: Memory) -> None:
    names = fresh(70)
    assert store.first_present(names, soon()) == 70
    assert store.first_present([], soon()) == 0
    parts = [memory.filled(i, 64) for i in range(2)]
    assert statuses(store.write_from([names[66], names[5]], parts, soon())) == [Status.OK] * 2
    assert store.first_present(names, soon()) == 5
    assert store.first_present(names[6:], soon()) == 60
    assert store.first_present(names[::-1], soon()) == 3


def test_an_absent_object_is_missing(store: RemoteStore, memory: Memory) -> None:
    names = fresh(3)
    assert store.count_present(names, soon()).num_present == 0
    found = store.read_into(names, [memory.cleared(i, 64) for i in range(3)], soon())
    assert statuses(found) == [Status.MISSING] * 3
    assert statuses(store.discard(names, soon()))[0] in (Status.OK, Status.MISSING)
    assert store.count_present([], soon()).num_present == 0
    assert store.read_into([], [], soon()) == store.write_from([], [], soon()) == []


def test_layouts_of_a_model_are_noted_once_each(
    open_store: Callable[..., RemoteStore], store: RemoteStore
) -> None:
    model = os.urandom(16)
    assert note_layout(store, model, "tp=1|block=16", soon()) == []
    for _ in range(2):
        assert note_layout(store, model, "tp=2|block=16", soon()) == ["tp=1|block=16"]
    with closing(open_store(call_bytes=CALL_BYTES, timeout_s=TIMEOUT_S)) as other:
        assert note_layout(other, model, "é" * 5000, soon()) == ["tp=1|block=16", "tp=2|block=16"]
    for number in range(40):  # beyond the room for notes
        others = note_layout(store, model, f"tp={number}", soon())
        assert 3 <= len(others) <= 16
    assert note_layout(store, os.urandom(16), "tp=1|block=16", soon()) == []


def test_an_object_of_several_parts_comes_back_whole(store: RemoteStore, memory: Memory) -> None:
    (name,) = fresh(1)
    content = memory.filled(0, 64, 5000, 100_001)
    (written,) = store.write_from([name], [content], soon())
    assert (written.status, written.num_bytes) == (Status.OK, 105_065)
    target = memory.cleared(1, 64, 100_001, 5000)  # cut in other places
    (read,) = store.read_into([name], [target], soon())
    assert (read.status, read.num_bytes) == (Status.OK, 105_065)
    assert joined(target) == joined(content)


def test_a_smaller_object_leaves_the_rest_of_the_parts_untouched(
    store: RemoteStore, memory: Memory
) -> None:
    (name,) = fresh(1)
    content = memory.filled(0, 64, 1000)
    store.write_from([name], [content], soon())
    target = memory.cleared(1, 64, 500, 5000)
    (read,) = store.read_into([name], [target], soon())
    assert (read.status, read.num_bytes) == (Status.OK, 1064)
    assert joined(target) == joined(content) + bytes(4500)


def test_each_object_of_a_batch_has_its_own_outcome(store: RemoteStore, memory: Memory) -> None:
    names = fresh(4)
    contents = [memory.filled(i, 64, 2000) for i in range(4)]
    store.write_from(
        [names[0], names[1], names[3]], [contents[0], contents[1], contents[3]], soon()
    )
    rooms = [memory.cleared(8 + i, 64, 1000 if i == 1 else 2000) for i in range(4)]
    read = store.read_into(names, rooms, soon())
    assert statuses(read) == [Status.OK, Status.TOO_LARGE, Status.MISSING, Status.OK]
    assert all(outcome.reason for outcome in read[1:3])
    assert (joined(rooms[0]), joined(rooms[3])) == (joined(contents[0]), joined(contents[3]))


def test_objects_are_read_into_one_part_each(store: RemoteStore, memory: Memory) -> None:
    names = fresh(4)
    contents = [memory.filled(i, 64, 2000) for i in range(3)]
    store.write_from(names[:3], contents, soon())
    rooms = [memory.cleared(8 + i, size)[0] for i, size in enumerate((2064, 2063, 5000, 2064))]
    read = store.read_into(names, [[room] for room in rooms], soon())
    assert statuses(read) == [Status.OK, Status.TOO_LARGE, Status.OK, Status.MISSING]
    assert [outcome.num_bytes for outcome in read] == [2064, 0, 2064, 0]
    assert bytes(rooms[0]) == joined(contents[0])
    assert bytes(rooms[2]) == joined(contents[2]) + bytes(5000 - 2064)


@pytest.mark.parametrize("gap", [0, 1, 7, 8, 9, 23, 24, 39])
def test_presence_is_counted_up_to_the_first_gap(
    store: RemoteStore, memory: Memory, gap: int
) -> None:
    names = fresh(40)
    parts = [memory.filled(0, 64)] * 40
    there = names[:gap] + names[gap + 1 :]
    assert {o.status for o in store.write_from(there, parts[:39], soon())} == {Status.OK}
    assert store.count_present(names, soon()).num_present == gap
    assert store.count_present(there, soon()).num_present == 39


def test_an_existing_name_can_be_overwritten(store: RemoteStore, memory: Memory) -> None:
    (name,) = fresh(1)
    old, new = memory.filled(0, 64, 3000), memory.filled(1, 64, 3000)
    for content in (old, new):
        assert statuses(store.write_from([name], [content], soon())) == [Status.OK]
    target = memory.cleared(2, 64, 3000)
    assert statuses(store.read_into([name], [target], soon())) == [Status.OK]
    assert joined(target) in (joined(old), joined(new))


def test_a_discarded_name_is_free_again(store: RemoteStore, memory: Memory) -> None:
    names = fresh(2)
    content = memory.filled(0, 64, 3000)
    store.write_from(names, [content, content], soon())
    store.read_into(names[:1], [memory.cleared(1, 64, 3000)], soon())  # leased, in some stores
    assert statuses(store.discard(names[:1], soon()))[0] is not Status.FAILED
    assert store.count_present(names[:1], soon()).num_present == 0
    assert store.count_present(names[1:], soon()).num_present == 1
    new = memory.filled(2, 64, 3000)
    assert statuses(store.write_from(names[:1], [new], soon())) == [Status.OK]
    target = memory.cleared(1, 64, 3000)
    assert statuses(store.read_into(names[:1], [target], soon())) == [Status.OK]
    assert joined(target) == joined(new)


def test_a_large_batch(store: RemoteStore, memory: Memory) -> None:
    names = fresh(300)
    contents = [memory.filled(i % 30, 64, BLOCK_BYTES - 200) for i in range(30)] * 10
    for start in range(0, 300, 100):
        batch = slice(start, start + 100)
        written = store.write_from(names[batch], contents[batch], soon())
        assert set(statuses(written)) == {Status.OK}
    assert store.count_present(names, soon()).num_present == 300
    rooms = [memory.cleared(30 + i, 64, BLOCK_BYTES - 200) for i in range(30)]
    assert set(statuses(store.read_into(names[150:180], rooms, soon()))) == {Status.OK}
    assert [joined(room) for room in rooms] == [joined(content) for content in contents[:30]]
    store.discard(names, soon())
    assert store.count_present(names, soon()).num_present == 0


def test_another_client_sees_the_object_too(
    open_store: Callable[..., RemoteStore], store: RemoteStore, memory: Memory
) -> None:
    (name,) = fresh(1)
    content = memory.filled(0, 64, 3000)
    store.write_from([name], [content], soon())
    with HostSegment.create(4096, 1) as segment:
        segment.map()
        other = open_store(call_bytes=CALL_BYTES, timeout_s=TIMEOUT_S)
        target = segment.block(0)[:3064]
        assert other.count_present([name], soon()).num_present == 1
        assert statuses(other.read_into([name], [[target]], soon())) == [Status.OK]
        assert bytes(target) == joined(content)
        if other is not store:
            other.close()
        del target


def test_a_reader_sees_objects_whole_or_not_at_all(store: RemoteStore, memory: Memory) -> None:
    """Two write and discard, two read; an object is of one byte all through."""
    names = fresh(4)
    size, torn, counts, stop = 200_000, [], [], threading.Event()

    def write(thread: int) -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 120
            parts = memory.cleared(thread, 64, size)
            for part in parts:
                part[:] = bytes([2 * number + thread + 1]) * len(part)
            store.write_from(names, [parts] * 4, soon())
            store.discard(names[:2], soon())

    def read(thread: int) -> None:
        rooms = [memory.cleared(10 * thread + i, 64, size) for i in range(4)]
        num_read, give_up = 0, soon()
        while num_read < 20 and time.monotonic() < give_up:
            for room, outcome in zip(rooms, store.read_into(names, rooms, soon()), strict=True):
                if outcome.status is Status.OK:
                    num_read += 1
                    content = np.frombuffer(joined(room), np.uint8)
                    if (content != content[0]).any():
                        torn.append(content)
        counts.append(num_read)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    readers = [threading.Thread(target=read, args=(i,)) for i in (2, 3)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert min(counts) >= 20
    # Mooncake reads in place: what is discarded by force under a reader may be half another's.
    if "mooncake" not in store.name:
        assert not torn


def test_nothing_is_started_after_the_deadline(store: RemoteStore, memory: Memory) -> None:
    names = fresh(2)
    content, past = memory.filled(0, 64, 1000), time.monotonic() - 1
    assert set(statuses(store.write_from(names, [content] * 2, past))) == {Status.FAILED}
    assert store.count_present(names, past).error
    room = memory.cleared(1, 64, 1000)
    assert set(statuses(store.read_into(names[:1], [room], past))) == {Status.FAILED}
    assert joined(room) == bytes(1064)


# Blocks: as objects of every store; damage is found by their format, whatever the store.

ROOT = bytes(range(16))


def mover(compression: str = "none") -> BlockMover:
    return BlockMover(BlockCodec(compression), BLOCK_BYTES)


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def half_blocks(memory: Memory, first: int, count: int) -> list[list[memoryview]]:
    """Return blocks of two ranks."""
    half = BLOCK_BYTES // 2
    return [[memory.segment.block(i)[:half], memory.segment.block(i)[half:]] for i in range(count)]


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


def newer_version(data: bytes) -> bytes:
    fields = data[:8] + struct.pack("<H", FORMAT_VERSION + 1) + data[10:56]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + data[HEADER_BYTES:]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, bool]] = {
    "bit of the header": (flip(20), "header is damaged", True),
    "bit of the bytes": (flip(100_000), "checksum mismatch", True),
    "last bit": (flip(HEADER_BYTES + BLOCK_BYTES - 1), "checksum mismatch", True),
    "half of it": (lambda data: data[: len(data) // 2], "bytes are present", True),
    "less than a header": (lambda data: data[:10], "less than a header", True),
    "a byte more": (lambda data: data + b"x", "bytes where at most", True),
    "something else": (lambda data: b"#!/bin/sh\n" * 100, "not a FlexCache object", True),
    "newer version": (newer_version, f"format version {FORMAT_VERSION + 1}", False),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_tampered_object_is_recognised(memory: Memory, damage: str) -> None:
    store = MemoryStore()
    change, text, is_removed = DAMAGE[damage]
    keys = new_keys(3)
    blocks = [memory.filled(i, BLOCK_BYTES) for i in range(3)]
    assert mover().save(store, ROOT, keys, blocks, soon()) == BlocksMoved(3)
    name = object_name(ROOT, keys[1])
    store.objects[name] = change(store.objects[name])
    rooms = [memory.cleared(10 + i, BLOCK_BYTES) for i in range(3)]
    loaded = mover().load(store, ROOT, keys, rooms, soon())
    assert (loaded.num_ok, loaded.bad_block) == (1, True)
    assert text in (loaded.error or "")
    assert name in (loaded.error or "")
    assert joined(rooms[0]) == joined(blocks[0])
    assert (name in store.objects) is not is_removed


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_blocks_come_back_however_they_were_compressed(
    store: RemoteStore, memory: Memory, compression: str
) -> None:
    if compression != "none" and (reason := missing(PACKAGES[compression])):
        pytest.skip(reason)
    keys, half = new_keys(6), BLOCK_BYTES // 2
    blocks = half_blocks(memory, 0, 6)
    for i, pieces in enumerate(blocks):  # half of them do not compress
        for piece in pieces:
            piece[:] = os.urandom(half) if i % 2 else (b"kv" * half)[:half]
    assert mover(compression).save(store, ROOT, keys, blocks, soon()) == BlocksMoved(6)
    before = [joined(pieces) for pieces in blocks]
    for pieces in blocks:
        for piece in pieces:
            piece[:] = bytes(half)
    assert mover().load(store, ROOT, keys, blocks, soon()) == BlocksMoved(6)
    assert [joined(pieces) for pieces in blocks] == before


# Servers that stop, die and come back.

SERVERS = {"s3": s3_server, "mooncake": mooncake_master}
SHORT_S = 3.0


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    reason = missing(*NEEDS[request.param])
    if reason:
        pytest.skip(reason)
    with SERVERS[request.param]() as made:
        yield made


@pytest.fixture
def served(server: StoreServer, memory: Memory) -> Iterator[RemoteStore]:
    made = open_remote_store(server.url, call_bytes=CALL_BYTES, timeout_s=SHORT_S)
    yield made
    made.close()


def briefly() -> float:
    return time.monotonic() + SHORT_S


def write_until_it_works(store: RemoteStore, name: str, content: list[memoryview]) -> None:
    give_up = time.monotonic() + 120
    while statuses(store.write_from([name], [content], briefly())) != [Status.OK]:
        assert time.monotonic() < give_up
        time.sleep(0.1)


def assert_answers_with_errors(store: RemoteStore, memory: Memory) -> None:
    names = fresh(3)
    parts = [memory.cleared(i, 64, 1000) for i in range(3)]
    assert store.count_present(names, briefly()).error
    assert set(statuses(store.read_into(names, parts, briefly()))) == {Status.FAILED}
    assert set(statuses(store.write_from(names, parts, briefly()))) == {Status.FAILED}


@pytest.mark.skipif(missing(*NEEDS["s3"]) is not None, reason="no S3 server")
def test_the_address_of_a_compatible_store_may_be_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_server() as server:
        bucket, _, options = server.url.partition("?")
        monkeypatch.setenv("AWS_ENDPOINT_URL", parse_qs(options)["endpoint"][0])
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with closing(open_remote_store(bucket, timeout_s=TIMEOUT_S)) as store:
            assert store.count_present(fresh(1), soon()) == Presence(0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://192.0.2.1")
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL.*plain http is for loopback only"):
        open_remote_store(bucket, timeout_s=TIMEOUT_S)


@pytest.mark.skipif(missing(*NEEDS["s3"]) is not None, reason="no S3 server")
def test_a_store_that_does_not_answer_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    url = f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}&region=none"
    with pytest.raises(StoreUnavailableError):
        open_remote_store(url, timeout_s=1.0)


@pytest.mark.whole
def test_a_stopped_server_is_an_error_and_then_works_again(
    server: StoreServer, served: RemoteStore, memory: Memory
) -> None:
    (name,) = fresh(1)
    content = memory.filled(0, 64, 1000)
    write_until_it_works(served, name, content)
    server.stop()
    assert_answers_with_errors(served, memory)
    server.resume()
    write_until_it_works(served, fresh(1)[0], content)


@pytest.mark.whole
def test_a_server_that_died_is_an_error_and_works_again_after_its_restart(
    server: StoreServer, served: RemoteStore, memory: Memory
) -> None:
    content = memory.filled(0, 64, 1000)
    write_until_it_works(served, fresh(1)[0], content)
    server.kill()
    assert_answers_with_errors(served, memory)
    server.start()
    (name,) = fresh(1)
    write_until_it_works(served, name, content)
    target = memory.cleared(1, 64, 1000)
    assert statuses(served.read_into([name], [target], soon())) == [Status.OK]
    assert joined(target) == joined(content)


@pytest.mark.whole
@pytest.mark.skipif(missing("mooncake", "mooncake_master") is not None, reason="no Mooncake")
def test_a_full_store_makes_room_or_reports_failure(memory: Memory) -> None:
    """Mooncake evicts what has no lease; what it cannot take is not half there."""
    with (
        mooncake_master(segment_gb=0.02) as master,
        closing(open_remote_store(master.url, call_bytes=CALL_BYTES, timeout_s=TIMEOUT_S)) as store,
    ):
        names, block = fresh(400), memory.filled(0, 64, 200_000)
        for name in names:
            (written,) = store.write_from([name], [block], soon())
            assert written.status in (Status.OK, Status.FAILED)
        target = memory.cleared(1, 64, 200_000)
        found = [store.read_into([name], [target], soon())[0].status for name in names]
        assert set(found) == {Status.OK, Status.MISSING}


@pytest.mark.whole
@pytest.mark.skipif(missing("mooncake", "mooncake_master") is not None, reason="no Mooncake")
def test_tenants_of_a_mooncake_have_objects_of_their_own(memory: Memory) -> None:
    with (
        mooncake_master(segment_gb=0.05, tenants=("a", "b")) as master,
        mooncake_segment(master.url),
        ExitStack() as opened,
    ):
        address = master.url.partition("?")[0]
        urls = {name: f"{address}?tenant={name}" for name in "abc"} | {"default": address}
        stores = {
            name: opened.enter_context(
                closing(open_remote_store(url, call_bytes=CALL_BYTES, timeout_s=TIMEOUT_S))
            )
            for name, url in urls.items()
        }
        (shared,) = fresh(1)
        block = memory.filled(0, 64, 1000)
        for name in ("c", "default"):
            (refused,) = stores[name].write_from([shared], [block], soon())
            assert refused.status is Status.FAILED and "tenant" in str(refused.reason)
        assert statuses(stores["a"].write_from([shared], [block], soon())) == [Status.OK]
        found = {name: store.count_present([shared], soon()) for name, store in stores.items()}
        assert {name: each.num_present for name, each in found.items() if each.num_present} == {
            "a": 1
        }
