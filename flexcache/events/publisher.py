"""Publisher of KV events: numbered batches over ZMQ, the last of which are resent on request.

    publish --queue--> thread --PUB--> subscribers          (topic, number, payload)
                          +--ROUTER--> replay requesters    (peer, "", topic, number, payload) ...

A batch gets its number before it is queued, so a batch dropped from a full queue leaves a visible
gap. Numbers begin at 0 and have 8 bytes, big endian. Callers never wait; the thread owns the
sockets.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.events.held_blocks import HeldBlocks
from flexcache.events.wire import (
    END_OF_REPLAY,
    NUMBER_BYTES,
    Page,
    cursor_of,
    describe,
    encode_batch,
)
from flexcache.logs import log_event
from flexcache.processes import end_context
from flexcache.protocol.endpoints import listen_privately
from flexcache.protocol.trust import Doorkeeper

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

NUM_KEPT = NUM_QUEUED = 10_000
"""Batches of KV events kept for replay, and waiting to be sent."""
_SEND_QUEUE = 10_000  # batches queued for one slow subscriber, which has to request later ones
_REPLAY_BYTES = 256 << 20
_ANSWERS_ON_THEIR_WAY = 32  # to one peer; the rest of its replay follows as it reads
_MOST_REPLAYS = 64
_REPLAY_POLL_MS = 10
_REPLAY_PATIENCE_S = 10.0
_MOST_CONNECTIONS = 256  # to each socket: the ports take no key, and are often open to all hosts
_MAX_REQUEST_BYTES = 4096  # also of subscriptions; ZMQ disconnects a peer that sends more
_BATCHES_A_TURN = 256  # sent between looks for replay requests
_MOST_GATHERED = 16
_CLOSE_TIMEOUT_S = 1.0
_LINGER_MS = 500
_NOT_FOR_US = {
    "inproc:": "is not reachable from other processes",
    "ipc://@": "is open to every user of this host; use a path",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where batches are published.

    Attributes:
        endpoint: Endpoint of the PUB socket. Bound if it names this host (``*``, ``0.0.0.0``,
            ``::``, loopback, ipc); any other belongs to a subscriber, and is connected to.
        replay_endpoint: Endpoint of the ROUTER socket, always bound; None: no replay.
        topic: First frame of every message.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(slots=True)
class _Batch(Generic[Item]):
    """A queued batch: what was published under its number, in order."""

    number: int
    ts: float
    parts: list[Sequence[Item]]


@dataclass(slots=True)
class _Replay:
    """What a peer is still to be sent: the kept batches from ``next_number`` on."""

    next_number: int
    moved_s: float


class BatchPublisher(Generic[Item]):
    """Publishes items in order, in numbered batches.

    Args:
        address: Where to publish.
        encode: Makes a payload of a time and the batch that was published then. Called on the
            publisher's thread.
        num_kept: Batches kept for replay, within 256 MiB.
        num_queued: Batches that may be queued; beyond it the oldest are dropped.
        gather_s: Calls of `publish` within this time share one batch, up to 16 of them: most of a
            batch's cost is waking the thread and sending.

    A subclass that can tell what is held after the batches that were encoded has `_page`, for
    replay requests that ask for all of it, and `_missed`.
    """

    def __init__(
        self,
        address: Address,
        encode: Callable[[float, Sequence[Item]], bytes],
        *,
        num_kept: int,
        num_queued: int,
        gather_s: float = 0.0,
    ) -> None:
        self.address = address
        self._encode = encode
        self._num_queued = num_queued
        self._gather_s = gather_s
        self._id = os.urandom(8)  # pages of one snapshot are of one publisher
        self._topic = address.topic.encode()
        self._lock = threading.Lock()
        self._queue: deque[_Batch[Item]] = deque()
        self._next_number = 0
        self._num_kept = num_kept
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._num_published = 0
        self._num_dropped = 0
        self._number_due = 0
        self._is_behind = False
        self._replays: dict[bytes, _Replay] = {}
        """Replays that are not sent whole yet, by peer; the one that moved last is the last."""
        self._num_sent_again = 0
        self._num_pages = 0
        self._num_bad_requests = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._socket_files: list[Path] = []
        self._poller = zmq.Poller()
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._close_by: float | None = None

    def start(self) -> None:
        """Open the sockets and start to send.

        Raises:
            ConfigError: An address cannot be used.
        """
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.sndhwm = _SEND_QUEUE
            self._pub.maxmsgsize = _MAX_REQUEST_BYTES
            bound_sockets = [self._pub] if is_bound(self.address.endpoint) else []
            replay_endpoint = self.address.replay_endpoint
            if replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                bound_sockets.append(self._router)
            if bound_sockets:
                self._doorkeeper = Doorkeeper(bound_sockets, _MOST_CONNECTIONS)
            endpoint = _open(self._pub, self.address.endpoint, is_bound(self.address.endpoint))
            if self._router is not None and replay_endpoint is not None:
                # Bounds the cost of a peer that requests a replay and does not read it.
                self._router.router_mandatory = True
                self._router.maxmsgsize = _MAX_REQUEST_BYTES
                self._router.sndhwm = _ANSWERS_ON_THEIR_WAY
                replay_endpoint = _open(self._router, replay_endpoint, bind=True)
                self._poller.register(self._router, zmq.POLLIN)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._close_sockets()
            raise
        self.address = Address(endpoint, replay_endpoint, self.address.topic)
        for bound in filter(None, (endpoint, replay_endpoint)):
            if bound.startswith("ipc://"):
                self._socket_files.append(Path(bound.removeprefix("ipc://")))
                self._socket_files[-1].chmod(0o600)  # where ZMQ has chosen the path
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="flexcache-events", daemon=True)
        self._thread.start()

    def publish(self, items: Sequence[Item]) -> None:
        """Queue a batch, which must not change afterwards. Takes microseconds and never raises;
        after `close` the batch is dropped."""
        with self._lock:
            is_closing = self._close_by is not None
            last = self._queue[-1] if self._queue and self._gather_s and not is_closing else None
            if last is not None and len(last.parts) < _MOST_GATHERED:
                last.parts.append(items)
                return
            number, self._next_number = self._next_number, self._next_number + 1
            if is_closing:
                self._num_dropped += 1
                return
            self._queue.append(_Batch(number, time.time(), [items]))
            if len(self._queue) > self._num_queued:
                self._queue.popleft()
                self._num_dropped += 1
            elif len(self._queue) == 1 and self._thread is not None:
                os.eventfd_write(self._wake, 1)

    def stats(self) -> dict[str, int]:
        """Return counts of batches and requests; ``sequence`` is the next number."""
        with self._lock:
            return {
                "published_batches": self._num_published,
                "dropped_batches": self._num_dropped,
                "queued_batches": len(self._queue),
                "sequence": self._next_number,
                "replayed_batches": self._num_sent_again,
                "snapshot_pages": self._num_pages,
                "bad_replay_requests": self._num_bad_requests,
            }

    def close(self) -> None:
        """Send what is queued, for a second at most, and stop. Idempotent."""
        with self._lock:
            if self._close_by is not None:
                return
            self._close_by = time.monotonic() + _CLOSE_TIMEOUT_S
        if self._thread is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._close_sockets()
        self._num_dropped += len(self._queue)
        self._queue.clear()

    def _close_sockets(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=_LINGER_MS)
        end_context(self._context)  # the addresses are free after this
        for path in self._socket_files:
            path.unlink(missing_ok=True)
        self._socket_files.clear()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        has_more = True  # batches published before the start
        while True:
            is_closing = self._close_by is not None  # if so, nothing more is queued
            patience_ms = _REPLAY_POLL_MS if self._replays else None
            ready = dict(self._poller.poll(0 if has_more or is_closing else patience_ms))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if self._close_by is None:
                    time.sleep(self._gather_s)
            if self._router in ready:
                self._send_again()
            self._continue_replays()
            has_more = self._send_some()
            if is_closing and (not has_more or self._is_late()):
                return

    def _is_late(self) -> bool:
        return self._close_by is not None and time.monotonic() > self._close_by

    def _send_some(self) -> bool:
        """Send the oldest queued batches; return whether there are more."""
        for _ in range(_BATCHES_A_TURN):
            with self._lock:
                if not self._queue:
                    self._is_behind = False
                    return False
                batch = self._queue.popleft()
            self._note_gap(batch.number)
            parts = batch.parts
            items = parts[0] if len(parts) == 1 else [item for part in parts for item in part]
            self._send(batch.number, batch.ts, items)
        return True

    def _note_gap(self, number: int) -> None:
        """Log dropped batches once, until the queue has been empty again."""
        num_missing = number - self._number_due
        self._number_due = number + 1
        if num_missing:
            self._missed()
        if num_missing and not self._is_behind:
            self._is_behind = True
            log_event(
                logger, logging.WARNING, "kv_events_dropped", batches=num_missing,
                reason=f"more than {self._num_queued:,} batches are waiting",
            )  # fmt: skip

    def _send(self, number: int, ts: float, items: Sequence[Item]) -> None:
        assert self._pub is not None
        try:
            payload = self._encode(ts, items)
            self._pub.send_multipart([self._topic, _pack(number), payload])
        except Exception:  # one bad batch must not stop the publisher
            log_event(logger, logging.ERROR, "kv_events_lost", batch=number, exc_info=True)
            with self._lock:
                self._num_dropped += 1
            return
        self._num_published += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > 1 and (
            len(self._kept) > self._num_kept or self._kept_bytes > _REPLAY_BYTES
        ):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _send_again(self) -> None:
        """Answer one request: a page of a snapshot, or begin to send all kept batches from a number
        on and then the end mark.

        A REQ socket takes one answer: it gets the first of these, and may request the next.
        """
        assert self._router is not None
        frames = self._router.recv_multipart(copy=False)
        peer, *request = [frame.bytes for frame in frames]
        if len(request) != 2 or request[0] != b"" or len(request[1]) != NUMBER_BYTES:
            self._num_bad_requests += 1
            return
        first = int.from_bytes(request[1], "big")
        cursor = cursor_of(first)
        if cursor is not None and (found := self._page(cursor)) is not None:
            batch, following = found
            page = msgspec.msgpack.encode(Page(self._id, self._number_due, following, batch))
            self._num_pages += 1
            self._answer(peer, (self._topic, request[1], page))
        elif _is_of_req(frames[-1]):
            self._answer_one(peer, first)
        else:
            while len(self._replays) >= _MOST_REPLAYS and peer not in self._replays:
                del self._replays[next(iter(self._replays))]
            self._replays[peer] = _Replay(first, time.monotonic())

    def _answer_one(self, peer: bytes, first: int) -> None:
        """Send the first kept batch from a number on, or the end mark."""
        kept = next(((n, payload) for n, payload in self._kept if n >= first), None)
        last = (b"", END_OF_REPLAY, b"")
        answer = last if kept is None else (self._topic, _pack(kept[0]), kept[1])
        if self._answer(peer, answer) and kept is not None:
            self._num_sent_again += 1

    def _page(self, cursor: int) -> tuple[bytes, int | None] | None:
        """Return a batch's payload that stores some of what is held, and where the next page
        begins; None: what is held is not known."""
        return None

    def _missed(self) -> None:
        """Take note that a batch was dropped before it was encoded."""

    def _continue_replays(self) -> None:
        """Send on with each replay as far as its peer reads."""
        now = time.monotonic()
        for peer, replay in list(self._replays.items()):
            before = replay.next_number
            if self._continue_replay(peer, replay):
                del self._replays[peer]
            elif replay.next_number > before:
                replay.moved_s = now
                self._replays[peer] = self._replays.pop(peer)
            elif now - replay.moved_s > _REPLAY_PATIENCE_S:
                del self._replays[peer]

    def _continue_replay(self, peer: bytes, replay: _Replay) -> bool:
        """Whether the replay is over: sent whole, or the peer has gone."""
        first_kept = self._kept[0][0] if self._kept else 0
        start = min(max(0, replay.next_number - first_kept), len(self._kept))
        while start and self._kept[start - 1][0] >= replay.next_number:
            start -= 1  # lost batches are not among them
        try:
            for number, payload in islice(self._kept, start, None):
                self._send_answer(peer, (self._topic, _pack(number), payload))
                replay.next_number = number + 1
                self._num_sent_again += 1
            self._send_answer(peer, (b"", END_OF_REPLAY, b""))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            log_event(logger, logging.DEBUG, "kv_events_replay_ended", error=error)
        return True

    def _answer(self, peer: bytes, answer: tuple[bytes, bytes, bytes]) -> bool:
        """Send topic, number and payload; return whether the peer took them."""
        try:
            self._send_answer(peer, answer)
        except zmq.ZMQError as error:  # it has gone, or does not read
            log_event(logger, logging.DEBUG, "kv_events_replay_ended", error=error)
            return False
        return True

    def _send_answer(self, peer: bytes, answer: tuple[bytes, bytes, bytes]) -> None:
        assert self._router is not None
        self._router.send_multipart([peer, b"", *answer], zmq.NOBLOCK)


def _is_of_req(frame: zmq.Frame) -> bool:
    try:
        return frame.get("Socket-Type") == "REQ"
    except zmq.ZMQError:  # ZMTP 1 and 2 do not carry the socket type
        return False


def is_bound(endpoint: str) -> bool:
    """Return whether a publisher binds its endpoint, rather than connect to a subscriber's.

    This is vLLM's rule, except that loopback and 0.0.0.0, which also mean this host, are bound too.
    """
    host = endpoint.removeprefix("tcp://")
    return (
        "*" in endpoint
        or "::" in endpoint
        or endpoint.startswith("ipc://")
        or host.startswith(("127.", "localhost:", "0.0.0.0:"))
    )


def _open(socket: zmq.Socket[bytes], endpoint: str, bind: bool) -> str:
    """Bind or connect the socket; return the resulting address."""
    for scheme, objection in _NOT_FOR_US.items():
        if endpoint.startswith(scheme):
            raise ConfigError(f"address of KV events {endpoint!r}: {objection}")
    socket.ipv6 = "[" in endpoint
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        if endpoint.startswith("ipc://") and _has_listener(endpoint.removeprefix("ipc://")):
            raise ConfigError(
                f"address of KV events {endpoint!r}: in use"
            )  # ZMQ would take it over
        if endpoint.startswith("ipc://") and "*" not in endpoint:  # private from the start
            socket.setsockopt(zmq.USE_FD, listen_privately(endpoint))
        socket.bind(endpoint)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(f"address of KV events {endpoint!r}: {error.strerror}") from None


def _has_listener(path: str) -> bool:
    """Return whether a process serves the socket file, rather than a dead one left it behind."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _pack(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


