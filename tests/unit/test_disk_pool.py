"""Directories of the SSD tier: what is kept, what is created again, and what is refused by name."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flexcache.errors import ConfigError
from flexcache.storage import pool_directory
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import (
    DATA_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    PoolHeader,
    record_id,
    reserve_space,
)
from flexcache.storage.shards import KVIdentity
from flexcache.storage.slot_index import (
    HEADER_BYTES,
    RECORD_BYTES,
    SlotIndex,
    locate_slot,
    make_records,
)

SLOT_BYTES = 8192


@contextmanager
def pool(*paths: Path, slots: int = 10, size: int = SLOT_BYTES, on_mismatch: str = "refuse"):  # type: ignore[no-untyped-def]
    opened = DiskPool([str(p) for p in paths], size, slots, False, on_mismatch)
    try:
        yield opened
    finally:
        opened.close()


def fill(opened: DiskPool, era: int | None = None) -> None:
    """Record a prompt of as many blocks as there are slots, in files of their full size."""
    for fd in opened.data_fds:
        os.ftruncate(fd, HEADER_BYTES + opened.num_rows * opened.slot_bytes)
    keys = [b"block %d" % i for i in range(opened.num_slots)]
    records = make_records(b"r" * 16, 0, b"", keys, np.zeros(len(keys), np.uint64))
    own = record_id(opened.pool_id, opened.era if era is None else era)
    SlotIndex(opened.index_fds, own).write(np.arange(len(keys)), records)


def slots(opened: DiskPool) -> list[int]:
    found: list[int] = opened.load()["slot"].tolist()
    return sorted(found)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with pool(tmp_path) as opened:
        fill(opened)
    return tmp_path


@pytest.mark.parametrize("num_dirs", [1, 3])
def test_files_and_their_contents_survive_a_restart(num_dirs: int, tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(num_dirs)]
    with pool(*paths) as first:
        assert slots(first) == []
        fill(first)
        fd, offset = locate_slot(7, first.data_fds, SLOT_BYTES)
        os.pwrite(fd, b"seven", offset)
    assert sorted(os.listdir(paths[0])) == [INDEX_FILE, DATA_FILE]
    with pool(*paths) as second:
        assert second.record_id == first.record_id
        assert slots(second) == list(range(10))
        fd, offset = locate_slot(7, second.data_fds, SLOT_BYTES)
        assert os.pread(fd, 5, offset) == b"seven"


@pytest.mark.parametrize("num_dirs", [1, 2])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_was_made_void_does_not_return_though_it_is_written_later(
    num_dirs: int, is_killed: bool, tmp_path: Path
) -> None:
    paths = [tmp_path / str(number) for number in range(num_dirs)]
    with pool(*paths) as opened:
        fill(opened)
        opened.invalidate(opened.era + 1)
        fill(opened, opened.era - 1)  # by a worker that was at it
        opened.adopt(KVIdentity.of("model", "layout"))
        if is_killed:  # nothing of what an orderly end does reaches these files
            copies = [tmp_path / f"{path.name}-killed" for path in paths]
            for path, copy in zip(paths, copies, strict=True):
                shutil.copytree(path, copy)
            paths = copies
    with pool(*paths) as again:
        assert slots(again) == []
        fill(again)
    with pool(*paths) as third:
        assert slots(third) == list(range(10))


def test_after_an_orderly_end_no_void_record_is_left(filled: Path) -> None:
    with pool(filled) as opened:
        opened.invalidate(opened.era + 1)
    with pool(filled) as again:
        assert len(SlotIndex(again.index_fds, again.record_id).in_use(again.num_slots)) == 0


def test_what_is_recorded_after_it_was_made_void_returns(tmp_path: Path) -> None:
    with pool(tmp_path) as opened:
        fill(opened)
        opened.invalidate(opened.era + 1)
        fill(opened)
    for _ in range(2):
        with pool(tmp_path) as again:
            assert slots(again) == list(range(10))


def test_void_records_that_a_kill_left_are_dropped_once(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = (filled / INDEX_FILE).read_bytes()[HEADER_BYTES:]
    with pool(filled) as opened:
        opened.invalidate(opened.era + 1)
    with (filled / INDEX_FILE).open("r+b") as index:
        index.seek(HEADER_BYTES)
        index.write(left)
    for _ in range(2):
        with pool(filled) as again:
            assert slots(again) == []
    assert caplog.text.count("ssd_records_torn") == 1


def test_a_kill_between_two_headers_leaves_a_pool_of_which_nothing_is_found(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with pool(*paths) as opened:
        fill(opened)
    before = (paths[1] / INDEX_FILE).read_bytes()
    with pool(*paths) as opened:
        opened.invalidate(opened.era + 1)
    (paths[1] / INDEX_FILE).write_bytes(before)
    with pool(*paths) as again:
        assert slots(again) == []


def test_slots_are_striped_behind_the_header_page() -> None:
    located = [locate_slot(slot, [3, 4], SLOT_BYTES) for slot in range(5)]
    assert [fd for fd, _ in located] == [3, 4, 3, 4, 3]
    assert [(at - HEADER_BYTES) // SLOT_BYTES for _, at in located] == [0, 0, 1, 1, 2]
    assert located[0][1] == HEADER_BYTES


def test_the_number_of_slots_may_change_between_starts(filled: Path) -> None:
    with pool(filled, slots=4) as smaller:
        assert slots(smaller) == [0, 1, 2, 3]
        assert (filled / INDEX_FILE).stat().st_size == HEADER_BYTES + 4 * RECORD_BYTES
    with pool(filled, slots=20) as larger:
        assert slots(larger) == [0, 1, 2, 3]


def test_a_smaller_pool_gives_the_space_back(tmp_path: Path) -> None:
    with pool(tmp_path) as opened:
        assert reserve_space(opened.data_fds[0], HEADER_BYTES + 10 * SLOT_BYTES) is None
    with pool(tmp_path, slots=3):
        assert (tmp_path / DATA_FILE).stat().st_size == HEADER_BYTES + 3 * SLOT_BYTES


@pytest.fixture
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a locked directory at once."""
    monkeypatch.setattr(pool_directory, "_LOCK_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("_no_patience")
def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    in_use = pytest.raises(ConfigError, match="in use by another FlexCache process")
    with pool(tmp_path), in_use:
        pool(tmp_path).__enter__()
    with pool(tmp_path):
        pass


def test_a_file_of_the_first_version_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flexcache-ssd.data").write_bytes(b"slots" * 1000)
    with caplog.at_level(logging.INFO), pool(tmp_path) as opened:
        assert slots(opened) == []
    assert not (tmp_path / "flexcache-ssd.data").exists()
    assert caplog.text.count("FlexCache 0.1") == 1


@pytest.mark.usefixtures("_no_patience")
def test_a_file_of_the_first_version_in_use_is_left(tmp_path: Path) -> None:
    with (tmp_path / "flexcache-ssd.data").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another FlexCache process"):
            pool(tmp_path).__enter__()
    assert (tmp_path / "flexcache-ssd.data").exists()


def test_a_half_created_pool_is_recreated(filled: Path) -> None:
    first, second, third = (filled / str(i) for i in range(3))
    with pool(first, second, third) as made:
        fill(made)
    (second / INDEX_FILE).write_bytes(b"")  # a kill between the headers
    (third / INDEX_FILE).unlink()
    (third / DATA_FILE).write_bytes(bytes(HEADER_BYTES))  # a power cut before the sync
    with pool(first, second, third) as again:
        assert again.record_id == made.record_id
        assert slots(again) == [0, 3, 6, 9]
        fill(again)
    with pool(first, second, third) as filled_again:
        assert slots(filled_again) == list(range(10))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def as_newer_version(path: Path) -> None:
    for name in (DATA_FILE, INDEX_FILE):
        content = bytearray((path / name).read_bytes())
        content[8] = FORMAT_VERSION + 1
        (path / name).write_bytes(content)


def from_another_pool(path: Path) -> None:
    with pool(path / "other") as other:
        fill(other)
    (path / "other" / INDEX_FILE).replace(path / INDEX_FILE)


MISMATCHES: list[tuple[str, Callable[[Path], object]]] = [
    ("the header of flexcache-ssd.slots is damaged", lambda path: flip(path / DATA_FILE, 30)),
    ("the header of flexcache-ssd.index is damaged", lambda path: flip(path / INDEX_FILE, 50)),
    (f"has format {FORMAT_VERSION + 1}, from a newer FlexCache", as_newer_version),
    ("flexcache-ssd.index is there without its", lambda path: (path / DATA_FILE).unlink()),
    ("flexcache-ssd.index is not the index of", from_another_pool),
]


@pytest.mark.parametrize(("what", "damage"), MISMATCHES)
def test_a_mismatch_is_refused_by_name_or_cleared(
    what: str, damage: Callable[[Path], object], filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(filled)
    before = {path: path.read_bytes() for path in filled.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=what) as refused:
        pool(filled).__enter__()
    assert str(filled) in str(refused.value)
    assert f"flexcache doctor {filled} --clear" in str(refused.value)
    assert all(path.read_bytes() == content for path, content in before.items())
    with pool(filled, on_mismatch="clear") as cleared:
        assert slots(cleared) == []
        fill(cleared)
    assert what in caplog.text
    with pool(filled) as again:
        assert slots(again) == list(range(10))


def test_another_slot_size_is_refused_or_cleared(filled: Path) -> None:
    with pytest.raises(ConfigError, match="slots have 8192 bytes, this model's have 4096"):
        pool(filled, size=4096).__enter__()
    with pool(filled, size=4096, on_mismatch="clear") as cleared:
        assert slots(cleared) == []
    with pool(filled, size=4096) as again:
        assert again.record_id == cleared.record_id


def test_directories_in_another_order_or_number_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with pool(one, two) as made:
        fill(made)
    with pytest.raises(ConfigError, match="it was directory 2 of 2 and is now 1 of 2"):
        pool(two, one).__enter__()
    with pytest.raises(ConfigError, match="it was directory 1 of 2 and is now 1 of 1"):
        pool(one).__enter__()
    with pool(one, two) as again:
        assert slots(again) == list(range(10))


def test_directories_of_two_pools_are_refused_or_cleared(tmp_path: Path) -> None:
    for name in "ab":
        with pool(tmp_path / name / "0", tmp_path / name / "1") as made:
            fill(made)
    mixed = tmp_path / "a" / "0", tmp_path / "b" / "1"
    with pytest.raises(ConfigError, match="belong to different pools"):
        pool(*mixed).__enter__()
    with pool(*mixed, on_mismatch="clear") as cleared:
        assert slots(cleared) == []


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE])
@pytest.mark.parametrize("content", [b"my thesis", bytes(9000), b"FlexSSDz" + bytes(5000)])
@pytest.mark.parametrize("on_mismatch", ["refuse", "clear"])
def test_a_foreign_file_is_never_touched(
    name: str, content: bytes, on_mismatch: str, filled: Path
) -> None:
    other = {DATA_FILE: INDEX_FILE, INDEX_FILE: DATA_FILE}[name]
    flip(filled / other, 40)  # ours, and damaged: that alone would be cleared
    (filled / name).write_bytes(content)
    before = (filled / other).read_bytes()
    with pytest.raises(ConfigError, match=f"{name} was not written by FlexCache"):
        pool(filled, on_mismatch=on_mismatch).__enter__()
    assert (filled / name).read_bytes() == content
    assert (filled / other).read_bytes() == before


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE])
@pytest.mark.parametrize("on_mismatch", ["refuse", "clear"])
@pytest.mark.parametrize("content", [None, b"", b"another program's file"])
def test_a_symbolic_link_in_place_of_a_file_is_refused_by_name_and_not_followed(
    name: str, on_mismatch: str, content: bytes | None, tmp_path: Path
) -> None:
    directory, elsewhere = tmp_path / "ssd", tmp_path / "elsewhere"
    directory.mkdir()
    (directory / name).symlink_to(elsewhere)
    if content is not None:
        elsewhere.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{directory}.*{name} is a symbolic link"):
        DiskPool([str(directory)], SLOT_BYTES, 10, False, on_mismatch)
    assert (directory / name).is_symlink()
    assert elsewhere.exists() is (content is not None)
    assert content is None or elsewhere.read_bytes() == content


