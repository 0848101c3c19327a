"""Checks that an endpoint is served by this user.

Every client checks before it connects, and a server before it takes over an address. The other way
round, the mode of a socket file keeps other users out, and over TCP without keys a server asks the
same table who is at the other end (`doorkeeper`).

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
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from flexcache.config.values import split_tcp
from flexcache.errors import UntrustedError

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
