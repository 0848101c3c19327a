"""The remote worker: turns, outcomes of ops, the format, URLs; one real process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import Parts, checksum
from flexcache.storage.remote import check_remote_url, open_remote_store
from flexcache.storage.remote.base import (
    ObjectOutcome,
    Presence,
    RemoteStore,
    Status,
    StoreUnavailableError,
    failed,
)
from flexcache.storage.remote.directory import STEP_BYTES
from flexcache.storage.remote.memory import MemoryStore
from flexcache.storage.remote.objects import (
    HEADER_BYTES,
    BlockCodec,
    BlocksMoved,
    DamagedObjectError,
    object_name,
)
from flexcache.transfer.messages import (
    BlockNames,
    Discard,
    Done,
    Drop,
    Execute,
    LookedUp,
    LookUp,
    Ready,
    Stop,
    pack_ids,
)
from flexcache.transfer.remote_worker import (
    RemoteOp,
    RemoteService,
    RemoteWorker,
    RemoteWorkerConfig,
)

NUM_BLOCKS, BLOCK_BYTES, RANKS = 16, 5000, 2  # not a multiple of a page: the stride is padded
ROOT = bytes(range(16))
WAIT_S = 30.0


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def store_op(op_id: int, blocks: Sequence[int], *numbers: int) -> Execute:
    names = BlockNames(ROOT, 0, b"", keys(*numbers))
    packed = pack_ids(np.array(blocks))
    return Execute(op_id, OpKind.H2REMOTE, packed, bytes(len(packed)), 1, names=names)


def load_op(op_id: int, blocks: Sequence[int], *numbers: int) -> Execute:
    names = BlockNames(ROOT, 0, b"", keys(*numbers))
    packed = pack_ids(np.array(blocks))
    return Execute(op_id, OpKind.REMOTE2H, bytes(len(packed)), packed, 1, names=names)


# Whose turn it is.


class Turns(RuleBasedStateMachine):
    """Turns against two plain lists of waiting ops and one of running ops."""

    num_threads = 3

    def __init__(self) -> None:
        super().__init__()
        self.worker = RemoteWorker(self.num_threads)
        self.waiting: dict[bool, list[int]] = {True: [], False: []}
        self.running: list[RemoteOp] = []
        self.count = 0

    @rule(is_load=st.booleans())
    def execute(self, is_load: bool) -> None:
        self.count += 1
        self.worker.execute((load_op if is_load else store_op)(self.count, [0], 1), 0.0)
        self.waiting[is_load].append(self.count)

    @rule(op_id=st.integers(1, 30))
    def drop(self, op_id: int) -> None:
        waits = any(op_id in queue for queue in self.waiting.values())
        assert self.worker.drop(op_id) == (Done(op_id, 0) if waits else None)
        for queue in self.waiting.values():
            if op_id in queue:
                queue.remove(op_id)

    @precondition(lambda self: len(self.running) < self.num_threads)
    @rule()
    def a_thread_is_free(self) -> None:
        may_start = [
            is_load
            for is_load in (True, False)
            if self.waiting[is_load]
            and sum(op.is_load is is_load for op in self.running) < self.num_threads - 1
        ]
        op = self.worker.next_op()
        if not may_start:
            assert op is None
            return
        assert op is not None
        assert (op.is_load, op.op_id) == (may_start[0], self.waiting[may_start[0]].pop(0))
        self.running.append(op)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def an_op_ends(self, data: st.DataObject) -> None:
        op = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        done = self.worker.end(op, BlocksMoved(3, "some error", bad_block=True))
        assert done == Done(op.op_id, 3, error="some error", bad_block=True)

    @invariant()
    def it_is_idle_when_nothing_waits_or_runs(self) -> None:
        assert self.worker.is_idle == (not self.running and not any(self.waiting.values()))


Turns.TestCase.settings = settings(stateful_step_count=40)
TestTurns = Turns.TestCase


# How ops and look-ups end, over a store that follows a script.


class ObedientStore(MemoryStore):
    """A `MemoryStore` with gates, and outcomes that can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.writing = threading.Event()
        self.discard_gate = threading.Event()
        self.discard_gate.set()
        self.discarding = threading.Event()
        self.discards: list[tuple[Sequence[str], float]] = []
        """What was asked for, with the time that it was given."""
        self.broken: set[str] = set()
        self.raises: Exception | None = None

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        self.writing.set()
        self.write_gate.wait()
        outcomes = super().write_from(names, parts, deadline)
        return [
            failed("disk on fire") if name in self.broken else outcome
            for name, outcome in zip(names, outcomes, strict=True)
        ]

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        if self.raises:
            raise self.raises
        return super().read_into(names, parts, deadline)

    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        if self.raises:
            raise self.raises
        return super().count_present(names, deadline)

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        self.discards.append((names, deadline - time.monotonic()))
        self.discarding.set()
        self.discard_gate.wait()
        if self.raises:
            raise self.raises
        outcomes = super().discard(names, deadline)
        return [
            failed("disk on fire") if name in self.broken else outcome
            for name, outcome in zip(names, outcomes, strict=True)
        ]


