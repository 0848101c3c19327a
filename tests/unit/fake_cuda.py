"""A CUDA driver in host memory: real C functions that check their arguments and copy bytes.

Its signatures are written down here anew, from the driver's header, so that what `CudaDriver`
passes is read as the driver would read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}
CONTEXT = 0x5EED_0000_0001  # does not fit into 32 bits
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
    """

    version: int = 13_000
    most_registered: int = 1 << 60
    mapping_offset: int = 0
    refused_copy: int | None = None
    context: int = 0
    capture_mode: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    batches: list[tuple[int, int, int]] = field(default_factory=list)  # copies, order, flags
    batch_streams: list[int] = field(default_factory=list)
    num_single_copies: int = 0
    _kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch_copy = self._c(
            self._batch_copy,
            POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t,
            POINTER(Attributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p,
        )  # fmt: skip
        self.cuGetProcAddress_v2 = self._c(
            self._find, c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)
        )
        self.cuGetErrorName = self._c(self._name_error, c_int, POINTER(c_char_p))
        self.cuStreamGetCtx = self._c(self._context_of, c_void_p, POINTER(c_void_p))
        self.cuCtxSetCurrent = self._c(self._set_context, c_void_p)
        self.cuThreadExchangeStreamCaptureMode = self._c(self._exchange_mode, POINTER(c_int))
        self.cuMemHostRegister_v2 = self._c(self._register, c_void_p, c_size_t, c_uint)
        self.cuMemHostUnregister = self._c(self._unregister, c_void_p)
        self.cuMemHostGetDevicePointer_v2 = self._c(
            self._device_pointer, POINTER(c_uint64), c_void_p, c_uint
        )
        self.cuMemcpyAsync = self._c(self._copy, c_uint64, c_uint64, c_size_t, c_void_p)

        if self.version < 12_000:
            del self.cuGetProcAddress_v2

    def _c(self, function: Callable[..., int], *arguments: Any) -> Any:
        made = ctypes.CFUNCTYPE(c_int, *arguments)(function)
        self._kept.append(made)
        return made

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
        assert stream in STREAMS
        context[0] = CONTEXT
        return 0

    def _set_context(self, context: int) -> int:
        self.context = context
        return 0

    def _exchange_mode(self, mode: Any) -> int:
        mode[0], self.capture_mode = self.capture_mode, mode[0]
        return 0

    def _register(self, address: int, size: int, flags: int) -> int:
        if self.context != CONTEXT:
            return INVALID_CONTEXT
        if flags != 3 or address in self.registered:
            return INVALID_VALUE
        if sum(self.registered.values()) + size > self.most_registered:
            return OUT_OF_MEMORY
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, 0) else INVALID_VALUE

    def _device_pointer(self, seen: Any, address: int, flags: int) -> int:
        if address not in self.registered or flags:
            return INVALID_VALUE
        seen[0] = address + self.mapping_offset
        return 0

    def _copy(self, destination: int, source: int, size: int, stream: int) -> int:
        if self.context != CONTEXT:
            return INVALID_CONTEXT
        if stream not in STREAMS:
            return INVALID_VALUE
        self.num_single_copies += 1
        ctypes.memmove(destination, source, size)
        return 0

    def _batch_copy(
        self, to: Any, source: Any, sizes: Any, count: int, attributes: Any, indices: Any,
        num_attributes: int, failed: Any, stream: int,
    ) -> int:  # fmt: skip
        failed[0] = NO_INDEX
        if self.context != CONTEXT:
            return INVALID_CONTEXT
        if not stream or not 1 <= num_attributes <= count or indices[0] != 0:
            return INVALID_VALUE
        hints = (attributes[0].srcLocHint, attributes[0].dstLocHint)
        assert all((hint.type, hint.id) == (0, 0) for hint in hints)
        if self.refused_copy is not None and self.refused_copy < count:
            failed[0] = self.refused_copy
            return INVALID_VALUE
        for i in range(count):
            ctypes.memmove(to[i], source[i], sizes[i])
        self.batch_streams.append(stream)
        self.batches.append((count, attributes[0].srcAccessOrder, attributes[0].flags))
        return 0
