"""Files that follow one another, of which the oldest go."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class RotatingFiles:
    """Lines, in files ``<stem>.0001.jsonl``, ``<stem>.0002.jsonl``, ... of a directory.

    Args:
        max_bytes: A file is followed by another once it has so many.
        max_files: How many are kept.
        make_first_line: Of the file with this number.

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
        """Written since the start, also to files that are gone."""

    @property
    def room(self) -> int:
        """Bytes that still belong into the current file."""
        return self._max_bytes - self._size

    def begin_next(self) -> None:
        """End the current file, if there is one, and begin another."""
        self.close()
        self._number += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        self.path = self._directory / f"{self._stem}.{self._number:04}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)  # what is asked is nobody else's to know
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115
        self._kept.append(self.path)
        self._size = 0
        while len(self._kept) > self._max_files:
            self._kept.popleft().unlink(missing_ok=True)
        self.write(self._make_first_line(self._number))

    def write(self, lines: bytes) -> None:
        """To the current file. A line may be torn where the disk is full."""
        assert self._file is not None
        left = memoryview(lines)
        while left:
            written = self._file.write(left) or 0
            self._size += written
            self.num_bytes += written
            left = left[written:]

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