def test_a_directory_may_be_reached_by_a_symbolic_link(filled: Path) -> None:
    link = filled / "link"
    link.symlink_to(filled)
    with pool(link) as opened:
        assert slots(opened) == list(range(10))


def test_a_refused_pool_is_not_cleared_in_part(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    with pool(one, two, three) as made:
        fill(made)
    (one / "flexcache-ssd.data").write_bytes(b"slots")
    content = (three / DATA_FILE).read_bytes()
    (three / DATA_FILE).write_bytes(b"my thesis")
    with pytest.raises(ConfigError, match="was not written by FlexCache"):
        pool(one, two, three, size=4096, on_mismatch="clear").__enter__()
    assert (one / "flexcache-ssd.data").exists()
    (three / DATA_FILE).write_bytes(content)
    with pool(one, two, three) as again:
        assert slots(again) == list(range(10))


def test_a_failing_lock_call_is_refused_and_leaks_no_descriptor(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with pytest.raises(ConfigError, match="No locks available"):
            pool(filled).__enter__()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_refused_pool_releases_its_directories(filled: Path) -> None:
    with pytest.raises(ConfigError):
        pool(filled, size=4096).__enter__()
    with pool(filled):
        pass


def test_slots_that_were_erased_do_not_come_back(filled: Path) -> None:
    with pool(filled) as opened:
        opened.erase(np.array([0, 3, 9]))
    with pool(filled) as again:
        assert slots(again) == [1, 2, 4, 5, 6, 7, 8]


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/dir': Not a directory"):
        pool(tmp_path / "file" / "dir").__enter__()
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(ConfigError, match=f"{mount}': No space left"):
            pool(mount).__enter__()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_torn_records_are_left_out_and_counted(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(filled / INDEX_FILE, HEADER_BYTES + 3 * RECORD_BYTES + 20)
    with pool(filled) as opened:
        assert slots(opened) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert "ssd_records_torn dropped_records=1" in caplog.text


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_space_is_reserved_without_touching_what_is_there(fd: int) -> None:
    os.pwrite(fd, b"content", 0)
    assert reserve_space(fd, 1 << 20) is None
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    assert os.pread(fd, 8, 0) == b"content\0"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("size", [100, 9 << 20])
def test_without_fallocate_zeros_are_written_past_the_end(
    size: int, code: int, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, size: int) -> None:
        raise OSError(code, "not here")

    monkeypatch.setattr(pool_directory, "_fallocate", unsupported)
    os.pwrite(fd, b"content", 0)
    assert reserve_space(fd, size) is None
    assert os.fstat(fd).st_size == size
    assert os.fstat(fd).st_blocks * 512 >= size
    assert os.pread(fd, size, 0) == b"content".ljust(size, b"\0")
    assert reserve_space(fd, size // 2) is None
    assert os.fstat(fd).st_size == size


def test_any_other_failure_to_reserve_space_is_reported(fd: int) -> None:
    assert reserve_space(fd, 1 << 60) in (os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG))
    assert reserve_space(-1, 4096) == os.strerror(errno.EBADF)


def test_a_disk_that_fills_up_while_zeros_are_written_leaves_whole_pages(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last write gets some of its bytes in; with direct I/O none could follow that end."""
    room, pwrite = 5 << 20, os.pwrite

    def unsupported(fd: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    def nearly_full(fd: int, data: memoryview, offset: int) -> int:
        assert offset % 4096 == 0
        if offset >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[: room + 1000 - offset], offset)

    monkeypatch.setattr(pool_directory, "_fallocate", unsupported)
    os.pwrite(fd, b"content", 0)
    monkeypatch.setattr(os, "pwrite", nearly_full)
    assert reserve_space(fd, 9 << 20) == os.strerror(errno.ENOSPC)
    assert os.fstat(fd).st_size == room
    monkeypatch.undo()
    monkeypatch.setattr(pool_directory, "_fallocate", unsupported)
    assert reserve_space(fd, 9 << 20) is None
    assert os.pread(fd, 8, 0) == b"content\0"


def test_the_header_is_in_one_sector() -> None:
    page = PoolHeader(b"p" * 16, 1 << 40, 1 << 20, 3).page(b"magic..!")
    assert len(page) == HEADER_BYTES
    assert not any(page[512:])


def test_records_of_truncated_slots_are_left_out(tmp_path: Path) -> None:
    with pool(tmp_path) as opened:
        fill(opened)
    os.truncate(tmp_path / DATA_FILE, HEADER_BYTES + 4 * SLOT_BYTES - 1)
    with pool(tmp_path) as opened:
        assert slots(opened) == [0, 1, 2]


def test_a_packed_block_need_not_fill_the_last_slot(tmp_path: Path) -> None:
    with pool(tmp_path) as opened:
        fill(opened)
        index = SlotIndex(opened.index_fds, opened.record_id)
        records = make_records(b"r" * 16, 0, b"", [b"packed"], np.zeros(1, np.uint64))
        records["codec"], records["filled"] = 1, 1
        index.write(np.array([3]), records)
    os.truncate(tmp_path / DATA_FILE, HEADER_BYTES + 3 * SLOT_BYTES + SLOT_BYTES // 2)
    with pool(tmp_path) as opened:
        assert slots(opened) == [0, 1, 2, 3]
