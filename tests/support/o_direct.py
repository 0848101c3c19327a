"""Files that bypass the page cache, which not all file systems have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexcache.storage.pool_directory import PoolDirectory


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