@pytest.fixture
def segments() -> Iterator[list[HostSegment]]:
    made = [HostSegment.create(BLOCK_BYTES, NUM_BLOCKS) for _ in range(RANKS)]
    for rank, segment in enumerate(made):
        segment.map()
        for block in range(NUM_BLOCKS):
            content = np.random.default_rng((rank, block)).bytes(BLOCK_BYTES)
            segment.block(block)[:BLOCK_BYTES] = content
    yield made
    for segment in made:
        segment.close()


def config(segments: Sequence[HostSegment], url: str = "memory://", **changes: object):  # type: ignore[no-untyped-def]
    settings: dict[str, object] = {
        "endpoint": "",
        "identity": "remote-1",
        "segment_fds": [segment.fd for segment in segments],
        "segment_strides": [segment.stride for segment in segments],
        "num_host_blocks": NUM_BLOCKS,
        "shard_bytes": [BLOCK_BYTES] * len(segments),
        "url": url,
        "compression": "none",
        "timeout_s": 10.0,
        "concurrency": 4,
        "log_level": "WARNING",
        "log_format": "text",
    }
    return msgspec.convert(settings | changes, RemoteWorkerConfig)


class Running:
    """A service, and its answers in order."""

    def __init__(self, segments: list[HostSegment], open_store: Callable[..., RemoteStore]) -> None:
        self.service = RemoteService(config(segments), segments, open_store)
        self.answers: dict[int, Done | LookedUp] = {}
        self._poller = zmq.Poller()
        self._poller.register(*self.service.filenos(), zmq.POLLIN)

    def ask(self, message: Execute | LookUp) -> Done | LookedUp:
        self.service.take(message)
        return self.answer(message.op_id if isinstance(message, Execute) else message.lookup_id)

    def answer(self, number: int) -> Done | LookedUp:
        while number not in self.answers:
            assert self._poller.poll(WAIT_S * 1e3), "no answer"
            for answer in self.service.advance():
                key = answer.op_id if isinstance(answer, Done) else answer.lookup_id
                assert key not in self.answers
                self.answers[key] = answer
        return self.answers[number]

    def settle(self) -> None:
        """Wait until the worker may end, which it tells as it tells of answers."""
        while not self.service.is_idle:
            assert self._poller.poll(WAIT_S * 1e3), "it never ends"
            assert self.service.advance() == []

    def connect(self) -> None:
        """Connect, and wait until it has opened the store."""
        number = 1_000_000
        while self.ask(LookUp(number, ROOT, keys(1))) != LookedUp(number, 0):
            number += 1


@pytest.fixture
def store() -> ObedientStore:
    return ObedientStore()


@pytest.fixture
def running(segments: list[HostSegment], store: ObedientStore) -> Iterator[Running]:
    made = Running(segments, lambda *_, **__: store)
    made.connect()
    yield made
    made.service.close()
    assert made.service.is_idle


def contents(segments: Sequence[HostSegment], blocks: Sequence[int]) -> list[bytes]:
    return [bytes(segment.block(block)[:BLOCK_BYTES]) for block in blocks for segment in segments]


def test_blocks_of_all_ranks_go_out_and_come_back(
    running: Running, segments: list[HostSegment], store: ObedientStore
) -> None:
    expected = contents(segments, [3, 1, 7])
    assert running.ask(store_op(1, [3, 1, 7], 10, 11, 12)) == Done(1, 3)
    assert {len(data) for data in store.objects.values()} == {HEADER_BYTES + RANKS * BLOCK_BYTES}
    assert running.ask(LookUp(2, ROOT, keys(10, 11, 12, 13))) == LookedUp(2, 3)
    padding = [bytes(segment.block(13)[BLOCK_BYTES:]) for segment in segments]
    assert running.ask(load_op(3, [13, 14, 15], 10, 11, 12)) == Done(3, 3)
    assert contents(segments, [13, 14, 15]) == expected
    assert padding == [bytes(segment.block(13)[BLOCK_BYTES:]) for segment in segments]


