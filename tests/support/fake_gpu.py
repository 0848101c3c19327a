"""A GPU whose driver is `tests/fakecuda`: asynchronous, with memory that only its streams touch.

The driver is built by gcc when it is first needed. What a real driver leaves undefined (a copy that
crosses an end of pinned memory, memory unpinned while in use) is noted as a violation.

`FakeTorchCuda` is `torch.cuda` over it, with c10's notion of a thread's current device. When a
thread leaves a device, the one before it becomes current again only if it has a context. If not, it
is noted (`_target`), and the next call that uses it makes it current, context and all. As in torch,
streams come from a pool of 32, which are handed out again and again.

`FakeKernel` and `FakeDigests` stand for the kernels, `fake_hip_gpu` for AMD's driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flexcache.storage.pieces import checksum
from flexcache.transfer.cuda_driver import CudaDriver
from flexcache.transfer.direct.cufile import CuFile
from flexcache.transfer.hip_driver import HipDriver

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


POOL_SIZE = 32
SCRIBBLE = 0x5A


class FakeStream:
    """A stream of the driver.

    Args:
        handle: The driver's; 0 for a device's default stream.

    Attributes:
        cuda_stream: What torch says.
    """

    def __init__(self, owner: FakeTorchCuda, handle: int, device: int) -> None:
        self.cuda_stream = handle
        self.device = torch.device("cuda", device)
        self.computes_on_host = not handle and owner.computes_on_host
        self._owner = owner
        self._gpu = owner.gpu

    @property
    def handle(self) -> int:
        """The driver's stream, of which the default stream is a hidden one."""
        return self.cuda_stream or self._owner.default_handle(self.device.index)

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        event = self._owner.Event()
        event.record(stream)
        event.wait(self)

    def synchronize(self) -> None:
        self._gpu.call("cuStreamSynchronize", c_void_p(self.handle))


