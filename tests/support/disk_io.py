"""Disk I/O in every way that is supported: block I/O engines, and the page cache or not.

All implementations of block I/O must pass the same tests. ``NEW_LIBURING_PATH`` names a directory
with an unpacked wheel of liburing 2026.3 or later; without it, or on a CPU that cannot run it, its
tests are skipped.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from flexcache.storage.block_io import io_uring_problem
from flexcache.storage.pool_directory import PoolDirectory

IO_KINDS = ("threads", "io_uring", "io_uring that raises", "newer io_uring")


def io_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have this process and its children do I/O in one of `IO_KINDS`; returns the setting."""
    if kind == "threads":
        return kind
    directory = ""
    if kind == "io_uring that raises":
        directory = str(Path(__file__).parent / "raising_liburing")
    elif kind == "newer io_uring":
        directory = os.environ.get("NEW_LIBURING_PATH", "")
        if not directory:
            pytest.skip("NEW_LIBURING_PATH names no liburing of 2026.3 or later")
    if directory:
        monkeypatch.setenv("PYTHONPATH", directory, prepend=os.pathsep)
    problem = io_uring_problem()
    if problem is not None:
        pytest.skip(problem)
    if directory:
        monkeypatch.setitem(sys.modules, "liburing", _load(directory))
    return "io_uring"


@cache
def _load(directory: str) -> ModuleType:
    """Import the binding there beside the installed one."""
    files = (Path(directory) / "liburing.py", Path(directory) / "liburing" / "__init__.py")
    name = f"liburing_of_{Path(directory).name}"
    spec = spec_from_file_location(name, next(file for file in files if file.exists()))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def open_direct(path: Path) -> int:
    """Open a file for direct I/O. Skips the test if its file system has none."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        pytest.skip(f"O_DIRECT on {path}: {error.strerror}")


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have caches of this process use the page cache, as on file systems without direct I/O."""
    monkeypatch.setattr(PoolDirectory, "set_direct", lambda directory: False)


def require_direct(folder: Path) -> None:
    """Skip the test if a folder's file system has no direct I/O."""
    os.close(open_direct(folder / "o-direct"))
    (folder / "o-direct").unlink()
