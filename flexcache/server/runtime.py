"""Endpoints: where servers and clients of one user on one host meet."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import stat
import tempfile
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from flexcache.errors import ConfigError

_numbers = count()


def runtime_dir() -> Path:
    """The user's private directory for sockets, 0700; made if it is not there."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"flexcache-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory of this user's alone (mode 0700)")
    return path


def private_endpoint(name: str | None = None) -> str:
    """An ipc address in the private directory: for ``name`` always the same, else a new one."""
    text = f"{os.getpid()}-{next(_numbers)}" if name is None else name
    short = hashlib.sha256(text.encode()).hexdigest()[:16]  # socket paths end at 107 characters
    return f"ipc://{runtime_dir() / f'{short}.sock'}"


def check_endpoint(endpoint: str) -> None:
    """Raise `ConfigError` for an address that must not or cannot be served."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        path = endpoint.removeprefix("ipc://")
        if len(path) > 107:
            raise ConfigError(f"endpoint = {endpoint!r}: socket paths end at 107 characters")
        return
    if parts.scheme == "tcp":
        with contextlib.suppress(ValueError):
            host = parts.hostname or ""
            if host == "localhost" or ipaddress.ip_address(host).is_loopback:
                return
        raise ConfigError(f"endpoint = {endpoint!r}: TCP is served on loopback addresses only")
    raise ConfigError(f"endpoint = {endpoint!r}: must be ipc://PATH or tcp://127.0.0.1:PORT")


class EndpointLock:
    """Holds an ipc endpoint for one server; the kernel lets go when its process dies."""

    def __init__(self, endpoint: str) -> None:
        self._path: Path | None = None
        self._fd = -1
        if not endpoint.startswith("ipc://"):
            return  # binding a TCP port twice fails by itself
        self._path = Path(endpoint.removeprefix("ipc://") + ".lock")
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"endpoint = {endpoint!r}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._fd, 32).decode(errors="replace").strip()
            os.close(self._fd)
            raise ConfigError(f"endpoint = {endpoint!r}: in use by process {owner}") from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, str(os.getpid()).encode())

    def release(self) -> None:
        """Remove the socket and its lock. Idempotent."""
        if self._fd < 0 or self._path is None:
            return
        for path in (self._path.with_suffix(""), self._path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        os.close(self._fd)
        self._fd = -1
