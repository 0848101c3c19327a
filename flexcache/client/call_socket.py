"""The sockets by which a scheduler calls its server: a Unix socket where it can, else zmq's.

A call by a Unix socket wakes no other thread on its way, which takes a quarter of the time.
"""

from __future__ import annotations

import socket as sockets
import struct
from typing import Protocol

import zmq

from flexcache.protocol.call_stream import CallReader, pack_call

_SLICE_S = 0.1  # how soon a waiting call sees that the server is lost
_COPY_BELOW_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10
_CONNECT_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")


class CallSocket(Protocol):
    """One caller at a time."""

    def send(self, message: bytes, data: bytes | memoryview | None = None) -> bool:
        """Send a message and its raw data, if any; return whether the server takes it."""

    def receive(self) -> bytes | None:
        """Return the next answer; None if there is none for a slice of time.

        Raises:
            ConnectionError: There will be none.
        """

    def close(self) -> None:
        """Close; idempotent."""


class ZmqCallSocket:
    """A DEALER socket, which this closes."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.rcvtimeo = int(_SLICE_S * 1000)
        self._socket = socket

    def send(self, message: bytes, data: bytes | memoryview | None = None) -> bool:
        try:
            if data is None:
                self._socket.send(message, zmq.NOBLOCK)
            else:
                self._socket.send(message, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(data, zmq.NOBLOCK, copy=len(data) < _COPY_BELOW_BYTES)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv()
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close()


class UnixCallSocket:
    """A connected socket, which this closes; what it carries is a `protocol.call_stream`.

    Args:
        send_timeout_s: A server that reads nothing for this long takes no messages.
    """

    def __init__(self, socket: sockets.socket, send_timeout_s: float) -> None:
        socket.setblocking(True)  # the kernel keeps time: with Python's, each call would poll first
        _limit(socket, sockets.SO_RCVTIMEO, _SLICE_S)
        _limit(socket, sockets.SO_SNDTIMEO, send_timeout_s)
        self._socket = socket
        self._reader = CallReader()
        self._answers: list[list[bytes]] = []

    def send(self, message: bytes, data: bytes | memoryview | None = None) -> bool:
        try:
            self._socket.sendall(pack_call(message, data))
            if data:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        while not self._answers:
            try:
                received = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not received:
                raise ConnectionResetError("closed by the server")
            self._answers = self._reader.read(received)
        return self._answers.pop(0)[0]

    def close(self) -> None:
        self._socket.close()


def connect_past_zmq(
    path: str, server_pid: int, identity: bytes, timeout_s: float
) -> UnixCallSocket | None:
    """Connect to the socket for calls of a server that has been checked; None if it cannot be
    reached, or is not that server's: it may be on another host."""
    if not path:
        return None
    socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        socket.settimeout(timeout_s)
        socket.connect(path)
        found = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(found)
        if pid == server_pid:
            call_socket = UnixCallSocket(socket, timeout_s)
            if call_socket.send(identity):
                return call_socket
    except OSError:
        pass
    socket.close()
    return None


def _limit(socket: sockets.socket, option: int, seconds: float) -> None:
    whole, rest = divmod(seconds, 1.0)
    socket.setsockopt(sockets.SOL_SOCKET, option, _TIME.pack(int(whole), int(rest * 1e6)))
