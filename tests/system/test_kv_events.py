"""KV events over real sockets: order, gaps, replay, restarts, merging; those of a real cache."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from cluster import running_cluster, until

from flexcache import CacheConfig
from flexcache.cache.journal import Medium, Removed, Stored
from flexcache.errors import ConfigError
from flexcache.events.publisher import Address, BatchPublisher, KVEventPublisher, is_bound
from flexcache.events.subscriber import (
    BatchSubscriber,
    KVEventSubscriber,
    Lost,
    News,
    PublisherRestarted,
    Received,
)
from flexcache.events.wire import END_OF_REPLAY, BlockRemoved, BlockStored, Event, encode_batch
from flexcache.ids import BlockKey, RootId

PATIENCE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:0"


class Gate:
    """An encoder that a test can block."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def encode(self, ts: float, events: Sequence[Event]) -> bytes:
        self.entered.set()
        assert self.release.wait(PATIENCE_S)
        return encode_batch(ts, events)


@contextmanager
def publishing(
    endpoint: str = ANY_PORT, replay_endpoint: str | None = ANY_PORT, *, num_kept: int = 1000,
    num_queued: int = 1000, encode: Any = None, gather_s: float = 0.0,
) -> Iterator[BatchPublisher[Event]]:  # fmt: skip
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(endpoint, replay_endpoint, "kv@pod@model"),
        encode or encode_batch,
        num_kept=num_kept,
        num_queued=num_queued,
        gather_s=gather_s,
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


def following(publisher: BatchPublisher[Any], *, replay: bool = True) -> KVEventSubscriber:
    address = publisher.address
    return KVEventSubscriber(address.endpoint, address.replay_endpoint if replay else None)


def batch(number: int) -> list[Event]:
    return [BlockRemoved([number], "CPU")]


def publish(publisher: BatchPublisher[Event], count: int) -> None:
    first = publisher.stats()["sequence"]
    for number in range(first, first + count):
        publisher.publish(batch(number))


def settle(publisher: BatchPublisher[Any]) -> None:
    """Until all that was queued can be asked for again: requests are answered by the thread that
    sends, so an answer says how far it has come."""
    while publisher.stats()["queued_batches"]:
        ask(publisher, 1 << 40)


def take(subscriber: KVEventSubscriber, count: int) -> list[News]:
    """Return the next pieces of news."""
    news = []
    for _ in range(count):
        item = subscriber.receive(PATIENCE_S)
        assert item is not None
        news.append(item)
    return news


def numbers(news: Sequence[News]) -> list[int | News]:
    """Replace each batch by its number, after checking that its content was published under it."""
    seen: list[int | News] = []
    for item in news:
        if isinstance(item, Received):
            assert item.batch.events == batch(item.number)
            seen.append(item.number)
        else:
            seen.append(item)
    return seen


def connect(subscriber: KVEventSubscriber, publisher: BatchPublisher[Event]) -> list[News]:
    """Publish until something arrives: subscribing takes a moment and is not acknowledged."""
    while True:
        publish(publisher, 1)
        if (news := subscriber.receive(0.02)) is not None:
            return [news]


def request(publisher: BatchPublisher[Any], *frames: bytes, kind: int = zmq.DEALER) -> Any:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger, socket.rcvtimeo = 0, int(PATIENCE_S * 1000)
    socket.connect(publisher.address.replay_endpoint)
    socket.send_multipart(frames)
    return socket


def ask(publisher: BatchPublisher[Any], first: int) -> list[int]:
    """Ask for a replay; return the numbers of the batches sent again."""
    socket = request(publisher, b"", first.to_bytes(8, "big"))
    found = []
    while socket.poll(PATIENCE_S * 1000):
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            socket.close()
            return found
        assert topic == b"kv@pod@model" and payload
        found.append(int.from_bytes(number, "big"))
    raise AssertionError("the replay has no end")


