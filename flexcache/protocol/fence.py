"""Fence between answering a task and the ranks that may still copy for it.

An engine reuses GPU slots once its task is answered. The answer must come in time even if the
server is gone or a rank hangs, but no rank may copy to the slots after it. The server makes an
in-memory file for each engine, which provides two mechanisms:

* A lock: each rank holds it shared while it may touch slots on the server's behalf. The kernel
  releases it when a rank dies. If the server is lost, the scheduler waits until the lock is free.
* Words (`transfer.copier`): a task that must be answered while a rank may still be copying
  is revoked first. Server and scheduler have a word each.

A scheduler whose engine cannot do without a load counts on the ranks, by locks of their own:

    byte 0         shared: a step counts on all ranks
    byte 1 + rank  exclusive: the rank may be counted on

The scheduler takes byte 0 and then looks whether all ranks have theirs; a rank that leaves gives
its byte back and then waits until byte 0 is free. So either the scheduler sees that it leaves, or
it stays. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable

from flexcache.errors import RegistrationError
from flexcache.ids import NUM_WORDS, WORD_BYTES
from flexcache.processes import tell_of_forks

_SERVERS, _SCHEDULERS = range(NUM_WORDS)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_COUNTED_ON, _RANKS = 0, 1  # bytes that are locked
_FLOCK = struct.Struct("hhqqi4x")  # of the kernel: type, whence, start, length, process


class Fence:
    """One process's end of an engine's fence."""

    def __init__(self, fd: int, word: int) -> None:
        self._fd = fd
        self._word = word
        self._memory = mmap.mmap(fd, NUM_WORDS * WORD_BYTES)
        self.words = memoryview(self._memory).cast("Q")
        """The shared words, for `CopyPermit`."""
        tell_of_forks(self)

    @classmethod
    def create(cls) -> Fence:
        """Make the server's end of an engine's fence."""
        fd = os.memfd_create("flexcache-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NUM_WORDS * WORD_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, _SERVERS)

    @classmethod
    def open(cls, path: str) -> Fence:
        """Open a rank's or the scheduler's end of a fence that a running server made."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegistrationError(f"fence at {path}: {error.strerror}") from None
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("its size is not sealed")
            return cls(fd, _SCHEDULERS)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise RegistrationError(f"fence at {path}: {error}") from None

    @property
    def path(self) -> str:
        """Path by which other processes on this host open the fence while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def hold(self) -> None:
        """Hold the lock until `close`: this rank may touch slots until then."""
        # A lock, no delay: ranks and scheduler learn of a server's death at different moments, and
        # a copy in between would land in slots that serve another request.
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def is_free(self) -> bool:
        """Whether no rank holds the lock."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return True
        return False

    # -- ranks that are counted on ---------------------------------------------------------------

    def offer(self, rank: int) -> None:
        """This rank may be counted on: whatever a step needs of the pool, it has."""
        self._lock(fcntl.F_WRLCK, _RANKS + rank)

    def withdraw(self, rank: int) -> None:
        """No further step may count on this rank. Idempotent."""
        self._lock(fcntl.F_UNLCK, _RANKS + rank)

    def may_leave(self, rank: int) -> bool:
        """Withdraw this rank; return whether no step counts on it."""
        self.withdraw(rank)
        return self._could_lock(_COUNTED_ON)

    def count_on(self, ranks: Iterable[int]) -> bool:
        """Keep these ranks from leaving until `close`, unless one cannot be counted on."""
        is_kept = self._lock(fcntl.F_RDLCK, _COUNTED_ON)
        return is_kept and not any(self._could_lock(_RANKS + rank) for rank in ranks)

    @property
    def is_counted_on(self) -> bool:
        """Whether a step counts on the engine's ranks."""
        return not self._could_lock(_COUNTED_ON)

    def _lock(self, kind: int, byte: int, to_end: bool = False) -> bool:
        """Set a lock of this end; return whether no other end's is in the way."""
        if self._fd < 0:  # in a fork of the process
            return False
        lock = _FLOCK.pack(kind, os.SEEK_SET, byte, int(not to_end), 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):  # the kernel may say either
            return False
        return True

    def _could_lock(self, byte: int) -> bool:
        if self._fd < 0:
            return False
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question)
        return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)

    # -- revocations -----------------------------------------------------------------------------

    def revoke(self, task_id: int) -> None:
        """Stop ranks from starting another piece of a copy for this task or an earlier one.

        Call it before an answer that gives slots back while a rank may be copying.
        """
        # A stopped rank cannot be asked, and one load between pieces costs nothing. It revokes
        # older open tasks too: that costs a recompute, after a missed deadline or a lost session
        # only.
        self.words[self._word] = max(self.words[self._word], task_id)

    def begin_session(self) -> None:
        """Clear all revocations: no copy of an earlier session is in flight, and ids recur."""
        for word in range(NUM_WORDS):
            self.words[word] = 0

    def close(self) -> None:
        """Release the lock and the memory. Idempotent."""
        if self._fd >= 0:  # a child may have got the descriptor past `forked`
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._lock(fcntl.F_UNLCK, _COUNTED_ON, to_end=True)
        self.forked()

    def forked(self) -> None:
        if self._fd >= 0:
            self.words.release()
            self._memory.close()  # it has its own descriptor, which also holds the lock
            os.close(self._fd)
            self._fd = -1


class Scratch:
    """One end of a session's scratch memory.

    A prompt of 128k tokens is a megabyte: writing it into shared memory costs a fraction of sending
    it through a socket. The scheduler makes the file and seals its size, so that it cannot be
    truncated while the server reads it; the server maps it read-only. If that is impossible
    (another pid namespace, TCP from another host), prompts go over the socket.
    """

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory
        self._view = memoryview(memory)

    @classmethod
    def create(cls, size: int) -> Scratch:
        """Make the memory; pages are allocated only when they are written to."""
        fd = os.memfd_create("flexcache-scratch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, mmap.mmap(fd, size))

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> Scratch | None:
        """Map another process's memory read-only; None if it is missing or not as expected."""
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("its size is not sealed")
            return cls(mine, mmap.mmap(mine, size, prot=mmap.PROT_READ))
        except (OSError, ValueError):  # no such file in memory, or a smaller one
            os.close(mine)
            return None

    def write(self, data: bytes | memoryview, more: bytes = b"") -> None:
        self._view[: len(data)] = data
        self._view[len(data) : len(data) + len(more)] = more

    def read(self, num_bytes: int) -> memoryview:
        """Return what was written. Raises `ValueError` for more bytes than the memory has."""
        if not 0 <= num_bytes <= len(self._view):
            raise ValueError(f"{num_bytes} bytes in a scratch memory of {len(self._view)}")
        return self._view[:num_bytes]

    def close(self) -> None:
        """Release the memory. Idempotent. A slice still in use keeps the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._memory.close()
