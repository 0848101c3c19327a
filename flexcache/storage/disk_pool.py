"""SSD slots, striped over their directories, including those that survived a restart.

Slot `s` and its record are in directory `s % n`. A slot holds all ranks' runs of a block in
sequence, laid out as in the host pool, so that a block is one I/O. One process owns a directory at
a time; the files stay when it ends.

The number of slots may change between restarts: the slots that still exist are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.storage.pool_directory import PoolDirectory, PoolHeader, PoolMismatchError
from flexcache.storage.shards import KVIdentity
from flexcache.storage.slot_index import HEADER_BYTES, Records, SlotIds, SlotIndex

logger = logging.getLogger(__name__)


class DiskPool:
    """The open directories of the SSD tier, in order.

    Args:
        directories: Made if they do not exist.
        slot_bytes: Size of a block over all ranks.
        direct_io: Bypass the page cache in directories that support it.
        on_mismatch: ``refuse`` content that cannot be used as it is, or ``clear`` it. Files that
            are not FlexCache's are never touched.

    Raises:
        ConfigError: A directory is unusable, in use by another process, or refused.
    """

    def __init__(
        self,
        directories: Sequence[str],
        slot_bytes: int,
        num_slots: int,
        direct_io: bool = True,
        on_mismatch: str = "refuse",
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.pool_id = b""
        self.era = 0
        """How often the pool was reset. Records of earlier eras are void."""
        self._has_void = False
        self._headers = threading.Lock()
        self.identity: KVIdentity | None = None
        """Identity of the KV in the slots, if all directories agree on it."""
        self._clears = on_mismatch == "clear"
        self._directories: list[PoolDirectory] = []
        try:
            for directory in directories:
                self._open(Path(directory))
            self._make_one_pool()
            for opened in self._directories:
                opened.fit(self.num_rows, slot_bytes)
                if direct_io and not opened.set_direct():
                    log_event(
                        logger, logging.WARNING, "direct_io_refused", directory=opened.path,
                        effect="I/O goes through the page cache",
                    )  # fmt: skip
        except OSError as error:
            self.close()
            raise _unusable(", ".join(directories), error) from None
        except BaseException:
            self.close()
            raise

    @property
    def num_rows(self) -> int:
        """Number of slots in one directory."""
        return -(-self.num_slots // len(self._directories))

    @property
    def record_id(self) -> bytes:
        """What the checks of the records of this era depend on."""
        return self._header(0).record_id

    @property
    def data_fds(self) -> list[int]:
        return [directory.data_fd for directory in self._directories]

    @property
    def index_fds(self) -> list[int]:
        return [directory.index_fd for directory in self._directories]

    def load(self) -> Records:
        """Return the records of existing slots, as a `SLOT_RECORD` array. Reads no slot.

        Raises:
            ConfigError: An index cannot be read.
        """
        try:
            contents = SlotIndex(self.index_fds, self.record_id).load(self.num_slots)
        except OSError as error:
            paths = ", ".join(str(directory.path) for directory in self._directories)
            raise _unusable(paths, error) from None
        if len(contents.torn):
            log_event(
                logger, logging.WARNING, "ssd_records_torn", dropped_records=len(contents.torn)
            )
            if self.era:  # those of before a reset, after which there was no time to erase them
                with contextlib.suppress(OSError):
                    self.erase(contents.torn)
        is_whole = self._is_whole(contents.records)
        return contents.records if is_whole.all() else contents.records[is_whole]

    def _is_whole(self, records: Records) -> npt.NDArray[np.bool_]:
        """Whether each slot lies within its file, which may have been truncated.

        A packed block fills its slot's first part only, so the file may end within the last slot
        where its space could not be reserved. If it was cut off before, its checksum says so.
        """
        sizes = np.array([os.fstat(fd).st_size for fd in self.data_fds])
        num_rows = (sizes - HEADER_BYTES) // self.slot_bytes
        if not (num_rows < self.num_rows).any():
            return np.ones(len(records), np.bool_)
        rows, files = np.divmod(records["slot"], len(sizes))
        begun_rows = -((HEADER_BYTES - sizes) // self.slot_bytes)
        whole: npt.NDArray[np.bool_] = rows < num_rows[files]
        whole |= (records["filled"] > 0) & (rows < begun_rows[files])
        return whole

    def adopt(self, identity: KVIdentity) -> None:
        """Record in every directory which KV the slots hold from now on.

        Raises:
            OSError: Not all of them recorded it, so a restart may attribute slots to other KV.
        """
        with self._headers:
            self.identity = identity
            for position, directory in enumerate(self._directories):
                directory.adopt(self._header(position))

    def invalidate(self, era: int) -> None:
        """Begin an era: make all records void, durably, that are there or yet written of before.

        A restart finds none of them.

        Raises:
            OSError: It may find some.
        """
        with self._headers:
            self.era, self._has_void = max(self.era, era), True
            for position, directory in enumerate(self._directories):
                directory.update(self._header(position))

    def erase(self, slots: SlotIds, are_few: bool = False) -> None:
        """Erase the records of slots, durably.

        Args:
            are_few: Do not read the index to find out which of them have one.

        Raises:
            OSError: Some records may still be on the device.
        """
        index = SlotIndex(self.index_fds, self.record_id)
        if not are_few:
            slots = np.intersect1d(index.in_use(self.num_slots), slots, assume_unique=True)
        index.erase(slots)
        for fd in self.index_fds:
            os.fdatasync(fd)

    def close(self) -> None:
        """Release the directories. Idempotent."""
        if self._has_void and self._directories:
            with contextlib.suppress(OSError):  # a restart drops them as torn
                index = SlotIndex(self.index_fds, self.record_id)
                self.erase(index.load(self.num_slots).torn)
        for directory in self._directories:
            directory.close()
        self._directories = []

    def _open(self, path: Path) -> None:
        try:
            self._directories.append(PoolDirectory(path))
        except OSError as error:
            raise _unusable(str(path), error) from None

    def _make_one_pool(self) -> None:
        """Keep the directories that already belong to this pool; make the missing ones.

        Checks everything that may be refused before it changes anything.
        """
        headers, mismatches = self._recognise_all()
        self._clear_or_refuse(mismatches)
        found = [header for header in headers if header is not None]
        self.pool_id = found[0].pool_id if found else os.urandom(16)
        # They differ if a kill came between two headers.
        self.era = max((header.era for header in found), default=0)
        identities = {None if header is None else header.identity for header in headers}
        self.identity = identities.pop() if len(identities) == 1 else None
        for position, header in enumerate(headers):
            directory = self._directories[position]
            if header is None:
                directory.create(self._header(position))
            else:
                directory.update(replace(header, era=self.era))

    def _recognise_all(
        self,
    ) -> tuple[list[PoolHeader | None], dict[PoolDirectory, PoolMismatchError]]:
        """Return each directory's header, None for one to be made, and which ones do not fit."""
        headers: list[PoolHeader | None] = []
        mismatches: dict[PoolDirectory, PoolMismatchError] = {}
        for position, directory in enumerate(self._directories):
            try:
                headers.append(self._recognise(position))
            except PoolMismatchError as mismatch:
                headers.append(None)
                mismatches[directory] = mismatch
        if len({header.pool_id for header in headers if header is not None}) <= 1:
            return headers, mismatches
        strangers = PoolMismatchError(
            self._directories[0].path, "it and the other directories belong to different pools"
        )
        mismatches = {each: mismatches.get(each, strangers) for each in self._directories}
        return [None] * len(headers), mismatches

    def _recognise(self, position: int) -> PoolHeader | None:
        """Return the directory's header; None if the directory is empty.

        Raises:
            PoolMismatchError: The header does not fit this pool.
        """
        directory = self._directories[position]
        header = directory.header()
        if header is None:
            return None
        expected = (self.slot_bytes, len(self._directories), position)
        if (header.slot_bytes, header.num_directories, header.position) != expected:
            raise PoolMismatchError(directory.path, self._difference(header, position))
        return header

    def _header(self, position: int) -> PoolHeader:
        return PoolHeader(
            self.pool_id, self.slot_bytes, len(self._directories), position, self.identity,
            self.era,
        )  # fmt: skip

    def _difference(self, found: PoolHeader, position: int) -> str:
        if found.slot_bytes != self.slot_bytes:
            return f"its slots have {found.slot_bytes} bytes, this model's have {self.slot_bytes}"
        return (
            f"it was directory {found.position + 1} of {found.num_directories} and is now "
            f"{position + 1} of {len(self._directories)}"
        )

    def _clear_or_refuse(self, mismatches: Mapping[PoolDirectory, PoolMismatchError]) -> None:
        for mismatch in mismatches.values():
            if not self._clears or not mismatch.is_ours:
                raise mismatch
        for directory in self._directories:
            directory.remove_old_version()
        for directory, mismatch in mismatches.items():
            directory.clear()
            log_event(
                logger, logging.WARNING, "ssd_directory_cleared", directory=directory.path,
                reason=mismatch,
            )  # fmt: skip


def _unusable(where: str, error: OSError) -> ConfigError:
    return ConfigError(f"ssd_cache_dirs = {where!r}: {error.strerror or error}")
