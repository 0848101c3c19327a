"""The fence between answering a task and the ranks that may still copy for it.

An engine reuses GPU slots when it is answered. It must be answered in time although its server is
gone or a rank hangs, but no rank may copy to the slots afterwards. A file in memory, which the
server makes for each engine, has two things for that:

* A lock: each rank shares it for as long as it may touch slots on the server's behalf. The kernel
  lets go when a rank dies. When the server is lost, the scheduler waits for the lock to be free.
* Words (`transfer.workers.permit`): what must be answered in spite of a rank that may be copying is
  revoked first. Server and scheduler have a word each.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from flexcache.errors import RegistrationError
from flexcache.transfer.workers.permit import NUM_WORDS, WORD_BYTES

_SERVERS, _SCHEDULERS = range(NUM_WORDS)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Fence:
    """One process's end of an engine's fence."""

    def __init__(self, fd: int, word: int) -> None:
        self._fd = fd
        self._word = word
        self._memory = mmap.mmap(fd, NUM_WORDS * WORD_BYTES)
        self.words = memoryview(self._memory).cast("Q")
        """For `CopyPermit`."""

    @classmethod
    def create(cls) -> Fence:
        """Make an engine's fence: the server's end."""
        fd = os.memfd_create("flexcache-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NUM_WORDS * WORD_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, _SERVERS)

    @classmethod
    def open(cls, path: str) -> Fence:
        """Open a fence that a living server made: a rank's end, or the scheduler's."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegistrationError(f"fence at {path}: {error.strerror}") from None
        try:
            return cls(fd, _SCHEDULERS)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise RegistrationError(f"fence at {path}: {error}") from None

    @property
    def path(self) -> str:
        """Where other processes of this host open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def hold(self) -> None:
        """Slots may be touched until `close`."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def is_free(self) -> bool:
        """Whether no rank holds it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return True
        return False

    def revoke(self, task_id: int) -> None:
        """Have no rank begin another piece of a copy for this task or an earlier one.

        To be called before an answer that gives slots back while a rank may be copying.
        """
        self.words[self._word] = max(self.words[self._word], task_id)

    def begin_session(self) -> None:
        """Forget what was revoked: no copy for an earlier session is under way, and ids recur."""
        for word in range(NUM_WORDS):
            self.words[word] = 0

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            self.words.release()
            self._memory.close()  # it has a descriptor of its own, which holds the lock as well
            os.close(self._fd)
            self._fd = -1
