"""Connections of bound ZMQ sockets: counted, limited and, without keys, told apart by user.

ZMQ accepts without bound, and libzmq ends the process if an ``ipc://`` listener finds no free
descriptor. So the descriptor limit is raised where a socket is bound, and each socket gets a part.

TCP does not say who is at the other end, but on one host the kernel's table of sockets does. Each
connection is looked up while its handshake waits for us (ZAP), so it cannot have been replaced by
another one under the same descriptor. What is found travels with its messages as their User-Id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from flexcache.logs import log_event
from flexcache.processes import ServiceThread, raise_limit
from flexcache.protocol.trust import find_peer, user_name

logger = logging.getLogger(__name__)

_MOST_STRANGERS = 64
_SHARE = 4  # a socket gets no more than a quarter of the descriptors, however few there are
_CENSUS_INTERVAL_S = 1.0
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"flexcache"
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


def stranger_of(frame: zmq.Frame) -> int | None:
    """Return the user, if it is not ours, who sent a message to a socket with `Doorkeeper` and
    ``only_own_user``; -1 if it is unknown."""
    for entry in str(frame.get("User-Id")).split():
        fd, _, uid = entry.partition("=")
        if fd == str(frame.get(zmq.SRCFD)):
            return int(uid)
    return None


@dataclass
class _Door:
    """One bound socket."""

    socket: zmq.Socket[bytes]
    open: dict[int, int] = field(default_factory=dict)
    """Inode of each connection by its descriptor."""
    census_due_s: float = 0.0
    is_full: bool = False
    is_shut: bool = False
    """Whether connections of other users were closed."""


class Doorkeeper:
    """Watches bound sockets of one context on a thread of its own, from before they are bound.

    Args:
        most: Connections to each socket; newer ones are closed.
        only_own_user: Note who sends (see `stranger_of`). For sockets without keys on loopback.
    """

    def __init__(
        self, sockets: Sequence[zmq.Socket[bytes]], most: int, *, only_own_user: bool = False
    ) -> None:
        self._most = min(most, raise_limit() // _SHARE)
        self._doors: dict[zmq.Socket[bytes], _Door] = {}
        self._strangers: dict[int, int] = {}
        """Connections that are not known to be of our own user: descriptor and user, or -1."""
        self._most_strangers = min(self._most // _SHARE, _MOST_STRANGERS)
        """Connections of other users among them: they do not shut out our own."""
        self._only_own_user = only_own_user
        self._poller = zmq.Poller()
        self._zap: zmq.Socket[bytes] | None = None
        for watched in sockets:
            address = f"inproc://flexcache-doors-{int(watched.fd)}"
            watched.monitor(address, _EVENTS)
            monitor = watched.context.socket(zmq.PAIR)
            monitor.rcvhwm = 0  # a full queue would stop the thread that moves all messages
            monitor.connect(address)
            self._doors[monitor] = _Door(watched)
            self._poller.register(monitor, zmq.POLLIN)
            if only_own_user:
                watched.zap_domain = _DOMAIN
        if only_own_user:
            self._zap = sockets[0].context.socket(zmq.REP)
            self._zap.bind(_ZAP)
            self._poller.register(self._zap, zmq.POLLIN)
        self._thread = ServiceThread(self._run, "flexcache-doors")
        self._thread.start()

    def close(self) -> None:
        """Must be called on the thread that uses the sockets, before it closes them. Idempotent."""
        for door in list(self._doors.values()):
            if not door.socket.closed:
                door.socket.disable_monitor()
        self._thread.wait()

    def _run(self) -> None:
        while self._doors:
            ready = dict(self._poller.poll())
            try:
                self._take_events()
            except Exception:  # nothing else would let newcomers in
                log_event(logger, logging.ERROR, "connections_not_counted", exc_info=True)
            if self._zap in ready:
                self._admit()
        if self._zap is not None:
            self._zap.close()

    def _take_events(self) -> None:
        accepted: list[tuple[_Door, int, str]] = []
        for monitor, door in list(self._doors.items()):
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                fd = event["value"]
                if event["event"] == zmq.EVENT_ACCEPTED:
                    accepted.append((door, fd, event["endpoint"].decode()))
                    if self._only_own_user:
                        self._strangers[fd] = -1
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    door.open.pop(fd, None)
                    self._strangers.pop(fd, None)
                else:
                    self._poller.unregister(monitor)
                    monitor.close()
                    del self._doors[monitor]
                    break
        for door, fd, endpoint in accepted:
            self._look_at(door, fd, endpoint)

    def _look_at(self, door: _Door, fd: int, endpoint: str) -> None:
        """Find out whose a new connection is, and count it or close it."""
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:  # ours stays what it is
                if not _leads_to(connection, endpoint):
                    return  # it is closed, and the descriptor serves something else
                door.open[fd] = os.fstat(connection.fileno()).st_ino
                if self._only_own_user:
                    uid = find_peer(connection.getsockname()[:2], connection.getpeername()[:2])
                    if uid == os.geteuid():
                        self._strangers.pop(fd, None)
                    elif uid is not None:
                        self._strangers[fd] = uid
                if self._is_stranger_too_many(door, fd, endpoint):
                    del door.open[fd]  # its end is reported later
                    connection.shutdown(socket.SHUT_RDWR)
                elif len(door.open) > self._most and self._is_crowded(door, endpoint):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed
            return

    def _is_stranger_too_many(self, door: _Door, fd: int, endpoint: str) -> bool:
        """Whether a connection is another user's, and these have enough."""
        if fd not in self._strangers:
            return False
        num_strangers = len(door.open.keys() & self._strangers.keys())
        if num_strangers <= self._most_strangers:
            return False
        if not door.is_shut:
            door.is_shut = True
            whose = describe_stranger(self._strangers[fd])
            log_event(
                logger, logging.ERROR, "connections_refused", endpoint=endpoint,
                limit=self._most_strangers, reason=whose,
                effect="new connections of other users are closed",
            )  # fmt: skip
        return True

    def _is_crowded(self, door: _Door, endpoint: str) -> bool:
        """Whether there are too many connections: not all ends are reported to us."""
        now = time.monotonic()
        if now >= door.census_due_s:
            door.census_due_s = now + _CENSUS_INTERVAL_S
            door.open = {fd: inode for fd, inode in door.open.items() if _inode_of(fd) == inode}
        is_crowded = len(door.open) > self._most
        if is_crowded and not door.is_full:
            log_event(
                logger, logging.ERROR, "connections_refused", endpoint=endpoint, limit=self._most,
                effect="new connections are closed",
                remedy="end clients that only hold connections; where the limit is small, raise "
                "that of descriptors (ulimit -Hn)",
            )  # fmt: skip
        door.is_full = is_crowded
        return is_crowded

    def _admit(self) -> None:
        """Let a handshake go on. Its connection is among those that we know: none of it is lost."""
        assert self._zap is not None
        version, request_id, *_ = self._zap.recv_multipart()
        strangers = " ".join(f"{fd}={uid}" for fd, uid in self._strangers.items())
        reply = [version, request_id, b"200", b"OK", strangers.encode() or b"-", b""]
        self._zap.send_multipart(reply)


def describe_stranger(uid: int) -> str:
    """Say why a message of another user is refused, and what to do."""
    whose = "an unknown user" if uid < 0 else user_name(uid)
    return (
        f"the client belongs to {whose}, the server to {user_name(os.geteuid())}: run both as one "
        "user, or set curve_keys on both sides"
    )


def _leads_to(connection: socket.socket, endpoint: str) -> bool:
    name = connection.getsockname()
    if isinstance(name, tuple):
        return endpoint.endswith(f":{name[1]}")
    return bool(name) and endpoint.endswith(str(name))


def _inode_of(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None
