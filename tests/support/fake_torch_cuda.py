"""`torch.cuda` over `FakeCuda`, with c10's notion of a thread's current device.

When a thread leaves a device, the one before it becomes current again only if it has a context.
If not, it is noted (`_target`), and the next call that uses it makes it current, context and all.
Streams and events take notes. Device memory is host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_cuda import STREAM, FakeCuda


class FakeStream:
    def __init__(self, owner: FakeTorchCuda, handle: int, device: int) -> None:
        self.cuda_stream = handle
        self.device = device
        self._owner = owner

    def wait_event(self, event: object) -> None:
        self._owner.check()
        self._owner.notes.append(("wait", self.cuda_stream, event))

    def synchronize(self) -> None:
        self._owner.check()
        self._owner.cuda.land(self.cuda_stream)
        self._owner.notes.append(("synchronize", self.cuda_stream))


class FakeTorchCuda:
    """To be put in place of `torch.cuda`.

    Attributes:
        notes: What streams and events did, in order.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.notes: list[tuple[object, ...]] = []
        self._num_streams = 0
        self._thread = threading.local()
        owner = self

        class FakeEvent:
            def record(self, stream: FakeStream) -> None:
                owner.check()
                owner.notes.append(("record", stream.cuda_stream, self))

            def query(self) -> bool:
                return True

        self.Event = FakeEvent

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have torch use it, with device memory from `torch.empty`."""
        real_empty = torch.empty

        def empty(*size: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return real_empty(*size, device=device, **options)
            made = real_empty(*size, **options)
            self.cuda.device_memory.append((made.data_ptr(), made.nbytes))
            return made

        monkeypatch.setattr(torch, "cuda", self)
        monkeypatch.setattr(torch, "empty", empty)

    def check(self) -> None:
        if self.cuda.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        self._target = -1
        if self.cuda.current_device != index:
            self.cuda.set_device(index)

    def current_device(self) -> int:
        return self._target if self._target >= 0 else self.cuda.current_device

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        with self._on(device.index):
            handle = STREAM + 8 * self._num_streams
            self._num_streams += 1
            self.cuda.streams[handle] = device.index
            return FakeStream(self, handle, device.index)

    def current_stream(self, device: torch.device | int | None = None) -> FakeStream:
        index = device.index if isinstance(device, torch.device) else device
        if index is None:
            index = self.current_device()
        return self._streams.get(index) or FakeStream(self, 0, index)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        there = before
        if before.device != stream.device:
            with self._on(stream.device):
                there = self.current_stream(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.device != stream.device:
                self._set_stream(there)
            self._set_stream(before)

    def _set_stream(self, stream: FakeStream) -> None:
        if self.current_device() != stream.device:
            self.set_device(stream.device)
        self._streams[stream.device] = stream

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            if before in self.cuda.contexts:
                self.set_device(before)
            elif before != self.cuda.current_device:
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
