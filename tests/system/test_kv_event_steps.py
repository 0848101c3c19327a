"""A subscriber driven step by step, of a publisher that loses, restarts and keeps silent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from unittest import mock

import msgspec
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcache.cache.journal import Change, Medium, Removed, Stored
from flexcache.events import held_blocks
from flexcache.events.held_blocks import HeldBlocks
from flexcache.events.subscriber import (
    KVEventSubscriber,
    Lost,
    PublisherRestarted,
    SnapshotPart,
)
from flexcache.events.wire import (
    END_OF_REPLAY,
    BlockRemoved,
    BlockStored,
    Page,
    cursor_of,
    describe,
    encode_batch,
)
from flexcache.ids import BlockKey, RootId

ANY_PORT = "tcp://127.0.0.1:*"
ROOT = RootId(bytes(16))
PATIENCE_S = 60.0
TOPIC = b"t"


class Publisher:
    """Publishes, loses and answers when the test says so."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], makes_snapshots: bool) -> None:
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.pub.bind(ANY_PORT)
        self.router.bind(ANY_PORT)
        self._makes_snapshots = makes_snapshots
        self._life = 0
        self._next_block = 0
        self.was_silent = False
        self.begin()

    def begin(self) -> None:
        self._life += 1
        self.number = 0
        self.blocks: list[int] = []
        self._held = HeldBlocks()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=3)

    def _publish(self, change: Change, is_lost: bool) -> None:
        self._held.apply([change])
        payload = encode_batch(time.time(), [describe(change, "int")])
        self._kept.append((self.number, payload))
        if not is_lost:
            self.pub.send_multipart([TOPIC, self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def store(self, is_lost: bool = False) -> None:
        block, self._next_block = self._next_block, self._next_block + 1
        self.blocks.append(block)
        key = BlockKey(block.to_bytes(8, "big"))
        self._publish(Stored(Medium.CPU, ROOT, None, [key], 1, [block]), is_lost)

    def remove(self, is_lost: bool = False) -> None:
        if self.blocks:
            key = BlockKey(self.blocks.pop(len(self.blocks) // 2).to_bytes(8, "big"))
            self._publish(Removed(Medium.CPU, ROOT, [key]), is_lost)

    def answer(self) -> None:
        """Answer the requests that are there."""
        while self.router.poll(0):
            peer, _, request = self.router.recv_multipart()
            for frames in self._answers(int.from_bytes(request, "big"), request):
                self.router.send_multipart([peer, b"", *frames])

    def _answers(self, first: int, request: bytes) -> list[list[bytes]]:
        cursor = cursor_of(first)
        if cursor is not None and self._makes_snapshots:
            stored, following = self._held.page(cursor)
            batch = encode_batch(time.time(), [describe(each, "int") for each in stored])
            page = Page(bytes([self._life]), self.number, following, batch)
            return [[TOPIC, request, msgspec.msgpack.encode(page)]]
        again = [[TOPIC, n.to_bytes(8, "big"), load] for n, load in self._kept if n >= first]
        return [*again, [b"", END_OF_REPLAY, b""]]

    def ignore(self) -> None:
        while self.router.poll(0):
            self.router.recv_multipart()
            self.was_silent = True


class Reader:
    def __init__(self, subscriber: KVEventSubscriber) -> None:
        self.subscriber = subscriber
        self.blocks: set[int] = set()

    def step(self) -> bool:
        has_done = self.subscriber.step()
        while self.subscriber.news:
            news = self.subscriber.news.popleft()
            if isinstance(news, Lost | PublisherRestarted):
                self.blocks.clear()
                continue
            if isinstance(news, SnapshotPart) and news.is_first:
                self.blocks.clear()
            for event in news.batch.events:
                if isinstance(event, BlockStored):
                    self.blocks |= set(event.block_hashes)  # type: ignore[arg-type]
                elif isinstance(event, BlockRemoved):
                    self.blocks -= set(event.block_hashes)  # type: ignore[arg-type]
        return has_done

    @property
    def is_idle(self) -> bool:
        return self.subscriber.waits.until_s is None and not self.step()


def settle(publisher: Publisher, reader: Reader) -> None:
    """Until the reader knows of a batch that is published now, and waits for no answer."""
    publisher.store()
    last = publisher.blocks[-1]
    deadline = time.monotonic() + PATIENCE_S
    while not (last in reader.blocks and reader.is_idle):
        assert time.monotonic() < deadline
        publisher.answer()
        if not reader.step():
            time.sleep(0.001)


acts = st.lists(
    st.sampled_from(
        ["store", "store", "remove", "lose", "lose removal", "restart", "step", "step", "answer",
         "ignore", "wait", "settle"]
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(acts, st.booleans())
def test_whatever_happens_it_ends_up_with_what_is_held(
    acts: Sequence[str], makes_snapshots: bool
) -> None:
    with zmq.Context() as context, mock.patch.object(held_blocks, "_PAGE_BLOCKS", 2):
        publisher = Publisher(context, makes_snapshots)
        endpoints = [
            socket.getsockopt_string(zmq.LAST_ENDPOINT)
            for socket in (publisher.pub, publisher.router)
        ]
        with KVEventSubscriber(*endpoints, replay_timeout_s=0.2, snapshots=True) as subscriber:
            reader = Reader(subscriber)
            while not subscriber.is_connected:
                reader.step()
            for act in acts:
                _do(act, publisher, reader)
            settle(publisher, reader)
            held = set(publisher.blocks)
            assert reader.blocks <= held  # nothing that has gone
            if makes_snapshots and not publisher.was_silent:
                assert reader.blocks == held
            counters = subscriber.counters
            assert counters.malformed == 0
        publisher.pub.close(linger=0)
        publisher.router.close(linger=0)


def _do(act: str, publisher: Publisher, reader: Reader) -> None:
    match act:
        case "store":
            publisher.store()
        case "lose":
            publisher.store(is_lost=True)
        case "remove" | "lose removal":
            publisher.remove(is_lost=act == "lose removal")
        case "restart":
            settle(publisher, reader)  # what it sent before its end has arrived
            publisher.begin()
            publisher.store()
            reader.subscriber.catch_up()  # as after its connection was made again
        case "step":
            reader.step()
        case "answer":
            publisher.answer()
        case "ignore":
            publisher.ignore()
        case "wait":
            time.sleep(0.002)
        case "settle":
            settle(publisher, reader)


@settings(max_examples=40, deadline=None)
@given(acts, acts, st.booleans(), st.booleans())
def test_a_subscriber_that_begins_where_another_one_was_ends_up_with_what_is_held(
    before: Sequence[str], after: Sequence[str], makes_snapshots: bool, has_replay: bool
) -> None:
    with zmq.Context() as context, mock.patch.object(held_blocks, "_PAGE_BLOCKS", 2):
        publisher = Publisher(context, makes_snapshots)
        endpoint, replay = (
            socket.getsockopt_string(zmq.LAST_ENDPOINT)
            for socket in (publisher.pub, publisher.router)
        )
        options = {"replay_timeout_s": 0.2, "snapshots": True}
        with (
            KVEventSubscriber(endpoint, replay, **options) as first,
            KVEventSubscriber(endpoint, replay if has_replay else None, **options) as second,
        ):
            reader, late = Reader(first), Reader(second)
            while not first.is_connected:
                reader.step()
            for act in before:
                _do(act, publisher, reader)
            settle(publisher, reader)
            second.begin_at(first.position)
            late.blocks = set(reader.blocks)
            for act in after:
                _do(act, publisher, late)
            settle(publisher, late)
            held = set(publisher.blocks)
            assert late.blocks <= held
            if makes_snapshots and has_replay and not publisher.was_silent:
                assert late.blocks == held
        publisher.pub.close(linger=0)
        publisher.router.close(linger=0)
