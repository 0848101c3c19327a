"""Rotating files: a sequence of files of which the oldest are deleted."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from flexcache.storage.machine import make_directory


class RotatingFiles:
    """Writes lines to files ``<stem>.0001.jsonl``, ``<stem>.0002.jsonl``, ... of a directory.

    Args:
        max_bytes: Size at which the next file begins.
        max_files: How many files are kept.
        make_first_line: Returns the first line of the file with this number.

    Every method may raise `OSError`.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        max_bytes: int,
        max_files: int,
        make_first_line: Callable[[int], bytes],
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._make_first_line = make_first_line
        self._file: BinaryIO | None = None
        self._kept: deque[Path] = deque()
        self._number = 0
        self._size = 0
        self.path: Path | None = None
        self.num_bytes = 0
        """Total bytes written, including deleted files."""

    @property
    def room(self) -> int:
        """Bytes left in the current file."""
        return self._max_bytes - self._size

    def begin_next(self) -> None:
        """Close the current file, if there is one, and begin the next."""
        self.close()
        self._number += 1
        make_directory(self._directory)
        self.path = self._directory / f"{self._stem}.{self._number:04}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)  # prompts are private to this user
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115
        self._kept.append(self.path)
        self._size = 0
        while len(self._kept) > self._max_files:
            self._kept.popleft().unlink(missing_ok=True)
        self.write(self._make_first_line(self._number))

    def write(self, lines: bytes) -> None:
        """Append to the current file. A full disk may tear a line."""
        assert self._file is not None
        left = memoryview(lines)
        while left:
            written = self._file.write(left) or 0
            self._size += written
            self.num_bytes += written
            left = left[written:]

    def close(self) -> None:
        """Close the current file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