class LossyLink:
    """Forwards what a publisher sends, except for the messages that the test has it lose."""

    def __init__(self, publisher: BatchPublisher[Event]) -> None:
        context = zmq.Context.instance()
        self._source = context.socket(zmq.SUB)
        self._source.subscribe(b"")
        self._source.connect(publisher.address.endpoint)
        self._drain: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self._drain.bind(ANY_PORT)
        self.endpoint = self._drain.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_passed = 0
        while True:  # until we hear the publisher
            publish(publisher, 1)
            if self._source.poll(20):
                break

    def wait_subscribed(self) -> None:
        assert self._drain.recv() == b"\x01"

    def forward(self, until: int, losing: Sequence[int] = ()) -> None:
        """Forward everything up to the batch ``until``."""
        number = -1
        while number < until:
            assert self._source.poll(PATIENCE_S * 1000)
            frames = self._source.recv_multipart()
            number = int.from_bytes(frames[1], "big")
            if number not in losing:
                self._drain.send_multipart(frames)

    def close(self) -> None:
        self._source.close(linger=0)
        self._drain.close(linger=0)


def test_a_plain_subscriber_gets_topic_number_and_payload() -> None:
    config = CacheConfig(num_cpu_blocks=1, kv_events_endpoint=ANY_PORT)
    publisher = KVEventPublisher(config, "llama", pod="10.0.0.1:8000", data_parallel_rank=2)
    publisher.start()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"kv@10.0.0.1:8000@llama")
    socket.connect(publisher.address.endpoint)
    key = BlockKey(b"key" + (7).to_bytes(8, "big"))
    changes = [
        Stored(Medium.CPU, RootId(b"root"), None, [key], 2, [5, 6]),
        Removed(Medium.CPU, RootId(b"root"), [key]),
    ]
    try:
        while not socket.poll(20):
            publisher.publish(changes)
        topic, number, payload = socket.recv_multipart()
    finally:
        socket.close()
        publisher.close()
    assert (topic, len(number)) == (b"kv@10.0.0.1:8000@llama", 8)
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and rank == 2
    types = [event["type"] for event in events]  # what was published meanwhile shares the batch
    assert types == ["BlockStored", "BlockRemoved"] * (len(events) // 2)
    assert events[0]["block_hashes"] == events[1]["block_hashes"] == [7]
    assert events[0]["token_ids"] == [5, 6]


def test_a_late_subscriber_gets_all_that_is_kept() -> None:
    with publishing(num_kept=3) as publisher:
        publish(publisher, 5)
        settle(publisher)
        with following(publisher) as subscriber:
            assert numbers(take(subscriber, 4)) == [Lost(0, 2), 2, 3, 4]
            assert subscriber.counters.replayed == 3


def test_a_late_subscriber_without_replay_knows_what_it_missed() -> None:
    with publishing() as publisher:
        publish(publisher, 5)
        settle(publisher)
        with following(publisher, replay=False) as subscriber:
            (lost,) = connect(subscriber, publisher)
            assert isinstance(lost, Lost)
            assert lost.first == 0 and lost.stop >= 5
            assert numbers(take(subscriber, 1)) == [lost.stop]


@pytest.mark.parametrize(
    ("replay", "num_kept"), [(True, 1000), (True, 3), (False, 1000)],
    ids=["all is kept", "some are kept", "no replay endpoint"],
)  # fmt: skip
def test_a_lost_message_is_found_by_its_gap_and_repaired_as_far_as_can_be(
    replay: bool, num_kept: int
) -> None:
    with publishing(num_kept=num_kept) as publisher:
        link = LossyLink(publisher)
        known = publisher.stats()["sequence"]  # the link may forward what is before, or not
        replay_endpoint = publisher.address.replay_endpoint if replay else None
        with KVEventSubscriber(link.endpoint, replay_endpoint) as subscriber:
            link.wait_subscribed()
            publish(publisher, 1)
            link.forward(known)
            while numbers(take(subscriber, 1)) != [known]:
                pass
            publish(publisher, 6)
            settle(publisher)
            link.forward(known + 6, losing=range(known + 1, known + 5))
            got = numbers(take(subscriber, 3))
            expected: list[int | News]
            if not replay:
                expected = [Lost(known + 1, known + 5), known + 5, known + 6]
            elif num_kept == 3:
                expected = [Lost(known + 1, known + 4), known + 4, known + 5, known + 6]
            else:
                expected = [known + number for number in range(1, 7)]
            got += numbers(take(subscriber, len(expected) - 3))
            assert got == expected
            publish(publisher, 1)
            link.forward(known + 7)
            assert numbers(take(subscriber, 1)) == [known + 7]
        link.close()


def test_a_full_queue_drops_its_oldest_which_shows_as_a_gap_that_stays() -> None:
    gate = Gate()
    with publishing(num_queued=3, encode=gate.encode) as publisher:
        publish(publisher, 1)
        assert gate.entered.wait(PATIENCE_S)
        publish(publisher, 6)  # one is with the thread, three may wait: 1, 2 and 3 give way
        stats = publisher.stats()
        assert (stats["dropped_batches"], stats["queued_batches"]) == (3, 3)
        assert stats["sequence"] == 7
        gate.release.set()
        settle(publisher)
        with following(publisher) as subscriber:
            assert numbers(take(subscriber, 5)) == [0, Lost(1, 4), 4, 5, 6]
        assert publisher.stats()["published_batches"] == 4


def test_events_in_quick_succession_are_batched_up_to_a_limit() -> None:
    gate = Gate()
    with publishing(encode=gate.encode, gather_s=0.001) as publisher:
        publisher.publish(batch(0))
        assert gate.entered.wait(PATIENCE_S)
        for number in range(1, 41):  # while the thread is busy
            publisher.publish(batch(number))
        assert publisher.stats()["queued_batches"] == 3
        gate.release.set()
        settle(publisher)
        with following(publisher) as subscriber:
            told = []
            for news in take(subscriber, 4):
                assert isinstance(news, Received)
                told.append(news.batch.events)
    assert [len(events) for events in told] == [1, 16, 16, 8]
    assert [event for events in told for event in events] == [
        event for number in range(41) for event in batch(number)
    ]


def test_socket_files_are_private_to_the_user_and_removed_with_the_publisher(
    tmp_path: Path,
) -> None:
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("kv", "again")]
    with publishing(*endpoints) as publisher, following(publisher) as subscriber:
        assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]
        publish(publisher, 1)
        assert numbers(take(subscriber, 1)) == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_publisher_is_noticed_by_its_sequence_numbers() -> None:
    with publishing() as first:
        address = first.address
        subscriber = following(first, replay=False)
        connect(subscriber, first)
        publish(first, 900)  # more than the second one publishes until the subscriber is back
        while numbers(take(subscriber, 1)) != [first.stats()["sequence"] - 1]:
            pass
    with subscriber, publishing(address.endpoint, None) as second:
        publish(second, 1)
        (news,) = connect(subscriber, second)
        assert news == PublisherRestarted()
    assert subscriber.counters.restarts == 1


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_restarted_publisher_is_noticed_on_reconnect_whatever_its_sequence_numbers(
    count: int,
) -> None:
    with publishing() as first:
        address = first.address
        publish(first, 3)
        settle(first)
        subscriber = following(first)
        assert numbers(take(subscriber, 3)) == [0, 1, 2]
    with subscriber, publishing(address.endpoint, address.replay_endpoint) as second:
        publish(second, count)
        assert numbers(take(subscriber, 1 + count)) == [PublisherRestarted(), *range(count)]


