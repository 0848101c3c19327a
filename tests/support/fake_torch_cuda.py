"""`torch.cuda` over a fake GPU, with c10's notion of a thread's current device.

When a thread leaves a device, the one before it becomes current again only if it has a context.
If not, it is noted (`_target`), and the next call that uses it makes it current, context and all.
As in torch, streams come from a pool of 32, which are handed out again and again.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import NOT_READY, DeviceTensor, FakeGpu, Memory, over

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
