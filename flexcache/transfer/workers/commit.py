"""Makes groups of written slots durable, off the disk worker's thread.

For each directory: the slots' bytes are on the device before their records are written, and the
records are on the device before the group is done. Directories are independent of each other, so
each is committed on its own thread.

    group   fdatasync data -> write records -> fdatasync index      survives a power cut
    none                      write records                         survives a kill, as the kernel
                                                                    has the bytes, not a power cut
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from flexcache.storage.slot_index import FileCalls, Records, SlotIds, SlotIndex


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Result of a group's commit: all of it is durable, or there is an error and no guarantee.

    After a failed sync all other writes before it are in doubt too: the kernel reports an error
    once, and the next sync succeeds without the lost data.
    """

    error: str | None


class GroupCommit:
    """Commits one group at a time. `fileno` becomes readable when a directory is finished.

    Args:
        data_fds: Data files of the pool's directories; slot `s` is in directory `s % n`.
        index_fds: Index files, likewise.
        sync: As `CacheConfig.ssd_sync`.
        executor: Runs the directories' commits, instead of one thread each.
    """

    def __init__(
        self,
        data_fds: Sequence[int],
        index_fds: Sequence[int],
        index: SlotIndex,
        sync: str,
        files: FileCalls = os,
        executor: Executor | None = None,
    ) -> None:
        self._fds = list(zip(data_fds, index_fds, strict=True))
        self._index = index
        self._syncs = sync == "group"
        self._files = files
        self._executor = executor or ThreadPoolExecutor(
            len(self._fds), thread_name_prefix="flexcache-commit"
        )
        self._parts: list[Future[None]] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, slots: SlotIds, records: Records) -> None:
        """Commit slots whose bytes have been written. The previous group must have been reaped."""
        directories = slots % len(self._fds)
        for directory, (data_fd, index_fd) in enumerate(self._fds):
            here = directories == directory
            if here.any():
                part = (data_fd, index_fd, slots[here], records[here])
                self._parts.append(self._executor.submit(self._commit, *part))
        for running in self._parts:
            running.add_done_callback(lambda _: os.eventfd_write(self._event, 1))

    def _commit(self, data_fd: int, index_fd: int, slots: SlotIds, records: Records) -> None:
        if self._syncs:
            with _naming("sync of the data file"):
                self._files.fdatasync(data_fd)
        with _naming("write of the records"):
            self._index.write(slots, records)
        if self._syncs:
            with _naming("sync of the index file"):
                self._files.fdatasync(index_fd)

    def reap(self) -> CommitResult | None:
        """Return the group's result, once; None while it is running or if there is no group."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if not self._parts or not all(part.done() for part in self._parts):
            return None
        parts, self._parts = self._parts, []
        try:
            for part in parts:
                part.result()
        except Exception as error:
            return CommitResult(getattr(error, "strerror", None) or f"{error!r}")
        return CommitResult(None)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `reap` may have something to return."""
        return self._event

    def close(self) -> None:
        """Wait for the running group. Idempotent."""
        if self._event >= 0:
            self._executor.shutdown(wait=True)
            os.close(self._event)
            self._event = -1


@contextlib.contextmanager
def _naming(step: str) -> Iterator[None]:
    """Name the failed step in an error."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{step}: {error.strerror or error}") from error