def test_of_tails_the_first_that_is_there_and_of_use_is_found(running: Running) -> None:
    assert running.ask(store_op(1, [3, 1, 7], 10, 20, 21)) == Done(1, 3)
    missing, *there = keys(19, 20, 21)

    numbers = itertools.count(2)

    def found(blocks: list[int], *tails: tuple[int, bytes]) -> int:
        answer = running.ask(LookUp(next(numbers), ROOT, keys(*blocks), list(tails)))
        assert isinstance(answer, LookedUp)
        assert answer.num_present == min(1, len(blocks))
        return answer.tail

    assert found([10, 11], (2, there[0]), (1, missing), (1, there[1]), (0, there[0])) == 2
    assert found([], (1, there[0]), (0, there[1])) == 1
    assert found([10], (1, missing)) == -1
    assert found([10]) == -1


def test_a_malformed_op_is_refused_and_the_others_go_on(running: Running) -> None:
    ids = pack_ids(np.array([0, 1]))
    for number, malformed in enumerate(
        [
            Execute(1, OpKind.H2REMOTE, ids, ids, 1),
            Execute(2, OpKind.H2REMOTE, b"odd", b"odd", 1, names=BlockNames(ROOT, 0, b"", [])),
            store_op(3, [0, 1], 1),
            load_op(4, [0, NUM_BLOCKS], 1, 2),
        ],
        start=1,
    ):
        answer = running.ask(malformed)
        assert isinstance(answer, Done)
        assert (answer.op_id, answer.num_ok) == (number, 0)
        assert answer.error
    assert running.ask(store_op(5, [0, 1], 1, 2)) == Done(5, 2)


def test_a_missing_block_ends_a_load_and_is_reported_as_bad(running: Running) -> None:
    running.ask(store_op(1, [0, 1], 20, 22))
    done = running.ask(load_op(2, [8, 9, 10], 20, 21, 22))
    assert isinstance(done, Done)
    assert (done.num_ok, done.bad_block) == (1, True)
    assert "not in the store" in (done.error or "")


def test_a_damaged_object_ends_a_load_and_is_removed(
    running: Running, store: ObedientStore
) -> None:
    running.ask(store_op(1, [0, 1, 2], 20, 21, 22))
    name = object_name(ROOT, keys(21)[0])
    store.objects[name] = store.objects[name][:-1] + b"?"
    done = running.ask(load_op(2, [8, 9, 10], 20, 21, 22))
    assert isinstance(done, Done)
    assert (done.num_ok, done.bad_block) == (1, True)
    assert "checksum mismatch" in (done.error or "")
    assert running.ask(LookUp(3, ROOT, keys(20, 21, 22))) == LookedUp(3, 1)


def test_a_block_that_cannot_be_stored_ends_the_store(
    running: Running, store: ObedientStore
) -> None:
    store.broken.add(object_name(ROOT, keys(31)[0]))
    done = running.ask(store_op(1, [0, 1, 2], 30, 31, 32))
    assert isinstance(done, Done)
    assert (done.num_ok, done.bad_block) == (1, False)
    assert "disk on fire" in (done.error or "")


def test_a_store_error_does_not_mark_the_block_as_bad(
    running: Running, store: ObedientStore
) -> None:
    store.raises = StoreUnavailableError("gone fishing")
    assert running.ask(load_op(1, [0], 30)) == Done(1, 0, error="gone fishing")
    assert running.ask(LookUp(2, ROOT, keys(30))) == LookedUp(2, 0, "gone fishing")
    store.raises = ZeroDivisionError("a fault of ours")
    assert running.ask(load_op(3, [0], 30)) == Done(
        3, 0, error="ZeroDivisionError: a fault of ours"
    )
    assert running.ask(LookUp(4, ROOT, keys(30))) == LookedUp(
        4, 0, "ZeroDivisionError: a fault of ours"
    )


def test_loads_and_look_ups_pass_stores_that_hang(running: Running, store: ObedientStore) -> None:
    running.ask(store_op(1, [0], 40))
    store.write_gate.clear()
    for op_id in range(10, 20):
        running.service.take(store_op(op_id, [op_id % 8], op_id))
    store.writing.wait()
    assert running.ask(load_op(2, [9], 40)) == Done(2, 1)
    assert running.ask(LookUp(3, ROOT, keys(40))) == LookedUp(3, 1)
    running.service.take(Drop(19))
    assert running.answer(19) == Done(19, 0)  # it had not started
    store.write_gate.set()
    assert [running.answer(op_id) for op_id in range(10, 19)] == [
        Done(op_id, 1) for op_id in range(10, 19)
    ]


