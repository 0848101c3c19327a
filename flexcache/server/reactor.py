"""Sockets and waiting: what an event loop waits for, and a guard for what arrives. No cache."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.processes import end_context
from flexcache.protocol.endpoints import EndpointLock, listen_privately
from flexcache.protocol.messages import MAX_FRAME_BYTES, Refused
from flexcache.protocol.trust import Doorkeeper, describe_stranger, secure_server, stranger_of
from flexcache.stats import ServerCounters

logger = logging.getLogger(__name__)

EndReport = Callable[[float], None]
"""Called with the time when a process has ended."""

# A wake-up takes longer than most requests: the smallest match went from 480 to 235 us.
_SPIN_S = 0.0002
_LONGEST_SLEEP_S = 1.0
_POLL_INTERVAL_S = 0.002  # how late a death or a worker is seen while clients keep the loop busy


class Reactor:
    """Lets one thread wait for events. `wake` and `stop` may be called on any thread.

    Attributes:
        stopping: Whether the loop should end.
        spins: Whether to look for the main socket's next message for a moment before sleeping,
            since waking up takes longer than most requests. Only in a process that has no other
            use for the interpreter.
        wakes_at_s: When the present wait ends by itself, as its loop has planned it.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.spins = False
        self.wakes_at_s = math.inf
        self._poller = zmq.Poller()
        self._wake_fd = -1
        self._pidfds: dict[int, EndReport] = {}
        self._processes: dict[bytes, int] = {}
        """Pidfds that were opened here, by name."""
        self._main_socket: RouterSocket | None = None
        self._spin_until_s = 0.0
        self._poll_due_s = 0.0

    def open(self, main_socket: RouterSocket | None = None) -> None:
        """Wait for this socket from now on, if given, and make the loop ready to be woken."""
        if main_socket is not None:
            self._main_socket = main_socket
            self.add_socket(main_socket.zmq_socket)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def add_socket(self, socket: zmq.Socket[bytes]) -> None:
        """End a wait when the socket has a message."""
        self._poller.register(socket, zmq.POLLIN)

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Wait for it no more; it is to be closed."""
        self._poller.unregister(socket)

    # -- any thread ------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the current or the next wait."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def wake_by(self, due_s: float | None) -> None:
        """End the wait early if something is due before it would end by itself.

        Must be called under the lock under which the wait was planned.
        """
        if due_s is not None and due_s < self.wakes_at_s:
            self.wakes_at_s = due_s
            self.wake()

    def stop(self) -> None:
        """Have the loop end. Safe in a signal handler."""
        self.stopping = True
        self.wake()

    # -- processes -------------------------------------------------------------------------------

    def watch_pidfd(self, pidfd: int, ended: EndReport) -> None:
        """Report the end of a process whose pidfd the caller owns."""
        self._pidfds[pidfd] = ended
        self._poller.register(pidfd, zmq.POLLIN)

    def unwatch_pidfd(self, pidfd: int) -> None:
        """Stop watching; must be called before the pidfd is closed."""
        del self._pidfds[pidfd]
        self._poller.unregister(pidfd)

    def watch_process(self, name: bytes, pid: int, ended: EndReport) -> None:
        """Report the end of a process, if it can be seen from this pid namespace."""
        with contextlib.suppress(OSError, OverflowError):
            pidfd = self._processes[name] = os.pidfd_open(pid)
            self.watch_pidfd(pidfd, ended)

    def unwatch_process(self, name: bytes) -> None:
        """Stop watching a process, which may live on."""
        pidfd = self._processes.pop(name, None)
        if pidfd is not None:
            self.unwatch_pidfd(pidfd)
            os.close(pidfd)

    # -- the loop's thread -----------------------------------------------------------------------

    def wait(self, next_due: Callable[[float], float | None]) -> list[EndReport]:
        """Wait until there is something to do, and return the reports of ended processes.

        Args:
            next_due: Gets the time; returns when the wait has to end, or None.
        """
        now = time.monotonic()
        is_due = now >= self._poll_due_s
        if not is_due and self._message_comes_soon():
            return []
        self._poll_due_s = now + _POLL_INTERVAL_S
        ready = self._poller.poll(0 if is_due else self._patience_ms(next_due(now), now))
        ended = []
        for source, _ in ready:
            if source == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif source in self._pidfds:
                ended.append(self._pidfds[source])
        return ended

    def took_message(self) -> None:
        """The loop has just taken a message: more may follow at once."""
        if self.spins:
            self._spin_until_s = time.monotonic() + _SPIN_S

    def _message_comes_soon(self) -> bool:
        socket = self._main_socket
        while socket is not None and time.monotonic() < self._spin_until_s:
            if socket.has_message():
                return True
        return False

    def _patience_ms(self, due: float | None, now: float) -> int | None:
        if self.spins:  # a signal may come to another thread than this
            due = now + _LONGEST_SLEEP_S if due is None else min(due, now + _LONGEST_SLEEP_S)
        # Rounded up: a wait that ends too early would be repeated until it is due.
        return None if due is None else max(0, int((due - now) * 1000) + 1)

    def close(self) -> None:
        """Idempotent. Processes must not be watched any more."""
        if self._wake_fd >= 0:
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)


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
        # A client may be back before the loss of its former connection is noticed.
        socket.router_handover = True
        # To be told that a peer has left: messages to it would be dropped silently.
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
            # All were sent, or the peer has left.
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


class Endpoint:
    """Holds an address for one server.

    Args:
        address: A port of 0 takes a free one.
        curve_keys: Directory of the keys, if clients need one.

    Attributes:
        address: Where clients connect.
        socket: The clients' socket.
        context: For further sockets.

    Raises:
        ConfigError: Another process has the address, or it cannot be bound.
    """

    def __init__(self, address: str, curve_keys: str | None) -> None:
        self._lock = EndpointLock(address)
        self._authenticator: ThreadAuthenticator | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = RouterSocket(self.context)
        try:
            self.address = self._bind(address, curve_keys)
        except BaseException:
            self.close()
            self.unlock()
            raise

    def _bind(self, address: str, curve_keys: str | None) -> str:
        socket, is_local = self.socket.zmq_socket, address.startswith("ipc://")
        if curve_keys is not None:
            self._authenticator = secure_server(socket, curve_keys)
        try:
            if is_local:
                socket.setsockopt(zmq.USE_FD, listen_privately(address))
            self.socket.bind(address, only_own_user=not is_local and curve_keys is None)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"endpoint = {address!r}: {error.strerror or error}") from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def worker_address(self) -> str:
        """Where the server's own workers connect, apart from its clients."""
        return self._lock.worker_endpoint

    def close(self) -> None:
        """Close the sockets; other sockets of the context must be closed already. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.socket.close()
        end_context(self.context)

    def unlock(self) -> None:
        """Let another server have the address. Idempotent."""
        self._lock.release()


# -- what arrives ---------------------------------------------------------------------------------

Buffer = bytes | memoryview
Message = TypeVar("Message")
_MAX_TEXT = 500


class UnreadableError(ValueError):
    """Frames that are no message. ``why``: ``oversized`` or ``malformed``."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


