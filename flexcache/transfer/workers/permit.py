"""CopyPermit: whether a rank may still copy for a task.

A rank that hangs or is stopped cannot be asked to let go of GPU slots; its engine is answered all
the same and reuses them. So the task is revoked before the answer is given, in memory that rank,
server and scheduler share (`protocol.fence`), and the rank looks there before each piece of a copy.
If it goes on, what it was in the middle of lands late: one piece at most.

    | revoked by the server | revoked by the scheduler |      uint64 each; one writer per word

A word is a task id: that task and all before it are revoked.
"""

from __future__ import annotations

import numpy as np

from flexcache.errors import TaskRevokedError

PIECE_BYTES = 4 << 20
"""What may be copied between two looks at the words."""
NUM_WORDS = 2
WORD_BYTES = 8


class CopyPermit:
    """One rank's. Used by the thread that copies only.

    Args:
        words: The shared words; none are revoked without them.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        if words is None:
            words = memoryview(bytearray(NUM_WORDS * WORD_BYTES)).cast("Q")
        self._words = words
        self.address = int(np.frombuffer(words, np.uint64).ctypes.data)
        """Where compiled code finds the words."""
        self.task_id = 1
        """The task that is copied for."""

    @property
    def is_revoked(self) -> bool:
        return self.task_id <= max(self._words)

    def check(self) -> None:
        """Raises `TaskRevokedError` if the copy must not go on."""
        if self.is_revoked:
            raise TaskRevokedError
