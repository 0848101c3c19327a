"""Records in an index file: what was written comes back, what was torn or misplaced does not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.storage.slot_index import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    RECORD_BYTES,
    Records,
    SlotIndex,
    make_records,
)

POOL_ID = b"one pool of many"
ROOT = b"sixteen byte key"
NUM_SLOTS = 200


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """The index files of a pool of three directories."""
    made = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(3)]
    for fd in made:
        os.ftruncate(fd, HEADER_BYTES + 67 * RECORD_BYTES)
    yield made
    for fd in made:
        os.close(fd)


def some_records(count: int, first: int = 0, generation: int = 1) -> Records:
    parent = b"block %d" % (first - 1) if first else b""
    keys = [b"block %d" % (first + i) for i in range(count)]
    records = make_records(ROOT, first, parent, keys, np.arange(count, dtype=np.uint64) + 1000)
    records["generation"] = np.arange(generation, generation + count)
    return records


def slots_of(*slots: int) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def test_a_record_has_128_bytes_so_that_none_crosses_a_sector() -> None:
    assert RECORD_BYTES == 128
    assert HEADER_BYTES % 512 == 0


def test_records_come_back_with_their_slots(fds: list[int]) -> None:
    index = SlotIndex(fds, POOL_ID)
    slots = slots_of(199, 0, 3, 6, 1, 77)
    index.write(slots, some_records(6, first=4, generation=9))
    contents = SlotIndex(fds, POOL_ID).load(NUM_SLOTS)
    assert len(contents.torn) == 0
    found = contents.records[np.argsort(contents.records["generation"])]
    assert found["slot"].tolist() == slots.tolist()
    assert found["generation"].tolist() == [9, 10, 11, 12, 13, 14]
    assert found["checksum"].tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
    assert found["position"].tolist() == [4, 5, 6, 7, 8, 9]
    assert {bytes(root) for root in found["root"]} == {ROOT}
    assert found["key"][0] == np.void(b"block 4".ljust(MAX_KEY_BYTES, b"\0"))
    assert found["key_bytes"].tolist() == [7] * 6
    assert found["parent"][0] == np.void(b"block 3".ljust(MAX_KEY_BYTES, b"\0"))
    assert index.survey(NUM_SLOTS).last_generation == 14


def test_keys_that_end_in_zeros_keep_their_length(fds: list[int]) -> None:
    keys = [b"\0", b"\0\0", b"k" * MAX_KEY_BYTES, b"k" * (MAX_KEY_BYTES - 1) + b"\0"]
    index = SlotIndex(fds, POOL_ID)
    index.write(slots_of(0, 1, 2, 3), make_records(ROOT, 0, b"", keys, np.ones(4, np.uint64)))
    found = index.load(NUM_SLOTS).records
    found = found[np.argsort(found["position"])]
    read = [bytes(key)[:size] for key, size in zip(found["key"], found["key_bytes"], strict=True)]
    assert read == keys


def test_an_erased_slot_is_free_and_not_torn(fds: list[int]) -> None:
    index = SlotIndex(fds, POOL_ID)
    index.write(slots_of(5, 6, 7), some_records(3))
    index.erase(slots_of(6, 150))
    contents = index.load(NUM_SLOTS)
    assert sorted(contents.records["slot"].tolist()) == [5, 7]
    assert len(contents.torn) == 0
    assert SlotIndex(fds, POOL_ID).survey(NUM_SLOTS).last_generation == 3


def test_slots_beyond_the_capacity_or_the_file_are_not_loaded(fds: list[int]) -> None:
    index = SlotIndex(fds, POOL_ID)
    index.write(slots_of(2, 3, 4), some_records(3))
    assert sorted(index.load(4).records["slot"].tolist()) == [2, 3]
    os.ftruncate(fds[0], HEADER_BYTES + RECORD_BYTES + 50)  # slot 0, and a part of slot 3
    assert sorted(index.load(NUM_SLOTS).records["slot"].tolist()) == [2, 4]


def test_a_record_of_another_slot_or_another_pool_is_torn(fds: list[int]) -> None:
    index = SlotIndex(fds, POOL_ID)
    index.write(slots_of(0), some_records(1))
    record = os.pread(fds[0], RECORD_BYTES, HEADER_BYTES)
    os.pwrite(fds[1], record, HEADER_BYTES + 5 * RECORD_BYTES)
    contents = index.load(NUM_SLOTS)
    assert contents.records["slot"].tolist() == [0]
    assert contents.torn.tolist() == [16]
    stranger = SlotIndex(fds, b"another one here").load(NUM_SLOTS)
    assert len(stranger.records) == 0
    assert stranger.torn.tolist() == [0, 16]


@given(position=st.integers(0, 8 * RECORD_BYTES - 1))
def test_any_flipped_bit_is_noticed(position: int) -> None:
    fd = os.memfd_create("index")
    try:
        index = SlotIndex([fd], POOL_ID)
        index.write(slots_of(0, 1, 2), some_records(3))
        where = HEADER_BYTES + RECORD_BYTES + position // 8
        (byte,) = os.pread(fd, 1, where)
        os.pwrite(fd, bytes([byte ^ 1 << position % 8]), where)
        contents = index.load(3)
        assert contents.records["slot"].tolist() == [0, 2]
        assert contents.torn.tolist() == [1]
    finally:
        os.close(fd)


def test_garbage_never_passes_for_a_record(fds: list[int]) -> None:
    garbage = np.random.default_rng(5).bytes(67 * RECORD_BYTES)
    for fd in fds:
        os.pwrite(fd, garbage, HEADER_BYTES)
    contents = SlotIndex(fds, POOL_ID).load(NUM_SLOTS)
    assert len(contents.records) == 0
    assert len(contents.torn) == NUM_SLOTS
    assert SlotIndex(fds, POOL_ID).survey(NUM_SLOTS).last_generation == 0


@given(
    num_directories=st.integers(1, 4),
    writes=st.lists(st.lists(st.integers(0, 30), unique=True, min_size=1), max_size=8),
)
def test_the_last_write_of_a_slot_counts(num_directories: int, writes: list[list[int]]) -> None:
    fds = [os.memfd_create("index") for _ in range(num_directories)]
    try:
        index, model = SlotIndex(fds, POOL_ID), dict[int, int]()
        generation = 1
        for turn, slots in enumerate(writes):
            if turn % 3 == 2:
                index.erase(slots_of(*slots))
                for slot in slots:
                    model.pop(slot, None)
                continue
            index.write(slots_of(*slots), some_records(len(slots), generation=generation))
            model.update(zip(slots, range(generation, generation + len(slots)), strict=True))
            generation += len(slots)
        found = index.load(31).records
        assert dict(zip(found["slot"].tolist(), found["generation"].tolist(), strict=True)) == model
        assert index.survey(31).last_generation == max(model.values(), default=0)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("root", "first", "parent", "keys"),
    [
        (b"short", 0, b"", [b"k"]),
        (ROOT, 0, b"", [b"k" * (MAX_KEY_BYTES + 1)]),
        (ROOT, 0, b"", [b"k", b""]),
        (ROOT, 1, b"", [b"k"]),
        (ROOT, 0, b"p", [b"k"]),
        (ROOT, 1, b"p" * (MAX_KEY_BYTES + 1), [b"k"]),
    ],
)
def test_names_that_do_not_fit_are_refused(
    root: bytes, first: int, parent: bytes, keys: list[bytes]
) -> None:
    with pytest.raises(ValueError):
        make_records(root, first, parent, keys, np.zeros(len(keys), np.uint64))


class WornDevice:
    """Reads as the kernel does: what is before a bad page comes back, and then an error.

    At most ``most`` bytes come at a time. A strict one returns nothing of a read with a bad page.
    """

    def __init__(self, bad_pages: set[int], most: int, is_strict: bool) -> None:
        self.bad_pages, self.most, self.is_strict = bad_pages, most, is_strict

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        end = offset + min(length, self.most)
        pages = range(offset // 4096, -(-end // 4096))
        bad = [page for page in pages if page in self.bad_pages]
        if bad and (self.is_strict or bad[0] == pages[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, (bad[0] * 4096 if bad else end) - offset, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)


@given(
    bad_pages=st.sets(st.integers(1, 8)),
    most=st.sampled_from([100, 4096, 5000, 1 << 30]),
    is_strict=st.booleans(),
)
def test_pages_that_cannot_be_read_are_torn_and_the_others_come_back(
    bad_pages: set[int], most: int, is_strict: bool
) -> None:
    num_slots, rows_of_a_page = 250, 4096 // RECORD_BYTES
    fd = os.memfd_create("index")
    try:
        os.ftruncate(fd, HEADER_BYTES + num_slots * RECORD_BYTES)
        index = SlotIndex([fd], POOL_ID, WornDevice(bad_pages, most, is_strict))
        index.write(np.arange(200), some_records(200))
        lost = {slot for slot in range(num_slots) if 1 + slot // rows_of_a_page in bad_pages}
        contents = index.load(num_slots)
        assert set(contents.torn.tolist()) == lost
        assert set(contents.records["slot"].tolist()) == set(range(200)) - lost
        assert set(index.in_use(num_slots).tolist()) == set(range(200)) | lost
        assert index.survey(num_slots).last_generation == max(
            {0, *range(1, 201)} - {s + 1 for s in lost}
        )
    finally:
        os.close(fd)


def test_an_index_that_cannot_be_read_at_all_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file"):
        SlotIndex([1 << 20], POOL_ID).load(NUM_SLOTS)


def test_a_partial_write_is_an_error() -> None:
    class HalfADisk:
        def pread(self, fd: int, length: int, offset: int) -> bytes:
            raise NotImplementedError

        def pwrite(self, fd: int, data: bytes, offset: int) -> int:
            return len(data) // 2

        def fdatasync(self, fd: int) -> None:
            pass

    with pytest.raises(OSError, match="only partially"):
        SlotIndex([0], POOL_ID, HalfADisk()).write(slots_of(0), some_records(1))