class FakeEvent:
    owner: FakeTorchCuda

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._handle = c_void_p()  # the driver's event is made at the first record
        self._is_timed = enable_timing

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.owner.current_stream()
        if not isinstance(stream, FakeStream):
            return  # of an engine on the CPU: what it would queue is done
        if not self._handle:
            self.owner.gpu.call("cuEventCreate", byref(self._handle), 0 if self._is_timed else 2)
        self.owner.gpu.call("cuEventRecord", self._handle, c_void_p(stream.handle))

    def query(self) -> bool:
        if not self._handle:
            return True
        code = self.owner.gpu.loaded.cuEventQuery(self._handle)
        if code not in (0, NOT_READY):
            raise RuntimeError(f"CUDA error {code}")
        return bool(code == 0)

    def wait(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.owner.current_stream()
        if not self._handle:
            return
        if stream.computes_on_host:
            self.synchronize()
        self.owner.gpu.call("cuStreamWaitEvent", c_void_p(stream.handle), self._handle, 0)

    def synchronize(self) -> None:
        if self._handle:
            self.owner.gpu.call("cuEventSynchronize", self._handle)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return milliseconds between two points that were timed and have come."""
        assert self._is_timed and end._is_timed
        took = ctypes.c_float()
        self.owner.gpu.call("cuEventElapsedTime", byref(took), self._handle, end._handle)
        return took.value


class FakePinnedTensor(torch.Tensor):
    """A tensor in page-locked memory, which can be sent to the device and fetched from there."""

    owner: FakeTorchCuda

    def to(self, device: torch.device, *, non_blocking: bool) -> DeviceTensor:
        """Queue a copy to memory that is used again, in the order of the stream, once the tensor
        is gone: as torch does."""
        assert non_blocking
        gpu, stream = self.owner.gpu, self.owner.current_stream().handle
        memory = gpu.allocate(self.nbytes, device.index)
        self.owner.copy(memory.address, self.data_ptr(), self.nbytes, stream)
        there: DeviceTensor = over(memory.address, self).as_subclass(DeviceTensor)
        weakref.finalize(there, gpu.fill, stream, memory, SCRIBBLE)
        return there

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> FakePinnedTensor:
        """Queue a copy from the device."""
        assert non_blocking
        assert source.is_contiguous()
        stream = self.owner.current_stream().handle
        self.owner.copy(self.data_ptr(), source.data_ptr(), self.nbytes, stream)
        return self


class FakeTorchCuda:
    """To be put in place of `torch.cuda`.

    Args:
        computes_on_host: The engine's compute is done by the calling thread itself, not by kernels:
            what waits for an event on the default stream waits on the thread.
    """

    def __init__(self, gpu: FakeGpu, *, computes_on_host: bool = False) -> None:
        self.gpu = gpu
        self.computes_on_host = computes_on_host
        self._pools: dict[int, deque[FakeStream]] = {}
        self._defaults: dict[int, int] = {}
        self._contexts: dict[int, int] = {}
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._real = torch.cuda
        self.Event = type("Event", (FakeEvent,), {"owner": self})
        self.PinnedTensor = type("PinnedTensor", (FakePinnedTensor,), {"owner": self})

    def __getattr__(self, name: str) -> Any:
        """Return what an engine that runs beside the fake uses of the real one."""
        return getattr(self.__dict__["_real"], name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have torch use it, with device memory from `torch.empty`."""
        real_empty: Callable[..., torch.Tensor] = torch.empty

        def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if options.pop("pin_memory", False):
                return real_empty(*size, **options).as_subclass(self.PinnedTensor)
            if device is None or torch.device(device).type != "cuda":
                return real_empty(*size, device=device, **options)
            like = real_empty(*size, **options)
            memory = self.gpu.allocate(like.nbytes, torch.device(device).index)
            return over(memory.address, like).as_subclass(DeviceTensor)

        monkeypatch.setattr(torch, "cuda", self)
        monkeypatch.setattr(torch, "empty", empty)

    # -- devices -----------------------------------------------------------------------------------

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        self._target = -1
        if self._runtime_device != index:
            self._set_runtime_device(index)

    def current_device(self) -> int:
        return self._target if self._target >= 0 else self._runtime_device

    @property
    def _runtime_device(self) -> int:
        """Device of the calling thread's context, or else the first, as in the runtime."""
        context = c_void_p()
        self.gpu.call("cuCtxGetCurrent", byref(context))
        known = {handle: device for device, handle in self._contexts.items()}
        return known.get(context.value or 0, 0)

    def _set_runtime_device(self, device: int) -> None:
        """Set the device as the runtime does since CUDA 12, which makes the context."""
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                self.gpu.call("cuDevicePrimaryCtxRetain", byref(context), device)
                self._contexts[device] = context.value or 0
        self.gpu.call("cuCtxSetCurrent", c_void_p(self._contexts[device]))

    # -- streams -----------------------------------------------------------------------------------

    def Stream(self, device: torch.device | None = None) -> FakeStream:  # noqa: N802
        if device is None or device.type == "cpu":
            return self._real.Stream(device)  # type: ignore[return-value]  # vLLM's placeholder
        with self._on(device.index), self._lock:
            pool = self._pools.setdefault(device.index, deque())
            if len(pool) < POOL_SIZE:
                pool.append(FakeStream(self, self._make_stream(device.index), device.index))
            else:
                pool.rotate(-1)
            return pool[-1]

    def ExternalStream(self, handle: int, device: torch.device) -> FakeStream:  # noqa: N802
        with self._on(device.index):
            return FakeStream(self, handle, device.index)

    def current_stream(self, device: torch.device | int | None = None) -> FakeStream:
        if isinstance(device, torch.device) and device.type == "cpu":
            return self._real.current_stream(device)  # type: ignore[no-any-return]
        index = device.index if isinstance(device, torch.device) else device
        if index is None:
            index = self.current_device()
        return self._streams.get(index) or FakeStream(self, 0, index)

    def set_stream(self, stream: FakeStream) -> None:
        if isinstance(stream, FakeStream):
            self._set_stream(stream)

    def default_handle(self, device: int) -> int:
        with self._lock:
            if device not in self._defaults:
                self._defaults[device] = self._make_stream(device)
            return self._defaults[device]

    def _make_stream(self, device: int) -> int:
        """Make a stream and leave the calling thread's context as it was."""
        before, context, handle = c_void_p(), c_void_p(), c_void_p()
        self.gpu.call("cuCtxGetCurrent", byref(before))
        if device not in self._contexts:
            self._set_runtime_device(device)
        context = c_void_p(self._contexts[device])
        self.gpu.call("cuCtxSetCurrent", context)
        self.gpu.call("cuStreamCreateWithPriority", byref(handle), 1, 0)
        self.gpu.call("cuCtxSetCurrent", before)
        return handle.value or 0

    def copy(self, to: int, start: int, size: int, stream: int) -> None:
        """Queue a copy. As the runtime does, make the calling thread's device current first."""
        device, self._target = self.current_device(), -1
        self._set_runtime_device(device)
        ends = ctypes.c_uint64(to), ctypes.c_uint64(start)
        self.gpu.call("cuMemcpyAsync", *ends, ctypes.c_size_t(size), c_void_p(stream))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        there = before
        if before.device != stream.device:
            with self._on(stream.device.index):
                there = self.current_stream(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.device != stream.device:
                self._set_stream(there)
            self._set_stream(before)

    def _set_stream(self, stream: FakeStream) -> None:
        if self.current_device() != stream.device.index:
            self.set_device(stream.device)
        self._streams[stream.device.index] = stream

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            if before in self.gpu.contexts:
                self.set_device(before)
            elif before != self._runtime_device:
                self._target = before

    @property
    def _target(self) -> int:
        return getattr(self._thread, "target", -1)

    @_target.setter
    def _target(self, device: int) -> None:
        self._thread.target = device

    @property
    def _streams(self) -> dict[int, FakeStream]:
        """The calling thread's current stream of each device."""
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[int, FakeStream] = self._thread.streams
        return streams


class FakeKernel:
    """In place of the module `copy_kernel`: queues the fake driver's copy kernel.

    Attributes:
        error: Raised instead of copying, once there were `sound_ops`.
        compile: Called before the first copies.
    """

    MIN_RUNS = 32
    PROGRAMS = (4, 8, 12)

    def __init__(self, torch_cuda: FakeTorchCuda) -> None:
        self.error: Exception | None = None
        self.sound_ops = 0
        self.compile: Callable[[], None] = lambda: None
        self.num_ops = 0
        self.programs = 0
        self._torch = torch_cuda

    def takes(self, to: np.ndarray, start: np.ndarray, sizes: np.ndarray) -> bool:
        return not ((to | start | sizes) % 16).any()

    def launch(self, table: torch.Tensor, scratch: torch.Tensor, programs: int) -> None:
        if not self.num_ops:
            self.compile()
        if self.error is not None and self.num_ops >= self.sound_ops:
            raise self.error
        self.num_ops += 1
        self.programs = programs
        assert table.is_contiguous() and scratch.numel() >= table.numel()
        where = Memory(table.data_ptr(), table.numpy().view(np.uint8))
        self._torch.gpu.launch(self._torch.current_stream().handle, where)


class FakeDigests:
    """In place of the module `digest_kernel`: computes on the host when its stream comes to it.

    Attributes:
        error: Raised by the next launch instead.
        is_wrong: Its checksums are.
        after: Called when checksums have been computed.
    """

    def __init__(self, torch_cuda: FakeTorchCuda) -> None:
        self.error: Exception | None = None
        self.is_wrong = False
        self.after: Callable[[], None] = lambda: None
        self._torch = torch_cuda

    def workspace(self, num_pieces: int, length: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_pieces * length // 8, dtype=torch.uint8, device=device)

    def start(self, addresses: np.ndarray, length: int, space: torch.Tensor) -> torch.Tensor:
        assert self._torch.current_device() == space.device.index
        assert space.nbytes >= len(addresses) * length // 8
        assert not (addresses % 16).any()
        assert length % 4096 == 0
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        found = np.zeros(len(addresses), np.uint64)

        def compute() -> None:
            for place, address in enumerate(addresses.tolist()):
                found[place] = self._checksum(address, length)
            self.after()

        self._torch.gpu.queue(self._torch.current_stream().handle, compute)
        return torch.from_numpy(found.view(np.int64))

    def finish(self, found: torch.Tensor, length: int) -> np.ndarray:
        return found.numpy().view(np.uint64)

    def _checksum(self, address: int, length: int) -> int:
        gpu = self._torch.gpu
        seen = (ctypes.c_uint8 * length).from_address(gpu.loaded.fake_seen_at(c_uint64(address)))
        assert not gpu.is_in_file_io(Memory(address, np.ctypeslib.as_array(seen)))
        return checksum([memoryview(seen)]) ^ self.is_wrong


FIRST_WITH_BATCHES = 12_080
"""The fake driver's version from which on it stands for ROCm 7.1 and later."""


class HipLibrary:
    """The fake library, which has no CUDA functions."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> object:
        version = c_int()
        self._gpu.call("cuDriverGetVersion", byref(version))
        is_missing = name == "hipMemcpyBatchAsync" and version.value < FIRST_WITH_BATCHES
        if is_missing or name.startswith("cu"):
            raise AttributeError(name)
        return getattr(self._gpu.loaded, name)


@contextmanager
def fake_hip_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let torch be for ROCm, and `HipDriver` find the fake driver."""
    with fake_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(torch.version, "hip", "7.1.0")
        monkeypatch.setattr(HipDriver, "load", lambda: HipDriver(HipLibrary(gpu)))
        yield gpu
