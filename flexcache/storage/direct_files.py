"""The SSD tier's data files, as a rank opens them to move slots past the host pool.

A rank opens them through the server's /proc entries, as it does the host pool: only the server's
processes need be visible to it, no path. Its descriptors are its own: it may be given less than the
server has, and what it sets on them leaves the server's as they are.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

import msgspec

from flexcache.errors import NoDirectPathError
from flexcache.processes import tell_of_forks
from flexcache.storage.disk_pool import locate_slot
from flexcache.storage.rank_lock import hold_as_rank, let_go_as_rank


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
