"""Subscriber to KV events, FlexCache's or vLLM's: follows one publisher and detects missed batches.

Batches are numbered. After a gap in the numbers, and after every connect, the subscriber requests
the missing batches; those that the publisher no longer has are reported as lost. A repeated number
with different content means that the publisher restarted. For one thread, which may follow many
publishers by `BatchSubscriber.step`: none of them has it wait.

Where the publisher makes snapshots, and the subscriber wants them, a snapshot replaces the batches
that are not known from the first on: at the first connect, after a restart, and where a replay does
not reach back.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from flexcache.errors import ConfigError
from flexcache.events.wire import (
    END_OF_REPLAY,
    NUMBER_BYTES,
    EventBatch,
    Page,
    decode_batch,
    pack_request,
)
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_MAX_SOCKETS = 65_535
_MAX_MESSAGE = 128 << 20  # a batch is decoded at once: a larger one would hold up all others
_MAX_REPLAY = 512 << 20
_MAX_REPLAYED = 100_000  # batches: one that goes on sending would take all memory


def make_socket(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Return a socket that can be connected to the endpoint."""
    socket = _context(os.getpid()).socket(kind)
    socket.ipv6 = "[" in endpoint
    socket.maxmsgsize = _MAX_MESSAGE
    return socket


@contextmanager
def _asking(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket of its own for a replay or a snapshot: a late answer to an earlier request
    must not interfere."""
    socket = make_socket(zmq.DEALER, endpoint)
    socket.rcvhwm = 0
    try:
        socket.connect(endpoint)
        yield socket
    except zmq.ZMQError as error:
        raise ConfigError(f"address of KV events {endpoint!r}: {error.strerror}") from None
    finally:
        socket.close(linger=0)


@cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of this process. The default one allows for 300 subscribers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


T = TypeVar("T")
S = TypeVar("S", bound="BatchSubscriber[Any]")

_RECEIVE_QUEUE = 100_000  # batches queued here while the caller is busy


class Wait(NamedTuple):
    """What a subscriber waits for: a message on one of the sockets, or a (monotonic) time.

    Attributes:
        until_s: None: however long it takes; then no request is open.
    """

    sockets: tuple[zmq.Socket[bytes], ...]
    until_s: float | None = None

    def poll(self, timeout_ms: int) -> list[Any]:
        """Return the sockets that have a message, as soon as one has."""
        found = zmq.zmq_poll([(socket, zmq.POLLIN) for socket in self.sockets], timeout_ms)
        return [socket for socket, _ in found]


class Position(NamedTuple):
    """How far a publisher was followed.

    Attributes:
        number: Of the next batch.
        digest: Of the payload of the batch before it: a publisher that has another one there is
            not the one that was followed.
    """

    number: int
    digest: int


_digest = xxhash.xxh3_64_intdigest
_GO_ON = Wait((), 0.0)
Steps = Generator[Wait, list[Any], T]
"""Work that is interrupted where something must arrive, and between its longer parts. It gets
the sockets that have a message."""


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """A batch, in order. ``topic`` is empty if it came in a replay by an old version of vLLM."""

    number: int
    batch: T
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches ``[first, stop)`` are no longer available: the changes in them are unknown."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class PublisherRestarted:
    """The publisher restarted and counts from 0 again: its earlier events no longer hold."""


@dataclass(frozen=True, slots=True)
class SnapshotPart(Generic[T]):
    """Part of all that the publisher holds. With the first part, all earlier news no longer
    hold."""

    batch: T
    topic: str
    is_first: bool


BatchNews = Received[T] | Lost | PublisherRestarted | SnapshotPart[T]


@dataclass(slots=True)
class SubscriberCounters:
    """Counts of batches; ``malformed`` counts messages that were not batches, ``gaps`` how often
    batches were missing, whether or not they were replayed."""

    received: int = 0
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    restarts: int = 0
    snapshots: int = 0
    malformed: int = 0


class BatchSubscriber(Generic[T]):
    """Yields a publisher's batches, from its first on.

    Args:
        endpoint: The publisher's endpoint; one with ``*`` is bound, for publishers that connect.
        decode: Reads a payload; raises ValueError if it is not a batch, which is then lost.
        replay_endpoint: Where to request missed batches; None: nowhere.
        topic: Prefix of the topics to receive.
        replay_timeout_s: A replay ends when the publisher is silent this long.
        snapshots: Begin with a snapshot, if the publisher makes any.

    Attributes:
        num_connects: How often a connection to the publisher was made.
        is_connected: Whether there is one, as far as `step` has noticed.
        news: What was found and not taken yet, for callers of `step`.
        waits: What the next step waits for.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        decode: Callable[[bytes], T],
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        snapshots: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.counters = SubscriberCounters()
        self.num_connects = 0
        self.is_connected = False
        self._decode = decode
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._topic = topic.encode()
        self._wants_snapshots = snapshots
        self._covered = 0
        """Batches before this one are in a snapshot, or lost; they may also arrive late."""
        self._next = 0
        self._last_digest: int | None = None
        """That of the payload before ``_next``."""
        self._replayed: dict[int, int] = {}
        """Replayed batches, which may also arrive regularly, with their payloads' hashes."""
        self._must_catch_up = False
        self.news: deque[BatchNews[T]] = deque()
        self._socket = make_socket(zmq.SUB, endpoint)
        self._socket.rcvhwm = _RECEIVE_QUEUE
        self._socket.subscribe(topic)
        # A subscriber sends nothing: without probes it would not notice that a host has gone.
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle, self._socket.tcp_keepalive_intvl = 2, 1  # seconds
        self._socket.tcp_keepalive_cnt = 3
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._steps = self._follow()
        self.waits: Wait = next(self._steps)
        try:
            (self._socket.bind if "*" in endpoint else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"address of KV events {endpoint!r}: {error.strerror}") from None

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[BatchNews[T]]:
        """Yield news forever."""
        while True:
            news = self.receive(None)
            assert news is not None
            yield news

    def receive(self, timeout_s: float | None) -> BatchNews[T] | None:
        """Return the next piece of news; None if there is none within ``timeout_s``.

        Takes longer if missed batches have to be requested and the publisher does not answer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.news:
            if self.step():
                continue
            until_s, now = self.waits.until_s, time.monotonic()
            if until_s is None and deadline is not None and now >= deadline:
                return None
            end = deadline if until_s is None else until_s
            self.waits.poll(-1 if end is None else max(0, math.ceil((end - now) * 1000)))
        return self.news.popleft()

    def step(self) -> bool:
        """Do a part of what there is to do, if there is anything, without waiting: take a message,
        or one of an answer. Returns whether there was; `news` may have grown."""
        ready, until_s = self.waits.poll(0), self.waits.until_s
        if not ready and (until_s is None or time.monotonic() < until_s):
            return False
        try:
            self.waits = self._steps.send(ready)
        except BaseException:
            self._steps = self._follow()
            self.waits = next(self._steps)
            raise
        return True

    @property
    def position(self) -> Position | None:
        """What all news up to now tell of; None before the first batch, and while a snapshot is
        read."""
        digest = self._last_digest
        return None if digest is None else Position(self._next, digest)

    def begin_at(self, position: Position | None) -> None:
        """Begin where another subscriber was, whose caller's knowledge the caller has; None: with
        nothing. Before the first `step`.

        Should the publisher be another by now, or batches be missing, that is news as ever. Without
        replay one that is not connected yet begins with nothing: it may restart until it is.
        """
        while self._monitor.poll(0):
            self._note_connection()
        if self._must_catch_up:
            self.catch_up()
        if self._replay_endpoint is None and not self.is_connected:
            position = None
        self._next = self._covered = 0 if position is None else position.number
        self._last_digest = None if position is None else position.digest

    def catch_up(self) -> None:
        """Have everything since the last batch requested. Without this call, a batch lost during a
        connection is noticed only when the next one arrives."""
        self._must_catch_up = True
        if self.waits.until_s is None:
            self.waits = _GO_ON

    def register(self, poller: zmq.Poller) -> None:
        """Make a poller wake when `receive` may have something."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._steps.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _follow(self) -> Steps[None]:
        idle = Wait((self._monitor, self._socket))
        while True:
            if self._must_catch_up:
                self._must_catch_up = False  # first: should this fail, the next connect repeats it
                if self._last_digest is not None or not (yield from self._read_snapshot()):
                    yield from self._take_replay()
                continue
            ready = yield idle
            if self._monitor in ready:
                self._note_connection()
            elif ready:
                yield from self._take_message(self._socket.recv_multipart())

    def _note_connection(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.num_connects += self.is_connected
        self._must_catch_up |= self.is_connected
        if self.is_connected and self.num_connects > 1 and self._replay_endpoint is None:
            # Numbers alone tell that the publisher restarted; until they do, it is not known.
            self._covered, self._last_digest = 0, None

    # -- numbers ---------------------------------------------------------------------------------

    def _take_message(self, frames: list[bytes]) -> Steps[None]:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self._found_malformed(f"a message of {len(frames)} frames")
            return
        topic, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        if number < self._next:
            if self._replayed.pop(number, None) == hash(payload):
                return  # the replay was faster
            if number < self._covered:
                return
            self._note_restart()
        if number > self._next:
            self.counters.gaps += 1
            if (yield from self._take_replay(number)):
                return  # with all that was published since
        if number >= self._next:
            self._deliver(number, payload, topic)
            self._replayed.clear()  # this batch comes after all replayed ones
            self._covered = 0
        else:
            self._replayed.pop(number, None)

    def _note_restart(self) -> None:
        self.counters.restarts += 1
        self._next, self._last_digest = 0, None
        self._replayed.clear()
        self._covered = 0
        self.news.append(PublisherRestarted())

    def _deliver(self, number: int, payload: bytes, topic: bytes) -> None:
        """Deliver a batch; those between it and the last delivered one are lost."""
        if number > self._next:
            self._lose(number)
        self._last_digest = _digest(payload)
        batch = self._read(payload, f"batch {number}")
        if batch is None:
            self._lose(number + 1)
            return
        self._next = number + 1
        self.counters.received += 1
        self.news.append(Received(number, batch, topic.decode(errors="replace")))

    def _read(self, payload: bytes, what: str) -> T | None:
        try:
            return self._decode(payload)
        except ValueError as error:
            self._found_malformed(f"{what}: {error}")
            return None

    def _found_malformed(self, what: str) -> None:
        if self.counters.malformed == 0:
            log_event(
                logger, logging.WARNING, "kv_events_not_understood", endpoint=self.endpoint,
                what=what,
            )  # fmt: skip
        self.counters.malformed += 1

    def _lose(self, stop: int) -> None:
        self.counters.lost += stop - self._next
        self._covered = stop
        self.news.append(Lost(self._next, stop))
        self._next = stop

    # -- snapshots -------------------------------------------------------------------------------

    def _read_snapshot(self) -> Steps[bool]:
        """Deliver all that the publisher holds, page by page, and then what was published since.

        Returns:
            Whether the publisher makes snapshots.
        """
        if not self._wants_snapshots or self._replay_endpoint is None:
            return False
        publisher: bytes | None = None
        cursor: int | None = 0
        with _asking(self._replay_endpoint) as socket:
            while cursor is not None:
                found = yield from self._read_page(socket, cursor)
                if found is None or publisher not in (None, found[0].publisher):
                    break
                page, topic = found
                batch = self._read(page.batch, "a snapshot")
                if batch is not None:
                    name = topic.decode(errors="replace")
                    self.news.append(SnapshotPart(batch, name, is_first=publisher is None))
                if publisher is None:
                    self.counters.snapshots += 1
                    self._next = self._covered = page.number
                    self._last_digest = None
                    self._replayed.clear()
                publisher, cursor = page.publisher, page.cursor
        if publisher is None:
            return False
        if cursor is None:
            yield from self._take_replay(may_begin_snapshot=False)
        else:  # the publisher is away, or another: the next connect begins a new one
            self.news.append(Lost(0, self._next))
        return True

    def _read_page(
        self, socket: zmq.Socket[bytes], cursor: int
    ) -> Steps[tuple[Page, bytes] | None]:
        """Return a page and its topic; None if the publisher makes none."""
        request = pack_request(cursor)
        socket.send_multipart([b"", request])
        if not (yield from self._hears(socket)):
            return None
        frames = socket.recv_multipart()
        if len(frames) != 4 or frames[2] != request or not frames[1].startswith(self._topic):
            return None
        try:
            return msgspec.msgpack.decode(frames[3], type=Page), frames[1]
        except msgspec.MsgspecError:
            return None

    def _hears(self, socket: zmq.Socket[bytes]) -> Steps[bool]:
        """Wait for an answer; returns whether there is one."""
        ready = yield Wait((socket,), time.monotonic() + self._replay_timeout_s)
        return bool(ready)

    # -- replay ----------------------------------------------------------------------------------

    def _take_replay(
        self, stop: int | None = None, *, may_begin_snapshot: bool = True
    ) -> Steps[bool]:
        """Request and deliver a replay of the batches not delivered yet.

        The request includes the last delivered batch. A publisher always keeps its last one, so if
        it is missing or its content differs, the publisher has restarted.

        Args:
            stop: Number of a batch that has arrived.
            may_begin_snapshot: Deliver a snapshot instead where batches are missing for good.

        Returns:
            Whether it did.
        """
        known = self._last_digest
        first = self._next if known is None else self._next - 1
        again, is_whole = yield from self._request_replay(first)
        if known is not None and not self._goes_on(again, is_whole):
            self._note_restart()
            if may_begin_snapshot and (yield from self._read_snapshot()):
                return True
            again, _ = yield from self._request_replay(0)
        again = [batch for batch in again if batch[0] >= self._next]
        has_hole = self._has_hole([batch[0] for batch in again], stop)
        if has_hole and may_begin_snapshot and (yield from self._read_snapshot()):
            return True
        yield from self._deliver_again(again)
        return False

    def _deliver_again(self, again: Sequence[tuple[int, bytes, bytes]]) -> Steps[None]:
        for number, topic, payload in again:
            self.counters.replayed += 1
            self._replayed[number] = hash(payload)
            self._deliver(number, payload, topic)
            yield _GO_ON

    def _goes_on(self, again: Sequence[tuple[int, bytes, bytes]], is_whole: bool) -> bool:
        """Return whether a replay from the last delivered batch on is of the same publisher."""
        if not again:
            return not is_whole
        number, _, payload = again[0]
        return number != self._next - 1 or _digest(payload) == self._last_digest

    def _request_replay(self, first: int) -> Steps[tuple[list[tuple[int, bytes, bytes]], bool]]:
        """Return number, topic and payload of the kept batches from ``first`` on, and whether the
        answer was complete.

        Raises:
            ConfigError: The address cannot be used.
        """
        if self._replay_endpoint is None:
            return [], False
        batches: list[tuple[int, bytes, bytes]] = []
        num_bytes = num_messages = 0
        with _asking(self._replay_endpoint) as socket:
            socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while num_bytes < _MAX_REPLAY and num_messages < _MAX_REPLAYED:
                if not (yield from self._hears(socket)):
                    break
                # "", topic, number, payload; without the topic until vLLM 0.25
                frames = socket.recv_multipart()
                num_bytes, num_messages = num_bytes + len(frames[-1]), num_messages + 1
                if len(frames) not in (3, 4) or len(frames[-2]) != NUMBER_BYTES:
                    self._found_malformed(f"a replay of {len(frames)} frames")
                    continue
                number_bytes, payload = frames[-2:]
                if number_bytes == END_OF_REPLAY:
                    return batches, True
                topic = frames[1] if len(frames) == 4 else b""
                if not topic or topic.startswith(self._topic):
                    batches.append((int.from_bytes(number_bytes, "big"), topic, payload))
        log_event(
            logger, logging.WARNING, "kv_events_replay_incomplete", endpoint=self._replay_endpoint,
            waited_s=self._replay_timeout_s, batches=num_messages,
        )  # fmt: skip
        return batches, False

    def _has_hole(self, numbers: Sequence[int], stop: int | None) -> bool:
        """Return whether batches are missing from the next one to the last, or to ``stop``."""
        end = self._next + len(numbers)
        if numbers and numbers[-1] != end - 1:
            return True
        return stop is not None and end < stop


News = BatchNews[EventBatch]


class KVEventSubscriber(BatchSubscriber[EventBatch]):
    """Yields a publisher's events, from its first batch on.

    Args:
        endpoint: The publisher's endpoint; one with ``*`` is bound, for publishers that connect.
        replay_endpoint: Where to request missed batches; None: nowhere.
        topic: Prefix of the topics to receive.
        replay_timeout_s: A replay ends when the publisher is silent this long.
        snapshots: Begin with a snapshot of what is held, if the publisher makes any (FlexCache's
            does). `SnapshotPart` is then among the news.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        snapshots: bool = False,
    ) -> None:
        super().__init__(
            endpoint, decode_batch, replay_endpoint, topic, replay_timeout_s, snapshots
        )