def test_a_replayed_batch_that_also_arrives_late_is_delivered_once() -> None:
    with publishing() as publisher:
        link = LossyLink(publisher)
        with KVEventSubscriber(link.endpoint, publisher.address.replay_endpoint) as subscriber:
            link.wait_subscribed()
            publish(publisher, 5)
            settle(publisher)
            last = publisher.stats()["sequence"] - 1
            assert numbers(take(subscriber, last + 1)) == list(range(last + 1))
            link.forward(last)
            publish(publisher, 1)
            link.forward(last + 1)
            assert numbers(take(subscriber, 1)) == [last + 1]
            assert subscriber.counters.received == last + 2
            assert subscriber.counters.restarts == subscriber.counters.lost == 0
        link.close()


def test_replays_begin_at_the_requested_number_and_end_with_a_marker() -> None:
    with publishing(num_kept=4) as publisher:
        publish(publisher, 6)
        settle(publisher)
        assert ask(publisher, 0) == [2, 3, 4, 5]
        assert ask(publisher, 4) == [4, 5]
        assert ask(publisher, 6) == []


def test_a_req_client_gets_one_batch_for_each_request() -> None:
    with publishing() as publisher:
        publish(publisher, 3)
        settle(publisher)
        socket = request(publisher, (0).to_bytes(8, "big"), kind=zmq.REQ)
        for number in (0, 1, 2):
            assert socket.poll(PATIENCE_S * 1000)
            frames = socket.recv_multipart()
            assert frames[:2] == [b"kv@pod@model", number.to_bytes(8, "big")]
            socket.send((number + 1).to_bytes(8, "big"))
        assert socket.recv_multipart() == [b"", END_OF_REPLAY, b""]
        socket.close()


