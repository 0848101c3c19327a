"""`flexcache doctor` on directories in every possible state."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from flexcache.cache.tail_index import TAIL_FIRST, tail_keys
from flexcache.cli import app
from flexcache.ids import BlockKey
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import DATA_FILE, INDEX_FILE
from flexcache.storage.slot_index import (
    HEADER_BYTES,
    RECORD_BYTES,
    SlotIndex,
    locate_slot,
    make_records,
)

SLOT_BYTES, NUM_SLOTS, NUM_BLOCKS = 8192, 12, 10


def doctor(*arguments: object) -> tuple[int, str]:
    """Return the exit status and the findings about directories."""
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def open_pool(*paths: Path) -> DiskPool:
    return DiskPool([str(path) for path in paths], SLOT_BYTES, NUM_SLOTS, direct_io=False)


def fill(*paths: Path) -> None:
    """Store a prompt of ten blocks in slots 0 to 9."""
    write(paths, 0, 0, b"", [b"block %d" % i for i in range(NUM_BLOCKS)])


def write(
    paths: Sequence[Path], first_slot: int, position: int, parent: bytes, keys: Sequence[bytes]
) -> None:
    """Store blocks behind ``parent``, in slots from ``first_slot`` on."""
    pool = open_pool(*paths)
    contents = [bytes([first_slot + i + 1]) * SLOT_BYTES for i in range(len(keys))]
    slots = np.arange(first_slot, first_slot + len(keys))
    for slot, content in zip(slots.tolist(), contents, strict=True):
        fd, offset = locate_slot(slot, pool.data_fds, SLOT_BYTES)
        os.pwrite(fd, content, offset)
    sums = np.array([xxhash.xxh3_64_intdigest(content) for content in contents], np.uint64)
    records = make_records(b"root of a model!", position, parent, keys, sums)
    SlotIndex(pool.index_fds, pool.record_id).write(slots, records)
    pool.close()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path


def test_an_empty_directory_is_fine_and_stays_empty(tmp_path: Path) -> None:
    code, said = doctor(tmp_path)
    assert code == 0
    assert "no cache in it" in said
    assert os.listdir(tmp_path) == []


def test_a_pool_is_described(filled: Path) -> None:
    code, said = doctor(filled, "--verify")
    assert code == 0
    assert "format 3, 1 of 1 directories, 12 slots of 8,192 bytes, 10 recorded" in said
    assert "10 blocks can be found, 0 cannot" in said
    assert "all recorded slots match their checksums" in said


@pytest.mark.parametrize(
    ("num_units", "expected"),
    [
        (2, "12 blocks can be found, 2 of them in tails, 0 cannot"),
        (1, "10 blocks can be found, 1 cannot"),
    ],
)
def test_tails_are_found_whole_or_not_at_all(filled: Path, num_units: int, expected: str) -> None:
    parent = b"block %d" % (NUM_BLOCKS - 1)
    units = tail_keys(BlockKey(parent), 2)[:num_units]
    write([filled], NUM_BLOCKS, TAIL_FIRST, parent, units)
    assert expected in doctor(filled, "--verify")[1]


@pytest.mark.parametrize("option", ["--verify", "--repair", "--clear"])
def test_nothing_to_verify_repair_or_clear_is_an_error(option: str) -> None:
    code, said = doctor(option)
    assert code == 1
    assert "no directory to verify, repair or clear" in said


@pytest.mark.whole
def test_a_pool_in_use_is_left_alone(filled: Path) -> None:
    pool = open_pool(filled)
    try:
        code, said = doctor(filled)
        assert code == 0
        assert "in use by a FlexCache process" in said
        for option in ("--verify", "--repair", "--clear"):
            assert doctor(filled, option)[0] == 1
        assert len(pool.load()) == NUM_BLOCKS
    finally:
        pool.close()


def test_torn_records_are_an_error_until_they_are_repaired(filled: Path) -> None:
    flip(filled / INDEX_FILE, HEADER_BYTES + 7 * RECORD_BYTES + 30)
    code, said = doctor(filled)
    assert code == 1
    assert "1 records are torn -> --repair erases" in said
    assert "7 blocks can be found, 2 cannot" in said
    code, said = doctor(filled, "--repair")
    assert code == 0
    assert "1 records are torn: erased" in said
    assert doctor(filled)[0] == 0


def test_only_verifying_finds_wrong_bytes_and_repairing_drops_them(filled: Path) -> None:
    flip(filled / DATA_FILE, HEADER_BYTES + 4 * SLOT_BYTES + 100)
    assert doctor(filled)[0] == 0
    code, said = doctor(filled, "--verify")
    assert code == 1
    assert "1 slots do not match their records" in said
    assert doctor(filled, "--verify", "--repair")[0] == 0
    code, said = doctor(filled, "--verify")
    assert code == 0
    assert "4 blocks can be found, 5 cannot" in said


def test_a_truncated_data_file_is_found_by_verifying(filled: Path) -> None:
    os.truncate(filled / DATA_FILE, HEADER_BYTES + 6 * SLOT_BYTES + 1)
    code, said = doctor(filled, "--verify")
    assert code == 1
    assert "4 slots do not match" in said


def test_chains_are_followed_through_all_directories_of_a_pool(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, two)
    code, said = doctor(one, two, "--verify")
    assert code == 0
    assert "2 of 2 directories" in said
    assert "10 blocks can be found" in said
    code, said = doctor(two, "--verify")
    assert code == 0
    assert "1 of 2 directories, 12 slots of 8,192 bytes, 5 recorded" in said
    assert "-> name all directories of the pool" in said
    assert "all recorded slots match their checksums" in said


def test_a_damaged_pool_is_named_and_cleared_on_request_only(filled: Path) -> None:
    flip(filled / INDEX_FILE, 20)
    for options in ([], ["--repair"]):
        code, said = doctor(filled, *options)
        assert code == 1
        assert "the header of flexcache-ssd.index is damaged" in said
    code, said = doctor(filled, "--clear")
    assert code == 0
    assert "emptied" in said
    assert [path.stat().st_size for path in filled.iterdir()] == [0, 0]
    fill(filled)  # as good as new


def test_a_symbolic_link_in_place_of_a_file_is_named_and_never_cleared(filled: Path) -> None:
    moved = filled.parent / "moved"
    (filled / INDEX_FILE).rename(moved)
    (filled / INDEX_FILE).symlink_to(moved)
    before = moved.read_bytes()
    for options in ((), ("--clear",)):
        code, said = doctor(filled, *options)
        assert code == 1
        assert f"{INDEX_FILE} is a symbolic link" in said
    assert moved.read_bytes() == before


def test_a_foreign_file_is_never_cleared(filled: Path) -> None:
    (filled / DATA_FILE).write_bytes(b"my thesis")
    code, said = doctor(filled, "--clear")
    assert code == 1
    assert "was not written by FlexCache" in said
    assert (filled / DATA_FILE).read_bytes() == b"my thesis"


def test_leftovers_of_the_first_version_are_mentioned(tmp_path: Path) -> None:
    (tmp_path / "flexcache-ssd.data").write_bytes(b"slots")
    code, said = doctor(tmp_path)
    assert code == 0
    assert "removes flexcache-ssd.data" in said
    assert (tmp_path / "flexcache-ssd.data").exists()


@pytest.mark.parametrize(
    ("missing", "code", "text"),
    [
        (INDEX_FILE, 0, "no cache in it"),
        (DATA_FILE, 1, f"{INDEX_FILE} is there without its {DATA_FILE}"),
    ],
)
def test_examining_creates_no_file(filled: Path, missing: str, code: int, text: str) -> None:
    (filled / missing).unlink()
    (there,) = filled.iterdir()
    content = there.read_bytes()
    for options in ([], ["--verify"], ["--repair"]):
        found, said = doctor(filled, *options)
        assert (found, text in said) == (code, True)
    assert list(filled.iterdir()) == [there]
    assert there.read_bytes() == content
    assert doctor(filled, "--clear")[0] == 0
    assert there.stat().st_size == 0


def test_a_directory_that_is_named_twice_is_examined_once(filled: Path) -> None:
    (filled / "again").symlink_to(filled)
    code, said = doctor(filled, filled, filled / "again", "--verify")
    assert code == 0
    assert said.count("10 recorded") == 1
    assert "in use" not in said


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_failed_repair_is_not_reported_as_done(
    filled: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(filled / INDEX_FILE, HEADER_BYTES + 7 * RECORD_BYTES + 30)
    monkeypatch.setattr(os, call, failing(errno.EIO))
    code, said = doctor(filled, "--repair")
    assert code == 1
    assert "1 records are torn and could not be erased: Input/output error" in said
    assert "torn: erased" not in said


@pytest.mark.parametrize("call", ["preadv", "ftruncate", "fsync"])
def test_a_directory_that_cannot_be_read_or_cleared_is_a_finding(
    filled: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(errno.EIO))
    code, said = doctor(filled, "--clear")
    assert code == 1
    assert f"{filled}: Input/output error" in said
    assert "emptied" not in said
