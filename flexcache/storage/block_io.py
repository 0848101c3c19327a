"""Block I/O on files: one contract, implemented with io_uring and with threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import select
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event

logger = logging.getLogger(__name__)


class Direction(Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Request:
    """One vectored I/O: consecutive ``pieces``, from or to ``offset`` of the file.

    The pieces must stay alive and, for a write, unchanged until the completion, which has the same
    ``token``: whatever the caller knows the request by.
    """

    token: Any
    direction: Direction
    fd: int
    offset: int
    pieces: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of an I/O: bytes moved, or a negated errno. Short counts are passed on unchanged."""

    token: Any
    result: int

    def problem(self, num_bytes: int) -> str | None:
        """Return why it did not move this many bytes; None if it did."""
        if self.result < 0:
            return os.strerror(-self.result)
        return None if self.result == num_bytes else f"{self.result} of {num_bytes} bytes moved"


class BlockIO(ABC):
    """Runs up to ``depth`` vectored I/Os at once, for one thread.

    Every submitted request yields exactly one completion. `fileno` becomes readable when there is
    something to reap, so that the owner can wait for I/O and for messages in one place.
    """

    name: str
    depth: int

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Start I/Os. The caller keeps no more than ``depth`` unfinished."""

    @abstractmethod
    def reap(self) -> list[Completion]:
        """Return what has completed since the last call. Never blocks."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when `reap` has something to return."""

    @abstractmethod
    def close(self) -> None:
        """Wait for unfinished I/O and release all resources. Idempotent."""


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


# ------------------------------------------------------------------------------------------------
# Block I/O with io_uring, through the `liburing` Python binding.
#
# Two generations of the binding are in use: the Cython one (2024.5) and the Zig one (2026.3), whose
# wheels need a CPU with AVX-512. They differ in names, in `writev`, and in how they report an
# error: as a negative number, or as an exception when it is read. `_Binding` hides the differences.


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
        self._numbers = count()
        self._in_flight: dict[int, tuple[Request, Any]] = {}
        """Requests and their iovecs, which stay alive until the kernel is done with them."""

    def submit(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        for request in requests:
            iovec = self._binding.new_iovec(list(request.pieces))
            number = next(self._numbers)
            self._in_flight[number] = (request, iovec)
            sqe = self._lib.io_uring_get_sqe(self._ring)
            self._binding.prepare(sqe, request, iovec)
            self._lib.io_uring_sqe_set_data64(sqe, number)
        while self._lib.io_uring_sq_ready(self._ring):
            self._lib.io_uring_submit(self._ring)  # stops after a request that the kernel refuses

    def reap(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        reaped = []
        # One entry at a time: indexing beyond the first is unreliable in the 2026 binding.
        while self._peek():
            entry = self._cqe[0]
            number, result = entry.user_data, self._binding.result(entry)
            self._lib.io_uring_cq_advance(self._ring, 1)
            request, _ = self._in_flight.pop(number)
            reaped.append(Completion(request.token, result))
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


_PROBE = """
import errno, resource, select, tempfile
from flexcache.storage.block_io import Direction, Request
from flexcache.storage.block_io import UringBlockIO
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
io, page, results = UringBlockIO(2), [memoryview(bytearray(16))], {}
with tempfile.TemporaryFile() as file:
    io.submit([
        Request(1, Direction.WRITE, file.fileno(), 0, page), Request(2, Direction.READ, -1, 0, page)
    ])
    while len(results) < 2:
        select.select([io.fileno()], [], [])
        results.update((completion.token, completion.result) for completion in io.reap())
    io.close()
if results != {1: 16, 2: -errno.EBADF}:
    raise RuntimeError(f"the liburing binding reports wrong results: {results}")
"""


def io_uring_problem() -> str | None:
    """Return why io_uring cannot be used here; None if it can.

    Tries it in a child process, because a binding built for another CPU dies by a signal (SIGILL
    without AVX-512). Nothing else in FlexCache imports the binding before this has succeeded.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return "the probe did not answer"
    if probe.returncode == 0:
        return None
    if probe.returncode < 0:
        name = signal.Signals(-probe.returncode).name
        return f"the liburing binding dies by {name} on this CPU; liburing==2024.5.3 builds for it"
    return probe.stderr.strip().rsplit("\n", 1)[-1] or f"the probe exited with {probe.returncode}"


QUEUE_DEPTH = 32
"""Block I/Os in flight: more gain nothing on NVMe, and each holds a buffer back."""


def open_block_io(engine: str, depth: int) -> BlockIO:
    """Open ``io_uring``, ``threads``, or for ``auto`` the first of them that works here."""
    if engine == "threads":
        return ThreadedBlockIO(depth)
    problem = io_uring_problem()
    if problem is None:
        return UringBlockIO(depth)
    if engine == "io_uring":
        if problem.startswith(MissingDependencyError.__module__):
            raise MissingDependencyError(problem)
        raise ConfigError(f"io_engine = 'io_uring': cannot be used here: {problem}")
    log_event(
        logger, logging.WARNING, "io_uring_unusable", problem=problem, effect="I/O runs on threads",
        remedy="run `flexcache doctor` for details",
    )  # fmt: skip
    return ThreadedBlockIO(depth)