_GATHER_S = 0.005  # a delay that routers tolerate
_MORE_THAN_A_NAME = "|"  # separates the name from the rest of the identity: revision, dtypes


class KVEventPublisher(BatchPublisher[Change]):
    """Publishes changes at the config's ``kv_events_endpoint``.

    Args:
        config: Addresses, format and bounds (``kv_events_*``).
        model_id: The part before the first ``|`` names the model in the topic.
        pod: Name of this publisher in the topic, as routers know it; None: the host's name (in
            Kubernetes the pod's). The config's ``kv_events_topic`` replaces the whole topic.
        data_parallel_rank: Rank in every batch; None for a cache that ranks share.
        num_kept, num_queued: See `BatchPublisher`.
    """

    def __init__(
        self,
        config: CacheConfig,
        model_id: str,
        pod: str | None = None,
        data_parallel_rank: int | None = None,
        *,
        num_kept: int = NUM_KEPT,
        num_queued: int = NUM_QUEUED,
    ) -> None:
        if config.kv_events_endpoint is None:
            raise ConfigError("kv_events_endpoint = None: needed to publish KV events")
        topic = config.kv_events_topic
        if topic is None:
            name = model_id.partition(_MORE_THAN_A_NAME)[0]
            topic = f"kv@{pod or sockets.gethostname()}@{name}"
        self._hashes = config.kv_events_hashes
        self._rank = data_parallel_rank
        self._held: HeldBlocks | None = None
        if config.kv_events_replay_endpoint is not None or config.kv_events_runs:
            self._held = HeldBlocks(by_runs=config.kv_events_runs)
        super().__init__(
            Address(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic),
            self._follow_and_encode,
            num_kept=num_kept,
            num_queued=num_queued,
            gather_s=_GATHER_S,
        )

    def _follow_and_encode(self, ts: float, changes: Sequence[Change]) -> bytes:
        told = changes if self._held is None else self._held.apply(changes)
        return self._encode_changes(ts, told)

    def _page(self, cursor: int) -> tuple[bytes, int | None] | None:
        if self._held is None or not self._held.is_whole:
            return None
        stored, following = self._held.page(cursor)
        return self._encode_changes(time.time(), stored), following

    def _missed(self) -> None:
        if self._held is not None:
            self._held.missed()

    def _encode_changes(self, ts: float, changes: Sequence[Change]) -> bytes:
        events = [describe(change, self._hashes) for change in changes]
        return encode_batch(ts, events, self._rank)