def test_malformed_requests_are_counted_and_harmless() -> None:
    bad = [(b"x",), (b"", b"short"), (b"", b"", bytes(8)), (b"no", bytes(8)), (b"", bytes(9))]
    with publishing() as publisher:
        publish(publisher, 2)
        sockets = [request(publisher, *frames) for frames in bad]
        while publisher.stats()["bad_replay_requests"] < len(bad):
            assert ask(publisher, 0) in ([], [0], [0, 1])
        assert ask(publisher, 0) == [0, 1]
        for socket in sockets:
            assert not socket.poll(0)
            socket.close()


def test_a_peer_with_the_oldest_protocol_is_answered_too() -> None:
    """It does not say what kind of socket it is."""
    with publishing() as publisher:
        publish(publisher, 2)
        assert publisher.address.replay_endpoint is not None
        host, port = publisher.address.replay_endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
            peer.sendall(b"\x01\x00" + b"\x01\x01" + b"\x09\x00" + bytes(8))  # ZMTP 1.0
            told = b""
            while END_OF_REPLAY not in told:
                told += peer.recv(1 << 16)
        assert ask(publisher, 0) == [0, 1]


def test_a_client_that_sends_more_than_a_request_is_cut_off() -> None:
    with publishing() as publisher:
        publish(publisher, 2)
        assert publisher.address.replay_endpoint is not None
        huge = zmq.Context.instance().socket(zmq.DEALER)
        monitor = huge.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        huge.connect(publisher.address.replay_endpoint)
        huge.send_multipart([b"", bytes(8 << 20)])
        assert monitor.poll(PATIENCE_S * 1000)
        assert ask(publisher, 0) == [0, 1]
        huge.disable_monitor()
        huge.close(linger=0)


def test_a_client_that_does_not_read_delays_no_other() -> None:
    large: list[Event] = [BlockStored([1], None, [1 << 20] * 50_000, 50_000, None, "CPU", None)]
    with publishing(num_kept=8) as publisher:
        for _ in range(8):
            publisher.publish(large)
        settle(publisher)
        greedy = request(publisher, b"", bytes(8))
        for _ in range(40):  # ten times what is kept for a client that does not read
            greedy.send_multipart([b"", bytes(8)])
        assert ask(publisher, 0) == list(range(8))
        publish(publisher, 1)
        settle(publisher)
        assert ask(publisher, 8) == [8]
        greedy.close()


def test_the_replays_of_older_versions_of_vllm_are_read() -> None:
    """Until 0.25 they have no topic."""
    context = zmq.Context.instance()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(ANY_PORT), router.bind(ANY_PORT)

    def answer() -> None:
        peer, empty, first = router.recv_multipart()
        assert (empty, first) == (b"", bytes(8))
        for number in range(2):
            payload = encode_batch(1.0, batch(number))
            router.send_multipart([peer, b"", number.to_bytes(8, "big"), payload])
        router.send_multipart([peer, b"", END_OF_REPLAY, b""])

    thread = threading.Thread(target=answer)
    thread.start()
    endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (pub, router)]
    with KVEventSubscriber(*endpoints) as subscriber:
        assert numbers(take(subscriber, 2)) == [0, 1]
    thread.join()
    pub.close(), router.close()


def test_invalid_messages_are_counted_and_an_unreadable_batch_is_lost() -> None:
    socket = zmq.Context.instance().socket(zmq.XPUB)
    socket.bind(ANY_PORT)
    with KVEventSubscriber(socket.getsockopt_string(zmq.LAST_ENDPOINT)) as subscriber:
        assert socket.recv() == b"\x01"
        socket.send(b"one frame")
        socket.send_multipart([b"", b"short", b""])
        socket.send_multipart([b"", bytes(8), b"not msgpack \xc1"])
        socket.send_multipart([b"", (1).to_bytes(8, "big"), encode_batch(1.0, batch(1))])
        assert numbers(take(subscriber, 2)) == [Lost(0, 1), 1]
        assert subscriber.counters.malformed == 3
    socket.close()


