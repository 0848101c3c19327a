"""Functions of NVIDIA's libcufile (GPUDirect Storage) that file I/O on device memory needs.

Only the synchronous ones: they are the ones in wide use, and return when the bytes have moved. The
batched and the stream-ordered ones depend on more of the platform, and their errors come later. The
library is part of CUDA, and optional. In its compatibility mode (without kernel support for the
file system) it copies through host memory: correct, but no faster than without it.

Never run on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any

from flexcache.errors import MissingDependencyError
from flexcache.logs import log_event
from flexcache.storage.block_io import Direction
from flexcache.transfer.direct.ops import BAD_BLOCK_ERRORS, Transfer

logger = logging.getLogger(__name__)

_HANDLE_TYPE_OPAQUE_FD = 1
_DRIVER_ALREADY_OPEN = 5026
_FIRST_ERROR = 5001
_PATIENCE_S = 20.0
_POSIX_MODE = 1 << 2  # CU_FILE_POSIX_IO_MODE, among the flags of control
_ERRORS = {
    5001: "nvidia-fs is not loaded, and compatibility mode is not allowed",
    5002: "invalid property",
    5007: "this platform is not supported",
    5008: "this file system is not supported",
    5009: "this GPU is not supported",
    5011: "the CUDA driver failed",
    5013: "this is not device memory",
    5014: "beyond the end of the allocation",
    5015: "another CUDA context is current",
    5018: "not a regular file",
    5019: "the file is not open with O_DIRECT",
    5022: "invalid arguments",
    5023: "the memory is already registered",
    5025: "permission denied",
    5027: "the file is not registered",
    5028: "the file is already registered",
    5030: "internal error",
    5033: "the driver could not be initialized",
    5034: "disabled by configuration",
    5036: "not enough GPU memory can be pinned",
}


class _Error(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]


class _FileHandle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle", _FileHandle),
        ("fs_ops", ctypes.c_void_p),
    ]


class _Properties(ctypes.Structure):
    """CUfileDrvProps_t, and room for what later versions may put behind it."""

    _fields_ = [
        ("version", ctypes.c_uint * 2),
        ("sizes", ctypes.c_size_t * 2),
        ("file_systems", ctypes.c_uint),
        ("control", ctypes.c_uint),
        ("rest", ctypes.c_uint * 64),
    ]


class CuFile:
    """The library's functions, with errors raised. Thread-safe.

    A thread that calls them has the context of the memory that it names.

    Args:
        library: The loaded library, with its functions as attributes.
    """

    def __init__(self, library: Any) -> None:
        pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self._library = library
        self._open = self._function("cuFileDriverOpen", _Error)
        self._properties = self._function("cuFileDriverGetProperties", _Error, pointer)
        self._register_file = self._function("cuFileHandleRegister", _Error, pointer, pointer)
        self._deregister_file = self._function("cuFileHandleDeregister", None, pointer)
        self._register_memory = self._function(
            "cuFileBufRegister", _Error, pointer, size, ctypes.c_int
        )
        self._deregister_memory = self._function("cuFileBufDeregister", _Error, pointer)
        moves = (ctypes.c_ssize_t, pointer, pointer, size, offset, offset)
        self._read = self._function("cuFileRead", *moves)
        self._write = self._function("cuFileWrite", *moves)

    @classmethod
    def load(cls) -> CuFile:
        """Load this machine's library.

        Raises:
            MissingDependencyError: There is none.
        """
        try:
            return cls(ctypes.CDLL("libcufile.so.0", use_errno=True))
        except OSError as error:
            raise MissingDependencyError(f"libcufile cannot be loaded: {error}") from None

    def open_driver(self, patience_s: float = _PATIENCE_S) -> None:
        """Connect this process to the kernel's part.

        There is no call that undoes it: others in this process may use the library too. On a
        thread of its own: without the CUDA driver, the library's version 1.19 never returns.

        Raises:
            RuntimeError: The library refused, or did not answer within ``patience_s``.
        """
        answers: list[_Error] = []
        opening = Thread(target=lambda: answers.append(self._open()), daemon=True)
        opening.start()
        opening.join(patience_s)
        if not answers:
            raise RuntimeError(f"cuFileDriverOpen did not answer within {patience_s:.0f} s")
        if answers[0].err != _DRIVER_ALREADY_OPEN:
            _check("cuFileDriverOpen", answers[0])

    def why_through_host(self) -> str:
        """Return why the library copies through host memory, its compatibility mode; "" if it does
        not. The driver must be open.

        It answers for the machine. Whether one file system is supported it does not say, and uses
        that mode without a word; such a path is found to be slow.
        """
        # Neither forbidden nor changed: its settings are the whole process's, and the engine may
        # use the library too. It is merely no faster than DRAM, which is timed.
        found = _Properties()
        error = self._properties(ctypes.byref(found))
        if error.err:
            return _describe("cuFileDriverGetProperties", error.err, error.cu_err)
        if found.control & _POSIX_MODE:
            return "cuFile is configured for plain file calls (posix_io_mode)"
        if not found.file_systems:
            return (
                "cuFile is in its compatibility mode: nvidia-fs is not loaded, and the kernel has "
                "no other way between files and this GPU"
            )
        return ""

    def register_file(self, fd: int) -> int:
        """Return a handle for a file that is open with O_DIRECT; see `deregister_file`."""
        handle = ctypes.c_void_p()
        descriptor = _Descriptor(_HANDLE_TYPE_OPAQUE_FD, _FileHandle(fd=fd))
        error = self._register_file(ctypes.byref(handle), ctypes.byref(descriptor))
        _check("cuFileHandleRegister", error)
        return handle.value or 0

    def deregister_file(self, handle: int) -> None:
        self._deregister_file(handle)

    def register_memory(self, address: int, size: int) -> None:
        """Pin device memory for transfers that go directly to and from it."""
        _check("cuFileBufRegister", self._register_memory(address, size, 0))

    def deregister_memory(self, address: int) -> None:
        """Undo `register_memory`; I/O that uses the memory must have ended."""
        _check("cuFileBufDeregister", self._deregister_memory(address))

    def read(self, handle: int, base: int, size: int, file_offset: int, base_offset: int) -> int:
        """Read into device memory; return the number of bytes read once they are there.

        Args:
            base: Where the memory was registered.
            base_offset: From there to the first byte. This and the others in whole pages: what
                is not goes through memory of the library's own.

        Raises:
            OSError: The file could not be read.
            RuntimeError: The library failed.
        """
        moved = self._read(handle, base, size, file_offset, base_offset)
        return _check_moved("cuFileRead", moved)

    def write(self, handle: int, base: int, size: int, file_offset: int, base_offset: int) -> int:
        """Write from device memory; as `read`."""
        moved = self._write(handle, base, size, file_offset, base_offset)
        return _check_moved("cuFileWrite", moved)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(result, *arguments, use_errno=True)(address or 0)


def _check(call: str, error: _Error) -> None:
    if error.err:
        raise RuntimeError(_describe(call, error.err, error.cu_err))


def _check_moved(call: str, moved: int) -> int:
    if moved >= 0:
        return moved
    if -moved < _FIRST_ERROR:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    raise RuntimeError(_describe(call, -moved))


def _describe(call: str, code: int, driver_code: int = 0) -> str:
    of_driver = f", CUDA error {driver_code}" if driver_code else ""
    return f"{call} failed: {_ERRORS.get(code, 'an unknown error')} ({code}{of_driver})"


# ------------------------------------------------------------------------------------------------
# DeviceFiles: files and a piece of GPU memory between which whole pages move, on threads.
#
# cuFile's calls return when the bytes have moved, without the interpreter lock, so each I/O in
# flight has a thread. The memory is registered, so the bytes go directly, if files and GPU allow
# it.


class DeviceFiles:
    """Used by one thread. What it is given stays alive until `close`.

    Args:
        fds: Files, open with O_DIRECT.
        address: Where the memory begins, at a page.
        size: Of the memory.
        depth: Most I/Os in flight.
        bind: Gives a thread the context of the memory. Called by the constructor's thread before.

    Attributes:
        through_host: As `DirectIO.through_host`.

    Raises:
        RuntimeError: The library cannot use the files or the memory. Nothing stays registered.
    """

    def __init__(
        self, library: CuFile, fds: Sequence[int], address: int, size: int, depth: int,
        bind: Callable[[], None],
    ) -> None:  # fmt: skip
        self._library = library
        self._address = address
        self._ended: deque[Transfer] = deque()
        self._closing: list[Callable[[], object]] = []
        self._handles: dict[int, int] = {}
        try:
            library.open_driver()
            self.through_host = library.why_through_host()
            library.register_memory(address, size)
            self._closing.append(partial(library.deregister_memory, address))
            for fd in fds:
                handle = self._handles[fd] = library.register_file(fd)
                self._closing.append(partial(library.deregister_file, handle))
        except BaseException:
            self.close()
            raise
        self._bind = bind
        self._threads = ThreadPoolExecutor(depth, "flexcache-cufile")
        self._closing.append(partial(self._threads.shutdown, wait=True))

    def start(self, transfer: Transfer) -> None:
        """Start to move a transfer's part of its file, from or to its place in the memory."""
        self._threads.submit(self._run, transfer)

    def take_ended(self) -> list[Transfer]:
        """Return what has ended since the last call: so far, in the memory."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def move(self, transfer: Transfer) -> None:
        """Move it now."""
        is_read = transfer.direction is Direction.READ
        call = self._library.read if is_read else self._library.write
        handle, length = self._handles[transfer.fd], transfer.length
        try:
            moved = call(handle, self._address, length, transfer.offset, transfer.place)
        except OSError as error:
            transfer.fail(error.strerror or str(error), error.errno in BAD_BLOCK_ERRORS)
        except Exception as error:  # whatever it is, it belongs to this transfer
            transfer.fail(str(error))
        else:
            if moved != length:
                transfer.fail(f"{moved} of {length} bytes moved", is_bad=True)

    def _run(self, transfer: Transfer) -> None:
        try:
            self._bind()  # by each I/O: an initializer that raises would end no I/O
        except Exception as error:  # a lost device, say
            transfer.fail(str(error))
        else:
            self.move(transfer)
        self._ended.append(transfer)

    def close(self) -> None:
        """Wait for I/O in flight and release everything. Never raises. Idempotent."""
        while self._closing:
            step = self._closing.pop()
            try:
                step()
            except Exception as error:  # a lost device, say; the remaining steps still run
                log_event(logger, logging.WARNING, "device_files_not_closed_cleanly", error=error)
