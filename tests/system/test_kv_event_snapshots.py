"""Snapshots on the replay socket: a late subscriber knows what is held, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from cluster import running_cluster

from flexcache import CacheConfig
from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.events import held_blocks
from flexcache.events.consolidator import Consolidation
from flexcache.events.publisher import Address, BatchPublisher, KVEventPublisher
from flexcache.events.subscriber import (
    KVEventSubscriber,
    Lost,
    News,
    PublisherRestarted,
    Received,
    SnapshotPart,
)
from flexcache.events.wire import END_OF_REPLAY, BlockRemoved, BlockStored, Event, encode_batch
from flexcache.ids import BlockKey, RootId
from flexcache.router.events import EventApplier
from flexcache.router.fleet import Tier
from flexcache.router.holdings import find
from flexcache.router.index import Holder, KVIndexer
from flexcache.server import observers

PATIENCE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:0"
ROOT = RootId(bytes(16))
PAGE = 4  # blocks


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "_PAGE_BLOCKS", PAGE)


def stored(*blocks: int) -> Stored:
    """Store a prompt of blocks of one token."""
    keys = [BlockKey(block.to_bytes(8, "big")) for block in blocks]
    return Stored(Medium.CPU, ROOT, None, keys, 1, blocks)


def removed(*blocks: int) -> Removed:
    return Removed(Medium.CPU, ROOT, [BlockKey(block.to_bytes(8, "big")) for block in blocks])


@contextmanager
def publishing(
    endpoint: str = ANY_PORT, replay: str = ANY_PORT, num_kept: int = 2, **settings: Any
) -> Iterator[KVEventPublisher]:
    config = CacheConfig(
        num_cpu_blocks=1,
        kv_events_endpoint=endpoint,
        kv_events_replay_endpoint=replay,
        **settings,
    )
    publisher = KVEventPublisher(config, "model", pod="pod", num_kept=num_kept)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def publish(publisher: KVEventPublisher, *changes: Change) -> None:
    """Publish each change as a batch of its own."""
    for change in changes:
        publisher.publish([change])
        settle(publisher)


def settle(publisher: BatchPublisher[Any]) -> None:
    """Until all that was queued is sent: requests are answered by the thread that sends."""
    while publisher.stats()["queued_batches"]:
        ask(publisher, b"\xff" + bytes(7))
    ask(publisher, b"\xff" + bytes(7))


def ask(publisher: BatchPublisher[Any], request: bytes) -> list[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(publisher.address.replay_endpoint)
    socket.send_multipart([b"", request])
    assert socket.poll(PATIENCE_S * 1000)
    answer = socket.recv_multipart()
    socket.close()
    return answer


def following(publisher: BatchPublisher[Any], **more: Any) -> KVEventSubscriber:
    address = publisher.address
    return KVEventSubscriber(address.endpoint, address.replay_endpoint, snapshots=True, **more)


class Held:
    """What a subscriber knows from the news."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.kinds: list[str] = []

    def follow(self, news: News) -> None:
        self.kinds.append(type(news).__name__)
        if isinstance(news, Lost | PublisherRestarted):
            self.blocks.clear()
            return
        if isinstance(news, SnapshotPart) and news.is_first:
            self.blocks.clear()
        for event in news.batch.events:
            if isinstance(event, BlockStored):
                assert event.token_ids in ([], event.block_hashes)
                self.blocks |= set(event.block_hashes)  # type: ignore[arg-type]
            elif isinstance(event, BlockRemoved):
                self.blocks -= set(event.block_hashes)  # type: ignore[arg-type]
            else:
                self.blocks.clear()

    def follow_until(self, subscriber: KVEventSubscriber, blocks: Sequence[int]) -> None:
        while self.blocks != set(blocks):
            news = subscriber.receive(PATIENCE_S)
            assert news is not None
            self.follow(news)


def test_a_late_subscriber_gets_what_is_held_and_then_what_changes() -> None:
    with publishing() as publisher:
        publish(publisher, stored(1, 2, 3), stored(4, 5), removed(3), stored(6, 7, 8))
        with following(publisher) as subscriber:
            held = Held()
            held.follow_until(subscriber, [1, 2, 4, 5, 6, 7, 8])
            assert held.kinds == ["SnapshotPart"] * 2
            publish(publisher, removed(7, 8), stored(9))
            held.follow_until(subscriber, [1, 2, 4, 5, 6, 9])
            assert held.kinds[2:] == ["Received"] * 2
            assert subscriber.counters.lost == subscriber.counters.restarts == 0
            assert (subscriber.counters.snapshots, subscriber.counters.gaps) == (1, 0)
        assert publisher.stats()["snapshot_pages"] == 2


