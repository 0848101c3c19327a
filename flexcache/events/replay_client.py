"""Requests what a publisher has sent before: batches from a number on, or all that it holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache

import msgspec
import zmq

from flexcache.errors import ConfigError
from flexcache.events.snapshot import END_OF_REPLAY, NUMBER_BYTES, Page, pack_request
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_MAX_SOCKETS = 65_535


class ReplayClient:
    """Asks one publisher.

    Args:
        endpoint: Its replay endpoint; None: it has none.
        timeout_s: An answer ends when the publisher is silent this long.
        topic: Prefix of the topics to receive.
        found_malformed: Called with a description of each message that is no answer.
    """

    def __init__(
        self,
        endpoint: str | None,
        timeout_s: float,
        topic: bytes,
        found_malformed: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._topic = topic
        self._found_malformed = found_malformed

    def batches_from(self, first: int) -> tuple[list[tuple[int, bytes, bytes]], bool]:
        """Return number, topic and payload of the kept batches from ``first`` on, and whether the
        answer was complete.

        Raises:
            ConfigError: The address cannot be used.
        """
        if self._endpoint is None:
            return [], False
        # One socket per request: a late answer to an earlier request must not interfere.
        socket = _connected(self._endpoint)
        batches: list[tuple[int, bytes, bytes]] = []
        try:
            socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while socket.poll(int(self._timeout_s * 1000)):
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
        finally:
            socket.close(linger=0)
        log_event(
            logger, logging.WARNING, "kv_events_replay_incomplete", endpoint=self._endpoint,
            waited_s=self._timeout_s,
        )  # fmt: skip
        return batches, False

    def snapshot(self) -> SnapshotReader:
        """Return what requests a snapshot.

        Raises:
            ConfigError: The address cannot be used.
        """
        assert self._endpoint is not None
        return SnapshotReader(self._endpoint, self._timeout_s, self._topic)


class SnapshotReader:
    """Requests the pages of one snapshot, one after another."""

    def __init__(self, endpoint: str, timeout_s: float, topic: bytes) -> None:
        self._timeout_s = timeout_s
        self._topic = topic
        self._cursor: int | None = 0
        self._publisher: bytes | None = None
        self._socket = _connected(endpoint)

    def read(self) -> tuple[Page, bytes] | None:
        """Return the next page and its topic; None if the publisher makes none, or is not the one
        that made the pages before."""
        assert self._cursor is not None
        request = pack_request(self._cursor)
        self._socket.send_multipart([b"", request])
        if not self._socket.poll(int(self._timeout_s * 1000)):
            return None
        frames = self._socket.recv_multipart()
        if len(frames) != 4 or frames[2] != request or not frames[1].startswith(self._topic):
            return None
        try:
            page = msgspec.msgpack.decode(frames[3], type=Page)
        except msgspec.MsgspecError:
            return None
        if self._publisher not in (None, page.publisher):
            return None
        self._publisher, self._cursor = page.publisher, page.cursor
        return page, frames[1]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close(linger=0)


def make_socket(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Return a socket that can be connected to the endpoint."""
    socket = _context(os.getpid()).socket(kind)
    socket.ipv6 = "[" in endpoint
    return socket


def _connected(endpoint: str) -> zmq.Socket[bytes]:
    socket = make_socket(zmq.DEALER, endpoint)
    socket.rcvhwm = 0
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"address of KV events {endpoint!r}: {error.strerror}") from None
    return socket


@cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of this process. The default one allows for 300 subscribers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context
