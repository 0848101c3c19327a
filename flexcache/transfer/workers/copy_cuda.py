"""Scattered copies between pinned host memory and a CUDA device, one driver call per op.

`cuMemcpyBatchAsync` (driver 12.8 and later) takes the whole op as three arrays of addresses and
sizes, which numpy computed; nothing is done in Python per layer or per block. The copies run on
the copy engines and take no SM from the model.

Not measured yet: see ``docs/benchmarks.md``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import MissingDependencyError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment

Addresses = npt.NDArray[np.int64]

_SRC_ACCESS_ORDER_STREAM = 1
_PIN_STEP = 16 << 30  # registering more at once stalls other CUDA calls for long


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of the CUDA driver API."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", _MemLocation),
        ("dst_location", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


class CudaCopier:
    """Batched asynchronous copies on two streams of its own, one per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        driver = ctypes.CDLL("libcuda.so.1")
        # The second version dropped the index of the failed copy from the arguments.
        self._batch: Any = getattr(driver, "cuMemcpyBatchAsync_v2", None)
        self._has_fail_index = self._batch is None
        if self._batch is None:
            self._batch = getattr(driver, "cuMemcpyBatchAsync", None)
        if self._batch is None:
            raise MissingDependencyError(
                "the CUDA driver lacks cuMemcpyBatchAsync: version 12.8 or later is needed"
            )
        self._to_device = torch.cuda.Stream(device)
        self._to_host = torch.cuda.Stream(device)
        self._attributes = _MemcpyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        self._pinned: list[int] = []

    def attach(self, segment: HostSegment) -> None:
        """Page-lock the segment for the device, in steps."""
        address, size = segment.address, segment.size
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            for start in range(0, size, _PIN_STEP):
                step = min(_PIN_STEP, size - start)
                code = int(runtime.cudaHostRegister(address + start, step, 0))
                if code:
                    raise RuntimeError(f"cudaHostRegister of {step} bytes failed with {code}")
                self._pinned.append(address + start)

    def fence(self) -> torch.cuda.Event:
        """What the calling thread's current stream has been given up to now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(
        self,
        destinations: Addresses,
        sources: Addresses,
        sizes: Addresses,
        kind: OpKind,
        after: object,
    ) -> torch.cuda.Event:
        """Queue the copies behind ``after``; the event returned fires when they have landed."""
        stream = self._to_device if kind is OpKind.H2D else self._to_host
        if after is not None:
            stream.wait_event(after)
        count = len(sizes)
        arrays = [np.ascontiguousarray(a, dtype=np.uint64) for a in (destinations, sources, sizes)]
        first = ctypes.c_size_t(0)
        fail_index = ctypes.c_size_t(0)
        arguments: list[Any] = [
            *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays),
            ctypes.c_size_t(count),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._has_fail_index:
            arguments.append(ctypes.byref(fail_index))
        with torch.cuda.device(self.device):
            code = self._batch(*arguments, ctypes.c_void_p(stream.cuda_stream))
            if code:
                raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies failed with {code}")
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def close(self) -> None:
        self._to_device.synchronize()
        self._to_host.synchronize()
        runtime = torch.cuda.cudart()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned = []
