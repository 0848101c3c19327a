"""What holds prompts' KV is for its user alone, whatever the umask."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexcache.storage.pool_directory import PoolDirectory
from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import Status
from flexcache.tracing.tracer import RotatingFiles


@pytest.fixture(params=[0, 0o022, 0o077])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    before = os.umask(request.param)
    yield tmp_path / "above" / "it"
    os.umask(before)


def modes_below(place: Path) -> set[tuple[str, int]]:
    """Kinds and modes of all that is at and below a path, and of what is above it."""
    found = [place.parent, place, *place.rglob("*")]
    return {
        ("file" if path.is_file() else "directory", stat.S_IMODE(path.stat().st_mode))
        for path in found
    }


@pytest.mark.parametrize(("option", "file", "directory"), [
    ("", 0o600, 0o700), ("?access=user", 0o600, 0o700), ("?access=group", 0o640, 0o750),
])  # fmt: skip
def test_objects_of_a_directory(place: Path, option: str, file: int, directory: int) -> None:
    store = open_remote_store(f"file://{place}{option}")
    deadline = time.monotonic() + 60
    outcomes = store.write_from(["a/b/c", "d"], [[memoryview(b"abc")]] * 2, deadline)
    store.close()
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 2
    assert modes_below(place) == {("file", file), ("directory", directory)}


def test_an_ssd_directory(place: Path) -> None:
    PoolDirectory(place).close()
    assert modes_below(place) == {("file", 0o600), ("directory", 0o700)}


def test_a_trace_directory(place: Path) -> None:
    files = RotatingFiles(place, "trace", 1000, 2, lambda _: b"first\n")
    files.begin_next()
    files.close()
    assert modes_below(place) == {("file", 0o600), ("directory", 0o700)}


def test_a_directory_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    PoolDirectory(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
