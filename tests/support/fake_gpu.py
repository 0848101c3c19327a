"""A GPU whose driver is `tests/fakecuda`: asynchronous, with memory that only its streams touch.

The driver is built by gcc when it is first needed. What a real driver leaves undefined (a copy that
crosses an end of pinned memory, memory unpinned while in use) is noted as a violation.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flexcache.transfer.cuda_driver import CudaDriver
from flexcache.transfer.direct.cufile import CuFile

SOURCES = Path(__file__).resolve().parents[1] / "fakecuda"

INVALID_VALUE = 1
NOT_SUPPORTED = 801
NOT_READY = 600
GLOBAL_CAPTURE = 0
FOREVER = 1 << 30
CALL = ctypes.CFUNCTYPE(None)


class Speed(ctypes.Structure):
    """How long calls and copies take, in microseconds; nothing by default."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in ("call_us", "start_us", "run_us", "bytes_per_us", "late_us")
    ]


class Faults(ctypes.Structure):
    """How the driver misbehaves; see ``fake.h``."""

    _fields_ = [
        ("is_lost", ctypes.c_bool),
        ("lost_after_copies", c_int),
        ("refused_run", c_int),
        ("most_pinned", ctypes.c_int64),
        ("mapping_offset", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
    ]


class CopyCall(ctypes.Structure):
    """A call that queued copies."""

    _fields_ = [
        ("stream", c_uint64),
        ("num_runs", ctypes.c_int64),
        ("is_batch", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("priority", ctypes.c_int32),
    ]


class Memory(NamedTuple):
    """Device memory: where the device has it, and the same bytes for the test."""

    address: int
    seen: np.ndarray


@cache
def build_driver() -> Path:
    """Compile the driver, unless it has been. Skips the test without a compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    files = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"flexcache-fakecuda-{os.getuid()}-{digest}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        sources = [str(file) for file in files if file.suffix == ".c"]
        options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-pthread", "-o", str(part), *sources], check=True)
        part.rename(library)
    return library


@cache
def load_driver() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build_driver()))
    loaded.fake_hold.restype = c_void_p
    for name in ("seen_at", "num_streams", "registered", "copy_calls"):
        getattr(loaded, f"fake_{name}").restype = c_uint64
    for name in ("num_files", "num_buffers", "num_transfers", "num_bounced"):
        getattr(loaded, f"fake_{name}").restype = c_size_t
    return loaded


class FakeLibrary:
    """The driver library as `CudaDriver` takes it, without some functions."""

    def __init__(self, loaded: ctypes.CDLL, lacks: set[str]) -> None:
        self._loaded = loaded
        self._lacks = lacks

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(name)
        return getattr(self._loaded, name)


class DriverState:
    """What the driver has seen and done."""

    def __init__(self) -> None:
        self.loaded = load_driver()

    @property
    def is_lost(self) -> bool:
        faults = Faults()
        self.loaded.fake_get_faults(byref(faults))
        return bool(faults.is_lost)

    @property
    def registered(self) -> dict[int, int]:
        """Pinned pieces: address to size."""
        starts, sizes = (c_uint64 * 8192)(), (c_uint64 * 8192)()
        count = self.loaded.fake_registered(starts, sizes, c_size_t(8192))
        return dict(zip(starts[:count], sizes[:count], strict=True))

    @property
    def copy_calls(self) -> list[CopyCall]:
        """Calls that queued copies, in order."""
        room = 65_536
        calls = (CopyCall * room)()
        return list(calls[: self.loaded.fake_copy_calls(calls, c_size_t(room))])

    def forget_copy_calls(self) -> None:
        self.loaded.fake_forget_copy_calls()

    @property
    def batches(self) -> list[int]:
        """Number of copies of each batch."""
        return [call.num_runs for call in self.copy_calls if call.is_batch]

    @property
    def num_single_copies(self) -> int:
        return sum(not call.is_batch for call in self.copy_calls)

    @property
    def num_streams(self) -> int:
        return int(self.loaded.fake_num_streams())

    @property
    def num_files(self) -> int:
        """Files registered for I/O on device memory."""
        return int(self.loaded.fake_num_files())

    @property
    def num_buffers(self) -> int:
        """Pieces of device memory registered for file I/O."""
        return int(self.loaded.fake_num_buffers())

    @property
    def num_transfers(self) -> int:
        """File I/O in flight."""
        return int(self.loaded.fake_num_transfers())

    @property
    def num_bounced(self) -> int:
        """File I/O that did not go directly to or from device memory."""
        return int(self.loaded.fake_num_bounced())

    @property
    def contexts(self) -> set[int]:
        """Devices on which this process has a context."""
        return {device for device in range(4) if self.loaded.fake_num_holders(device)}

    @property
    def violation(self) -> str:
        """The first use that a real driver leaves undefined; "" if there was none."""
        text = ctypes.create_string_buffer(256)
        self.loaded.fake_violation(text, c_size_t(len(text)))
        return text.value.decode()


class FakeGpu(DriverState):
    """The driver's state, and what tests do to it. One at a time; see `fake_gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.call_errors: list[BaseException] = []
        self._calls: list[Any] = []
        self._lacks: set[str] = set()
        self.library = FakeLibrary(self.loaded, self._lacks)
        self.loaded.fake_reset()

    # -- what it does wrong, and how fast ----------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Be a driver of this version; 12000 is 12.0."""
        self.loaded.fake_set_version(version)
        self._lacks.clear()
        if version < 12_000:
            self._lacks.add("cuGetProcAddress_v2")

    def set_speed(self, **speed: float) -> None:
        self.loaded.fake_set_speed(byref(Speed(**speed)))

    def set_faults(self, **changes: int | bool) -> None:
        faults = Faults()
        self.loaded.fake_get_faults(byref(faults))
        for name, value in changes.items():
            setattr(faults, name, value)
        self.loaded.fake_set_faults(byref(faults))

    def refuse(self, name: str, code: int = NOT_SUPPORTED, from_call: int = 1) -> None:
        """Have a function answer ``code`` from this call on."""
        self.loaded.fake_refuse(name.encode(), code, from_call)

    def refuse_nothing(self) -> None:
        self.loaded.fake_refuse_nothing()

    def corrupt(self, name: str, *, to_device: bool, at_least: int = 1) -> None:
        """Have a way of copying report success and copy wrong bytes, from so many runs on."""
        self.loaded.fake_corrupt(name.encode(), int(to_device), c_size_t(at_least))

    def be_compatible(self) -> None:
        """Move files through host memory, as cuFile does without nvidia-fs."""
        self.loaded.fake_be_compatible()

    def keep_registered(self, address: int) -> None:
        """Fail to unregister this piece."""
        self.loaded.fake_keep_registered(c_uint64(address))

    # -- time --------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Execute no copies until `thaw`."""
        self.loaded.fake_freeze(1)

    def thaw(self) -> None:
        self.loaded.fake_freeze(0)

    def hold(self, stream: int) -> int:
        """Keep a stream busy, as with a long kernel, until `fire` of the result."""
        return int(self.loaded.fake_hold(c_void_p(stream)))

    def fire(self, held: int) -> None:
        self.loaded.fake_fire(c_void_p(held))

    def fill(self, stream: int, memory: Memory, value: int) -> None:
        """Queue a kernel that writes device memory."""
        self.loaded.fake_fill(
            c_void_p(stream), c_uint64(memory.address), value, c_size_t(memory.seen.nbytes)
        )

    def launch(self, stream: int, table: Memory) -> None:
        """Queue the copy kernel with a table ``(3, n)`` of int64, where the device can read it."""
        self.loaded.fake_launch(
            c_void_p(stream), c_uint64(table.address), c_size_t(table.seen.nbytes // 24)
        )

    def queue(self, stream: int, call: Callable[[], None]) -> None:
        """Queue a call in place of a kernel. If it raises, the test fails at its end."""
        called = CALL(partial(self._make_call, call))
        self._calls.append(called)  # which the stream's thread needs until it has run
        self.loaded.fake_call(c_void_p(stream), called)

    def _make_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self.call_errors.append(error)

    def is_in_file_io(self, memory: Memory) -> bool:
        """Whether file I/O from or to device memory is in flight."""
        size = c_size_t(memory.seen.nbytes)
        return bool(self.loaded.fake_is_in_file_io(c_uint64(memory.address), size))

    def wait_quiet(self) -> None:
        """Wait until all that can happen has: streams are idle, held, waiting or frozen."""
        self.loaded.fake_wait_quiet()

    def wait_idle(self) -> None:
        self.loaded.fake_wait_idle()

    def begin_capture(self, stream: int, mode: int = GLOBAL_CAPTURE) -> None:
        self.loaded.fake_begin_capture(c_void_p(stream), mode)

    def end_capture(self, stream: int) -> bool:
        """End a capture; return whether it is valid."""
        return bool(self.loaded.fake_end_capture(c_void_p(stream)))

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, size: int, device: int = 0) -> Memory:
        """Allocate device memory. Leaves the calling thread's context as it was."""
        before, context, address = c_void_p(), c_void_p(), c_uint64()
        call = self.call
        call("cuCtxGetCurrent", byref(before))
        call("cuDevicePrimaryCtxRetain", byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", byref(address), c_size_t(size))
        call("cuCtxSetCurrent", before)
        call("cuDevicePrimaryCtxRelease_v2", device)
        seen = self.loaded.fake_seen_at(address)
        return Memory(
            address.value, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(seen))
        )

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver as torch would. Raises `RuntimeError`."""
        code = getattr(self.loaded, name)(*arguments)
        if code:
            text = c_char_p()
            self.loaded.cuGetErrorName(code, byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} in {name}")

    def reset(self) -> None:
        self.loaded.fake_reset()


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let `CudaDriver` and `CuFile` find the fakes. Fails the test at the end if misused."""
    gpu = FakeGpu()
    monkeypatch.setattr(CudaDriver, "load", lambda: CudaDriver(gpu.library))
    monkeypatch.setattr(CuFile, "load", lambda: CuFile(gpu.loaded))
    try:
        yield gpu
        gpu.thaw()
        gpu.wait_idle()
        assert gpu.violation == "", gpu.violation
        assert not gpu.call_errors, gpu.call_errors
    finally:
        gpu.reset()


# -- tensors -------------------------------------------------------------------------------------


class DeviceTensor(torch.Tensor):
    """A tensor in a fake GPU's memory. Only its shape, strides and address may be used, and a few
    operations of torch, which are done at once."""

    COMPUTED = {"copy_", "cpu", "fill_", "random_"}

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") not in cls.COMPUTED:
            return super().__torch_function__(function, types, arguments, options)
        seen = [each.seen() if isinstance(each, DeviceTensor) else each for each in arguments]
        result = function(*seen, **(options or {}))
        return result.clone() if function.__name__ == "cpu" else arguments[0]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", load_driver().fake_device_of(c_uint64(self.data_ptr())))

    def seen(self) -> torch.Tensor:
        """Return the same bytes where the test may touch them."""
        start = self.untyped_storage().data_ptr()
        return over(load_driver().fake_seen_at(c_uint64(start)), self)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def over(address: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one, with the storage that begins at an address."""
    size = like.untyped_storage().nbytes()
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(memory.untyped_storage(), like.storage_offset(), like.shape, like.stride())
