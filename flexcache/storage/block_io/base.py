"""The contract of block I/O."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Request:
    """One vectored I/O: consecutive ``pieces``, from or to ``offset`` of the file.

    The pieces must stay alive and, for a write, unchanged until the completion.
    """

    token: int
    direction: Direction
    fd: int
    offset: int
    pieces: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of an I/O: bytes moved, or a negated errno. Short counts are passed on unchanged."""

    token: int
    result: int

    def problem(self, num_bytes: int) -> str | None:
        """Return why it did not move this many bytes; None if it did."""
        if self.result < 0:
            return os.strerror(-self.result)
        return None if self.result == num_bytes else f"{self.result} of {num_bytes} bytes moved"


class BlockIO(ABC):
    """Runs up to ``depth`` vectored I/Os at once, for one thread.

    Every submitted request yields exactly one completion. `fileno` becomes readable when there is
    something to reap, so that the owner can wait for I/O and for messages in one place.
    """

    name: str
    depth: int

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Start I/Os. The caller keeps no more than ``depth`` unfinished."""

    @abstractmethod
    def reap(self) -> list[Completion]:
        """Return what has completed since the last call. Never blocks."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when `reap` has something to return."""

    @abstractmethod
    def close(self) -> None:
        """Wait for unfinished I/O and release all resources. Idempotent."""
