"""The SSD tier's files: fixed slots, striped slot by slot over the directories.

Slot `s` lives in directory `s % n` at offset `s // n * slot_bytes`. A slot is all ranks' runs of a
block, one after the other as they stand in the host pool, so that a block is one I/O. One process
owns a directory, by a lock on the data file; the file lasts as long as its owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flexcache.errors import ConfigError

logger = logging.getLogger(__name__)

DATA_FILE = "flexcache-ssd.data"
_LOCK_PATIENCE_S = 1.0


class DiskPool:
    """Open data files of the SSD tier.

    Raises:
        ConfigError: A directory cannot be used, or another process uses it.
    """

    def __init__(
        self, directories: Sequence[str], slot_bytes: int, num_slots: int, direct_io: bool
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.fds: list[int] = []
        self.paths: list[Path] = []
        slots_each = -(-num_slots // len(directories))
        try:
            for directory in directories:
                self._open(Path(directory), slots_each * slot_bytes, direct_io)
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path, size: int, direct_io: bool) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / DATA_FILE
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _lock_soon(lock):
                os.close(lock)
                raise ConfigError(
                    f"ssd_cache_dirs = {str(directory)!r}: in use by another FlexCache process; "
                    "give each its own directory"
                ) from None
        except OSError as error:
            raise ConfigError(
                f"ssd_cache_dirs = {str(directory)!r}: {error.strerror or error}"
            ) from None
        self.fds.append(lock)
        self.paths.append(path)
        os.ftruncate(lock, 0)
        os.ftruncate(lock, size)
        if direct_io and not _set_direct(lock):
            logger.warning("O_DIRECT is refused in %s: I/O goes through the page cache", directory)

    def close(self) -> None:
        """Remove the files and release the directories. Idempotent."""
        for fd, path in zip(self.fds, self.paths, strict=True):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)
        self.fds, self.paths = [], []


def _lock_soon(fd: int) -> bool:
    """Lock the file. The disk worker of a server that was killed may hold it a moment longer."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def locate_slot(slot: int, fds: Sequence[int], slot_bytes: int) -> tuple[int, int]:
    """File descriptor and offset of a slot that is striped over ``fds``."""
    return fds[slot % len(fds)], slot // len(fds) * slot_bytes


def preallocate(fd: int, size: int) -> str | None:
    """Reserve the file's space; returns why not. Writes then fail one by one where it lacks."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EOPNOTSUPP, errno.EINVAL, errno.EFBIG):
            raise
        return error.strerror
    return None


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def supports_direct_io(directory: Path) -> bool:
    """Whether files in the directory can be opened for direct I/O."""
    path = directory / ".flexcache-probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return _set_direct(fd)
    finally:
        os.close(fd)
        path.unlink()
