"""Ownership checks of endpoints and connections: each must belong to this user.

Every client checks before it connects, and a server before it takes over an address. The other way
round, the mode of a socket file keeps other users out, and over TCP without keys a server asks the
same table who is at the other end (`Doorkeeper`).

A server receives prompts, borrows GPU memory and decides where bytes go, so a client connects only
to servers of its own user:

    ipc://   the socket file is ours, in a directory where no other user can replace it
    tcp://   with CURVE keys, the keys prove it; without, the kernel's socket table must list only
             our own listeners at that port

The check and zmq's connection are two steps, and zmq reconnects by itself. Checking twice closes
that race: if the `Listener` is the same before the connection and after the Welcome, it was there
all the time, since only its own user could have restored it. One gap remains: a server may stop
while its process lives on, unnoticed by a client that has not read `Stop` by the time the server's
socket closes, 0.2 s later at most. Another user may then take a loopback port, or a name in a
sticky directory, and receive block keys and tokens. (The client notices the death of a process
before zmq reconnects.) `check_server_process` still refuses memory that such a server names.

A client that has had a server ignores one that it cannot trust, as if no server were there
(`client.link`); only at first contact is this a permanent error.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pwd
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq import auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from flexcache.config.values import split_tcp
from flexcache.errors import ConfigError, UntrustedError
from flexcache.logs import log_event
from flexcache.processes import ServiceThread, raise_limit
from flexcache.storage.machine import make_directory

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Listener = frozenset[tuple[int, ...]]
"""Identifies the sockets that serve an endpoint, as opposed to any later ones."""

_PROVEN_BY_KEYS: Listener = frozenset()
_ESTABLISHED, _LISTENING = "01", "0A"  # linux/tcp_states.h


def find_listener(endpoint: str, has_keys: bool) -> Listener | None:
    """Find the listener that serves the endpoint; None if there is none yet.

    Raises:
        UntrustedError: Another user serves it, or could.
    """
    if endpoint.startswith("ipc://"):
        return _find_socket_file(Path(endpoint.removeprefix("ipc://")))
    return _PROVEN_BY_KEYS if has_keys else _find_port(endpoint)


def check_server_process(pid: int, paths: list[str]) -> None:
    """Refuse a server of another user, or one that passes off other processes' memory as its own.

    Raises:
        UntrustedError: The process belongs to another user, or a path is not in its memory.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:  # it died, or is in another pid namespace: its memory cannot be opened either
        return
    if owner != os.geteuid():
        raise UntrustedError(f"server process {pid} belongs to {user_name(owner)}: {_REMEDY}")
    for path in paths:
        if re.fullmatch(rf"/proc/{pid}/fd/\d+", path) is None:
            raise UntrustedError(f"{path!r} is not memory of server process {pid}")


def check_file(path: Path, found: os.stat_result, what: str) -> None:
    """Raise `UntrustedError` if another user owns this file of an endpoint."""
    if found.st_uid != os.geteuid():
        raise UntrustedError(f"{what} {path} belongs to {user_name(found.st_uid)}: {_REMEDY}")


def check_place(path: Path) -> os.stat_result | None:
    """Stat the file at the path of a socket; None if there is none.

    Raises:
        UntrustedError: It belongs to another user, or another user could replace it.
    """
    try:
        _check_directory(Path(os.path.realpath(path.parent)))
        found = path.lstat()
    except FileNotFoundError:
        return None
    check_file(path, found, "socket")
    return found


def _check_directory(directory: Path) -> None:
    """Raise `UntrustedError` if another user could replace our file in this directory.

    The owners of parent directories are trusted: choosing a path below them relies on them.
    """
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise UntrustedError(f"directory {directory} belongs to {user_name(owner)}: {_REMEDY}")
    for path in (directory, *directory.parents):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise UntrustedError(
                f"directory {path} (mode {mode:04o}) is writable by other users, which could "
                f"replace its files: run `chmod go-w {path}`, or choose another endpoint"
            )


_REMEDY = "start the server as this user, or choose another endpoint"


def _find_socket_file(path: Path) -> Listener | None:
    found = check_place(path)
    if found is None:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        raise UntrustedError(f"{path} is not a socket: remove it, or choose another endpoint")
    return frozenset({(found.st_dev, found.st_ino, found.st_mtime_ns)})


