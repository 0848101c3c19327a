"""Directory of the SSD tier: its two files, their lock, and their headers.

    flexcache-ssd.slots    header page, then the slots' bytes
    flexcache-ssd.index    header page, then the slots' records (`slot_index`)

Both headers have the same content, including the pool's id, which shows that the pair belongs
together. The index's header also says which KV the slots hold (`KVIdentity`), once that is known,
and how often all records were made void.
The index is made after the data file's header is on the device: a directory without an index holds
nothing, and an incomplete one is made again. Files are emptied, never removed, since the lock is on
the data file itself. A rank may have the data files open, too, to move slots past the host pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import xxhash

from flexcache.errors import ConfigError, NoDirectPathError
from flexcache.logs import log_event
from flexcache.processes import tell_of_forks
from flexcache.storage.machine import make_directory
from flexcache.storage.pieces import PAGE_BYTES, align_up
from flexcache.storage.shards import DIGEST_BYTES, KVIdentity
from flexcache.storage.slot_index import HEADER_BYTES, RECORD_BYTES, locate_slot

logger = logging.getLogger(__name__)

DATA_FILE = "flexcache-ssd.slots"
INDEX_FILE = "flexcache-ssd.index"
FORMAT_VERSION = 3
"""docs/internals/formats.md describes how readers handle other versions."""
OLDEST_READABLE = 2
"""All slots of this format are plain; a pool that is opened gets the current one."""
OLD_DATA_FILE = "flexcache-ssd.data"
"""FlexCache 0.1's file: slots without a header or an index, useless once their owner is gone."""

