"""Endpoints: the addresses where servers and clients of one user on one host connect."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import socket
import stat
import tempfile
import time
from functools import cache
from itertools import count
from pathlib import Path

from flexcache.config.values import is_loopback, server_of, split_tcp
from flexcache.errors import ConfigError, UntrustedError
from flexcache.logs import log_event
from flexcache.processes import tell_of_forks
from flexcache.protocol.trust import check_file, check_place

logger = logging.getLogger(__name__)

_numbers = count()
_PROBE_PATIENCE_S = 0.3
_MAX_SOCKET_PATH = 107
_BACKLOG = 100


def runtime_dir() -> Path:
    """Return the user's private directory for sockets (mode 0700); make it if it does not exist.

    It is in ``XDG_RUNTIME_DIR`` or, if that is unusable, in the directory for temporary files.

    Raises:
        ConfigError: It cannot be made, or other users have access to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and not os.path.isabs(base):  # server and engines may have other working directories
        _log_unusable(base, "it is no absolute path")
    elif base:
        try:
            return _private_dir(Path(base))
        except OSError as error:
            _log_unusable(base, str(error))
    try:
        return _private_dir(Path(tempfile.gettempdir()))
    except OSError as error:
        raise ConfigError(
            f"cannot make a directory for sockets ({error}): set XDG_RUNTIME_DIR to a writable "
            "directory of this user"
        ) from None


def _private_dir(base: Path) -> Path:
    """Return our directory in ``base``. Raises `OSError` if it can be neither found nor made."""
    path = base / f"flexcache-{os.getuid()}"
    if len(os.fsencode(path / f"{_short('')}.sock")) > _MAX_SOCKET_PATH:
        raise OSError(errno.ENAMETOOLONG, "too long for socket paths", str(path))
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory that only this user can access (mode 0700)")
    return path


@cache
def _log_unusable(base: str, reason: str) -> None:
    """Log the problem once, however often the directory is requested."""
    log_event(
        logger, logging.WARNING, "runtime_directory_unusable", XDG_RUNTIME_DIR=base, reason=reason,
        effect="sockets go to the directory for temporary files",
    )  # fmt: skip


def private_endpoint(name: str | None = None) -> str:
    """Return an ipc address in the private directory: fixed for a ``name``, else a new one."""
    # In vLLM scheduler and workers derive the same address from the engine id: it has no way to
    # hand a resolved config from the scheduler to workers that start before it.
    text = f"{os.getpid()}-{next(_numbers)}" if name is None else name
    return f"ipc://{runtime_dir() / f'{_short(text)}.sock'}"


def _short(text: str) -> str:
    """Return a short file name for any text: socket paths are limited to 107 characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_endpoint(endpoint: str, has_keys: bool = False) -> None:
    """Raise `ConfigError` for an address that must not or cannot be served."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):  # this also rejects abstract ones, open to every user
            raise ConfigError(f"endpoint = {endpoint!r}: must be ipc:// and an absolute path")
        if len(path) > _MAX_SOCKET_PATH:
            raise ConfigError(
                f"endpoint = {endpoint!r}: a socket path has at most {_MAX_SOCKET_PATH} characters"
            )
        return
    try:
        host, _ = split_tcp(endpoint)
    except ValueError:
        hint = "must be ipc://PATH or tcp://HOST:PORT"
        raise ConfigError(f"endpoint = {endpoint!r}: {hint}") from None
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"endpoint = {endpoint!r}: without curve_keys, TCP is for loopback addresses only"
        )


def _lock_path(address: str) -> Path:
    endpoint = server_of(address)
    if endpoint.startswith("ipc://"):
        return Path(endpoint.removeprefix("ipc://") + ".lock")
    return runtime_dir() / f"{_short(endpoint)}.tcp.lock"