def _find_port(endpoint: str) -> Listener | None:
    host, port = split_tcp(endpoint)
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    places = {address, ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")}
    found = [
        (inode, uid) for place, at, uid, inode in _listeners() if place in places and at == port
    ]
    for _, uid in found:
        if uid != os.geteuid():
            raise UntrustedError(f"{endpoint} is served by {user_name(uid)}: {_REMEDY}")
    return frozenset((inode,) for inode, _ in found) or None


def find_peer(ours: tuple[str, int], theirs: tuple[str, int]) -> int | None:
    """Find the user at the other end of a connection on this host, by its two addresses.

    Returns None if it is not there any more: the kernel lists what no process holds as root's.
    """
    for name, table in _tables():
        there, here = _write_place(theirs, name), _write_place(ours, name)
        wanted = f": {there} {here} {_ESTABLISHED} "  # parsing all lines, of thousands, takes 20 ms
        start = table.find(wanted)
        while start >= 0:
            fields = table[start : table.index("\n", start)].split()
            if int(fields[9]):
                return int(fields[7])
            start = table.find(wanted, start + 1)
    return None


def _write_place(name: tuple[str, int], table: str) -> str:
    """Write an end as the kernel does in a table."""
    address = _unmapped(ipaddress.ip_address(name[0].partition("%")[0]))
    packed = address.packed
    if table == "tcp6" and address.version == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(w, sys.byteorder):08X}" for w in words) + f":{name[1]:04X}"


def _listeners() -> Iterator[tuple[Address, int, int, int]]:
    """Yield address, port, uid and inode of every TCP socket that listens on this host."""
    for _, table in _tables():
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                digits, _, port = fields[1].partition(":")
                yield _read_address(digits), int(port, 16), int(fields[7]), int(fields[9])


def _tables() -> Iterator[tuple[str, str]]:
    """Yield the kernel's tables of TCP sockets, with their names."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # without IPv6
            yield name, Path("/proc/net", name).read_text()


def _read_address(digits: str) -> Address:
    """Parse an address; the kernel prints each of its words in the machine's byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _unmapped(ipaddress.ip_address(packed))


def _unmapped(address: Address) -> Address:
    """An IPv4 address that a socket of both families writes as one of IPv6."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def user_name(uid: int) -> str:
    """Name a user for a message."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


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

    ZMQ accepts without bound, and libzmq ends the process if an ``ipc://`` listener finds no free
    descriptor. So the descriptor limit is raised where a socket is bound, and each socket gets a
    part.

    TCP does not say who is at the other end, but on one host the kernel's table of sockets does.
    Each connection is looked up while its handshake waits for us (ZAP), so it cannot have been
    replaced by another one under the same descriptor. What is found travels with its messages as
    their User-Id.

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
            with _socket_at(fd) as connection:
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


def _socket_at(fd: int) -> socket.socket:
    """Return what a descriptor refers to, under one of its own: it stays what it is.

    Raises:
        OSError: It is closed, or serves something else than a socket.
    """
    ours = os.dup(fd)
    try:
        return socket.socket(fileno=ours)
    except OSError:
        os.close(ours)  # a pipe's reader would wait for its end for ever
        raise


def _leads_to(connection: socket.socket, endpoint: str) -> bool:
    name = connection.getsockname()
    if isinstance(name, tuple):
        return endpoint.endswith(f":{name[1]}")
    return bool(name) and endpoint.endswith(str(name))


def _inode_of(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def make_keys(directory: Path) -> None:
    """Make both key pairs, which authenticate a server and its clients to each other over TCP.

    One directory, made by ``flexcache server --keygen DIR``, holds everything; copy it to clients
    without ``server.key_secret``:

        DIR/server.key  server.key_secret      the server's pair
        DIR/client.key  client.key_secret      the pair that clients use; any other is rejected

    Raises:
        ConfigError: The directory already holds keys, or cannot be written.
    """
    try:
        make_directory(directory)
        if any(directory.glob("*.key*")):
            raise ConfigError(f"{directory} already holds keys; choose another directory")
        for name in ("server", "client"):
            _, secret = auth.create_certificates(directory, name)
            Path(secret).chmod(0o600)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None


def secure_server(socket: zmq.Socket[bytes], directory: str) -> ThreadAuthenticator:
    """Accept only clients that have the client key. The caller must stop the authenticator."""
    socket.curve_publickey, socket.curve_secretkey = _load(directory, "server.key_secret")
    socket.curve_server = True
    allowed, _ = _load(directory, "client.key", needs_secret=False)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_Only(allowed))
    return authenticator


def check_client_keys(directory: object) -> None:
    """Raise `ConfigError` unless a client finds its keys in the directory."""
    if not isinstance(directory, (str, Path)):
        raise ConfigError(f"curve_keys = {directory!r}: must be a directory of CURVE keys")
    _load(str(directory), "server.key", needs_secret=False)
    _load(str(directory), "client.key_secret")


def secure_client(socket: zmq.Socket[bytes], directory: str) -> None:
    """Authenticate this process, and accept only the server as its peer."""
    socket.curve_serverkey, _ = _load(directory, "server.key", needs_secret=False)
    socket.curve_publickey, socket.curve_secretkey = _load(directory, "client.key_secret")


class _Only:
    """Accepts one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def _load(directory: str, name: str, needs_secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public, secret = auth.load_certificate(Path(directory) / name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"curve_keys = {directory!r}: {name}: {error}; "
            "`flexcache server --keygen DIR` makes keys"
        ) from None
    if needs_secret and secret is None:
        raise ConfigError(f"curve_keys = {directory!r}: {name} holds no secret key")
    return public, secret or b""
