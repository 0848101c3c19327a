"""The lock by which ranks that write to an SSD data file outlast the server that let them.

A server's own lock on a directory ends with it and its workers, but a rank may still be writing
then. So such ranks share a lock of another kind, which the next owner of the directory waits for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

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