def test_changes_between_pages_are_not_missed() -> None:
    with publishing(num_kept=1000) as publisher:
        for first in range(0, 80, 4):
            publish(publisher, stored(*range(first, first + 4)))
        with following(publisher) as subscriber:
            held = Held()
            news = subscriber.receive(PATIENCE_S)
            assert news is not None
            held.follow(news)
            assert held.blocks == set(range(4))
            publish(publisher, removed(*range(4)), removed(*range(8, 12)))
            publish(publisher, stored(*range(8, 10)), removed(9), stored(100))
            expected = {*range(4, 9), *range(12, 80), 100}
            held.follow_until(subscriber, list(expected))
            publish(publisher, removed(100))
            held.follow_until(subscriber, list(expected - {100}))
            assert "Lost" not in held.kinds and "PublisherRestarted" not in held.kinds


def test_an_empty_publisher_says_so() -> None:
    with publishing() as publisher:
        publish(publisher, stored(1), removed(1))
        with following(publisher) as subscriber:
            news = subscriber.receive(PATIENCE_S)
            assert isinstance(news, SnapshotPart)
            assert news.is_first and news.batch.events == [] and news.topic == "kv@pod@model"


class LossyLink:
    """Forwards what a publisher sends, if the test wants it to."""

    def __init__(self, publisher: BatchPublisher[Any]) -> None:
        context = zmq.Context.instance()
        self._source = context.socket(zmq.SUB)
        self._source.connect(publisher.address.endpoint)
        self._source.subscribe(b"")
        self._drain = context.socket(zmq.XPUB)
        self._drain.bind(ANY_PORT)
        self.endpoint = self._drain.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_subscribed(self) -> None:
        assert self._drain.poll(PATIENCE_S * 1000)
        self._drain.recv()

    def hears(self) -> bool:
        return bool(self._source.poll(20))

    def take(self, number: int) -> list[bytes]:
        """Take everything up to a batch, and return that batch."""
        frames = [b"", b"", b""]
        while frames[1] != number.to_bytes(8, "big"):
            assert self._source.poll(PATIENCE_S * 1000)
            frames = self._source.recv_multipart()
        return frames

    def send(self, frames: list[bytes]) -> None:
        self._drain.send_multipart(frames)

    def close(self) -> None:
        self._source.close(linger=0)
        self._drain.close(linger=0)


def test_a_gap_beyond_what_is_kept_is_filled_by_a_snapshot() -> None:
    with publishing() as publisher:
        link = LossyLink(publisher)
        publish(publisher, stored(0))
        while not link.hears():
            publish(publisher, stored(publisher.stats()["sequence"]))
        first = publisher.stats()["sequence"]
        replay = publisher.address.replay_endpoint
        with KVEventSubscriber(link.endpoint, replay, snapshots=True) as subscriber:
            link.wait_subscribed()
            held = Held()
            held.follow_until(subscriber, range(first))
            assert subscriber.receive(0) is None  # the replay after the snapshot has ended
            publish(publisher, *[stored(first + number) for number in range(9)])
            link.send(link.take(first + 1))  # only the last two are kept
            held.follow_until(subscriber, range(first + 9))
            assert subscriber.counters.snapshots == 2
            for number in range(first + 2, first + 9):  # those before the snapshot come late
                link.send(link.take(number))
            publish(publisher, stored(1000))
            link.send(link.take(first + 9))
            held.follow_until(subscriber, [*range(first + 9), 1000])
            assert subscriber.counters.restarts == subscriber.counters.lost == 0
            assert subscriber.counters.snapshots == 2
        link.close()


def test_a_restarted_publisher_is_followed_from_a_snapshot() -> None:
    with publishing() as first:
        address = first.address
        publish(first, stored(1), stored(2))
        subscriber = following(first)
        held = Held()
        held.follow_until(subscriber, [1, 2])
        publish(first, stored(3))
        held.follow_until(subscriber, [1, 2, 3])
    with subscriber, publishing(address.endpoint, address.replay_endpoint) as second:
        publish(second, *[stored(number) for number in range(10, 20)], removed(11))
        held.follow_until(subscriber, [10, *range(12, 20)])
        assert subscriber.counters.snapshots >= 2


