"""Whether what serves an endpoint is this user's own.

Every client asks before it connects, and a server before it takes a place over.

A server is sent prompts, is lent GPU memory and says where bytes go, so a client connects only to
servers of its own user:

    ipc://   the socket file is ours, in a directory where no other user can put another one there
    tcp://   with CURVE keys, these prove it; without, every listener at that port is a socket of
             ours, by the kernel's table of them

The check and zmq's connection are two steps, and zmq connects again by itself. That race is closed
by asking twice: the same `Listener` before the connection and after the Welcome was there all the
time in between, since only its own user could have put it back. What is left open is a server that
ends while its process lives on, unnoticed by a client that has not read `Stop` when the server's
socket closes, 0.2 s later at most: another user may then take a loopback port, or a name in a
sticky directory, and be sent block keys and tokens. (The death of a process is seen by the client
before zmq tries again.) Memory that it names is still refused by `check_server_process`.

A client that has had a server passes over what it cannot trust, as if no server were there
(`client.link`); only at the first contact is it refused for good.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from flexcache.errors import UntrustedError

Listener = frozenset[tuple[int, ...]]
"""What tells the sockets that serve an endpoint from any that come later."""

_PROVEN_BY_KEYS: Listener = frozenset()
_LISTENING = "0A"


def find_listener(endpoint: str, has_keys: bool) -> Listener | None:
    """What serves the endpoint; None if nothing does yet.

    Raises:
        UntrustedError: Another user does, or could.
    """
    if endpoint.startswith("ipc://"):
        return _find_socket_file(Path(endpoint.removeprefix("ipc://")))
    return _PROVEN_BY_KEYS if has_keys else _find_port(endpoint)


def check_server_process(pid: int, paths: list[str]) -> None:
    """Refuse a server that is not this user's, or that shows other processes' memory as its own.

    Raises:
        UntrustedError: The process is another user's, or a path is not of its memory.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:  # it died, or is in another pid namespace: its memory cannot be opened either
        return
    if owner != os.geteuid():
        raise UntrustedError(f"server process {pid} belongs to {_user(owner)}: {_REMEDY}")
    for path in paths:
        if re.fullmatch(rf"/proc/{pid}/fd/\d+", path) is None:
            raise UntrustedError(f"{path!r} is not memory of server process {pid}")


def check_file(path: Path, found: os.stat_result, what: str) -> None:
    """Raise `UntrustedError` for a file of an endpoint that another user put there."""
    if found.st_uid != os.geteuid():
        raise UntrustedError(f"{what} {path} belongs to {_user(found.st_uid)}: {_REMEDY}")


def check_place(path: Path) -> os.stat_result | None:
    """What is at the path of a socket; None if nothing is.

    Raises:
        UntrustedError: It is another user's, or another user could replace it.
    """
    try:
        _check_directory(Path(os.path.realpath(path.parent)))
        found = path.lstat()
    except FileNotFoundError:
        return None
    check_file(path, found, "socket")
    return found


def _check_directory(directory: Path) -> None:
    """Raise `UntrustedError` where another user could put a file in place of ours.

    The owners of the directories above are trusted: who names a path in them relies on them.
    """
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise UntrustedError(f"directory {directory} belongs to {_user(owner)}: {_REMEDY}")
    for path in (directory, *directory.parents):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise UntrustedError(
                f"directory {path} (mode {mode:04o}) can be written by other users, who could "
                f"replace what is in it: `chmod go-w {path}`, or name another endpoint"
            )


_REMEDY = "start the server as this user, or name another endpoint"


def _find_socket_file(path: Path) -> Listener | None:
    found = check_place(path)
    if found is None:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        raise UntrustedError(f"{path} is no socket: remove it, or name another endpoint")
    return frozenset({(found.st_dev, found.st_ino, found.st_mtime_ns)})


def _find_port(endpoint: str) -> Listener | None:
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    places = {address, ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")}
    found = [
        (inode, uid) for place, at, uid, inode in _listeners() if place in places and at == port
    ]
    for _, uid in found:
        if uid != os.geteuid():
            raise UntrustedError(f"{endpoint} is served by {_user(uid)}: {_REMEDY}")
    return frozenset((inode,) for inode, _ in found) or None


def _listeners() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, int, int]]:
    """Address, port, uid and inode of every TCP socket that listens on this host."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:  # without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] != _LISTENING:
                continue
            digits, _, port = fields[1].partition(":")
            address = _read_address(digits)
            yield address, int(port, 16), int(fields[7]), int(fields[9])


def _read_address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints each word of an address in the machine's byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
