"""A piece of memory in which a scheduler shows the server a prompt's keys or tokens.

A prompt of 128k tokens is a megabyte: to write it into shared memory costs a fraction of sending it
through a socket. The scheduler makes the file and seals its size, so that it cannot be cut off
under the server's hands; the server maps it for reading. Where that cannot be (other pid namespace,
TCP from elsewhere), prompts go over the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Scratch:
    """One end of a session's scratch memory."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory
        self._view = memoryview(memory)

    @classmethod
    def create(cls, size: int) -> Scratch:
        """Make it; memory is taken only where something is written."""
        fd = os.memfd_create("flexcache-scratch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, mmap.mmap(fd, size))

    @classmethod
    def open(cls, pid: int, fd: int, size: int) -> Scratch | None:
        """Map another process's for reading; None if it is not there or not what it should be."""
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
        """What was written. Raises `ValueError` if there cannot be as much."""
        if not 0 <= num_bytes <= len(self._view):
            raise ValueError(f"{num_bytes} bytes in a scratch memory of {len(self._view)}")
        return self._view[:num_bytes]

    def close(self) -> None:
        """Idempotent. A slice that is still in use keeps the mapping until it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._memory.close()
