"""A CUDA driver in host memory: real C functions that check their arguments and copy bytes.

Its signatures are written down here again, from the driver's header, so that what `CudaDriver`
passes is read as the driver would read it. Each thread has a current context of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_SUPPORTED = 801
NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    700: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    801: b"CUDA_ERROR_NOT_SUPPORTED",
}
CONTEXT = 0x5EED_0000_0001  # of device 0, does not fit into 32 bits; those of others follow
STREAM = 0x7F00_0000_1230
STREAMS = (STREAM, STREAM + 8)
NO_INDEX = 2**64 - 1


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("srcAccessOrder", c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", c_uint),
    ]


@dataclass
class FakeCuda:
    """The driver library. Its attributes are C functions.

    Attributes:
        version: Without the batched copy before 12080.
        most_registered: Bytes that may be registered at once.
        mapping_offset: How far off the device sees registered memory.
        refused_copy: Index of a copy in a batch that is refused.
        refuses: What a function answers instead of doing its work.
        corrupts: Functions that report success and copy wrong bytes, with the direction.
        corrupts_from: The smallest batch that is copied wrong.
        is_lazy: Whether copies are made only when their stream is waited for.
        stuck: Addresses that are not unregistered.
        page_bytes: No two registrations may share a page, counted from ``page_origin``.
        is_lost: Whether all calls fail, as after an illegal address.
        streams: The device of each stream.
        contexts: Devices of which this process has the primary context.
        device_memory: Addresses and sizes.
    """

    version: int = 13_000
    most_registered: int = 1 << 60
    mapping_offset: int = 0
    refused_copy: int | None = None
    refuses: dict[str, int] = field(default_factory=dict)
    corrupts: set[tuple[str, str]] = field(default_factory=set)
    corrupts_from: int = 1
    is_lazy: bool = False
    stuck: set[int] = field(default_factory=set)
    page_bytes: int = 4096
    page_origin: int = 0
    is_lost: bool = False
    streams: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    contexts: set[int] = field(default_factory=set)
    device_memory: list[tuple[int, int]] = field(default_factory=list)
    capture_mode: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    batches: list[tuple[int, int, int]] = field(default_factory=list)  # copies, order, flags
    batch_streams: list[int] = field(default_factory=list)
    num_single_copies: int = 0
    _queued: dict[int, list[tuple[str, int, int, int, int]]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _thread: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.batch_copy = self._c(
            "cuMemcpyBatchAsync", self._batch_copy,
            POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t,
            POINTER(Attributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p,
        )  # fmt: skip
        self.cuGetProcAddress_v2 = self._c(
            "cuGetProcAddress",
            self._find,
            c_char_p,
            POINTER(c_void_p),
            c_int,
            c_uint64,
            POINTER(c_int),
        )
        self.cuGetErrorName = self._c("cuGetErrorName", self._name_error, c_int, POINTER(c_char_p))
        self.cuStreamGetCtx = self._c(
            "cuStreamGetCtx", self._context_of, c_void_p, POINTER(c_void_p)
        )
        self.cuCtxSetCurrent = self._c("cuCtxSetCurrent", self._set_context, c_void_p)
        self.cuThreadExchangeStreamCaptureMode = self._c(
            "cuThreadExchangeStreamCaptureMode", self._exchange_mode, POINTER(c_int)
        )
        self.cuMemHostRegister_v2 = self._c(
            "cuMemHostRegister", self._register, c_void_p, c_size_t, c_uint
        )
        self.cuMemHostUnregister = self._c("cuMemHostUnregister", self._unregister, c_void_p)
        self.cuMemHostGetDevicePointer_v2 = self._c(
            "cuMemHostGetDevicePointer", self._device_pointer, POINTER(c_uint64), c_void_p, c_uint
        )
        self.cuMemcpyAsync = self._c(
            "cuMemcpyAsync", self._copy, c_uint64, c_uint64, c_size_t, c_void_p
        )

        if self.version < 12_000:
            del self.cuGetProcAddress_v2

    def _c(self, name: str, function: Callable[..., int], *arguments: Any) -> Any:
        def call(*values: Any) -> int:
            if self.is_lost and name != "cuGetErrorName":
                return ILLEGAL_ADDRESS
            return self.refuses.get(name) or function(*values)

        made = ctypes.CFUNCTYPE(c_int, *arguments)(call)
        self._kept.append(made)
        return made

    @property
    def context(self) -> int:
        """Context of the calling thread; 0 for none."""
        return getattr(self._thread, "context", 0)

    @property
    def current_device(self) -> int:
        """Device of the calling thread's context, or else the first, as in the runtime."""
        return self.context - CONTEXT if self.context else 0

    def set_device(self, device: int) -> None:
        """Set the device as the runtime does since CUDA 12, which creates the context."""
        self.contexts.add(device)
        self._thread.context = CONTEXT + device

    def _find(self, name: bytes, found: Any, version: int, flags: int, status: Any) -> int:
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12_080, 0)
        if self.version < 12_080:
            found[0], status[0] = None, 2  # success all the same: the status says it
            return 0
        found[0], status[0] = ctypes.cast(self.batch_copy, c_void_p).value, 0
        return 0

    def _name_error(self, code: int, name: Any) -> int:
        name[0] = NAMES.get(code)
        return 0 if code in NAMES else INVALID_VALUE

    def _context_of(self, stream: int, context: Any) -> int:
        context[0] = CONTEXT + self.streams[stream]
        return 0

    def _set_context(self, context: int) -> int:
        self._thread.context = context
        return 0

    def _exchange_mode(self, mode: Any) -> int:
        mode[0], self.capture_mode = self.capture_mode, mode[0]
        return 0

    def _register(self, address: int, size: int, flags: int) -> int:
        if not self.context:
            return INVALID_CONTEXT
        if flags != 3:
            return INVALID_VALUE
        if any(self._share_a_page(address, size, *other) for other in self.registered.items()):
            return ALREADY_REGISTERED
        if sum(self.registered.values()) + size > self.most_registered:
            return OUT_OF_MEMORY
        self.registered[address] = size
        return 0

    def _share_a_page(self, address: int, size: int, other: int, other_size: int) -> bool:
        def pages(start: int, size: int) -> tuple[int, int]:
            start -= self.page_origin
            return start // self.page_bytes, (start + size - 1) // self.page_bytes

        (first, last), (other_first, other_last) = pages(address, size), pages(other, other_size)
        return first <= other_last and other_first <= last

    def _unregister(self, address: int) -> int:
        if address in self.stuck:
            return INVALID_VALUE
        return 0 if self.registered.pop(address, 0) else INVALID_VALUE

    def _device_pointer(self, seen: Any, address: int, flags: int) -> int:
        if address not in self.registered or flags:
            return INVALID_VALUE
        seen[0] = address + self.mapping_offset
        return 0

    def _copy(self, destination: int, source: int, size: int, stream: int) -> int:
        if stream not in self.streams:
            return INVALID_VALUE
        if self.context != CONTEXT + self.streams[stream]:
            return INVALID_CONTEXT
        self.num_single_copies += 1
        self._move("cuMemcpyAsync", 1, destination, source, size, stream)
        return 0

    def land(self, stream: int) -> None:
        """Execute the copies that were queued on the stream."""
        for name, count, destination, source, size in self._queued.pop(stream, []):
            self._copy_bytes(name, count, destination, source, size)

    def _move(
        self, name: str, count: int, destination: int, source: int, size: int, stream: int
    ) -> None:
        self._queued.setdefault(stream, []).append((name, count, destination, source, size))
        if not self.is_lazy:
            self.land(stream)

    def _copy_bytes(self, name: str, count: int, destination: int, source: int, size: int) -> None:
        to_device = any(a <= destination < a + n for a, n in self.device_memory)
        ctypes.memmove(destination, source, size)
        if (name, "H2D" if to_device else "D2H") in self.corrupts and count >= self.corrupts_from:
            last = c_char.from_address(destination + size - 1)
            last.value = bytes([last.value[0] ^ 1])

    def _batch_copy(
        self, to: Any, source: Any, sizes: Any, count: int, attributes: Any, indices: Any,
        num_attributes: int, failed: Any, stream: int,
    ) -> int:  # fmt: skip
        failed[0] = NO_INDEX
        if self.context != CONTEXT + self.streams.get(stream, 0):
            return INVALID_CONTEXT
        if stream not in self.streams or not 1 <= num_attributes <= count or indices[0] != 0:
            return INVALID_VALUE
        hints = (attributes[0].srcLocHint, attributes[0].dstLocHint)
        assert all((hint.type, hint.id) == (0, 0) for hint in hints)
        if self.refused_copy is not None and self.refused_copy < count:
            failed[0] = self.refused_copy
            return INVALID_VALUE
        for i in range(count):
            self._move("cuMemcpyBatchAsync", count, to[i], source[i], sizes[i], stream)
        self.batch_streams.append(stream)
        self.batches.append((count, attributes[0].srcAccessOrder, attributes[0].flags))
        return 0
