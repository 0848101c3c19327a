"""CopyPermit: whether a rank may still copy for a task.

A rank that hangs or is stopped cannot be asked to release GPU slots; its engine is answered all the
same and reuses them. So the task is revoked before the answer is sent, in memory that rank, server
and scheduler share (`protocol.fence`), and the rank checks it before each piece of a copy. If the
rank resumes, only the pieces that it was copying land late: one of its own thread's, and one of
each thread that makes queued copies (`copy_queue`).

    | revoked by the server | revoked by the scheduler |      uint64 each; one writer per word

A word is a task id: that task and all before it are revoked.
"""

from __future__ import annotations

import numpy as np

from flexcache.errors import TaskRevokedError

PIECE_BYTES = 4 << 20
"""Bytes that may be copied between two checks of the words."""
NEVER_REVOKED = (1 << 64) - 1
"""In place of the task of a promised load; no word reaches it."""
NUM_WORDS = 2
WORD_BYTES = 8


class CopyPermit:
    """One rank's permit. Used by the thread that drives the rank; compiled code looks at its words.

    Args:
        words: The shared words; without them no task is ever revoked.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        if words is None:
            words = memoryview(bytearray(NUM_WORDS * WORD_BYTES)).cast("Q")
        self._words = words
        self.address = int(np.frombuffer(words, np.uint64).ctypes.data)
        """Address of the words, for compiled code."""
        self.task_id = 1
        """The task of the current copy."""

    @property
    def is_revoked(self) -> bool:
        return self.task_id <= max(self._words)

    def check(self) -> None:
        """Raise `TaskRevokedError` if the copy must not continue."""
        if self.is_revoked:
            raise TaskRevokedError