def test_a_publisher_that_restarts_between_pages_is_asked_again() -> None:
    with publishing() as first:
        address = first.address
        for number in range(20):
            publish(first, stored(number))
        subscriber = following(first)
        held = Held()
        news = subscriber.receive(PATIENCE_S)
        assert news is not None
        held.follow(news)
        assert held.blocks == set(range(PAGE))
    with subscriber, publishing(address.endpoint, address.replay_endpoint) as second:
        for number in range(30, 36):
            publish(second, stored(number))
        held.follow_until(subscriber, range(30, 36))


def test_a_publisher_without_snapshots_is_followed_by_replay() -> None:
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(ANY_PORT, ANY_PORT, "t"), encode_batch, num_kept=9, num_queued=9
    )
    publisher.start()
    publisher.publish([BlockStored([1], None, [1], 1, None, "CPU", None)])
    settle(publisher)
    with following(publisher) as subscriber:
        held = Held()
        held.follow_until(subscriber, [1])
        assert held.kinds == ["Received"]
    assert publisher.stats()["bad_replay_requests"] == 0
    publisher.close()


def test_after_dropped_batches_there_is_no_snapshot_until_all_is_cleared() -> None:
    entered, release = threading.Event(), threading.Event()

    class Blocking(KVEventPublisher):
        def _encode_changes(self, ts: float, changes: Sequence[Change]) -> bytes:
            entered.set()
            assert release.wait(PATIENCE_S)
            return super()._encode_changes(ts, changes)

    config = CacheConfig(
        num_cpu_blocks=1, kv_events_endpoint=ANY_PORT, kv_events_replay_endpoint=ANY_PORT,
    )  # fmt: skip
    publisher = Blocking(config, "model", num_queued=1)
    publisher.start()
    publisher.publish([stored(1)])
    assert entered.wait(PATIENCE_S)
    for number in range(2, 60):  # more than are gathered into the waiting one
        publisher.publish([stored(number)])
    assert publisher.stats()["dropped_batches"] > 0
    release.set()
    settle(publisher)
    assert ask(publisher, b"\xfe" + bytes(7))[2] == END_OF_REPLAY
    with following(publisher) as subscriber:
        assert isinstance(subscriber.receive(PATIENCE_S), Received)
        assert isinstance(subscriber.receive(PATIENCE_S), Lost)
    publish(publisher, Cleared(), stored(7))
    with following(publisher) as subscriber:
        Held().follow_until(subscriber, [7])
        assert subscriber.counters.snapshots == 1
    publisher.close()


def test_a_req_client_gets_one_page_for_each_request() -> None:
    with publishing() as publisher:
        publish(publisher, stored(1), stored(2))
        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.connect(publisher.address.replay_endpoint)
        for _ in range(2):
            socket.send(b"\xfe" + bytes(7))
            assert socket.poll(PATIENCE_S * 1000)
            assert socket.recv_multipart()[:2] == [b"kv@pod@model", b"\xfe" + bytes(7)]
        socket.close()


def test_a_publisher_that_answers_nonsense_is_followed_by_replay() -> None:
    context = zmq.Context.instance()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(ANY_PORT), router.bind(ANY_PORT)

    def answer() -> None:
        for frames in ([b"topic", b"\xfe" + bytes(7), b"not a page"], [b"", END_OF_REPLAY, b""]):
            peer, *_ = router.recv_multipart()
            if frames[1] == END_OF_REPLAY:
                payload = encode_batch(1.0, [BlockRemoved([5], "CPU")])
                router.send_multipart([peer, b"", b"topic", bytes(8), payload])
            router.send_multipart([peer, b"", *frames])

    thread = threading.Thread(target=answer)
    thread.start()
    endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (pub, router)]
    with KVEventSubscriber(*endpoints, snapshots=True) as subscriber:
        news = subscriber.receive(PATIENCE_S)
        assert isinstance(news, Received) and news.batch.events == [BlockRemoved([5], "CPU")]
    thread.join()
    pub.close(), router.close()


