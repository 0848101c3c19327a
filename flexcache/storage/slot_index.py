"""SSD index on disk: one fixed-size record per slot, updated in place.

A pool has an index file per directory, beside the data file. After a header page the record of slot
`s` is row `s // n` of file `s % n`, like the slot's bytes in the data files:

    | check 8 | generation 8 | checksum 8 | position 4 | key length 1 | codec 1 | parent length 1 |
    | filled 1 | root 16 | key 40 | parent's key 40 |                           little endian

Codec and filled are the form of the slot's bytes (`slot_io`); zeros: the block as it is. The
checksum is that of the block, in any form. A free slot's record is all zeros. A record is 128 bytes
and so never crosses a sector; if it is torn all the same, or belongs to another pool or slot, its
check reveals it. A record is trusted only once the slot's block matches its checksum, which is
verified when it is read: `load` reads no slot.

There is no log and nothing to compact: the index is as large as the pool, and loading it is one
sequential read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.ids import MAX_KEY_BYTES, ROOT_BYTES
from flexcache.storage.pieces import PAGE_BYTES

# ------------------------------------------------------------------------------------------------
# Write times of SSD slots: the generation of a record is also the time at which it was written.
#
# Of two records of one block the later one counts. Generations are microseconds since the epoch,
# or, where records are written faster than that or the clock was set back, rise by one from the
# last. A block that is written long after its last use has the time of that use. Pools of before
# have small generations: their records count as decades old.

_PER_SECOND = 1_000_000


def next_generation(last: int, wall_s: float) -> int:
    """Return the generation of the next record.

    Args:
        last: That of the last one.
        wall_s: Seconds since the epoch.
    """
    return max(last + 1, int(wall_s * _PER_SECOND))


def ages_s(generations: npt.NDArray[np.uint64], wall_s: float) -> npt.NDArray[np.float64]:
    """Return how long ago records were written, in seconds; 0 for times to come."""
    return np.maximum(wall_s - generations.astype(np.float64) / _PER_SECOND, 0.0)


def older(
    generations: npt.NDArray[np.int64], ages_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the generations of records whose blocks were last used that long before."""
    return np.maximum(generations - (ages_s * _PER_SECOND).astype(np.int64), 1)


HEADER_BYTES = PAGE_BYTES
"""Bytes before the first record of an index file, and before the first slot of a data file."""

_NAMES = [
    ("generation", "<u8"), ("checksum", "<u8"), ("position", "<u4"), ("key_bytes", "u1"),
    ("codec", "u1"), ("parent_bytes", "u1"), ("filled", "u1"), ("root", f"V{ROOT_BYTES}"),
    ("key", f"V{MAX_KEY_BYTES}"), ("parent", f"V{MAX_KEY_BYTES}"),
]  # fmt: skip
RECORD = np.dtype([("check", "<u8"), *_NAMES])
"""A record on disk. Keys are zero-padded to the size of their field."""
RECORD_BYTES = RECORD.itemsize
SLOT_RECORD = np.dtype([("slot", "<i8"), *_NAMES])
"""A record that was read: its slot takes the place of its check."""

FORM = np.dtype([("codec", "u1"), ("filled", "u1")])
"""The form of a slot's bytes (`slot_io`), a part of its record. All zeros: plain."""

Records = npt.NDArray[Any]
SlotIds = npt.NDArray[np.int64]
SlotForms = npt.NDArray[Any]
"""An array of `FORM`."""

_CHUNK_ROWS = 1 << 12  # they stay in the processor's cache while they are checked
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def locate_slot(slot: int, fds: Sequence[int], slot_bytes: int) -> tuple[int, int]:
    """Return the data file and offset of a slot striped over ``fds``."""
    return fds[slot % len(fds)], HEADER_BYTES + slot // len(fds) * slot_bytes


def make_records(
    root: bytes, first: int, parent: bytes, keys: Sequence[bytes],
    checksums: npt.NDArray[np.uint64],
) -> Records:  # fmt: skip
    """Make records of consecutive blocks of one prompt, without generations and checks.

    Raises:
        ValueError: The root or a key does not fit its field.
    """
    if len(root) != ROOT_BYTES or not all(0 < len(key) <= MAX_KEY_BYTES for key in keys):
        raise ValueError(f"a root has {ROOT_BYTES} bytes, a key 1 to {MAX_KEY_BYTES}")
    if len(parent) > MAX_KEY_BYTES or bool(parent) != (first > 0):
        raise ValueError(f"block {first} cannot follow a key of {len(parent)} bytes")
    records = np.zeros(len(keys), RECORD)
    parents = [parent, *keys[:-1]]
    records["checksum"] = checksums[: len(keys)]
    records["position"] = np.arange(first, first + len(keys))
    records["root"] = np.void(root)
    for field, values in (("key", keys), ("parent", parents)):
        padded = b"".join(value.ljust(MAX_KEY_BYTES, b"\0") for value in values)
        records[field] = np.frombuffer(padded, RECORD[field])
        records[f"{field}_bytes"] = [len(value) for value in values]
    return records