def is_served(endpoint: str) -> bool:
    """Whether a running server on this host holds the endpoint.

    Raises:
        UntrustedError: Its lock belongs to another user.
    """
    try:
        fd = _open_lock(_lock_path(endpoint))
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def served_privately() -> list[str]:
    """Return the endpoints in the private directory that running servers hold."""
    # A lock may also be that of an address at which nothing listens.
    paths = [path.with_suffix("") for path in sorted(runtime_dir().glob("*.sock.lock"))]
    addresses = [f"ipc://{path}" for path in paths if path.exists()]
    return [address for address in addresses if is_served(address)]


def listen_privately(endpoint: str) -> int:
    """Make a socket that listens at an ``ipc://`` endpoint for this user only; the lock is held.

    The mode is set before the socket has a name: no other user can connect in between, and the
    process-wide umask stays as it is.
    """
    path = endpoint.removeprefix("ipc://")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by a server that died
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(_BACKLOG)
        return listener.detach()


class EndpointLock:
    """Holds an endpoint for one server; the kernel releases it when the process dies.

    Taking it also removes files that dead servers left in the private directory.
    """

    def __init__(self, endpoint: str) -> None:
        self._path = _lock_path(endpoint)
        self._fd = -1
        try:
            if endpoint.startswith("ipc://"):
                check_place(Path(endpoint.removeprefix("ipc://")))
            fd = _lock_file(self._path, _PROBE_PATIENCE_S)
        except OSError as error:
            raise ConfigError(f"endpoint = {endpoint!r}: {self._path}: {error.strerror}") from None
        if fd is None:
            owner = "another"
            with contextlib.suppress(OSError):
                owner = self._path.read_text().split("\n")[0]
            raise ConfigError(f"endpoint = {endpoint!r}: in use by process {owner}")
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            self._worker_socket = runtime_dir() / f"{_short(endpoint)}.work"
            os.write(fd, f"{os.getpid()}\n{self._worker_socket}\n".encode())
        except OSError as error:  # the file system is full, say
            self.forked()
            raise ConfigError(
                f"endpoint = {endpoint!r}: {self._path}: {error.strerror}; make room there, or set "
                "XDG_RUNTIME_DIR to another directory of this user"
            ) from None
        _remove_stale(self._path)
        tell_of_forks(self)

    @property
    def worker_endpoint(self) -> str:
        """Endpoint for the server's own workers, separate from its clients."""
        return f"ipc://{self._worker_socket}"

    def release(self) -> None:
        """Remove the sockets and the lock. Idempotent."""
        if self._fd < 0:
            return
        _remove(self._path, self._worker_socket)
        self.forked()

    def forked(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _remove(lock: Path, worker_socket: Path | None) -> None:
    """Remove the sockets that belong to a held lock, then the lock itself."""
    for path in (lock.with_suffix(""), worker_socket, lock):
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _open_lock(path: Path, flags: int = 0) -> int:
    """Open a lock of this user. Refuse another user's (in a shared directory, say) and name it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        check_file(path, path.lstat(), "lock")
        raise
    try:
        check_file(path, os.fstat(fd), "lock")
    except UntrustedError:
        os.close(fd)
        raise
    return fd


def _lock_file(path: Path, patience_s: float = 0.0) -> int | None:
    """Lock a file that other processes may remove in the meantime.

    Returns None if another process still holds the lock after ``patience_s``, which is longer than
    `is_served` holds it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        fd = _open_lock(path, os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)  # it was removed between our two calls


def _remove_stale(ours: Path) -> None:
    """Remove what servers left in the private directory when they did not shut down cleanly."""
    for path in runtime_dir().glob("*.lock"):
        if path == ours:
            continue
        with contextlib.suppress(OSError, UntrustedError):
            fd = _lock_file(path)
            if fd is None:
                continue
            lines = os.read(fd, 4096).decode(errors="replace").split("\n")
            worker_socket = Path(lines[1]) if len(lines) > 1 else None
            if worker_socket is not None and worker_socket.parent != path.parent:
                worker_socket = None
            _remove(path, worker_socket)
            os.close(fd)
