"""HIP, AMD's counterpart of the CUDA driver: its functions by other names, and without contexts.

torch for ROCm is `torch.cuda` as well, so all else about copies is the same code. Written against
HIP's headers and tested on a stand-in with its signatures; never run on an AMD GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexcache.errors import MissingDependencyError
from flexcache.transfer.cuda_driver import CudaDriver, batch_function

_LIBRARY = "libamdhip64.so"
_MEMCPY_DEFAULT = 4  # hipMemcpyDefault: the addresses tell the direction
_BATCH_COPY = "hipMemcpyBatchAsync"


class HipDriver(CudaDriver):
    """HIP's functions, with errors raised. A device's number is its context."""

    _SYMBOLS: ClassVar[Mapping[str, str]] = {
        "cuDeviceGet": "hipDeviceGet",
        "cuDeviceGetPCIBusId": "hipDeviceGetPCIBusId",
        "cuCtxGetStreamPriorityRange": "hipDeviceGetStreamPriorityRange",
        "cuStreamCreateWithPriority": "hipStreamCreateWithPriority",
        "cuStreamDestroy": "hipStreamDestroy",
        "cuThreadExchangeStreamCaptureMode": "hipThreadExchangeStreamCaptureMode",
        "cuMemHostRegister": "hipHostRegister",
        "cuMemHostUnregister": "hipHostUnregister",
        "cuMemHostGetDevicePointer": "hipHostGetDevicePointer",
        "cuMemcpyAsync": "hipMemcpyAsync",
        "cuMemcpyBatchAsync": _BATCH_COPY,
    }

    @classmethod
    def load(cls) -> HipDriver:
        """Load the library that torch uses: another copy of it would not know torch's streams.

        Raises:
            MissingDependencyError: There is none.
        """
        try:
            return cls(ctypes.CDLL(_loaded_library() or _LIBRARY))
        except OSError as error:
            raise MissingDependencyError(
                f"KV tensors on an AMD GPU need ROCm's {_LIBRARY}: {error}"
            ) from None

    def open_context(self, index: int) -> int:
        return index

    def close_context(self, index: int) -> None:
        """Do nothing: a device has one context, which is the process's."""

    def _make_current(self, context: int) -> None:
        self._check("hipSetDevice", self._set_device(context))

    def _load_own_functions(self) -> None:
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        name_of = ctypes.cast(self._library.hipGetErrorName, pointer).value
        self._error_text = ctypes.CFUNCTYPE(ctypes.c_char_p, integer)(name_of or 0)
        self._clear_error = self._function("hipGetLastError")
        self._set_device = self._function("hipSetDevice", integer, prototype=ctypes.PYFUNCTYPE)
        copy = (pointer, pointer, size, integer, pointer)
        self._copy_unlocked = self._function("cuMemcpyAsync", *copy)
        self._copy = self._function("cuMemcpyAsync", *copy, prototype=ctypes.PYFUNCTYPE)

    def _last_arguments(self, stream: int) -> tuple[int, ...]:
        return _MEMCPY_DEFAULT, stream

    def _find_batch_copy(self) -> Any:
        """Find the batched copy, which ROCm has since 7.1 with the arguments of CUDA 12.8."""
        function = getattr(self._library, _BATCH_COPY, None)
        if function is None:
            return None
        return batch_function(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def _check(self, call: str, code: int) -> None:
        """Raise an error, and forget it: torch would take HIP's note of it for one of its own."""
        if code:
            self._clear_error()
            name, *rest = call.split(" ", 1)
            super()._check(" ".join([self._SYMBOLS.get(name, name), *rest]), code)

    def _name_of(self, code: int) -> str:
        return (self._error_text(code) or b"an unknown error").decode()


def load_driver() -> CudaDriver:
    """Load the driver of the GPUs that torch was built for.

    Raises:
        MissingDependencyError: There is none.
    """
    return HipDriver.load() if torch.version.hip else CudaDriver.load()


def _loaded_library() -> str | None:
    """Return the path of the library in this process, if it is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if _LIBRARY in line)
    return next(paths, None)