def _stir(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = words * _PRIME
    words ^= words >> _HALF
    return words


def _words(records: Records) -> npt.NDArray[np.uint64]:
    """View each record as a row of 64-bit words."""
    return records.view("<u8").reshape(-1, RECORD_BYTES // 8)


def _checks(records: Records, slots: SlotIds, pool_id: bytes) -> npt.NDArray[np.uint64]:
    """Compute each record's expected check, in this pool and for this slot."""
    words = _words(records)
    low, high = np.frombuffer(pool_id, "<u8")
    mixed = _stir(slots.astype(np.uint64) ^ low)
    for column in range(1, words.shape[1]):
        mixed = _stir(mixed ^ words[:, column])
    return _stir(mixed ^ high)


@dataclass(frozen=True, slots=True)
class IndexContents:
    """The content of an index: sound records (`SLOT_RECORD`), and the slots of torn ones.

    A record that cannot be read counts as torn.
    """

    records: Records
    torn: SlotIds


@dataclass(frozen=True, slots=True)
class Survey:
    """The highest generation in an index (0: it has no records), and the form of each slot."""

    last_generation: int
    forms: SlotForms


class SlotIndex:
    """The records of a pool's slots, in its open index files.

    Only one thread at a time may write to a directory; nothing here syncs.

    Args:
        fds: The index files, in the order of the pool's directories; -1 for an unavailable one,
            whose slots are left out.
        pool_id: 16 bytes that no other pool has, nor the same in an earlier era. May be set to
            another era's while nothing is written.
    """

    def __init__(self, fds: Sequence[int], pool_id: bytes, files: Any = os) -> None:
        self._fds = tuple(fds)
        self.pool_id = pool_id
        self._files = files

    def write(self, slots: SlotIds, records: Records) -> None:
        """Write records to their places and fill in their checks.

        Raises:
            OSError: Some may have been written and others not.
        """
        records = records.copy()
        records["check"] = _checks(records, slots, self.pool_id)
        self._put(slots, records)

    def in_use(self, num_slots: int) -> SlotIds:
        """Return the slots that have a record, sound or not. Vectorised."""
        used = [np.empty(0, np.int64)]
        for slots, records in self._rows(num_slots):
            used.append(slots[_words(records).any(axis=1)])
        return np.concatenate(used)

    def erase(self, slots: SlotIds) -> None:
        """Mark slots as free.

        Raises:
            OSError: Some may be erased and others not.
        """
        self._put(slots, np.zeros(len(slots), RECORD))

    def _put(self, slots: SlotIds, records: Records) -> None:
        """Write records, with one call for every run of neighbours."""
        if not len(slots):
            return
        order = np.lexsort((slots, slots % len(self._fds)))
        slots, records = slots[order], records[order]
        breaks = np.flatnonzero(np.diff(slots) != len(self._fds)) + 1
        for start, stop in pairwise([0, *breaks.tolist(), len(slots)]):
            row, directory = divmod(int(slots[start]), len(self._fds))
            data = records[start:stop].tobytes()
            offset = HEADER_BYTES + row * RECORD_BYTES
            if self._files.pwrite(self._fds[directory], data, offset) != len(data):
                raise OSError(errno.EIO, "a record was written only partially")

    def load(self, num_slots: int) -> IndexContents:
        """Read the records of the first ``num_slots`` slots. Vectorised: O(slots), 0.1 us each."""
        found, count, torn = np.empty(num_slots, SLOT_RECORD), 0, [np.empty(0, np.int64)]
        for slots, records in self._rows(num_slots):
            contents = self._sift(records, slots)
            rows = slice(count, count + len(contents.records))
            _words(found[rows])[:] = _words(contents.records)
            torn.append(contents.torn)
            count = rows.stop
        return IndexContents(found[:count], np.concatenate(torn))

    def survey(self, num_slots: int) -> Survey:
        """Read what is needed to write and read slots, from the sound records."""
        last_generation, forms = 0, np.zeros(num_slots, FORM)
        for slots, raw in self._rows(num_slots):
            matters = (raw["generation"] > last_generation) | (raw["filled"] > 0)
            records = self._sift(raw[matters], slots[matters]).records
            if len(records):
                last_generation = max(last_generation, int(records["generation"].max()))
                packed = records[records["filled"] > 0]
                forms[packed["slot"]] = packed[list(FORM.names or ())]
        return Survey(last_generation, forms)

    def _rows(self, num_slots: int) -> Iterator[tuple[SlotIds, Records]]:
        """Yield the raw records and their slots, in chunks."""
        for directory, fd in enumerate(self._fds):
            num_rows = len(range(directory, num_slots, len(self._fds))) if fd >= 0 else 0
            for first in range(0, num_rows, _CHUNK_ROWS):
                size = min(_CHUNK_ROWS, num_rows - first) * RECORD_BYTES
                data = self._read(fd, size, HEADER_BYTES + first * RECORD_BYTES)
                records = np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)
                rows = np.arange(first, first + len(records))
                yield rows * len(self._fds) + directory, records

    def _read(self, fd: int, size: int, offset: int) -> bytearray:
        """Read part of a file, or less if the file ends before.

        Pages that the device cannot read are returned as all ones, which no record is: in use,
        and torn.
        """
        data, by_page = bytearray(), False
        while len(data) < size:
            here, length = offset + len(data), size - len(data)
            if by_page:
                length = min(length, PAGE_BYTES - here % PAGE_BYTES)
            try:
                part = self._files.pread(fd, length, here)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                if not by_page:
                    by_page = True
                    continue
                part = b"\xff" * length
            if not part:
                break
            data += part
        return data

    def _sift(self, records: Records, slots: SlotIds) -> IndexContents:
        key_bytes, parent_bytes = records["key_bytes"], records["parent_bytes"]
        sound = records["check"] == _checks(records, slots, self.pool_id)
        sound &= (key_bytes > 0) & (key_bytes <= MAX_KEY_BYTES) & (parent_bytes <= MAX_KEY_BYTES)
        sound &= (records["position"] == 0) == (parent_bytes == 0)
        sound &= (records["codec"] == 0) == (records["filled"] == 0)
        torn = slots[:0]
        if not sound.all():
            torn = slots[~sound & _words(records).any(axis=1)]
            records, slots = records[sound], slots[sound]
        found = records.view(SLOT_RECORD)
        found["slot"] = slots
        return IndexContents(found, torn)