def test_a_late_consolidator_knows_what_is_held() -> None:
    with publishing() as publisher:
        publish(publisher, *[stored(number) for number in range(9)])
        address = publisher.address
        with Consolidation(
            [(address.endpoint, address.replay_endpoint)], Address(ANY_PORT, ANY_PORT, "t")
        ) as consolidation:
            subscriber = consolidation._subscribers[0]
            while len(consolidation._consolidator) < 9:
                poller = zmq.Poller()
                subscriber.register(poller)
                poller.poll(20)
                consolidation._take(subscriber)
            consolidation._consolidator.check()


def test_a_snapshot_of_a_cache_is_what_its_tiers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    monkeypatch.setattr(observers, "NUM_KEPT", 1)
    settings = {
        "kv_events_endpoint": ANY_PORT,
        "kv_events_replay_endpoint": ANY_PORT,
    }
    for life in range(2):  # the second begins with what is on SSD
        with running_cluster(
            [tmp_path], num_cpu_blocks=24, num_ssd_blocks=40, skip_slow_loads=False, **settings
        ) as cluster:
            publisher = cluster.server._observers._publisher
            tiers = list(cluster.server.cache.tasks.cache.tiers)
            prompts = [rng.integers(0, 50_000, 160) for _ in range(12)]
            for tokens in prompts:
                cluster.put(tokens, range(10))
            settle(publisher)
            with following(publisher) as subscriber:
                media: dict[str | None, set[int]] = {"CPU": set(), "STORAGE": set()}
                known: set[int] = set()
                while media != {"CPU": held_by(tiers[0]), "STORAGE": held_by(tiers[1])}:
                    news = subscriber.receive(PATIENCE_S)
                    assert isinstance(news, SnapshotPart)
                    for event in news.batch.events:
                        assert isinstance(event, BlockStored)
                        hashes: set[int] = set(event.block_hashes)  # type: ignore[arg-type]
                        parent = event.parent_block_hash
                        assert parent is None or parent in media[event.medium]
                        media[event.medium] |= hashes
                        if event.token_ids:
                            assert len(event.token_ids) == event.block_size * len(hashes)
                            known |= hashes
                assert media["CPU"] <= known and (life or media["STORAGE"] <= known)


def held_by(tier: Any) -> set[int]:
    directories = tier.index._directories.values()
    return {int.from_bytes(key[-8:], "big") for keys in directories for key in keys}


def test_an_ssd_told_by_runs_is_known_to_early_and_late_subscribers_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    settings = {
        "kv_events_endpoint": ANY_PORT,
        "kv_events_replay_endpoint": ANY_PORT,
        "kv_events_runs": True,
    }
    with running_cluster(
        [tmp_path], num_cpu_blocks=96, num_ssd_blocks=80, skip_slow_loads=False, **settings
    ) as cluster:
        publisher = cluster.server._observers._publisher
        tiers = list(cluster.server.cache.tasks.cache.tiers)
        prompts = [rng.integers(0, 50_000, 16 * 40) for _ in range(4)]
        early, late = EventApplier(KVIndexer()), EventApplier(KVIndexer())
        for tokens in prompts:
            cluster.put(tokens, range(40))
        settle(publisher)
        address = publisher.address
        with KVEventSubscriber(address.endpoint, address.replay_endpoint) as subscriber:
            follow(subscriber, early)  # all that was told, from the first batch on
        with following(publisher) as subscriber:
            follow(subscriber, late)
        on_ssd = len(held_by(tiers[1]))
        for applier in (early, late):
            applier.check()
            held = {each.tier: applier.index.num_held(each) for each in applier.index.holders}
            assert held[Tier.DRAM] == len(held_by(tiers[0]))
            # A prompt's last run may have lost some of its blocks.
            assert on_ssd // 16 - len(prompts) <= held[Tier.DISK] <= on_ssd // 16
            assert held[Tier.DISK] == early.index.num_held(Holder("c", Tier.DISK)) > 0
        for tokens in prompts:
            found = [sorted(find(each.index, each.forms, tokens).tokens) for each in (early, late)]
            assert found[0] == found[1]


def follow(subscriber: KVEventSubscriber, applier: EventApplier) -> None:
    news = subscriber.receive(PATIENCE_S)
    while news is not None:
        assert isinstance(news, Received | SnapshotPart)
        applier.apply("c", news.batch)
        news = subscriber.receive(0)
