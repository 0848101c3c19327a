"""Link: a client's connection to its server, one conversation after another.

The driver (`KVTPClient`, `RemoteTransport`) sends Hello, and calls `attend` after the server's
Welcome. From then on `receive` raises `ServerLostError` as soon as the server's process is gone, or
has been silent for too long although it is pinged twice a second (`ping_rarely`: less often).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
import uuid
from collections import deque
from typing import Any

import msgspec
import zmq

from flexcache.config.values import server_of
from flexcache.errors import ServerLostError, UntrustedError
from flexcache.logs import log_event
from flexcache.protocol.endpoints import check_endpoint
from flexcache.protocol.messages import Answer, GetStats, HelloEngine, HelloRank, Ping, ToServer
from flexcache.protocol.trust import (
    Listener,
    check_client_keys,
    check_server_process,
    find_listener,
    secure_client,
)

logger = logging.getLogger(__name__)

_PING_INTERVAL_S = 0.5
_RETRY_S = 0.01
_STABLE_AFTER_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_encode = msgspec.msgpack.Encoder().encode


class ServerLink:
    """A connection to one server. Use it from one thread; only `wake` is thread-safe.

    Args:
        endpoint: The server's address.
        curve_keys: Directory of CURVE keys, if the server requires them.
        timeout_s: A server that is silent for this long is considered lost.

    Raises:
        ConfigError: The address is malformed, or the directory lacks keys.
    """

    def __init__(self, endpoint: str, curve_keys: str | None, timeout_s: float) -> None:
        check_endpoint(endpoint, has_keys=curve_keys is not None)
        if curve_keys is not None:
            check_client_keys(curve_keys)
        self.endpoint = endpoint
        self._curve_keys = curve_keys
        self._timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._identity = b""
        self._listener: Listener | None = None
        """The process that served the endpoint when this client connected."""
        self._was_served = False
        self._distrusted = ""
        """Why the listener at the endpoint is ignored, as last logged."""
        self._unsent: deque[bytes] = deque()
        self._poller = zmq.Poller()
        self._pidfd = -1
        self._ping_interval_s = _PING_INTERVAL_S
        self._ping_due_s: float | None = None
        self._attended_s: float | None = None
        """When the server's Welcome came."""
        self._pause_s = 0.0
        self._greets_again_s = 0.0
        self._asked_s: float | None = None
        """When the oldest ping was sent that no message has followed."""
        self.heard_s = 0.0
        """When the last message came from the server."""
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """What `wake` writes."""
        self._poller.register(self.event, zmq.POLLIN)

    def greet(self, hello: HelloRank | HelloEngine) -> None:
        """Send Hello to the server, if there is one: under an unguessable identity, and on a new
        connection if another server has replaced it. After a conversation that ended soon after the
        Welcome it does so only after a pause, which grows: what was wrong may be so again.

        Raises:
            UntrustedError: Before the first server, another user serves the endpoint, or could.
        """
        if time.monotonic() < self._greets_again_s:
            return
        listener = self._find_listener()
        if listener != self._listener:
            self._disconnect()
        if listener is None:
            return
        if self._socket is None:
            self._identity = uuid.uuid4().hex.encode()
            self._socket = self.connect(self._identity)
            self._listener = listener
            self._poller.register(self._socket, zmq.POLLIN)
        self.offer(hello)

    @property
    def identity(self) -> bytes:
        """The client's, at the server that it has greeted."""
        return self._identity

    def check_listener(self) -> None:
        """Check that the process that was checked before connecting still serves the endpoint.

        Raises:
            ServerLostError: Another server has replaced it.
            UntrustedError: Before the first server, another user has replaced it.
        """
        if self._find_listener() != self._listener:
            raise ServerLostError("another server has taken the endpoint")

    def _find_listener(self) -> Listener | None:
        """Return the process that serves the endpoint, if any.

        After the first server, an untrusted listener counts as none: another user must not end an
        engine's cache by listening briefly.
        """
        try:
            return find_listener(self.endpoint, self._curve_keys is not None)
        except UntrustedError as error:
            if not self._was_served:
                raise
            if str(error) != self._distrusted:
                self._distrusted = str(error)
                log_event(
                    logger, logging.ERROR, "server_not_trusted", endpoint=self.endpoint,
                    reason=error, effect="waits for a server of this user",
                )  # fmt: skip
            return None

    def connect(self, identity: bytes, immediate: bool = True) -> zmq.Socket[bytes]:
        """Open a socket to the server, which the caller has checked; the caller closes it.

        Unless ``immediate``, messages may be sent before the connection is established.
        """
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 1000  # ms, for the goodbye
        socket.identity = identity
        socket.ipv6 = "[" in self.endpoint
        socket.immediate = immediate  # if set, nothing is queued for an absent server
        try:
            if self._curve_keys is not None:
                secure_client(socket, self._curve_keys)
            socket.connect(self.endpoint)
        except BaseException:
            socket.close()  # otherwise the context could never terminate
            raise
        return socket

    def attend(self, server_pid: int, paths: list[str]) -> None:
        """Watch for the end of a server that has sent Welcome, with its memory at ``paths``.

        Raises:
            ServerLostError: It is no longer the one that this client connected to.
            UntrustedError: It is another user's, or the memory is not its own.
        """
        self._attended_s = time.monotonic()
        self.check_listener()
        check_server_process(server_pid, paths)
        self._was_served, self._distrusted = True, ""
        self.heard_s = time.monotonic()
        self._ping_interval_s = _PING_INTERVAL_S
        self._ping_due_s = self.heard_s + self._ping_interval_s
        self._asked_s = None
        # In another pid namespace only its silence reveals its end.
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(server_pid)
            self._poller.register(self._pidfd, zmq.POLLIN)

    def ping_rarely(self) -> None:
        """Ping the attended server once a timeout only: it is in this process, and can hang but not
        die alone. Each ping takes the interpreter from the engine four times."""
        self._ping_interval_s = max(self._timeout_s, _PING_INTERVAL_S)
        self._ping_due_s = self.heard_s + self._ping_interval_s

    def offer(self, message: ToServer) -> None:
        """Send a message now or not at all; for messages that are repeated anyway."""
        if self._socket is None:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(_encode(message), zmq.NOBLOCK)

    def send(self, message: ToServer) -> None:
        """Send a message now, or as soon as the server accepts it. Never waits."""
        self._unsent.append(_encode(message))
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            while self._unsent:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """Wait for messages, a call of `wake`, or ``timeout_s``; return the messages.

        Raises:
            ServerLostError: The server is dead or silent.
        """
        if self._unsent:
            self._flush()
        ready = dict(self._poller.poll(self._patience_ms(timeout_s)))
        if self.event in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.event)
        now, messages = time.monotonic(), []
        if self._socket is not None and self._socket in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(self._socket.recv(zmq.NOBLOCK))
        if messages:
            self.heard_s, self._asked_s = now, None
        if self._pidfd in ready and not messages:
            raise ServerLostError("the server died")
        if self._ping_due_s is not None:
            self._keep_alive(now)
        return messages

    def _keep_alive(self, now: float) -> None:
        if self._asked_s is not None and now - self._asked_s > self._timeout_s:
            raise ServerLostError(f"the server was silent for {self._timeout_s:g} s")
        assert self._ping_due_s is not None
        if now >= self._ping_due_s:
            self.offer(Ping())
            self._ping_due_s = now + self._ping_interval_s
            self._asked_s = self._asked_s or now

    def _patience_ms(self, timeout_s: float | None) -> int | None:
        if self._ping_due_s is not None:
            until_ping = max(0.0, self._ping_due_s - time.monotonic())
            timeout_s = until_ping if timeout_s is None else min(timeout_s, until_ping)
        if self._unsent:
            timeout_s = min(timeout_s or _RETRY_S, _RETRY_S)
        return None if timeout_s is None else -int(-timeout_s * 1000 // 1)

    def rest(self, timeout_s: float) -> None:
        """Wait for a call of `wake` or for ``timeout_s``, without listening to the server."""
        poller = select.poll()
        poller.register(self.event, select.POLLIN)
        if poller.poll(max(0.0, timeout_s) * 1000):
            os.eventfd_read(self.event)

    def wake(self) -> None:
        """Make `receive` or `rest` return. Thread-safe."""
        os.eventfd_write(self.event, 1)

    def hang_up(self) -> None:
        """End the conversation. Idempotent."""
        if self._attended_s is not None:
            now = time.monotonic()
            if now - self._attended_s > _STABLE_AFTER_S:
                self._pause_s = 0.0
            else:
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._greets_again_s, self._attended_s = now + self._pause_s, None
        if self._pidfd >= 0:
            self._poller.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._ping_due_s = None
        self._unsent.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        self._listener = None
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Release everything; sockets made by `connect` must be closed first."""
        self.hang_up()
        self._context.term()
        os.close(self.event)


def read_status(address: str, curve_keys: str | None, timeout_s: float) -> dict[str, Any]:
    """`KVManager.stats` of the server as a whole.

    Raises:
        ServerLostError: No server is there, or it does not answer within ``timeout_s``.
        UntrustedError: Another user serves the endpoint, or could.
    """
    endpoint = server_of(address)
    link = ServerLink(endpoint, curve_keys, timeout_s)
    has_keys = curve_keys is not None
    try:
        listener = find_listener(endpoint, has_keys)
        if listener is None:
            raise ServerLostError(f"{endpoint}: no server is there")
        with link.connect(uuid.uuid4().hex.encode(), immediate=False) as socket:
            socket.linger = 0
            socket.send(msgspec.msgpack.encode(GetStats(1)))
            if not socket.poll(int(timeout_s * 1000)):
                raise ServerLostError(f"{endpoint}: no answer within {timeout_s:g} s")
            if find_listener(endpoint, has_keys) != listener:
                raise ServerLostError(f"{endpoint}: another server has taken its place")
            report: dict[str, Any] = msgspec.msgpack.decode(socket.recv(), type=Answer).value
            return report
    finally:
        link.close()
