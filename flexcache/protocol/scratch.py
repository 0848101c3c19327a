"""Shared memory in which a scheduler passes a prompt's keys or tokens to the server.

A prompt of 128k tokens is a megabyte: writing it into shared memory costs a fraction of sending it
through a socket. The scheduler makes the file and seals its size, so that it cannot be truncated
while the server reads it; the server maps it read-only. If that is impossible (another pid
namespace, TCP from another host), prompts go over the socket.
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