def test_batches_of_any_payload_can_be_followed() -> None:
    publisher: BatchPublisher[int] = BatchPublisher(
        Address(ANY_PORT, ANY_PORT, "numbers"),
        lambda ts, items: msgspec.json.encode(list(items)),
        num_kept=9,
        num_queued=9,
    )
    publisher.start()
    publisher.publish([1, 2])
    settle(publisher)
    endpoint, replay = publisher.address.endpoint, publisher.address.replay_endpoint
    read = msgspec.json.Decoder(list[int]).decode
    with BatchSubscriber(endpoint, read, replay, "numbers") as subscriber:
        assert subscriber.receive(PATIENCE_S) == Received(0, [1, 2], "numbers")
    publisher.close()


def test_a_closed_publisher_has_sent_its_queue_and_drops_later_batches() -> None:
    with publishing() as publisher:
        publish(publisher, 500)
        publisher.close()
        publish(publisher, 2)
        stats = publisher.stats()
        assert (stats["published_batches"], stats["dropped_batches"]) == (500, 2)
        assert (stats["queued_batches"], stats["sequence"]) == (0, 502)


def test_batches_published_before_the_start_are_sent_at_the_start() -> None:
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(ANY_PORT, ANY_PORT, "kv@pod@model"), encode_batch, num_kept=9, num_queued=9
    )
    publish(publisher, 2)
    publisher.start()
    with following(publisher) as subscriber:
        assert numbers(take(subscriber, 2)) == [0, 1]
    publisher.close()


def test_a_batch_that_cannot_be_encoded_leaves_one_gap() -> None:
    with publishing() as publisher, following(publisher) as subscriber:
        publisher.publish(batch(0))
        publisher.publish([BlockRemoved([1 << 70], "CPU")])
        publish(publisher, 1)
        settle(publisher)
        subscriber.catch_up()
        assert numbers(take(subscriber, 3)) == [0, Lost(1, 2), 2]
        assert publisher.stats()["dropped_batches"] == 1


def test_a_socket_file_is_not_taken_from_the_process_that_serves_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'kv'}"
    with publishing(endpoint) as publisher:
        with pytest.raises(ConfigError, match="in use"), publishing(endpoint):
            pass
        with following(publisher, replay=False) as subscriber:
            while subscriber.receive(0.05) is None:  # to subscribe takes a moment
                publish(publisher, 1)
    left_behind = tmp_path / "kv"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(left_behind))
    with publishing(endpoint):
        pass


def test_an_address_that_is_taken_is_named() -> None:
    with publishing() as publisher:
        taken = publisher.address
        for endpoint, replay in ((taken.endpoint, None), (ANY_PORT, taken.replay_endpoint)):
            with pytest.raises(ConfigError, match="in use"), publishing(endpoint, replay):
                pass
    for endpoint in ("nonsense", "inproc://nonsense", "ipc://@nonsense"):
        with pytest.raises(ConfigError, match="nonsense"), publishing(endpoint):
            pass
    with pytest.raises(ConfigError, match="nonsense"):
        KVEventSubscriber("nonsense")


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True), ("tcp://[::]:5557", True), ("tcp://0.0.0.0:5557", True),
        ("tcp://127.0.0.1:5557", True), ("tcp://localhost:5557", True), ("ipc:///run/kv", True),
        ("tcp://10.0.0.7:5557", False), ("tcp://router:5557", False),
        ("tcp://router127.:5557", False),
    ],
)  # fmt: skip
def test_endpoints_of_this_host_are_bound_and_others_connected_to(
    endpoint: str, bound: bool
) -> None:
    assert is_bound(endpoint) is bound


# -- merging -------------------------------------------------------------------------------------


@contextmanager
def consolidating(*publishers: BatchPublisher[Event]) -> Iterator[subprocess.Popen[str]]:
    sources = [f"{p.address.endpoint},{p.address.replay_endpoint}" for p in publishers]
    arguments = [text for source in sources for text in ("--source", source)]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "flexcache.cli", "events", "consolidate", *arguments,
            "--publish", ANY_PORT, "--replay-endpoint", ANY_PORT, "--topic", "kv@pod@model",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def stored(hashes: list[int], medium: str) -> BlockStored:
    return BlockStored(list(hashes), None, hashes, 1, None, medium, None)


