"""Directories that hold prompts' KV: for this user alone, whatever the umask."""

from __future__ import annotations

import contextlib
import os
from errno import ENOTDIR
from pathlib import Path


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Make a directory, and those above it, with this mode; existing ones stay as they are.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    try:
        path.mkdir(mode & 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(path)) from None
        return  # another process made it a moment ago
    if mode & 0o077:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(mode)