_DATA_MAGIC, _INDEX_MAGIC = b"FlexSSDd", b"FlexSSDi"
_HEADER = struct.Struct(f"<8sII16sQII{DIGEST_BYTES}s{DIGEST_BYTES}s")
_CHECK = struct.Struct("<Q")
_UNKNOWN = bytes(DIGEST_BYTES)
_TEXT_OFFSET = 512  # everything that is checked is in the first sector; the text is for display
_LOCK_PATIENCE_S = 5.0  # the worker of a killed server may still be waiting for its device
_FILL_BYTES = 4 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """Which pool a directory's files belong to, and their place in it."""

    pool_id: bytes
    slot_bytes: int
    num_directories: int
    position: int
    identity: KVIdentity | None = None
    """Identity of the KV in the slots; None until the first rank has registered."""
    era: int = 0
    """How often all records were made void at once; only in the index's header."""
    format: int = field(default=FORMAT_VERSION, compare=False)
    """Format of the file that it was read from."""

    def page(self, magic: bytes) -> bytes:
        identity = self.identity or KVIdentity(_UNKNOWN, _UNKNOWN)
        fields = _HEADER.pack(
            magic, FORMAT_VERSION, self.era, self.pool_id, self.slot_bytes, self.num_directories,
            self.position, identity.model, identity.layout,
        )  # fmt: skip
        sector = (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(_TEXT_OFFSET, b"\0")
        text = identity.text.encode()[: HEADER_BYTES - _TEXT_OFFSET]
        return (sector + text).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def parse(cls, page: bytes) -> PoolHeader | None:
        """Parse the header on a page of a readable format; None if its check fails."""
        fields = page[: _HEADER.size].ljust(_HEADER.size, b"\0")
        if page[_HEADER.size :][: _CHECK.size] != _CHECK.pack(xxhash.xxh3_64_intdigest(fields)):
            return None
        _, version, era, pool_id, slot_bytes, directories, position, model, layout = _HEADER.unpack(
            fields
        )
        identity = None
        if layout != _UNKNOWN:
            text = page[_TEXT_OFFSET:].rstrip(b"\0").decode(errors="replace")
            identity = KVIdentity(model, layout, text)
        return cls(pool_id, slot_bytes, directories, position, identity, era, version)

    @property
    def data_header(self) -> PoolHeader:
        """The header of the data file that belongs to this index."""
        return replace(self, identity=None, era=0)

    @property
    def record_id(self) -> bytes:
        """What the checks of sound records depend on."""
        return record_id(self.pool_id, self.era)


def record_id(pool_id: bytes, era: int) -> bytes:
    """Return what the checks of a pool's records of one era depend on."""
    return xxhash.xxh3_128_digest(pool_id + era.to_bytes(4, "little")) if era else pool_id


class PoolMismatchError(ConfigError):
    """A directory's content cannot be used as it is; if ``is_ours``, it may be cleared."""

    def __init__(self, directory: Path, what: str, *, is_ours: bool = True) -> None:
        self.is_ours = is_ours
        remedy = (
            "use another directory, set ssd_on_mismatch = clear, or empty this one with "
            f"`flexcache doctor {directory} --clear`"
            if is_ours
            else "use another directory, or move the file away"
        )
        super().__init__(f"ssd_cache_dirs = {str(directory)!r}: {what}; {remedy}")


def missing_data_file(directory: Path) -> PoolMismatchError:
    return PoolMismatchError(directory, f"{INDEX_FILE} is there without its {DATA_FILE}")


class DirectoryInUseError(ConfigError):
    """Another process owns the directory."""


class PoolDirectory:
    """The open and locked files of one directory.

    Raises:
        DirectoryInUseError: Another process has locked the directory.
        OSError: The directory cannot be used at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_fd = -1
        make_directory(path)
        self.data_fd = _open_locked(path / DATA_FILE)
        try:
            self.index_fd = _open(path / INDEX_FILE)
        except BaseException:
            self.close()
            raise
        tell_of_forks(self)

    def header(self) -> PoolHeader | None:
        """Return the files' header; None for a directory that is still empty.

        Raises:
            PoolMismatchError: The files are not ours, of a newer version, damaged, or not a pair.
        """
        pages = [
            self._read_page(self.index_fd, INDEX_FILE, _INDEX_MAGIC),
            self._read_page(self.data_fd, DATA_FILE, _DATA_MAGIC),
        ]
        index = self._parse(pages[0], INDEX_FILE)
        data = self._parse(pages[1], DATA_FILE)
        if index is None:
            if data is not None:
                log_event(
                    logger, logging.WARNING, "ssd_index_missing", directory=self.path,
                    effect="the content of its slots is unknown",
                )  # fmt: skip
            return None
        if data is None and pages[1]:  # of an older format
            return None
        if data is None:
            raise missing_data_file(self.path)
        if data != index.data_header:
            raise PoolMismatchError(self.path, f"{INDEX_FILE} is not the index of {DATA_FILE}")
        return index

    def _read_page(self, fd: int, name: str, magic: bytes) -> bytes:
        """Return the file's header page; empty if nothing was ever written."""
        page = _first_page(fd)
        if os.fstat(fd).st_size <= HEADER_BYTES and not any(page):
            return b""
        if not page.startswith(magic):
            raise PoolMismatchError(
                self.path, f"{name} was not written by FlexCache", is_ours=False
            )
        return page

    def _parse(self, page: bytes, name: str) -> PoolHeader | None:
        if not page:
            return None
        version = int.from_bytes(page[8:12], "little")
        # Older files count as empty: a refusal would stop every host during an upgrade. Newer ones
        # may be read again after the rollback ends.
        if version < OLDEST_READABLE:
            log_event(
                logger, logging.WARNING, "ssd_old_format", directory=self.path, file=name,
                format=version,
                effect="treated as empty: it does not record the layout of its bytes",
            )  # fmt: skip
            return None
        if version > FORMAT_VERSION:
            raise PoolMismatchError(
                self.path,
                f"{name} has format {version}, from a newer FlexCache; this one knows up to "
                f"{FORMAT_VERSION}",
            )
        header = PoolHeader.parse(page)
        if header is None:
            raise PoolMismatchError(self.path, f"the header of {name} is damaged")
        return header

    def update(self, header: PoolHeader) -> None:
        """Give the files this header, durably, where theirs differs. Their contents stay."""
        for fd, magic, page_header in (
            (self.index_fd, _INDEX_MAGIC, header),
            (self.data_fd, _DATA_MAGIC, header.data_header),
        ):
            page = page_header.page(magic)
            if _first_page(fd) != page:
                os.pwrite(fd, page, 0)
                os.fsync(fd)

    def adopt(self, header: PoolHeader) -> None:
        """Replace the index's header with one that has another identity.

        Not synced: each commit of blocks syncs the same file before they count as stored.
        """
        os.pwrite(self.index_fd, header.page(_INDEX_MAGIC), 0)

    def create(self, header: PoolHeader) -> None:
        """Make the files of an empty part of a pool, durably. Discards previous content."""
        self.clear()
        for fd, magic, page_header in (
            (self.data_fd, _DATA_MAGIC, header.data_header), (self.index_fd, _INDEX_MAGIC, header),
        ):  # fmt: skip
            os.pwrite(fd, page_header.page(magic), 0)
            os.fsync(fd)
        _sync_directory(self.path)

    def clear(self) -> None:
        """Empty the files, whatever they hold: the index first, because it vouches for the data."""
        for fd in (self.index_fd, self.data_fd):
            os.ftruncate(fd, 0)
            os.fsync(fd)

    def remove_old_version(self) -> None:
        """Remove the file that FlexCache 0.1 left here.

        Raises:
            DirectoryInUseError: The file is still in use.
        """
        path = self.path / OLD_DATA_FILE
        if path.exists():
            fd = _open_locked(path)
            path.unlink()
            os.close(fd)
            log_event(
                logger, logging.INFO, "ssd_old_file_removed", path=path, written_by="FlexCache 0.1"
            )

    def fit(self, num_rows: int, slot_bytes: int) -> None:
        """Resize the index to the capacity, and cut off slots beyond it.

        The data file grows when its space is reserved.
        """
        os.ftruncate(self.index_fd, index_file_bytes(num_rows))
        size = data_file_bytes(num_rows, slot_bytes)
        if os.fstat(self.data_fd).st_size > size:
            os.ftruncate(self.data_fd, size)

    def set_direct(self) -> bool:
        """Let the slots' I/O bypass the page cache; return whether the file system supports it."""
        return _set_direct(self.data_fd)

    def close(self) -> None:
        """Release the directory; the files stay. Nothing must write to them. Idempotent."""
        if self.data_fd >= 0:  # a child may have got the descriptor past `forked`
            fcntl.flock(self.data_fd, fcntl.LOCK_UN)
        self.forked()

    def forked(self) -> None:
        for fd in (self.index_fd, self.data_fd):
            if fd >= 0:
                os.close(fd)
        self.index_fd = self.data_fd = -1


def index_file_bytes(num_rows: int) -> int:
    return HEADER_BYTES + num_rows * RECORD_BYTES


def data_file_bytes(num_rows: int, slot_bytes: int) -> int:
    return HEADER_BYTES + num_rows * slot_bytes


def files_in(path: Path) -> list[str]:
    """Return which of a pool's two files exist."""
    return [name for name in (DATA_FILE, INDEX_FILE) if os.path.lexists(path / name)]


def reserve_space(fd: int, size: int) -> str | None:
    """Make the file ``size`` bytes long with all its space reserved; return why that failed.

    If the file system cannot reserve space, the part beyond the file's end is filled with zeros.
    """
    try:
        _reserve(fd, size)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _reserve(fd: int, size: int) -> None:
    try:
        _fallocate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        log_event(logger, logging.INFO, "ssd_fallocate_unsupported", effect="zeros are written")
        _fill_with_zeros(fd, size)


def _fallocate(fd: int, size: int) -> None:
    """Allocate without `os.posix_fallocate`: without kernel support libc writes byte by byte."""
    offset, length = ctypes.c_int64(0), ctypes.c_int64(size)
    while _LIBC.fallocate64(fd, 0, offset, length):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _fill_with_zeros(fd: int, size: int) -> None:
    # Memory and offsets are aligned, since the file may be open for direct I/O.
    end = os.fstat(fd).st_size
    if end % PAGE_BYTES and end < size:
        end = min(size, align_up(end))
        os.ftruncate(fd, end)
    zeros = memoryview(mmap.mmap(-1, _FILL_BYTES))
    while end < size:
        wanted = min(_FILL_BYTES, size - end)
        written = os.pwrite(fd, zeros[:wanted], end)
        if written < wanted:  # the next write reports why
            written -= written % PAGE_BYTES
            os.ftruncate(fd, end + written)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end += written


def _open(path: Path) -> int:
    """Open or make a file. Refuses symbolic links: their targets are not FlexCache's to write."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise OSError(
            errno.ELOOP,
            f"{path.name} is a symbolic link, which is not followed; move it away, or use another "
            "directory",
        ) from None


def _open_locked(path: Path) -> int:
    fd = _open(path)
    try:
        if not _lock_soon(fd):
            raise DirectoryInUseError(
                f"ssd_cache_dirs = {str(path.parent)!r}: in use by another FlexCache process, "
                "or by one that is still shutting down; give each its own directory, or have "
                "engines share a cache by setting endpoint"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock_soon(fd: int) -> bool:
    """Lock the file, with patience: the disk worker of a killed server may hold it a bit longer,
    as may ranks that write to it."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_free_of_ranks(fd):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def _first_page(fd: int) -> bytes:
    """Read the first page into aligned memory, since the file may be open for direct I/O."""
    with mmap.mmap(-1, HEADER_BYTES) as page:
        return page[: os.preadv(fd, [page], 0)]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def supports_direct_io(directory: Path) -> bool:
    """Whether files in the directory can be opened for direct I/O."""
    path = directory / ".flexcache-probe"
    fd = _open(path)
    try:
        return _set_direct(fd)
    finally:
        os.close(fd)
        path.unlink()


# -- ranks that have the files open --------------------------------------------------------------

# The lock by which ranks that write to a data file outlast the server that let them. A server's own
# lock on a directory ends with it and its workers, but a rank may still be writing then. So such
# ranks share a lock of another kind, which the next owner of the directory waits for.

_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems that know no such locks; so no rank can hold one there."""


def hold_as_rank(fd: int) -> None:
    """Hold the lock until `let_go_as_rank`; it belongs to the descriptor's file description.

    Raises:
        OSError: The file system has no such locks.
        BlockingIOError: A server is looking whether it is free.
    """
    _set_rank_lock(fd, fcntl.F_RDLCK)


def let_go_as_rank(fd: int) -> None:
    """Release the lock, if it is held, even if a forked child has the descriptor as well."""
    with contextlib.suppress(OSError):
        _set_rank_lock(fd, fcntl.F_UNLCK)


def is_free_of_ranks(fd: int) -> bool:
    """Return whether no rank holds the lock."""
    try:
        _set_rank_lock(fd, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return True
    _set_rank_lock(fd, fcntl.F_UNLCK)
    return True


def _set_rank_lock(fd: int, kind: int) -> None:
    """Set or release the lock on the file's first byte."""
    request = _LOCK.pack(kind, os.SEEK_SET, 0, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except PermissionError as error:  # what some file systems say instead
        raise BlockingIOError(error.errno, error.strerror) from None


class DirectFilesRef(msgspec.Struct, frozen=True):
    """Reference by which a rank on this host finds the files.

    ``direct_io``: whether I/O on them bypasses the page cache. ``is_choice``: loads may as well go
    through DRAM, and take the faster way.
    """

    paths: list[str]
    inodes: list[int]
    slot_bytes: int
    direct_io: bool
    is_writable: bool
    is_choice: bool

    @classmethod
    def of(
        cls, fds: Sequence[int], slot_bytes: int, *, is_writable: bool, is_choice: bool
    ) -> DirectFilesRef:
        """Refer to files that this process has open."""
        return cls(
            paths=[f"/proc/{os.getpid()}/fd/{fd}" for fd in fds],
            inodes=[os.fstat(fd).st_ino for fd in fds],
            slot_bytes=slot_bytes,
            direct_io=all(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT for fd in fds),
            is_writable=is_writable,
            is_choice=is_choice,
        )


class DirectFiles:
    """The pool's data files, open in a rank; one that may write keeps other servers off until
    `close`.

    A rank opens them through the server's /proc entries, as it does the host pool: only the
    server's processes need be visible to it, no path. Its descriptors are its own: it may be given
    less than the server has, and what it sets on them leaves the server's as they are.

    Raises:
        NoDirectPathError: They cannot be opened or locked.
    """

    def __init__(self, ref: DirectFilesRef) -> None:
        self.slot_bytes = ref.slot_bytes
        self.fds: list[int] = []
        flags = os.O_CLOEXEC | (os.O_RDWR if ref.is_writable else os.O_RDONLY)
        flags |= os.O_DIRECT if ref.direct_io else 0
        try:
            for path, inode in zip(ref.paths, ref.inodes, strict=True):
                self.fds.append(os.open(path, flags))
                if os.fstat(self.fds[-1]).st_ino != inode:
                    raise NoDirectPathError(f"SSD file at {path} is no longer the server's")
                if ref.is_writable:
                    hold_as_rank(self.fds[-1])
        except OSError as error:
            self.close()
            raise NoDirectPathError(f"SSD files: {error.strerror}") from None
        except BaseException:
            self.close()
            raise
        tell_of_forks(self)

    def locate(self, slot: int) -> tuple[int, int]:
        """Return the file and the offset of a slot."""
        return locate_slot(slot, self.fds, self.slot_bytes)

    def close(self) -> None:
        """Release the files. Idempotent."""
        for fd in self.fds:
            let_go_as_rank(fd)
        self.forked()

    def forked(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