def test_the_events_of_engine_and_cache_are_merged_by_a_process() -> None:
    with publishing() as engine, publishing() as cache, consolidating(engine, cache) as process:
        words = re.findall(r"tcp://[^\s,]+", process.stdout.readline())  # type: ignore[union-attr]
        with KVEventSubscriber(*words) as merged:

            def tell(publisher: BatchPublisher[Event], event: Event) -> None:
                publisher.publish([event])

            def told() -> list[Event]:
                (news,) = take(merged, 1)
                assert isinstance(news, Received) and news.topic == "kv@pod@model"
                return news.batch.events

            tell(engine, stored([1, 2], "GPU"))
            assert told() == [stored([1, 2], "GPU")]
            tell(cache, stored([2, 3], "CPU"))
            assert told() == [BlockStored([3], 2, [3], 1, None, "CPU", None)]
            tell(engine, BlockRemoved([1, 2], "GPU"))
            assert told() == [BlockRemoved([1], "GPU")]
            tell(cache, BlockRemoved([2], "CPU"))
            assert told() == [BlockRemoved([2], "GPU")]


def run_beside(publisher: BatchPublisher[Event], command: Sequence[str]) -> str:
    """Run a follower of the publisher; returns what it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(int(PATIENCE_S)):
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=1.0)
                assert process.returncode == 0
                return output
            publish(publisher, 1)  # a replay that was late is requested again at the next batch
        process.kill()
    raise AssertionError("it does not end")


def test_tail_shows_events_in_words_and_as_json() -> None:
    with publishing() as publisher:
        publisher.publish([stored([1, 2], "CPU"), BlockRemoved([b"\x01" * 32], "STORAGE")])
        settle(publisher)
        address = publisher.address
        command = [
            sys.executable, "-m", "flexcache.cli", "events", "tail", address.endpoint,
            "--replay", str(address.replay_endpoint), "--count", "1",
        ]  # fmt: skip
        words = run_beside(publisher, command)
        assert re.search(r"stored +CPU +2 blocks 0000000000000001\.\.0000000000000002", words)
        assert re.search(r"removed +STORAGE +1 blocks 0101010101010101\n", words)
        lines = run_beside(publisher, [*command, "--json"]).splitlines()
        first, second = (json.loads(line) for line in lines)
        assert (first["type"], first["block_hashes"]) == ("BlockStored", [1, 2])
        assert (second["number"], second["block_hashes"]) == (0, ["01" * 32])


# -- a real cache --------------------------------------------------------------------------------


class Shelves:
    """The state that a consumer derives from events alone."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        self.tokens: dict[int, list[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.num_stored = self.num_removed = 0

    def follow(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hashes=hashes, medium=str(medium)):
                    size = event.block_size
                    assert len(event.token_ids) == size * len(hashes)
                    assert self.blocks[medium].isdisjoint(hashes)
                    self.num_stored += len(hashes)
                    self.blocks[medium] |= set(hashes)  # type: ignore[arg-type]
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.blocks[medium]
                    for i, block in enumerate(hashes):
                        self.tokens[block] = event.token_ids[i * size : (i + 1) * size]  # type: ignore[index]
                        self.parents[block], parent = parent, block  # type: ignore[index,assignment]
                case BlockRemoved(hashes, str(medium)):
                    assert self.blocks[medium] >= set(hashes)
                    self.num_removed += len(hashes)
                    self.blocks[medium] -= set(hashes)  # type: ignore[arg-type]
                case _:
                    self.blocks = {medium: set() for medium in self.blocks}


