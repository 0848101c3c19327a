"""Block I/O with preadv/pwritev on threads: works on every file system."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from flexcache.storage.block_io.base import BlockIO, Completion, Direction, Request


class ThreadedBlockIO(BlockIO):
    """Uses one thread per I/O in flight; the system calls release the interpreter lock."""

    name = "threads"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._executor = ThreadPoolExecutor(depth, thread_name_prefix="flexcache-io")
        self._completed: deque[Completion] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._executor.submit(self._run, request)

    def _run(self, request: Request) -> None:
        call = os.preadv if request.direction is Direction.READ else os.pwritev
        try:
            result = call(request.fd, request.pieces, request.offset)
        except Exception as error:  # whatever it is, it belongs to this I/O
            result = -(getattr(error, "errno", None) or errno.EIO)
        self._completed.append(Completion(request.token, result))
        os.eventfd_write(self._event, 1)

    def reap(self) -> list[Completion]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        reaped = []
        while self._completed:
            reaped.append(self._completed.popleft())
        return reaped

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event >= 0:
            self._executor.shutdown(wait=True)
            os.close(self._event)
            self._event = -1