def test_look_ups_pass_objects_that_are_removed_slowly(
    running: Running, store: ObedientStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch is too late; however long the others have waited, they have its time."""
    running.ask(store_op(1, [0, 1, 2, 3], 40, 41, 42, 43))
    store.discard_gate.clear()
    for number in (41, 42, 43):
        running.service.take(Discard(ROOT, keys(number)))
    assert running.ask(LookUp(2, ROOT, keys(40))) == LookedUp(2, 1)
    assert running.ask(LookUp(3, ROOT, keys(40))) == LookedUp(3, 1)
    assert store.discarding.wait(WAIT_S)
    assert not running.service.is_idle
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: began + 100.0)
        store.discard_gate.set()
        running.settle()
    assert list(store.objects) == [object_name(ROOT, key) for key in keys(40, 41)]
    assert [seconds for _, seconds in store.discards[1:]] == pytest.approx([10.0, 10.0])


def test_objects_that_were_not_removed_are_counted_in_the_log(
    running: Running, store: ObedientStore, caplog: pytest.LogCaptureFixture
) -> None:
    running.ask(store_op(1, [0, 1, 2], 50, 51, 52))
    store.broken = {object_name(ROOT, key) for key in keys(50, 51)}
    running.service.take(Discard(ROOT, keys(50, 51, 52, 53)))
    running.settle()
    store.raises = ZeroDivisionError("a fault of ours")
    running.service.take(Discard(ROOT, keys(50, 51, 52)))
    running.settle()
    of_store, of_ours = caplog.records
    assert "objects_not_removed" in of_store.getMessage()
    assert "count=2" in of_store.getMessage()
    assert "disk on fire" in of_store.getMessage()
    assert "count=3" in of_ours.getMessage()
    assert of_ours.exc_info


def test_a_store_that_is_down_at_first_is_opened_later(segments: list[HostSegment]) -> None:
    refusals = iter(["no route", "no route"])

    def open_store(*_: object, **__: object) -> RemoteStore:
        for reason in refusals:
            raise StoreUnavailableError(reason)
        return MemoryStore()

    running = Running(segments, open_store)
    done = running.ask(store_op(1, [0], 1))
    assert isinstance(done, Done)
    assert done.error in ("not connected yet", "no route")
    running.connect()
    assert running.ask(store_op(2, [0], 1)) == Done(2, 1)
    running.service.close()


# The format.


def encoded(key: bytes = b"k" * 16, compression: str = "none") -> tuple[bytearray, list[bytearray]]:
    pieces = [bytearray(np.random.default_rng(i).bytes(60) + bytes(40)) for i in range(2)]
    codec = BlockCodec(compression)
    header = memoryview(bytearray(HEADER_BYTES))
    parts = codec.encode(ROOT, key, [memoryview(piece) for piece in pieces], header)
    return bytearray(b"".join(parts)), pieces


def decoded(data: bytes, key: bytes = b"k" * 16) -> list[bytearray]:
    """Decode an object that was read into a header and a block."""
    header, read = data[:HEADER_BYTES], data[HEADER_BYTES:].ljust(200, b"\0")
    pieces = [bytearray(read[:100]), bytearray(read[100:200])]
    BlockCodec().decode(
        ROOT, key, memoryview(header.ljust(HEADER_BYTES, b"\0")),
        [memoryview(piece) for piece in pieces], len(data),
    )  # fmt: skip
    return pieces


OBJECT_OF_VERSION_2 = (
    bytes.fromhex(
        "466c657843610d0a0200000040000000c800000000000000c800000000000000"
        "cb330d938f8ce14cc89cef02ac8aef718c461bb13ae1ff0b4db7ac7a9629448c"
    )
    + b"kv" * 50
    + b"KV" * 50
)


def test_objects_of_version_two_stay_readable() -> None:
    assert decoded(OBJECT_OF_VERSION_2) == [b"kv" * 50, b"KV" * 50]
    assert object_name(ROOT, b"\xab" * 16) == f"v2/{ROOT.hex()}/ab/{'ab' * 16}"


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_a_block_comes_back_from_its_object(compression: str) -> None:
    if compression != "none":
        pytest.importorskip({"zstd": "zstandard", "lz4": "lz4"}[compression])
    data, pieces = encoded(compression=compression)
    assert decoded(bytes(data)) == pieces
    assert (len(data) < HEADER_BYTES + 200) == (compression != "none")


@given(
    st.sampled_from(["none", "zstd", "lz4"]),
    st.integers(0, 2**31),
    st.sampled_from(["flip", "cut", "grow"]),
)
def test_no_damage_goes_unnoticed(compression: str, where: int, damage: str) -> None:
    try:
        data, pieces = encoded(compression=compression)
    except ImportError:
        return
    if damage == "flip":
        data[where // 8 % len(data)] ^= 1 << where % 8
    elif damage == "cut":
        del data[where % len(data) :]
    else:
        data += bytes(1 + where % 5)
    with contextlib.suppress(DamagedObjectError):
        # Compressed, a flipped bit may mean nothing: then what comes out is the block all the same.
        assert decoded(bytes(data)) == pieces
        assert damage == "flip"
        assert compression != "none"


def test_a_digest_that_differs_is_damage() -> None:
    data, pieces = encoded()
    views = [memoryview(bytearray(piece)) for piece in pieces]
    header = memoryview(data)[:HEADER_BYTES]
    for digest in (checksum(views), checksum(views) ^ 1):
        with (
            contextlib.nullcontext()
            if digest == checksum(views)
            else pytest.raises(DamagedObjectError, match="checksum mismatch")
        ):
            BlockCodec().decode(ROOT, b"k" * 16, header, views, len(data), digest=digest)


def test_an_object_of_another_block_is_refused() -> None:
    data, _ = encoded(b"a" * 16)
    with pytest.raises(DamagedObjectError, match="another block's"):
        decoded(bytes(data), b"b" * 16)


def test_a_frame_that_claims_more_than_the_block_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("lz4")
    import lz4.frame

    from flexcache.storage.compression import Codec, open_compressor

    bombs = {
        Codec.ZSTD: zstandard.compress(bytes(10**7)),
        Codec.LZ4: lz4.frame.compress(bytes(10**7)),
    }
    for codec, bomb in bombs.items():
        with pytest.raises(ValueError):
            open_compressor(codec).decompress(bomb, [memoryview(bytearray(100))])
        with pytest.raises(ValueError):
            open_compressor(codec).decompress(b"nonsense", [memoryview(bytearray(100))])


# URLs.


@pytest.mark.parametrize(
    ("url", "location", "options"),
    [
        ("mooncake://10.0.0.1:50051", "10.0.0.1:50051", {}),
        ("mooncake://h:1?segment_gb=2.5&protocol=rdma&device=mlx5_0", "h:1",
         {"segment_gb": "2.5", "protocol": "rdma", "device": "mlx5_0"}),
        ("s3://bucket/some/prefix/", "bucket/some/prefix", {}),
        ("s3://b?endpoint=http://127.0.0.1:8333", "b", {"endpoint": "http://127.0.0.1:8333"}),
        ("gs://bucket", "bucket", {}),
        ("az://container/p?account=me", "container/p", {"account": "me"}),
        ("file:///shared/a%20b", "/shared/a b", {}),
        ("memory://", "", {}),
    ],
)  # fmt: skip
def test_urls_are_parsed(url: str, location: str, options: dict[str, str]) -> None:
    parsed = check_remote_url(url)
    assert (parsed.location, dict(parsed.options)) == (location, options)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://h:1", "must begin with one of mooncake://, s3://"),
        ("no.such.module://h", "a module that cannot be imported: No module named 'no'"),
        ("json.decoder://h", "the module json.decoder registers no store"),
        ("outside.sqlite_store://h/x", "must be outside.sqlite_store:///FILE"),
        ("outside.sqlite_store:///x?journal=off", "journal = 'off': must be one of delete, wal"),
        ("mooncake://host", "must be mooncake://HOST:PORT"),
        ("mooncake://host:port", "is no URL"),
        ("mooncake://h:1?segmnet_gb=1", "did you mean segment_gb?"),
        ("mooncake://h:1?protocol=udp", "protocol = 'udp': must be one of tcp, rdma"),
        ("mooncake://h:1?segment_gb=-1", "must be a number from 0"),
        ("s3://", "must be s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket", "must not hold credentials"),
        ("s3://b?endpoint=http://example.com", "plain http is for loopback only"),
        ("file://host/dir", "must be file:///DIRECTORY"),
        ("file:relative", "must be file:///DIRECTORY"),
        ("memory://x", "must be memory://"),
        ("s3://b#x", "must not have a fragment"),
        ("mooncake://h:1?metadata=", "must not be empty"),
        ("s3://b?endpoint=http://[", "plain http is for loopback only"),
    ],
)
def test_a_wrong_url_is_refused_by_name(url: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_remote_url(url)
    assert "remote_url = " in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:SECRET@bucket/prefix",
        "s3://key:SEC/SECRET@bucket",
        "s3://key:SECRET?SECRET#SECRET@bucket",
        "mooncake://user:SECRET@h:port",
        "redis://user:SECRET@h:1",
        "s3://bucket?aws_secret_access_key=SECRET",
        "s3://bucket?endpoint=https://key:SECRET@h",
        "s3://bucket?endpoint=http://key:SECRET@example.com",
        "s3://bucket?region=r#SECRET",
    ],
)
def test_a_possible_secret_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_remote_url(url)
    assert f"remote_url = '{url.partition('//')[0]}//" in str(caught.value)
    assert "SEC" not in str(caught.value)


# Opening stores.


def test_a_directory_that_cannot_be_created_may_exist_later(tmp_path: Path) -> None:
    (tmp_path / "mount").write_bytes(b"")
    url = f"file://{tmp_path}/mount/store"
    with pytest.raises(StoreUnavailableError, match="mount/store"):
        open_remote_store(url)
    (tmp_path / "mount").unlink()
    store = open_remote_store(url)
    assert store.count_present(["name"], time.monotonic() + WAIT_S) == Presence(0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RemoteStore]:
    store = open_remote_store(f"file://{tmp_path}/store", concurrency=4)
    yield store
    store.close()


def soon() -> float:
    return time.monotonic() + WAIT_S


def files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def views(*contents: bytes) -> list[memoryview]:
    return [memoryview(bytearray(content)) for content in contents]


@pytest.mark.parametrize("size", [1, STEP_BYTES - 1, STEP_BYTES, 3 * STEP_BYTES + 5])
def test_a_directory_computes_the_digest_of_what_follows_the_header(
    directory: RemoteStore, size: int
) -> None:
    header, body = os.urandom(64), os.urandom(size)
    assert directory.write_from(["a/b"], [views(header, body)], soon()) == [
        ObjectOutcome(Status.OK, 64 + size)
    ]
    cut = size // 3
    room = views(bytes(64), bytes(cut), bytes(size - cut + 10))
    (outcome,) = directory.read_into(["a/b"], [room], soon())
    assert outcome == ObjectOutcome(Status.OK, 64 + size, digest=xxhash.xxh3_64_intdigest(body))
    assert b"".join(room) == header + body + bytes(10)


def test_a_file_that_cannot_be_written_leaves_nothing(
    directory: RemoteStore, tmp_path: Path
) -> None:
    """The system refuses files of more than 10,000 bytes, as it does on a device that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    names, content = ["k/small", "k/large", "k/other"], [bytes(100), bytes(20_000), bytes(100)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        found = directory.write_from(names, [views(each) for each in content], soon())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [outcome.status for outcome in found] == [Status.OK, Status.FAILED, Status.OK]
    assert found[1].reason == "File too large"
    assert files(tmp_path / "store") == ["k/other", "k/small"]
    assert directory.write_from(names[1:2], [views(content[1])], soon())[0].status is Status.OK


def test_a_file_in_the_way_costs_the_objects_behind_it(
    directory: RemoteStore, tmp_path: Path
) -> None:
    (tmp_path / "store" / "k").write_bytes(b"")
    found = directory.write_from(["k/a", "j/a"], [views(b"1"), views(b"2")], soon())
    assert [outcome.status for outcome in found] == [Status.FAILED, Status.OK]
    assert directory.count_present(["j/a", "k/a"], soon()) == Presence(1, "Not a directory")
    (read,) = directory.read_into(["k/a"], [views(b"1")], soon())
    assert read == failed("Not a directory")


def test_a_file_that_hangs_delays_the_others_of_its_batch_only(
    directory: RemoteStore, tmp_path: Path
) -> None:
    names = [f"k/{i}" for i in range(20)]
    directory.write_from(names, [views(b"%02d" % i) for i in range(20)], soon())
    (tmp_path / "store" / names[3]).unlink()
    os.mkfifo(tmp_path / "store" / names[3])  # to open it takes until another process writes to it
    rooms = [views(bytes(2)) for _ in names]
    found: list[list[ObjectOutcome]] = []
    reading = threading.Thread(
        target=lambda: found.append(directory.read_into(names, rooms, soon()))
    )
    reading.start()
    while any(bytes(room[0]) != b"%02d" % i for i, room in enumerate(rooms) if i != 3):
        time.sleep(0.01)
    assert directory.count_present(names, soon()) == Presence(20)
    assert not found
    with (tmp_path / "store" / names[3]).open("wb"):
        reading.join()
    assert [outcome.num_bytes for outcome in found[0]] == [0 if i == 3 else 2 for i in range(20)]


class MooncakeClient:
    """A client whose puts wait for a gate, and which lets a stranger overwrite its memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.shown: dict[int, int] = {}
        """Size by address of the memory that anyone may read and write."""
        self.num_puts = 0
        self.niceness = 0
        self.putting, self.gate = threading.Event(), threading.Event()
        self.before_a_put, self.after_a_get = (lambda: None), (lambda: None)

    def setup(self, settings: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.shown[address] = size
        return 0

    def scribble(self) -> None:
        """Change the last byte of each object that was moved last, wherever that lay."""
        for address, size in self._moved:
            ctypes.c_ubyte.from_address(address + size - 1).value ^= 1

    def batch_put_from(
        self, names: list[str], addresses: list[int], sizes: list[int], _: object
    ) -> list[int]:
        self.num_puts += 1
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.putting.set()
        assert self.gate.wait(WAIT_S)
        self._moved = list(zip(addresses, sizes, strict=True))
        self.before_a_put()
        self.objects |= dict(zip(names, map(ctypes.string_at, addresses, sizes), strict=True))
        return [0] * len(names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for name, address, size in zip(names, addresses, sizes, strict=True):
            ctypes.memmove(address, self.objects[name], min(size, len(self.objects[name])))
        self._moved = list(zip(addresses, sizes, strict=True))
        self.after_a_get()
        return [len(self.objects[name]) for name in names]

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [name in self.objects for name in names]

    def batch_remove(self, names: list[str], is_forced: bool) -> list[int]:
        for name in names:
            del self.objects[name]
        return [0] * len(names)

    def close(self) -> None:
        pass


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> MooncakeClient:
    """What stands in for Mooncake's client in this process."""
    client = MooncakeClient()
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: client  # type: ignore[attr-defined]
    module.ReplicateConfig = types.SimpleNamespace  # type: ignore[attr-defined]
    package = types.ModuleType("mooncake")
    package.store = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    monkeypatch.setattr(os, "environ", variables)
    return client


@pytest.fixture
def master() -> Iterator[str]:
    """The URL of a store whose master accepts connections, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"mooncake://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def mooncake(client: MooncakeClient, master: str) -> Iterator[tuple[RemoteStore, MooncakeClient]]:
    """A store over a scripted client, with 3 s per request."""
    store = open_remote_store(master, call_bytes=100, timeout_s=3.0)
    yield store, client
    store.close()


def test_a_mooncake_call_is_not_started_past_its_deadline(
    mooncake: tuple[RemoteStore, MooncakeClient],
) -> None:
    store, client = mooncake
    content = [memoryview(bytearray(10))]
    first = threading.Thread(
        target=store.write_from, args=(["a"], [content], time.monotonic() + WAIT_S)
    )
    first.start()
    assert client.putting.wait(WAIT_S)
    (late,) = store.write_from(["b"], [content], time.monotonic() + 0.05)
    assert late == failed("not done by its deadline (remote_timeout_s)")
    client.gate.set()
    first.join()
    assert store.write_from(["c"], [content], time.monotonic() + WAIT_S) == [
        ObjectOutcome(Status.OK, 10)
    ]
    assert client.num_puts == 2


def test_the_caller_of_a_mooncake_transfer_yields_to_the_threads_that_move_the_bytes(
    mooncake: tuple[RemoteStore, MooncakeClient],
) -> None:
    store, client = mooncake
    client.gate.set()
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store.write_from(["a"], [[memoryview(bytearray(10))]], time.monotonic() + WAIT_S)
    assert client.niceness == min(19, before + 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_mooncake_transfer_gives_each_of_its_waits_a_third_of_the_time(
    mooncake: tuple[RemoteStore, MooncakeClient],
) -> None:
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "1"
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "1"


@pytest.fixture
def exposed(segments: list[HostSegment], client: MooncakeClient, master: str) -> Iterator[Running]:
    """A service over a scripted client, which has stored blocks 0, 1 and 2 by the keys 1, 2, 3."""
    client.gate.set()
    made = Running(segments, lambda _, **settings: open_remote_store(master, **settings))
    made.connect()
    assert made.ask(store_op(1, [0, 1, 2], 1, 2, 3)) == Done(1, 3)
    yield made
    made.service.close()


def test_memory_that_mooncake_shows_to_the_network_holds_no_block_of_the_pool(
    exposed: Running, segments: list[HostSegment], client: MooncakeClient
) -> None:
    expected = contents(segments, range(NUM_BLOCKS))
    for address, size in client.shown.items():
        ctypes.memset(address, 0xEE, size)
    assert contents(segments, range(NUM_BLOCKS)) == expected
    assert exposed.ask(load_op(2, [8, 9, 10], 1, 2, 3)) == Done(2, 3)
    for address, size in client.shown.items():
        ctypes.memset(address, 0xEE, size)
    assert contents(segments, [8, 9, 10]) == contents(segments, [0, 1, 2])
    for place in client._moved:  # nothing else is handed to the client
        assert any(a <= place[0] and sum(place) <= a + size for a, size in client.shown.items())


def test_what_changes_between_the_read_and_the_copy_is_damage(
    exposed: Running, segments: list[HostSegment], client: MooncakeClient
) -> None:
    client.after_a_get = client.scribble
    done = exposed.ask(load_op(2, [8, 9, 10], 1, 2, 3))
    assert isinstance(done, Done)
    assert (done.num_ok, done.bad_block) == (0, True)
    assert "checksum mismatch" in (done.error or "")


@pytest.mark.parametrize("moment", ["update", "intdigest"])
def test_no_byte_is_served_that_changed_while_it_was_checked(
    moment: str, exposed: Running, segments: list[HostSegment], client: MooncakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A stranger writes right after each step of the checksum, or once it is known."""

    class Watched:
        def __init__(self) -> None:
            self._hasher = xxh3_64()

        def update(self, data: memoryview) -> None:
            self._hasher.update(data)
            if moment == "update":
                client.scribble()

        def intdigest(self) -> int:
            digest = self._hasher.intdigest()
            if moment == "intdigest":
                client.scribble()
            return int(digest)

    xxh3_64 = xxhash.xxh3_64
    monkeypatch.setattr(xxhash, "xxh3_64", Watched)
    done = exposed.ask(load_op(2, [8], 1))
    assert isinstance(done, Done)
    assert done.num_ok == 0 or contents(segments, [8]) == contents(segments, [0])


def test_what_changes_between_the_copy_and_the_write_is_damage(
    exposed: Running, segments: list[HostSegment], client: MooncakeClient
) -> None:
    client.before_a_put = client.scribble
    assert exposed.ask(store_op(2, [3], 4)) == Done(2, 1)
    done = exposed.ask(load_op(3, [8], 4))
    assert isinstance(done, Done)
    assert (done.num_ok, done.bad_block) == (0, True)
    assert "checksum mismatch" in (done.error or "")


def test_a_mooncake_client_that_shows_all_memory_to_the_network_is_refused(
    client: MooncakeClient, master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    info = tmp_path / "mooncake_transfer_engine-0.3.11.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mooncake-transfer-engine\nVersion: 0.3.11.post1\n")
    (info / "top_level.txt").write_text("mooncake\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"0\.3\.11\.post1 lets anyone"):
        open_remote_store(master)


# The process.


class Process:
    """The worker as the server runs it, and the server's side of its socket."""

    def __init__(self, segments: list[HostSegment], url: str, path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}/s")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "flexcache.transfer.remote_worker"],
            stdin=subprocess.PIPE,
            pass_fds=[segment.fd for segment in segments],
        )
        settings = config(segments, url, endpoint=f"ipc://{path}/s")
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._child.stdin.flush()

    def send(self, message: msgspec.Struct) -> None:
        self.send_frames(msgspec.msgpack.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart([b"remote-1", *frames])

    def receive(self) -> Ready | Done | LookedUp:
        assert self._socket.poll(WAIT_S * 1e3), "no answer"
        _, frame = self._socket.recv_multipart()
        return msgspec.msgpack.decode(frame, type=Ready | Done | LookedUp)

    def wait(self) -> int:
        return self._child.wait(WAIT_S)

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()
        self._socket.close()
        self._context.term()


@pytest.fixture
def process(
    segments: list[HostSegment], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Process]:
    made = Process(segments, getattr(request, "param", f"file://{tmp_path}/store"), tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("process", ["mooncake://127.0.0.1:9"], indirect=True)
def test_without_a_store_the_process_is_up_and_answers_with_errors(process: Process) -> None:
    assert isinstance(process.receive(), Ready)
    process.send(load_op(1, [0], 1))
    process.send(LookUp(2, ROOT, keys(1)))
    answers = [process.receive(), process.receive()]
    assert all(not isinstance(answer, Ready) and answer.error for answer in answers)


def test_the_process_goes_on_after_an_invalid_message(process: Process) -> None:
    assert isinstance(process.receive(), Ready)
    for frames in ((b"",), (b"\xc1",), (b"", os.urandom(300)), (msgspec.msgpack.encode([1]),)):
        process.send_frames(*frames)
    process.send(LookUp(1, ROOT, keys(1)))
    answer = process.receive()
    assert isinstance(answer, LookedUp) and answer.lookup_id == 1
    process.send(Stop())
    assert process.wait() == 0


def test_the_process_ends_when_its_parents_end_of_the_pipe_closes(process: Process) -> None:
    assert isinstance(process.receive(), Ready)
    process._child.stdin.close()  # type: ignore[union-attr]
    assert process.wait() == 0
