"""Block I/O with io_uring, through the `liburing` Python binding.

Two generations of the binding are in use: the Cython one (2024.5) and the Zig one (2026.3), whose
wheels need a CPU with AVX-512. They differ in names and in `writev`; `_Binding` evens that out.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any

from flexcache.errors import MissingDependencyError
from flexcache.storage.block_io.base import BlockIO, Completion, Direction, Request


class _Binding:
    """The handful of calls used here, whichever generation of the binding is installed."""

    def __init__(self) -> None:
        try:
            import liburing
        except ImportError as error:
            raise MissingDependencyError(
                f"io_uring needs the package liburing (extra flexcache[uring]): {error}"
            ) from None
        self.lib: Any = liburing
        self._is_cython = hasattr(liburing, "io_uring")
        if self._is_cython:
            self.new_ring, self.new_cqe = liburing.io_uring, liburing.io_uring_cqe
            self.new_iovec = liburing.iovec
        else:
            self.new_ring, self.new_cqe = liburing.Ring, liburing.Cqe
            self.new_iovec = liburing.Iovec

    def prepare(self, sqe: Any, request: Request, iovec: Any) -> None:
        if request.direction is Direction.READ:
            self.lib.io_uring_prep_readv(sqe, request.fd, iovec, request.offset)
        elif self._is_cython:
            count = len(request.pieces)
            self.lib.io_uring_prep_writev(sqe, request.fd, iovec, count, request.offset)
        else:
            self.lib.io_uring_prep_writev(sqe, request.fd, iovec, request.offset)


class UringBlockIO(BlockIO):
    """One ring, an eventfd that tells of completions, and the iovecs of what is in flight."""

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._binding = _Binding()
        self._lib = self._binding.lib
        self._ring = self._binding.new_ring()
        result = self._lib.io_uring_queue_init(1 << (depth - 1).bit_length(), self._ring)
        if result:
            raise OSError(-result, os.strerror(-result))
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lib.io_uring_register_eventfd(self._ring, self._event)
        self._cqe = self._binding.new_cqe()
        self._in_flight: dict[int, Any] = {}  # token -> iovec: alive until the kernel is done

    def submit(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        for request in requests:
            iovec = self._binding.new_iovec(list(request.pieces))
            self._in_flight[request.token] = (iovec, request)
            sqe = self._lib.io_uring_get_sqe(self._ring)
            self._binding.prepare(sqe, request, iovec)
            self._lib.io_uring_sqe_set_data64(sqe, request.token)
        self._lib.io_uring_submit(self._ring)

    def reap(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        reaped = []
        # One entry at a time: indexing further ones is unreliable in the 2026 binding.
        while self._peek():
            entry = self._cqe[0]
            completion = Completion(entry.user_data, entry.res)
            self._lib.io_uring_cq_advance(self._ring, 1)
            del self._in_flight[completion.token]
            reaped.append(completion)
        return reaped

    def _peek(self) -> bool:
        try:
            result = self._lib.io_uring_peek_cqe(self._ring, self._cqe)
        except BlockingIOError:
            return False
        if result and result != -errno.EAGAIN:
            raise OSError(-result, os.strerror(-result))
        return not result

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event < 0:
            return
        while self._in_flight:  # the kernel writes into our memory until they are done
            self._lib.io_uring_wait_cqe(self._ring, self._cqe)
            self.reap()
        self._lib.io_uring_queue_exit(self._ring)
        os.close(self._event)
        self._event = -1
