"""A ROUTER socket of the server. Used by one thread, and never waited on."""

from __future__ import annotations

from enum import Enum, auto

import zmq

from flexcache.protocol.messages import MAX_FRAME_BYTES

_RECEIVE_QUEUE = 64  # messages of one client that wait here; more wait at the client
_SEND_QUEUE = 10_000
_LINGER_MS = 200  # for the last Stop
_READABLE = int(zmq.POLLIN)  # plain numbers: an operation on zmq's enums costs more than a look
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Sent(Enum):
    """What became of a message."""

    QUEUED = auto()
    UNREAD = auto()
    """The peer's queue is full."""
    GONE = auto()
    """The peer is not connected."""


class RouterSocket:
    """Messages from and to many peers, by identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.zmq_socket = socket = context.socket(zmq.ROUTER)
        socket.linger = _LINGER_MS
        socket.router_handover = True
        socket.router_mandatory = True
        socket.maxmsgsize = 2 * MAX_FRAME_BYTES  # beyond it the connection is cut
        socket.rcvhwm = _RECEIVE_QUEUE
        socket.sndhwm = _SEND_QUEUE

    def has_message(self) -> bool:
        """Whether a message can be received at once."""
        return bool(int(self.zmq_socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive(self) -> list[bytes] | None:
        """The next message's frames, the sender's identity first; None if there is none."""
        try:
            return self.zmq_socket.recv_multipart(_NOW)
        except zmq.Again:
            return None

    def send(self, identity: bytes, data: bytes) -> Sent:
        """Queue a message of one frame."""
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
        """Close; messages in the queue have a moment to leave."""
        self.zmq_socket.close()
