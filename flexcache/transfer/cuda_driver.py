"""CUDA driver functions that copies need, called through ctypes directly on numpy arrays. Their
counterparts on AMD's GPUs are in `hip_driver`.

NVIDIA's Python bindings are unsuitable: their `cuMemcpyBatchAsync` takes lists, so each of an op's
thousands of addresses would first become a Python object. So is the runtime library: the signature
of its batched copy depends on the library that torch installed, and its errors persist until the
next call. A failed driver call leaves no error state.

Figures of an H200 are in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from flexcache.errors import MissingDependencyError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import Addresses, Runs

logger = logging.getLogger(__name__)


# Requesting this version gives the batched copy's signature below, whatever the driver's version.
_BATCH_COPY_VERSION = 12_080
_CAPTURE_MODE_RELAXED = 2
_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1
_REGISTER_PORTABLE_AND_MAPPED = 1 | 2
_STREAM_NON_BLOCKING = 1  # does not wait for the legacy default stream
_NO_INDEX = ctypes.c_size_t(-1).value


class SourceOrder(IntEnum):
    """When a copy may read its source (CUmemcpySrcAccessOrder). It always writes in stream order.

    ``ANY`` may read before the stream's earlier work has ended: correct only for bytes that are
    no longer written.
    """

    STREAM = 1
    ANY = 3


class _MemLocation(ctypes.Structure):
    """CUmemLocation: a hint that matters only for managed and pageable memory."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", _MemLocation),
        ("dst_location", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


class CudaDriver:
    """The driver's functions, with errors raised. Thread-safe; each thread binds its own context.

    Args:
        library: The loaded driver library, with its functions as attributes.
    """

    _SYMBOLS: ClassVar[Mapping[str, str]] = {
        name: f"{name}_v2"
        for name in (
            "cuDevicePrimaryCtxRelease", "cuStreamDestroy", "cuMemHostRegister",
            "cuMemHostGetDevicePointer",
        )
    }  # fmt: skip
    """What the library calls functions that it does not call by their names here."""

    def __init__(self, library: Any) -> None:
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._library = library
        self._load_own_functions()
        self._get_device = self._function("cuDeviceGet", pointer, ctypes.c_int)
        self._pci_address = self._function(
            "cuDeviceGetPCIBusId", pointer, ctypes.c_int, ctypes.c_int
        )
        self._priorities = self._function("cuCtxGetStreamPriorityRange", pointer, pointer)
        self._make_stream = self._function(
            "cuStreamCreateWithPriority", pointer, integer, ctypes.c_int
        )
        self._destroy_stream = self._function("cuStreamDestroy", pointer)
        self._set_capture_mode = self._function(
            "cuThreadExchangeStreamCaptureMode", pointer, prototype=ctypes.PYFUNCTYPE
        )
        self._register = self._function("cuMemHostRegister", pointer, size, integer)
        self._unregister = self._function("cuMemHostUnregister", pointer)
        self._device_pointer = self._function(
            "cuMemHostGetDevicePointer", pointer, pointer, integer
        )
        self._batch_copy = self._find_batch_copy()

    def _load_own_functions(self) -> None:
        """Load what has other arguments, or no counterpart, on other makers' GPUs."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._error_name = self._function("cuGetErrorName", ctypes.c_int, pointer)
        self._retain_context = self._function("cuDevicePrimaryCtxRetain", pointer, ctypes.c_int)
        self._release_context = self._function("cuDevicePrimaryCtxRelease", ctypes.c_int)
        self._set_context = self._function("cuCtxSetCurrent", pointer, prototype=ctypes.PYFUNCTYPE)
        self._copy_unlocked = self._function("cuMemcpyAsync", pointer, pointer, size, pointer)
        self._copy = self._function(
            "cuMemcpyAsync", pointer, pointer, size, pointer, prototype=ctypes.PYFUNCTYPE
        )

    @classmethod
    def load(cls) -> CudaDriver:
        """Load this machine's driver.

        Raises:
            MissingDependencyError: There is none.
        """
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise MissingDependencyError(
                f"KV tensors on cuda need the NVIDIA driver: {error}"
            ) from None

    @property
    def has_batch_copy(self) -> bool:
        """Whether one call can queue all copies of an op (driver 12.8 or later)."""
        return self._batch_copy is not None

    def pci_address(self, index: int) -> str:
        """Return the address of torch's device ``index`` on the bus, such as ``0000:3B:00.0``."""
        text = ctypes.create_string_buffer(32)
        code = self._pci_address(text, len(text), self._device(index))
        self._check("cuDeviceGetPCIBusId", code)
        return text.value.decode()

    def open_context(self, index: int) -> int:
        """Return the context that torch uses on its device ``index``; see `close_context`."""
        device, context = self._device(index), ctypes.c_void_p()
        code = self._retain_context(ctypes.byref(context), device)
        self._check("cuDevicePrimaryCtxRetain", code)
        return context.value or 0

    def close_context(self, index: int) -> None:
        self._check("cuDevicePrimaryCtxRelease", self._release_context(self._device(index)))

    def make_stream(self, *, is_urgent: bool) -> int:
        """Make a stream in the calling thread's context, of the highest or of normal priority."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        code = self._priorities(ctypes.byref(least), ctypes.byref(greatest))
        self._check("cuCtxGetStreamPriorityRange", code)
        priority = greatest.value if is_urgent else 0
        code = self._make_stream(ctypes.byref(stream), _STREAM_NON_BLOCKING, priority)
        self._check("cuStreamCreateWithPriority", code)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._check("cuStreamDestroy", self._destroy_stream(stream))

    def bind(self, context: int) -> None:
        """Make the calling thread work in the context, even while another captures a graph.

        A thread that never called the CUDA runtime has no context, and the functions below would
        fail. While the engine captures a graph, an allocation, registration or query by another
        thread invalidates the capture, unless that thread declared itself independent of it.

        It keeps the interpreter lock, as it comes before all copies: see `copy_singly`.
        """
        self._make_current(context)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._check("cuThreadExchangeStreamCaptureMode", self._set_capture_mode(ctypes.byref(mode)))

    def _make_current(self, context: int) -> None:
        self._check("cuCtxSetCurrent", self._set_context(context))

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory and make it accessible to devices."""
        self._check(
            "cuMemHostRegister", self._register(address, size, _REGISTER_PORTABLE_AND_MAPPED)
        )

    def unregister(self, address: int) -> None:
        """Undo `register`; copies that use the memory must have ended."""
        self._check("cuMemHostUnregister", self._unregister(address))

    def device_address(self, address: int) -> int:
        """Return the address at which the device sees registered host memory."""
        seen = ctypes.c_void_p()
        self._check(
            "cuMemHostGetDevicePointer", self._device_pointer(ctypes.byref(seen), address, 0)
        )
        return seen.value or 0

    def copy_singly(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int,
        *, is_pinned: bool,
    ) -> None:  # fmt: skip
        """Queue copies between host and device on a stream, one call for each.

        A call takes microseconds, unless it has to wait for unpinned memory. It keeps the
        interpreter lock where it does not wait: each time a busy thread gets the lock, it keeps it
        for up to a switch interval (5 ms).

        Raises:
            RuntimeError: A copy was refused. Those before it may be in flight.
        """
        copy = self._copy if is_pinned else self._copy_unlocked
        last = self._last_arguments(stream)
        runs = zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for destination, source, size in runs:
            if code := copy(destination, source, size, *last):
                self._check("cuMemcpyAsync", code)

    def copy_batch(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, order: SourceOrder,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue copies on a stream in one call, unordered among themselves; see `has_batch_copy`.

        Raises:
            RuntimeError: A copy was refused. Those before it may be in flight.
        """
        if not len(sizes):
            return  # the driver refuses an empty batch
        arrays = [np.ascontiguousarray(array, np.int64) for array in (destinations, sources, sizes)]
        attributes = _MemcpyAttributes(order, flags=_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        first_with_them = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(_NO_INDEX)
        code = self._batch_copy(
            *(array.ctypes.data for array in arrays),
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first_with_them),
            1,
            ctypes.byref(failed),
            stream,
        )
        which = "" if failed.value == _NO_INDEX else f", number {failed.value}"
        self._check(f"cuMemcpyBatchAsync of {len(sizes)} copies{which}", code)

    def _last_arguments(self, stream: int) -> tuple[int, ...]:
        """Return the arguments of a single copy behind its size."""
        return (stream,)

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._check("cuDeviceGet", self._get_device(ctypes.byref(device), index))
        return device.value

    def _function(self, name: str, *arguments: Any, prototype: Any = ctypes.CFUNCTYPE) -> Any:
        symbol = getattr(self._library, self._SYMBOLS.get(name, name))
        address = ctypes.cast(symbol, ctypes.c_void_p).value
        return prototype(ctypes.c_int, *arguments)(address or 0)

    def _find_batch_copy(self) -> Any:
        """Find `cuMemcpyBatchAsync` as of 12.8, which 13 still has; later ones lost ``failIdx``."""
        if not hasattr(self._library, "cuGetProcAddress_v2"):  # a driver before 12.0
            return None
        pointer = ctypes.c_void_p
        find = self._function(
            "cuGetProcAddress_v2",
            ctypes.c_char_p, pointer, ctypes.c_int, ctypes.c_uint64, pointer,
        )  # fmt: skip
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = find(
            b"cuMemcpyBatchAsync",
            ctypes.byref(found),
            _BATCH_COPY_VERSION,
            0,
            ctypes.byref(status),
        )
        if code or not found.value:
            return None
        return batch_function(found.value)

    def _check(self, call: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{call} failed: {self._name_of(code)} ({code})")

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(name))
        return (name.value or b"an unknown error").decode()


def batch_function(address: int) -> Any:
    """Return the batched copy at an address, with ``failIdx``."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)


# ------------------------------------------------------------------------------------------------
# Page-locking of the host pool: without it, the device cannot copy directly and copies are slow.
#
# The pool is pinned when a rank attaches, a piece at a time, since the driver blocks other calls
# while it registers one. Where it cannot be pinned, or not all of it, it is used as it is: copies
# are correct but several times slower, and the planner, which measures them, then loads only what
# still pays.
#
#     | piece | piece | given back | never pinned ... |
#                     end


class PinnedSegment:
    """A mapped segment as the device sees it. The context must be bound; see `CudaDriver.bind`.

    If the constructor raises, as it does only if ``after_each_step`` does, nothing stays pinned.

    Args:
        step: Approximate number of bytes to pin at a time.
        after_each_step: Called after each such piece.

    Attributes:
        starts: Start of each registered piece, and of the rest if there is one; empty if nothing is
            pinned. A copy must not span two of them, and no block does.
        end: Address up to which the segment is pinned.
        is_whole: Whether all of it is pinned.
        is_partial: Whether some of it is pinned and some is not.
        is_reachable: Whether a kernel may use the pinned part's own addresses.
    """

    def __init__(
        self, driver: CudaDriver, segment: HostSegment, step: int,
        after_each_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._driver = driver
        self._registered: list[int] = []
        self.end = segment.address
        self.is_reachable = False
        refusal: RuntimeError | None = None
        try:
            refusal = self._pin(segment, step, after_each_step)
        except BaseException:
            self.close()
            raise
        if self._registered:
            step = _whole_blocks(segment, step)
            self.end += min(len(self._registered) * step, segment.size)
        self.is_whole = self.end == segment.address + segment.size
        self.is_partial = bool(self._registered) and not self.is_whole
        starts = [*self._registered, self.end] if self.is_partial else self._registered
        self.starts: Addresses = np.array(starts, np.int64)
        self.is_reachable = bool(self._registered) and all(map(self._is_seen, self._registered))
        if refusal is not None:
            log_event(
                logger,
                logging.WARNING,
                "host_pool_partly_pinned" if self._registered else "host_pool_not_pinned",
                size_gb=segment.size / 1e9,
                pinned_gb=(self.end - segment.address) / 1e9,
                error=refusal,
                effect="copies of the other blocks are slow"
                if self._registered
                else "copies are slow",
                remedy="lower cpu_cache_gb; or check the container's memory limit (cgroup), the "
                "IOMMU settings, and on WSL how much memory Windows allows to be pinned",
            )

    def close(self) -> None:
        """Unpin. Copies must have ended. Never raises: failures are logged. Idempotent."""
        registered, self._registered = self._registered, []
        self.starts = np.empty(0, np.int64)
        self.is_reachable = False
        self._unpin(registered)

    def split(self, runs: Runs, kind: OpKind) -> tuple[Runs, Runs]:
        """Split off the copies of what is not pinned, if only a part is."""
        if not self.is_partial:
            return runs, runs.part(slice(0))
        on_host = runs.sources if kind is OpKind.H2D else runs.destinations
        return runs.part(on_host < self.end), runs.part(on_host >= self.end)

    def _unpin(self, starts: Sequence[int]) -> None:
        errors = []
        for start in starts:
            try:
                self._driver.unregister(start)
            except RuntimeError as error:  # go on with the other pieces
                errors.append(error)
        if errors:
            log_event(
                logger, logging.WARNING, "host_pool_still_pinned",
                pieces=f"{len(errors)} of {len(starts)}", error=errors[0],
                effect="its memory is not freed until this process ends",
            )  # fmt: skip

    def _pin(
        self, segment: HostSegment, step: int, after_each_step: Callable[[], None]
    ) -> RuntimeError | None:
        """Pin piece by piece; return why a piece was refused, if one was.

        The piece before it is then given back, since the engine needs memory that it can pin, too.
        """
        step = _whole_blocks(segment, step)
        end = segment.address + segment.size
        for start in range(segment.address, end, step):
            try:
                self._driver.register(start, min(step, end - start))
            except RuntimeError as error:
                self._unpin(self._registered[-1:])
                del self._registered[-1:]
                return error
            self._registered.append(start)
            after_each_step()
        return None

    def _is_seen(self, start: int) -> bool:
        """Whether the device sees registered memory under the same address."""
        try:
            return self._driver.device_address(start) == start
        except RuntimeError:  # the device cannot map it; the copy engine can still copy it
            return False


def _whole_blocks(segment: HostSegment, step: int) -> int:
    """Round the step to whole blocks and whole pages: no page can be registered twice."""
    unit = math.lcm(segment.stride, mmap.PAGESIZE)
    return max(step // unit, 1) * unit
