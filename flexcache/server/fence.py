"""The fence between a server's death and the reuse of GPU slots.

When a server is gone, an engine's scheduler must answer its open tasks, but may say that their
slots can be reused only once no rank copies to them any more. So each rank holds a shared lock on
its engine's fence, a file in memory that the server made, for as long as it may touch slots on the
server's behalf. The kernel lets go when a rank dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from flexcache.errors import RegistrationError


class Fence:
    """One process's end of an engine's fence."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls) -> Fence:
        return cls(os.memfd_create("flexcache-fence", os.MFD_CLOEXEC))

    @classmethod
    def open(cls, path: str) -> Fence:
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise RegistrationError(f"fence at {path}: {error.strerror}") from None

    @property
    def path(self) -> str:
        """Where other processes of this host open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def hold(self) -> None:
        """Slots may be touched until `close`."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def is_free(self) -> bool:
        """Whether nobody holds it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return True
        return False

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
