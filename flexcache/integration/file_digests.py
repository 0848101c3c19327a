"""Digests of files and of settings, by value.

Equal settings have equal digests in every process, on every host and in every release: no
addresses, cache paths, library versions or plain defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import xxhash

from flexcache.errors import ConfigError, FlexCacheError

_DIGEST_BYTES = 8
NOT_NUMBERS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config that change nothing, or are in the id separately."""


def digest(value: object) -> str:
    """Digest a setting by value: equal settings agree in every process and release."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: object) -> Any:
    """Convert to JSON's types. None in a mapping is left out: new settings start as None."""
    match value:
        case None | bool() | str():
            return value
        case Enum():
            return _plain(value.value)
        case int() | float():
            return int(value) if isinstance(value, int) or value.is_integer() else value
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items() if v is not None}
        case set() | frozenset():
            return sorted((_plain(v) for v in value), key=json.dumps)
        case list() | tuple():
            return [_plain(v) for v in value]
        case torch.dtype():
            return dtype_name(value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case Path():
            return str(value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    kind = type(value).__name__
    raise ConfigError(f"{value!r}: a {kind} in the model's settings cannot be identified by value")


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


ANY_TIME = 1 << 63
_PIECE_BYTES = 8 << 20
_FRESH_NS = 2_000_000_000
"""A file that changed this recently may change again within one tick of a coarse clock: it is read
each time, in this process also, for it is so for two seconds only."""
_MAX_KEPT = 8192
_LOCK_PATIENCE_S = 120.0
"""How long another process may hash before this one does so too."""
_FORMAT = "flexcache-file-digests/2"
_PROBE_BYTES = 64 << 10

_Key = tuple[str, int, int, int, int, int, int]
_SIZE: Final = 3
_CTIME: Final = 5


class NotKeptError(FlexCacheError):
    """The digest of a file is not kept: it would have to be read."""


class UnknownContentError(FlexCacheError):
    """What an engine has loaded cannot be told. The message says why, and of what."""


class _Kept(msgspec.Struct):
    format: str
    digests: list[tuple[_Key, str]]


class FileDigests:
    """Digests of files as they have been since this process, or ``since_ns``, began.

    A digest is kept by the file's device, inode, size, times of change and a few of its bytes: if
    those are the same, the rest is not read again. It covers the content alone, so hosts agree.

    Args:
        may_read: Whether a file may be read whose digest is not kept; else `NotKeptError` it is.
        since_ns: A file that changed later than this may differ from what was loaded; `ANY_TIME` if
            the caller sees to that.
        store: The file that keeps digests; None for the user's.
        waits: Whether to wait while another process hashes; its files may be the same. An engine's
            own thread must not: it then hashes for itself.

    Attributes:
        problem: Why it is unknown what was loaded; None if it is known.
    """

    def __init__(
        self, may_read: bool = True, since_ns: int | None = None, store: Path | None = None,
        waits: bool = True,
    ) -> None:  # fmt: skip
        self._may_read = may_read
        self._since_ns = _began_ns() if since_ns is None else since_ns
        self._store = _Store(store or _user_store(), _LOCK_PATIENCE_S if waits else 0.0)
        self.problem: str | None = None

    def note_unknown(self, reason: str) -> None:
        """Note that the files do not tell what was loaded."""
        self.problem = self.problem or reason

    def is_older(self, file: Path) -> bool:
        """Return whether a file has not changed since the engine began."""
        return os.stat(file).st_ctime_ns <= self._since_ns

    def of(self, file: Path, method: str = "xxh3", may_be_new: bool = False) -> str:
        """Return the digest of a file's content, as hexadecimal digits.

        Args:
            method: One of "xxh3", "sha256", "git-sha1", or "config" for a model's JSON without
                what does not change numbers.
            may_be_new: The caller knows what the digest must be, so the engine may have fetched
                the file itself.

        Raises:
            NotKeptError: It is not kept, and files may not be read.
            UnknownContentError: The file changed since the engine began, or cannot be read.
        """
        try:
            key = _key(method, file)
            if key[_CTIME] > self._since_ns and not may_be_new:
                raise UnknownContentError(f"{file} changed after the engine's process began")
            if (kept := self._store.get(key)) is not None:
                return kept
            if not self._may_read:
                raise NotKeptError(str(file))
            with self._store.locked():
                if (kept := self._store.get(key)) is not None:  # another process was first
                    return kept
                is_settled = self._store.is_settled(key)
                found = _read(file, method, key)
                if is_settled:
                    self._store.add(key, found)
            return found
        except (OSError, ValueError) as error:
            raise UnknownContentError(f"{file}: {error}") from None


def stats_of(files: list[Path]) -> list[_Key]:
    """Return what changes if a file's content does."""
    return [_key("", file) for file in files]


def _key(method: str, file: Path) -> _Key:
    with file.open("rb", buffering=0) as stream:
        return _key_of(method, stream.fileno())


def _key_of(method: str, file: int) -> _Key:
    found = os.fstat(file)
    # A file can be given an older mtime; its ctime cannot be set. But images (SquashFS, EROFS) have
    # one time for all, so those of two models can agree in all that is known of their files: hence
    # some bytes. Those at the start may be names and shapes only, which models have in common.
    probe = xxhash.xxh3_64()
    for offset in sorted({0, found.st_size // 2, max(0, found.st_size - _PROBE_BYTES)}):
        probe.update(os.pread(file, _PROBE_BYTES, offset))
    return (
        method, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
        probe.intdigest(),
    )  # fmt: skip


def _read(file: Path, method: str, key: _Key) -> str:
    with file.open("rb", buffering=0) as stream:
        if _key_of(method, stream.fileno()) != key:
            raise UnknownContentError(f"{file} changed while it was read")
        found = _METHODS[method](stream, key[_SIZE])
        if _key_of(method, stream.fileno()) != key:
            raise UnknownContentError(f"{file} changed while it was read")
    return found


def _hash_by(make: Callable[[], Any]) -> Callable[[Any, int], str]:
    """Both reading and hashing a piece release the GIL: the engine goes on meanwhile."""

    def hashed(stream: Any, size: int) -> str:
        hasher, piece = make(), memoryview(bytearray(min(_PIECE_BYTES, max(1, size))))
        while count := stream.readinto(piece):
            hasher.update(piece[:count])
        return str(hasher.hexdigest())

    return hashed


def _git_sha1(stream: Any, size: int) -> str:
    def make() -> Any:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    return _hash_by(make)(stream, size)


def _config(stream: Any, size: int) -> str:
    config = json.loads(stream.read())
    if isinstance(config, dict):
        config = {name: value for name, value in config.items() if name not in NOT_NUMBERS}
    return digest(config)


_METHODS: dict[str, Callable[[Any, int], str]] = {
    "xxh3": _hash_by(xxhash.xxh3_128),
    "sha256": _hash_by(hashlib.sha256),
    "git-sha1": _git_sha1,
    "config": _config,
}


def _began_ns() -> int:
    """Return when this process had begun, by the clock that stamps files."""
    with open("/proc/self/stat", "rb") as stream:
        ticks = int(stream.read().rpartition(b")")[2].split()[19]) + 1  # 10 ms, rounded down
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


def _user_store() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(base, "flexcache", "digests")


class _Store:
    """The digests that this process knows, and the file that keeps them. Without a usable file
    each process reads for itself, once."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._kept: dict[_Key, str] = {}
        self._is_loaded = False
        self._seen_ns: dict[_Key, int] = {}
        self._lock: int | None = None

    def get(self, key: _Key) -> str | None:
        if not self._is_loaded or (key not in self._kept and self._lock is not None):
            self._is_loaded = True
            self._kept = {**self._load(), **self._kept}
        return self._kept.get(key)

    def is_settled(self, key: _Key) -> bool:
        """Return whether a file that is read from now on will not change without another key."""
        if time.time_ns() - key[_CTIME] > _FRESH_NS:
            return True
        # The clock that stamps files may be another host's, and ahead of this one's.
        now_ns = time.monotonic_ns()
        return now_ns - self._seen_ns.setdefault(key, now_ns) > _FRESH_NS

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have other processes wait, which may be about to read the same files."""
        file = self._open(os.O_RDWR | os.O_CREAT)
        if file is not None and not _lock(file, self._patience_s):
            os.close(file)
            file = None
        self._lock = file
        try:
            yield
        finally:
            self._lock = None
            if file is not None:
                os.close(file)

    def add(self, key: _Key, found: str) -> None:
        """Keep a digest: in the file only while it is `locked`."""
        kept = self._load() if self._lock is not None else {}
        items = list({**kept, **self._kept, key: found}.items())[-_MAX_KEPT:]
        self._kept = dict(items)
        self._seen_ns.clear()
        if self._lock is None:
            return
        data = msgspec.json.encode(_Kept(_FORMAT, items))
        with contextlib.suppress(OSError):  # no space: read again next time
            os.ftruncate(self._lock, 0)  # what is cut short is no JSON, and ignored
            os.pwrite(self._lock, data, 0)

    def _load(self) -> dict[_Key, str]:
        file = self._open(os.O_RDONLY)
        if file is None:
            return {}
        with open(file, "rb") as stream, contextlib.suppress(OSError, msgspec.MsgspecError):
            kept = msgspec.json.decode(stream.read(), type=_Kept)
            if kept.format == _FORMAT:
                return dict(kept.digests)
        return {}

    def _open(self, flags: int) -> int | None:
        """Open the file unless another user could have written it."""
        try:
            if flags & os.O_CREAT:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError:  # no home, read-only, a symbolic link
            return None
        found = os.fstat(file)
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if is_ours and stat.S_ISREG(found.st_mode):
            return file
        os.close(file)
        return None


def _lock(file: int, patience_s: float) -> bool:
    """Wait for the lock, within bounds: its holder may be stopped."""
    give_up_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
