"""The feed keeps an index right: many sources, slow ones, killed ones, ones that come and go."""

from __future__ import annotations

import asyncio
import errno
import select
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import zmq
from event_publisher import PublisherProcess, stored
from ports import free_ports

from flexcache.errors import ConfigError
from flexcache.events import subscriber
from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.subscriber import KVEventSubscriber
from flexcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    encode_batch,
)
from flexcache.router.feed import MAX_BLOCKS, SILENT_REQUESTS, SILENT_TOKENS, Feed
from flexcache.router.fleet import EventSource

PATIENCE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:0"


class Holdings:
    """What each source holds, as an index would know it."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}

        self.largest = 0
        self.fails_at: int | None = None

    def of(self, source: EventSource) -> set[int]:
        return self.blocks.get(source.endpoint, set())

    def apply(self, source: str, batch: EventBatch) -> None:
        held = self.blocks.setdefault(source, set())
        for event in batch.events:
            if isinstance(event, BlockStored):
                hashes = {int(block) for block in event.block_hashes}  # type: ignore[arg-type]
                if self.fails_at in hashes:
                    raise RuntimeError("not these")
                self.largest = max(self.largest, len(hashes))
                held |= hashes
            elif isinstance(event, BlockRemoved):
                held -= set(event.block_hashes)  # type: ignore[arg-type]
            else:
                assert isinstance(event, AllBlocksCleared)
                held.clear()

    def forget(self, source: str) -> None:
        self.blocks.pop(source, None)


@contextmanager
def publishing(
    replay: str | None = ANY_PORT, num_kept: int = 1000
) -> Iterator[tuple[BatchPublisher[Event], EventSource]]:
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(ANY_PORT, replay, "kv@pod@model"),
        encode_batch,
        num_kept=num_kept,
        num_queued=1000,
    )
    publisher.start()
    address = publisher.address
    try:
        yield publisher, EventSource(address.endpoint, address.replay_endpoint)
    finally:
        publisher.close()


@asynccontextmanager
async def feeding(*sources: EventSource) -> AsyncIterator[tuple[Feed, Holdings]]:
    holdings = Holdings()
    feed = Feed(holdings, asyncio.get_running_loop())
    try:
        feed.set_sources(sources)
        feed.check()
        yield feed, holdings
    finally:
        feed.close()
        feed.check()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition; the event loop runs meanwhile."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE_S)

    asyncio.run(bounded())


def test_events_of_all_sources_arrive_in_order_and_in_slices() -> None:
    many = range(10 * MAX_BLOCKS)

    async def test() -> None:
        with publishing() as (one, a), publishing() as (two, b):
            one.publish([stored(many)])
            one.publish([BlockRemoved(list(many[5:]), "GPU")])
            async with feeding(a, b) as (feed, holdings):
                await until(lambda: holdings.of(a) == set(range(5)))
                two.publish([stored([7])])
                one.publish([AllBlocksCleared(), stored([8])])
                await until(lambda: (holdings.of(a), holdings.of(b)) == ({8}, {7}))
                assert holdings.largest <= MAX_BLOCKS
                stats = feed.stats()
                assert stats.keys() == {a.endpoint, b.endpoint}
                assert (stats[a.endpoint].batches, stats[b.endpoint].batches) == (3, 1)
                assert stats[a.endpoint].is_connected and not stats[a.endpoint].is_silent
                assert stats[a.endpoint].last_batch_age_s is not None
                assert stats[a.endpoint].losses == 0
                assert stats[a.endpoint].lag_s is not None

    run(test)


def test_sources_come_and_go_while_it_runs() -> None:
    async def test() -> None:
        with publishing() as (one, a), publishing() as (two, b):
            async with feeding(a) as (feed, holdings):
                one.publish([stored([1])])
                await until(lambda: holdings.of(a) == {1})
                feed.set_sources([a, b])
                two.publish([stored([2])])
                await until(lambda: holdings.of(b) == {2})
                feed.set_sources([b])
                feed.check()
                one.publish([stored([3])])
                two.publish([stored([4])])
                await until(lambda: holdings.of(b) == {2, 4})
                assert holdings.of(a) == {1}  # to be forgotten by the caller that removed it
                feed.set_sources([b, EventSource(a.endpoint, a.replay, "kv@pod")])
                await until(lambda: holdings.of(a) == {1, 3})

    run(test)


def test_a_source_that_changes_its_topic_begins_again() -> None:
    async def test() -> None:
        with publishing(replay=None) as (one, a):
            async with feeding(a) as (feed, holdings):
                number = 0
                while not holdings.of(a):  # subscribing is not acknowledged
                    one.publish([stored([number])])
                    number += 1
                    await asyncio.sleep(0.01)
                other = EventSource(a.endpoint, None, "another")
                feed.set_sources([other])
                one.publish([stored([number])])
                assert holdings.of(a) == set()
                await asyncio.sleep(0)
                assert feed.stats()[a.endpoint].batches == 0

    run(test)


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_publisher_that_is_killed_and_returns_is_known_by_its_new_blocks(
    has_replay: bool,
) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    source = EventSource(endpoint, replay if has_replay else None)

    def start() -> PublisherProcess:
        return PublisherProcess(source.endpoint, source.replay)

    async def live(process: PublisherProcess, feed: Feed, holdings: Holdings, first: int) -> None:
        expected = {first}
        await until(lambda: feed.stats()[source.endpoint].is_connected)
        await asyncio.to_thread(process.tell, "store", first)
        while not has_replay and not holdings.of(source) & expected:
            expected.add(max(expected) + 1)  # subscribing is not acknowledged
            await asyncio.to_thread(process.tell, "store", max(expected))
            await asyncio.sleep(0.01)
        await until(lambda: bool(holdings.of(source) & expected))
        assert holdings.of(source) <= expected  # nothing of an earlier life
        process.kill()
        await until(lambda: not feed.stats()[source.endpoint].is_connected)

    async def test() -> None:
        async with feeding(source) as (feed, holdings):
            for life in range(3):
                process = await asyncio.to_thread(start)
                try:
                    await live(process, feed, holdings, 100 * life)
                finally:
                    process.kill()
            stats = feed.stats()[source.endpoint]
            assert (stats.restarts if has_replay else stats.losses) >= 2

    run(test)


def test_a_gap_that_cannot_be_filled_makes_the_source_unknown() -> None:
    async def test() -> None:
        with publishing(num_kept=2) as (one, a):
            async with feeding(a) as (feed, holdings):
                one.publish([stored([0])])
                await until(lambda: holdings.of(a) == {0})
                one.publish([BlockRemoved([1 << 70], "GPU")])  # cannot be encoded: lost for good
                one.publish([stored([1])])
                await until(lambda: holdings.of(a) == {1})
                stats = feed.stats()[a.endpoint]
                assert (stats.gaps, stats.losses) == (1, 1)

    run(test)


def test_a_replay_endpoint_that_hangs_holds_up_no_other_source() -> None:
    hanging = zmq.Context.instance().socket(zmq.ROUTER)
    hanging.bind(ANY_PORT)
    endpoint = hanging.getsockopt_string(zmq.LAST_ENDPOINT)

    async def test() -> None:
        with publishing() as (one, a), publishing() as (two, b):
            silent = EventSource(a.endpoint, endpoint)
            async with feeding(silent, b) as (_, holdings):
                await until(lambda: bool(hanging.poll(0)))  # it was asked, and does not answer
                two.publish([stored([2])])
                await until(lambda: holdings.of(b) == {2})
                one.publish([stored([1])])
                await until(lambda: holdings.of(a) == {1})

    run(test)
    hanging.close(linger=0)


def test_a_busy_event_loop_loses_nothing() -> None:
    count = 300

    async def test() -> None:
        with publishing() as (one, a):
            async with feeding(a) as (feed, holdings):
                one.publish([stored([0])])
                await until(lambda: holdings.of(a) == {0})
                first = 1
                for _ in range(count):
                    one.publish([stored(range(first, first + 4 * MAX_BLOCKS))])
                    first += 4 * MAX_BLOCKS
                while one.stats()["published_batches"] <= count:
                    threading.Event().wait(0.01)  # the loop does not get to apply anything
                assert holdings.of(a) == {0}
                await until(lambda: holdings.of(a) == set(range(first)))
                assert feed.stats()[a.endpoint].losses == 0

    run(test)


def test_a_source_that_says_very_much_has_others_wait_for_no_more_than_a_slice() -> None:
    order: list[str] = []

    async def test() -> None:
        with publishing() as (one, a), publishing() as (two, b):
            async with feeding(a, b) as (feed, holdings):
                one.publish([stored([0])])
                two.publish([stored([0])])
                await until(lambda: bool(holdings.of(a) and holdings.of(b)))
                quiet = feed._sources[b.endpoint].subscriber
                assert quiet is not None
                await until(lambda: quiet.waits.until_s is None)
                file = int(quiet.waits.sockets[-1].getsockopt(zmq.FD))

                def apply(source: str, batch: EventBatch) -> None:
                    if not order:  # only now does the other one say something
                        two.publish([stored([1])])
                        assert select.select([file], [], [], PATIENCE_S)[0]
                    order.append(source)
                    threading.Event().wait(0.001)  # an index that takes as long as a turn

                holdings.apply = apply  # type: ignore[method-assign]
                one.publish([stored(range(100 * MAX_BLOCKS))])
                await until(lambda: len(order) == 101)

    run(test)
    rare = min(order, key=order.count)
    # The event loop has to come by before it looks at what is new.
    assert order.count(rare) == 1 and order.index(rare) < 10


def test_a_source_whose_sockets_fail_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = threading.Event()
    step = KVEventSubscriber.step

    def fail_once(subscriber: KVEventSubscriber) -> bool:
        if subscriber.counters.received and not has_failed.is_set():
            has_failed.set()
            raise OSError("no descriptors left")
        return step(subscriber)

    async def test() -> None:
        with publishing() as (one, a):
            async with feeding(a) as (feed, holdings):
                monkeypatch.setattr(KVEventSubscriber, "step", fail_once)
                one.publish([stored([0])])
                await until(has_failed.is_set)
                assert holdings.of(a) == set() and not feed.stats()[a.endpoint].is_connected
                feed.check()
                one.publish([stored([1])])
                await until(lambda: holdings.of(a) == {0, 1})
                assert feed.stats()[a.endpoint].losses == 1
                assert feed.stats()[a.endpoint].batches == 3

    run(test)


def test_without_descriptors_a_source_waits_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_socket, num_failures = subscriber.make_socket, 0

    def fail_twice(kind: int, endpoint: str) -> zmq.Socket[bytes]:
        nonlocal num_failures
        if num_failures < 2:
            num_failures += 1
            raise zmq.ZMQError(errno.EMFILE)
        return make_socket(kind, endpoint)

    async def test() -> None:
        with publishing() as (one, a):
            one.publish([stored([0])])
            monkeypatch.setattr(subscriber, "make_socket", fail_twice)
            async with feeding(a) as (_, holdings):
                await until(lambda: holdings.of(a) == {0})
        assert num_failures == 2

    run(test)


def test_a_replay_that_never_ends_holds_up_no_other_source() -> None:
    """It is nonsense, and there is always more of it."""
    hostile = zmq.Context.instance().socket(zmq.ROUTER)
    hostile.bind(ANY_PORT)
    endpoint = hostile.getsockopt_string(zmq.LAST_ENDPOINT)
    has_ended = threading.Event()

    def talk() -> None:
        peer = hostile.recv_multipart()[0]
        while not has_ended.wait(0.001):
            while hostile.poll(0):  # the next request is of another
                peer = hostile.recv_multipart()[0]
            for _ in range(100):
                hostile.send_multipart([peer, b"", b"topic", bytes(3), b"nonsense"])

    talking = threading.Thread(target=talk)

    async def test() -> None:
        with publishing() as (_, a), publishing() as (two, b):
            talking.start()
            async with feeding(EventSource(a.endpoint, endpoint), b) as (feed, holdings):
                await until(lambda: feed.stats()[a.endpoint].bad_batches > 1000)
                two.publish([stored([2])])
                await until(lambda: holdings.of(b) == {2})
            has_ended.set()

    run(test)
    talking.join()
    hostile.close(linger=0)


def test_a_batch_that_the_index_refuses_makes_the_source_unknown_and_no_more() -> None:
    async def test() -> None:
        with publishing() as (one, a):
            async with feeding(a) as (feed, holdings):
                holdings.fails_at = 2
                for number in range(4):
                    one.publish([stored([number])])
                await until(lambda: holdings.of(a) == {3})
                assert feed.stats()[a.endpoint].losses == 1

    run(test)


def test_a_silent_source_is_reported_by_its_statistics(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with publishing() as (one, a):
            wrong = EventSource(a.endpoint, a.replay, "another topic")
            async with feeding(wrong) as (feed, holdings):
                one.publish([stored([1])])
                await until(lambda: feed.stats()[a.endpoint].is_connected)
                for _ in range(2 * SILENT_REQUESTS):
                    feed.answered(
                        [a.endpoint, "another"],
                        num_tokens=SILENT_TOKENS // SILENT_REQUESTS,
                        predicted_tokens=0,
                        cached_tokens=None,
                    )
                stats = feed.stats()[a.endpoint]
                assert stats.is_silent and stats.batches == 0
                feed.set_sources([a])
                await until(lambda: holdings.of(a) == {1})
                assert not feed.stats()[a.endpoint].is_silent

    run(test)
    assert sum("source_silent" in record.message for record in caplog.records) == 1


def test_an_address_that_cannot_be_used_is_named() -> None:
    async def test() -> None:
        async with feeding() as (feed, _):
            with pytest.raises(ConfigError, match="nonsense"):
                feed.set_sources([EventSource("nonsense")])
            assert feed.stats() == {}

    run(test)
