"""The SSD tier's data files, as a rank opens them to move slots past the host pool.

A rank opens them through the server's /proc entries, as it does the host pool: only the server's
processes need be visible to it, no path. Its descriptors are its own: it may be given less than the
server has, and what it sets on them leaves the server's as they are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Sequence

import msgspec

from flexcache.errors import NoDirectPathError
from flexcache.processes import tell_of_forks
from flexcache.storage.slot_index import locate_slot

# ------------------------------------------------------------------------------------------------
# The lock by which ranks that write to an SSD data file outlast the server that let them.
#
# A server's own lock on a directory ends with it and its workers, but a rank may still be writing
# then. So such ranks share a lock of another kind, which the next owner of the directory waits for.

_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems that know no such locks; so no rank can hold one there."""


def hold_as_rank(fd: int) -> None:
    """Hold the lock until `let_go_as_rank`; it belongs to the descriptor's file description.

    Raises:
        OSError: The file system has no such locks.
        BlockingIOError: A server is looking whether it is free.
    """
    _set(fd, fcntl.F_RDLCK)


def let_go_as_rank(fd: int) -> None:
    """Release the lock, if it is held, even if a forked child has the descriptor as well."""
    with contextlib.suppress(OSError):
        _set(fd, fcntl.F_UNLCK)


def is_free_of_ranks(fd: int) -> bool:
    """Return whether no rank holds the lock."""
    try:
        _set(fd, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return True
    _set(fd, fcntl.F_UNLCK)
    return True


def _set(fd: int, kind: int) -> None:
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
    """The open files; a rank that may write keeps other servers off until `close`.

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
