"""Block I/O with io_uring, through the `liburing` Python binding.

Two generations of the binding are in use: the Cython one (2024.5) and the Zig one (2026.3), whose
wheels need a CPU with AVX-512. They differ in names, in `writev`, and in how they report an error:
as a negative number, or as an exception when it is read. `_Binding` hides the differences.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flexcache.errors import MissingDependencyError
from flexcache.storage.block_io.base import BlockIO, Completion, Direction, Request


def _import_binding() -> Any:
    """Import the binding, one process at a time.

    The Cython one keeps a list of its modules in a file of its package. Processes that renew it at
    the same time remove it under each other's hands.
    """
    with contextlib.ExitStack() as stack:
        spec = None if "liburing" in sys.modules else importlib.util.find_spec("liburing")
        if spec is not None and spec.origin is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(stack.enter_context(open(spec.origin, "rb")), fcntl.LOCK_EX)
        import liburing
    return liburing


class _Binding:
    """The few calls used here, for either generation of the binding."""

    def __init__(self) -> None:
        try:
            liburing = _import_binding()
        except ImportError as error:
            raise MissingDependencyError(
                f"io_uring needs the package liburing (extra uring): {error}"
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

    def peek(self, ring: Any, cqe: Any) -> int:
        """Point ``cqe`` to the oldest completion; return -EAGAIN if there is none."""
        return _number(lambda: self.lib.io_uring_peek_cqe(ring, cqe))

    def result(self, entry: Any) -> int:
        """Return the bytes moved, or a negated errno."""
        return _number(lambda: entry.res)


def _number(read: Callable[[], int]) -> int:
    """Return what the binding returns, or the negated errno of what it raises instead."""
    try:
        return read()
    except Exception as error:  # whatever it is, it belongs to one I/O
        return -(getattr(error, "errno", None) or errno.EIO)


class UringBlockIO(BlockIO):
    """One ring, an eventfd that signals completions, and the iovecs of requests in flight."""

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._binding = _Binding()
        self._lib = self._binding.lib
        self._ring = self._binding.new_ring()
        self._lib.io_uring_queue_init(1 << (depth - 1).bit_length(), self._ring)
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
        while self._lib.io_uring_sq_ready(self._ring):
            self._lib.io_uring_submit(self._ring)  # stops after a request that the kernel refuses

    def reap(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        reaped = []
        # One entry at a time: indexing beyond the first is unreliable in the 2026 binding.
        while self._peek():
            entry = self._cqe[0]
            completion = Completion(entry.user_data, self._binding.result(entry))
            self._lib.io_uring_cq_advance(self._ring, 1)
            del self._in_flight[completion.token]
            reaped.append(completion)
        return reaped

    def _peek(self) -> bool:
        result = self._binding.peek(self._ring, self._cqe)
        if result and result != -errno.EAGAIN:
            raise OSError(-result, os.strerror(-result))
        return not result

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event < 0:
            return
        completions = select.poll()  # waiting in the binding would hold the interpreter lock
        completions.register(self._event, select.POLLIN)
        while self._in_flight:  # the kernel writes to our memory until they are done
            completions.poll()
            self.reap()
        self._lib.io_uring_queue_exit(self._ring)
        os.close(self._event)
        self._event = -1