def read_message(
    decoder: msgspec.msgpack.Decoder[Message],
    frames: Sequence[Buffer],
    has_data: Callable[[Message], bool] = lambda _: False,
) -> Message:
    """Decode what a peer has sent.

    Args:
        decoder: Of the union of messages that the socket takes.
        has_data: Whether a frame of raw data follows a message.

    Raises:
        UnreadableError: It is too large, incomplete, or no such message. Nothing else is raised.
    """
    # libzmq bounds each frame, but not how many there are.
    if sum(len(frame) for frame in frames) > MAX_FRAME_BYTES:
        raise UnreadableError("oversized", f"more than {MAX_FRAME_BYTES} bytes")
    try:
        message = decoder.decode(frames[0]) if frames else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also of bad UTF-8
        # Cut, as it may quote the frame.
        raise UnreadableError("malformed", str(error)[:_MAX_TEXT]) from None
    if message is None or len(frames) != 1 + has_data(message):
        raise UnreadableError("malformed", f"{len(frames)} frames")
    return message


def log_failed(message: object, counters: ServerCounters, identity: bytes = b"") -> None:
    """Log and count that a message could not be handled; called where the error was caught."""
    log_event(
        logger, logging.ERROR, "message_failed", message=type(message).__name__,
        identity=identity.hex(), exc_info=True,
    )  # fmt: skip
    counters.failed_messages += 1
