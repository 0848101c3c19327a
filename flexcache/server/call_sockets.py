"""Unix sockets by which schedulers of this host call the server, past zmq's threads.

A scheduler first sends the identity that it has told the hub, so to the hub it makes no difference
whether a call came by such a socket or by zmq.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

from flexcache.protocol.call_stream import CallReader, pack_call
from flexcache.protocol.messages import MAX_FRAME_BYTES
from flexcache.protocol.runtime import listen_privately
from flexcache.server.router_socket import RouterSocket, Sent

_CHUNK_BYTES = 256 << 10
_MAX_CONNECTIONS = 1024


class _Connection:
    """One scheduler's socket, which is never waited on."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.identity = b""
        self.unsent = bytearray()
        self.waits_to_send = False
        self._reader = CallReader()

    def receive(self) -> list[list[bytes]]:
        """Return the calls that are complete.

        Raises:
            OSError: The connection is over.
            ValueError: What comes by it are no messages.
        """
        try:
            received = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionResetError("closed")
        return self._reader.read(received)

    def flush(self) -> None:
        """Send what the socket takes. Raises `OSError` if the connection is over."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]


class CallSockets:
    """The schedulers' sockets at one path. Used by one thread, and never waited on."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(fileno=listen_privately(path))
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}
        self._by_identity: dict[bytes, _Connection] = {}
        self._received: deque[list[bytes]] = deque()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to do."""
        return self._poll.fileno()

    def has_message(self) -> bool:
        """Whether something has come, or can be sent on."""
        return bool(self._received or self._poll.poll(0, 1))

    def knows(self, identity: bytes) -> bool:
        """Whether the scheduler that calls by this identity is connected here."""
        return identity in self._by_identity

    def receive(self) -> list[bytes] | None:
        """Return the next call: its sender's identity and its frames; None if there is none."""
        if not self._received:
            for fd, events in self._poll.poll(0):
                connection = self._connections.get(fd)
                if connection is None:
                    self._accept()
                else:
                    self._attend(connection, events)
        return self._received.popleft() if self._received else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connected, _ = self._listener.accept()
            if len(self._connections) >= _MAX_CONNECTIONS:
                connected.close()
                return
            self._connections[connected.fileno()] = _Connection(connected)
            self._poll.register(connected, select.EPOLLIN)

    def _attend(self, connection: _Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(connection)
            calls = connection.receive()
            if calls and not connection.identity:
                self._name(connection, calls.pop(0)[0])
        except (OSError, ValueError):
            self._drop(connection)
            return
        self._received.extend([connection.identity, *frames] for frames in calls)

    def _name(self, connection: _Connection, identity: bytes) -> None:
        if not identity or identity in self._by_identity:
            raise ValueError("not a name of its own")
        connection.identity = identity
        self._by_identity[identity] = connection

    def send(self, identity: bytes, data: bytes) -> Sent:
        """Queue a message of one frame for a scheduler that is connected here."""
        connection = self._by_identity[identity]
        if len(connection.unsent) > MAX_FRAME_BYTES:
            self._drop(connection)
            return Sent.UNREAD
        connection.unsent += pack_call(data)
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)
            return Sent.GONE
        return Sent.QUEUED

    def _flush(self, connection: _Connection) -> None:
        connection.flush()
        is_waiting = bool(connection.unsent)
        if is_waiting != connection.waits_to_send:
            connection.waits_to_send = is_waiting
            events = select.EPOLLIN | (select.EPOLLOUT if is_waiting else 0)
            self._poll.modify(connection.socket, events)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        self._poll.unregister(fd)
        del self._connections[fd]
        if self._by_identity.get(connection.identity) is connection:
            del self._by_identity[connection.identity]
        connection.socket.close()

    def close(self) -> None:
        """Close every socket; what was not sent is lost."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._poll.close()
        self._listener.close()


class ClientSocket(RouterSocket):
    """Where clients connect: zmq's socket and, if `listen` was called, one for calls beside it."""

    _calls: CallSockets | None = None
    _is_calls_turn = False

    def listen(self, path: str) -> None:
        """Also take the calls of schedulers at this path."""
        self._calls = CallSockets(path)

    @property
    def fds(self) -> list[int]:
        """Further descriptors that are readable while there is something to do."""
        return [] if self._calls is None else [self._calls.fileno()]

    def has_message(self) -> bool:
        return (self._calls is not None and self._calls.has_message()) or super().has_message()

    def receive(self) -> list[bytes] | None:
        """Return the next message's frames, the sender's identity first; None if there is none."""
        if self._calls is None:
            return super().receive()
        self._is_calls_turn = not self._is_calls_turn  # neither has to wait for a flood of others
        if self._is_calls_turn:
            return self._calls.receive() or super().receive()
        return super().receive() or self._calls.receive()

    def send(self, identity: bytes, data: bytes) -> Sent:
        if self._calls is not None and self._calls.knows(identity):
            return self._calls.send(identity, data)
        return super().send(identity, data)

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        super().close()
