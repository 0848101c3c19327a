"""A ROUTER socket of the server. Used by one thread, and never waited on."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec
import zmq

from flexcache.logs import log_event
from flexcache.protocol.doorkeeper import Doorkeeper, describe_stranger, stranger_of
from flexcache.protocol.messages import MAX_FRAME_BYTES, Refused

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096  # of 1,024 clients with two each, and of those that are on their way
_RECEIVE_QUEUE = 64  # messages of one client that wait here; more wait at the client
_SEND_QUEUE = 256  # messages for one client that libzmq keeps, whatever their sizes; more wait here
_MOST_UNSENT_BYTES = 16 << 20  # for one client, beside those: more than all answers to its tasks
_UNSENT_COST_BYTES = 128  # what keeping a message takes, beside its bytes
FLUSH_INTERVAL_S = 0.005
_LINGER_MS = 200  # for the last Stop
_READABLE = int(zmq.POLLIN)  # plain numbers: an operation on zmq's enums costs more than a look
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Sent(Enum):
    """What became of a message."""

    QUEUED = auto()
    UNREAD = auto()
    """The peer has left too much unread: this message is dropped, and what waited for it."""
    GONE = auto()
    """The peer is not connected."""


@dataclass(slots=True)
class _Unsent:
    """Messages that libzmq does not take for a peer yet."""

    messages: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class RouterSocket:
    """Messages from and to many peers, by identity.

    libzmq bounds the number of messages that it keeps for a peer, not their bytes. So it keeps few,
    and others wait here: `flush` must be called every `FLUSH_INTERVAL_S` while it `has_unsent`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._unsent: dict[bytes, _Unsent] = {}
        self._doorkeeper: Doorkeeper | None = None
        self._only_own_user = False
        self._refused_users: set[int] = set()
        self.zmq_socket = socket = context.socket(zmq.ROUTER)
        socket.linger = _LINGER_MS
        socket.router_handover = True
        socket.router_mandatory = True
        socket.maxmsgsize = 2 * MAX_FRAME_BYTES  # beyond it the connection is cut
        socket.rcvhwm = _RECEIVE_QUEUE
        socket.sndhwm = _SEND_QUEUE

    def bind(self, address: str, *, only_own_user: bool = False) -> None:
        """Let peers connect.

        Args:
            only_own_user: Refuse the messages of other users; for TCP on loopback.
        """
        self._only_own_user = only_own_user
        self._doorkeeper = Doorkeeper(
            [self.zmq_socket], _MOST_CONNECTIONS, only_own_user=only_own_user
        )
        self.zmq_socket.ipv6 = "[" in address
        self.zmq_socket.bind(address)

    def has_message(self) -> bool:
        """Whether a message can be received at once."""
        return bool(int(self.zmq_socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive(self) -> list[bytes] | None:
        """The next message's frames, the sender's identity first; none if it was refused here.
        None if there is no message."""
        try:
            if not self._only_own_user:
                return self.zmq_socket.recv_multipart(_NOW)
            frames = self.zmq_socket.recv_multipart(_NOW, copy=False)
        except zmq.Again:
            return None
        uid = stranger_of(frames[-1])
        if uid is not None:
            self._refuse(frames[0].bytes, uid)
            return []
        return [frame.bytes for frame in frames]

    def _refuse(self, identity: bytes, uid: int) -> None:
        reason = describe_stranger(uid)
        if uid not in self._refused_users:
            self._refused_users.add(uid)
            log_event(logger, logging.ERROR, "client_refused", reason=reason)
        self.send(identity, msgspec.msgpack.encode(Refused(reason, final=uid >= 0)))

    def send(self, identity: bytes, data: bytes) -> Sent:
        """Queue a message of one frame."""
        unsent = self._unsent.get(identity)
        if unsent is None:
            sent = self._offer(identity, data)
            if sent is not Sent.UNREAD:
                return sent
            unsent = self._unsent[identity] = _Unsent()
        unsent.messages.append(data)
        unsent.num_bytes += len(data) + _UNSENT_COST_BYTES
        if unsent.num_bytes <= _MOST_UNSENT_BYTES:
            return Sent.QUEUED
        del self._unsent[identity]  # as it cannot have all of them
        log_event(
            logger, logging.ERROR, "client_does_not_read", identity=identity.hex(),
            unread_bytes=unsent.num_bytes, effect="what waits for it is dropped, its session "
            "ends; a rank registers again once it reads",
        )  # fmt: skip
        return Sent.UNREAD

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for a `flush`."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what peers have room for by now."""
        for identity, unsent in list(self._unsent.items()):
            sent = Sent.UNREAD
            while unsent.messages:
                sent = self._offer(identity, unsent.messages[0])
                if sent is not Sent.QUEUED:
                    break
                unsent.num_bytes -= len(unsent.messages.popleft()) + _UNSENT_COST_BYTES
            if sent is not Sent.UNREAD:
                del self._unsent[identity]

    def _offer(self, identity: bytes, data: bytes) -> Sent:
        """Have libzmq send a message, if it has room for it."""
        try:
            self.zmq_socket.send(identity, _NOW_AND_MORE)
            self.zmq_socket.send(data, _NOW)
        except zmq.Again:
            return Sent.UNREAD
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.QUEUED

    def close(self) -> None:
        """Close; messages in the queue have a moment to leave. Idempotent."""
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self.zmq_socket.close()