def test_following_the_events_of_a_cache_yields_what_it_holds(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    settings = {"kv_events_endpoint": ANY_PORT, "kv_events_replay_endpoint": ANY_PORT}
    with running_cluster(
        [tmp_path], num_cpu_blocks=24, num_ssd_blocks=40, skip_slow_loads=False, **settings
    ) as cluster:
        publisher = cluster.server._observers._publisher
        tiers = list(cluster.server.cache.tasks.cache.tiers)

        def held(tier: Any) -> set[int]:
            directories = tier.index._directories.values()
            return {int.from_bytes(key[-8:], "big") for keys in directories for key in keys}

        with following(publisher) as subscriber:
            shelves = Shelves()
            prompts = [rng.integers(0, 50_000, 160) for _ in range(12)]
            for step in range(60):
                tokens = prompts[rng.integers(len(prompts))].copy()
                count = int(rng.integers(1, 11))
                act = rng.choice(["put", "get", "branch", "clear CPU", "clear SSD", "reset"],
                                 p=[0.5, 0.3, 0.1, 0.04, 0.03, 0.03])  # fmt: skip
                if act == "get":
                    cluster.get(tokens, range(count))
                elif act == "reset":
                    cluster.manager.reset()
                elif act.startswith("clear"):
                    cluster.manager.clear(act.split()[1])
                else:
                    if act == "branch":
                        tokens[80:] = step
                    cluster.put(tokens, range(count))
                with cluster.server.lock:
                    pass  # what was answered has been passed on to the feed
                settle(publisher)
                subscriber.catch_up()
                while (news := subscriber.receive(0)) is not None:
                    assert isinstance(news, Received)
                    shelves.follow(news.batch.events)
                assert shelves.blocks == {"CPU": held(tiers[0]), "STORAGE": held(tiers[1])}
            assert shelves.num_stored > 100 and shelves.num_removed > 100

        for block in shelves.blocks["CPU"] | shelves.blocks["STORAGE"]:
            told: list[int] = []
            ancestor: int | None = block
            while ancestor is not None:
                told = shelves.tokens[ancestor] + told
                ancestor = shelves.parents[ancestor]
            task_id, mask = cluster.manager.get_match(np.array(told))
            cluster.manager.cancel([task_id])
            assert mask.all() and len(told) % 16 == 0


def test_blocks_stored_before_a_restart_are_published_without_tokens(tmp_path: Path) -> None:
    settings = {"kv_events_endpoint": ANY_PORT, "kv_events_replay_endpoint": ANY_PORT}
    tokens = np.arange(80)
    with running_cluster([tmp_path], **settings) as cluster:
        cluster.put(tokens, range(5))
    with running_cluster([tmp_path], **settings) as cluster:
        publisher = cluster.server._observers._publisher
        settle(publisher)
        with following(publisher) as subscriber:
            (news,) = take(subscriber, 1)
    assert isinstance(news, Received)
    (event,) = news.batch.events
    assert isinstance(event, BlockStored)
    assert (event.medium, len(event.block_hashes), event.token_ids) == ("STORAGE", 5, [])
    assert event.parent_block_hash is None


def test_peers_that_ask_for_a_replay_and_do_not_read_it_cost_little() -> None:
    size, count, num_peers = 128 << 10, 400, 20
    publisher: BatchPublisher[bytes] = BatchPublisher(
        Address("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", ""),
        lambda _, items: b"".join(items), num_kept=1000, num_queued=1000,
    )  # fmt: skip
    publisher.start()
    assert publisher.address.replay_endpoint is not None
    try:
        for number in range(count):
            publisher.publish([number.to_bytes(4, "big") * (size // 4)])
        until(lambda: publisher.stats()["published_batches"] == count)
        before = memory_in_use()
        with zmq.Context() as context, ExitStack() as stack:
            for _ in range(num_peers):
                deaf = stack.enter_context(context.socket(zmq.DEALER))
                deaf.linger, deaf.rcvhwm = 0, 1
                deaf.connect(publisher.address.replay_endpoint)
                deaf.send_multipart([b"", bytes(8)])
            until(lambda: publisher.stats()["replayed_batches"] >= num_peers)
            reader = stack.enter_context(context.socket(zmq.DEALER))
            reader.linger, reader.rcvtimeo = 0, 30_000
            reader.connect(publisher.address.replay_endpoint)
            reader.send_multipart([b"", bytes(8)])
            for number in range(count):  # is served as before
                _, _, at, payload = reader.recv_multipart()
                assert int.from_bytes(at, "big") == number
                assert payload == number.to_bytes(4, "big") * (size // 4)
            assert reader.recv_multipart()[2] == END_OF_REPLAY
            assert memory_in_use() - before < num_peers * count * size // 3
    finally:
        publisher.close()


def memory_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
