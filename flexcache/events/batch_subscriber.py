"""Follows one publisher of numbered batches and detects missed ones.

Batches are numbered. After a gap in the numbers, and after every connect, the subscriber requests
the missing batches; those that the publisher no longer has are reported as lost. A repeated number
with different content means that the publisher restarted. For one thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from flexcache.errors import ConfigError
from flexcache.events.batch_publisher import END_OF_REPLAY, NUMBER_BYTES
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound="BatchSubscriber[Any]")

_RECEIVE_QUEUE = 100_000  # batches queued here while the caller is busy
_MAX_SOCKETS = 65_535


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


News = Received[T] | Lost | PublisherRestarted


@dataclass(slots=True)
class SubscriberCounters:
    """Counts of batches; ``malformed`` counts messages that were not batches, ``gaps`` how often
    batches were missing, whether or not they were replayed."""

    received: int = 0
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    restarts: int = 0
    malformed: int = 0


class BatchSubscriber(Generic[T]):
    """Yields a publisher's batches, from its first on.

    Args:
        endpoint: The publisher's endpoint; one with ``*`` is bound, for publishers that connect.
        decode: Reads a payload; raises ValueError if it is not a batch, which is then lost.
        replay_endpoint: Where to request missed batches; None: nowhere.
        topic: Prefix of the topics to receive.
        replay_timeout_s: A replay ends when the publisher is silent this long.

    Attributes:
        num_connects: How often a connection to the publisher was made.
        is_connected: Whether there is one, as far as `receive` has noticed.

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
    ) -> None:
        self.endpoint = endpoint
        self.counters = SubscriberCounters()
        self.num_connects = 0
        self.is_connected = False
        self._decode = decode
        self._topic = topic.encode()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._next = 0
        self._last_payload: bytes | None = None
        """Payload of the batch before ``_next``."""
        self._replayed: dict[int, int] = {}
        """Replayed batches, which may also arrive regularly, with their payloads' hashes."""
        self._news: deque[News[T]] = deque()
        self._socket = _make_socket(zmq.SUB, endpoint)
        self._socket.rcvhwm = _RECEIVE_QUEUE
        self._socket.subscribe(topic)
        # A subscriber sends nothing: without probes it would not notice that a host has gone.
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle, self._socket.tcp_keepalive_intvl = 2, 1  # seconds
        self._socket.tcp_keepalive_cnt = 3
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            (self._socket.bind if "*" in endpoint else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"address of KV events {endpoint!r}: {error.strerror}") from None
        self._poller = zmq.Poller()
        self.register(self._poller)

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[News[T]]:
        """Yield news forever."""
        while True:
            news = self.receive(None)
            assert news is not None
            yield news

    def receive(self, timeout_s: float | None) -> News[T] | None:
        """Return the next piece of news; None if there is none within ``timeout_s``.

        Takes longer if missed batches have to be requested and the publisher does not answer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._news:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(None if wait_s is None else int(wait_s * 1000)))
            if self._monitor in ready:
                self._take_monitor_event()
            elif self._socket in ready:
                self._take_message(self._socket.recv_multipart())
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        return self._news.popleft()

    def catch_up(self) -> None:
        """Request everything since the last batch. Without this call, a batch lost during a
        connection is noticed only when the next one arrives."""
        self._take_replay()

    def register(self, poller: zmq.Poller) -> None:
        """Make a poller wake when `receive` may have something."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _take_monitor_event(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_connected:
            self.num_connects += 1
            self.catch_up()

    # -- numbers ---------------------------------------------------------------------------------

    def _take_message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self._found_malformed(f"a message of {len(frames)} frames")
            return
        topic, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        if number < self._next:
            if self._replayed.pop(number, None) == hash(payload):
                return  # the replay was faster
            self._note_restart()
        if number > self._next:
            self.counters.gaps += 1
            self._take_replay()
        if number >= self._next:
            self._replayed.clear()  # this batch comes after all replayed ones
            self._deliver(number, payload, topic)
        else:
            self._replayed.pop(number, None)

    def _note_restart(self) -> None:
        self.counters.restarts += 1
        self._next, self._last_payload = 0, None
        self._replayed.clear()
        self._news.append(PublisherRestarted())

    def _deliver(self, number: int, payload: bytes, topic: bytes) -> None:
        """Deliver a batch; those between it and the last delivered one are lost."""
        if number > self._next:
            self._lose(number)
        self._last_payload = payload
        try:
            batch = self._decode(payload)
        except ValueError as error:
            self._found_malformed(f"batch {number}: {error}")
            self._lose(number + 1)
            return
        self._next = number + 1
        self.counters.received += 1
        self._news.append(Received(number, batch, topic.decode(errors="replace")))

    def _found_malformed(self, what: str) -> None:
        if self.counters.malformed == 0:
            log_event(
                logger,
                logging.WARNING,
                "kv_events_not_understood",
                endpoint=self.endpoint,
                what=what,
            )
        self.counters.malformed += 1

    def _lose(self, stop: int) -> None:
        self.counters.lost += stop - self._next
        self._news.append(Lost(self._next, stop))
        self._next = stop

    # -- replay ----------------------------------------------------------------------------------

    def _take_replay(self) -> None:
        """Request and deliver a replay of the batches not delivered yet.

        The request includes the last delivered batch. A publisher always keeps its last one, so if
        it is missing or its content differs, the publisher has restarted.
        """
        known = self._last_payload
        first = self._next if known is None else self._next - 1
        again, is_whole = self._ask_again(first)
        has_other = bool(again) and again[0][0] == first and again[0][2] != known
        has_none = is_whole and not again
        if known is not None and (has_other or has_none):
            self._note_restart()
            again, _ = self._ask_again(0)
        for number, topic, payload in again:
            if number >= self._next:
                self.counters.replayed += 1
                self._replayed[number] = hash(payload)
                self._deliver(number, payload, topic)

    def _ask_again(self, first: int) -> tuple[list[tuple[int, bytes, bytes]], bool]:
        """Return number, topic and payload of the kept batches from ``first`` on, and whether the
        answer was complete."""
        if self._replay_endpoint is None:
            return [], False
        # One socket per request: a late answer to an earlier request must not interfere.
        socket = _make_socket(zmq.DEALER, self._replay_endpoint)
        socket.rcvhwm = 0
        batches: list[tuple[int, bytes, bytes]] = []
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while socket.poll(int(self._replay_timeout_s * 1000)):
                # "", topic, number, payload; without the topic until vLLM 0.25
                frames = socket.recv_multipart()
                if len(frames) not in (3, 4) or len(frames[-2]) != NUMBER_BYTES:
                    self._found_malformed(f"a replay of {len(frames)} frames")
                    continue
                number_bytes, payload = frames[-2:]
                if number_bytes == END_OF_REPLAY:
                    return batches, True
                topic = frames[1] if len(frames) == 4 else b""
                if not topic or topic.startswith(self._topic):
                    batches.append((int.from_bytes(number_bytes, "big"), topic, payload))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"address of KV events {self._replay_endpoint!r}: {error.strerror}"
            ) from None
        finally:
            socket.close(linger=0)
        log_event(
            logger, logging.WARNING, "kv_events_replay_incomplete", endpoint=self._replay_endpoint,
            waited_s=self._replay_timeout_s,
        )  # fmt: skip
        return batches, False


@cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of this process. The default one allows for 300 subscribers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def _make_socket(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = _context(os.getpid()).socket(kind)
    socket.ipv6 = "[" in endpoint
    return socket
