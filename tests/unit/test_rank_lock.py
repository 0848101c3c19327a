"""The lock of ranks that write to SSD files: until when it is held, and file systems without it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexcache.errors import NoDirectPathError
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import DirectFiles, DirectFilesRef, is_free_of_ranks

SLOT_BYTES = 8192


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    pool = DiskPool([str(tmp_path / name) for name in "ab"], SLOT_BYTES, 4, False)
    yield pool
    pool.close()


def ref_of(pool: DiskPool) -> DirectFilesRef:
    return DirectFilesRef.of(pool.data_fds, SLOT_BYTES, is_writable=True, is_choice=False)


def test_a_rank_that_let_go_holds_nothing_by_the_descriptors_of_a_forked_child(
    pool: DiskPool,
) -> None:
    files = DirectFiles(ref_of(pool))
    assert not any(is_free_of_ranks(fd) for fd in pool.data_fds)
    of_child = [os.dup(fd) for fd in files.fds]  # of the same file descriptions, as after a fork
    files.close()
    assert all(is_free_of_ranks(fd) for fd in pool.data_fds)
    for fd in of_child:
        os.close(fd)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_such_locks_holds_a_pool_but_no_direct_path(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fcntl.fcntl

    def fcntl_without_locks(fd: int, command: int, argument: int | bytes = 0) -> int | bytes:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(number, os.strerror(number))
        return original(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_without_locks)
    pool = DiskPool([str(tmp_path)], SLOT_BYTES, 4, False)
    with pytest.raises(NoDirectPathError, match=os.strerror(number)):
        DirectFiles(ref_of(pool))
    pool.close()
