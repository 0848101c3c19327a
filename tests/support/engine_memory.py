"""The place of an engine's KV tensors: host memory, or a fake GPU's. Tests that use `memory` run on
both.

A test moves tensors there with `place` and reads and writes what it gets back, on behalf of the
engine's compute. FlexCache gets them by `lend`: on the GPU it can access their bytes only through
the driver, and no copy has landed because a call has returned.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from fake_gpu import DeviceTensor, FakeGpu, FakeTorchCuda, Memory, fake_gpu, over

Tensors = dict[str, torch.Tensor]

LATE_US = 500.0
"""Copies to a fake GPU land up to this much later."""


class HostMemory:
    """The engine computes on a CPU."""

    device = torch.device("cpu")

    def place(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return dict(tensors)

    def lend(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return dict(tensors)


class DeviceMemory:
    """The engine computes on a fake GPU. Views of one buffer remain that."""

    def __init__(self, gpu: FakeGpu, torch_cuda: FakeTorchCuda, device: int = 0) -> None:
        self.gpu = gpu
        self.torch = torch_cuda
        self.device = torch.device("cuda", device)
        self._by_seen: dict[int, Memory] = {}

    def place(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        placed: Tensors = {}
        moved: dict[int, Memory] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            memory = moved.get(storage.data_ptr())
            if memory is None:
                memory = self.gpu.allocate(storage.nbytes(), self.device.index)
                seen = memory.seen.ctypes.data
                moved[storage.data_ptr()] = self._by_seen[seen] = memory
                ctypes.memmove(seen, storage.data_ptr(), storage.nbytes())
            placed[name] = over(memory.seen.ctypes.data, tensor)
        return placed

    def lend(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return {
            name: over(self._by_seen[tensor.untyped_storage().data_ptr()].address, tensor)
            .as_subclass(DeviceTensor)
            for name, tensor in tensors.items()
        }  # fmt: skip


EngineMemory = HostMemory | DeviceMemory


@contextmanager
def device_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    """Memory of a fake GPU, without Triton. Copies land late; the test's thread is the compute
    stream, so what waits on that stream waits on the thread."""
    with fake_gpu(monkeypatch) as gpu:
        torch_cuda = FakeTorchCuda(gpu, computes_on_host=True)
        torch_cuda.install(monkeypatch)
        monkeypatch.setitem(sys.modules, "flexcache.transfer.copy_kernel", None)
        gpu.set_speed(late_us=LATE_US)
        yield DeviceMemory(gpu, torch_cuda)


@pytest.fixture(params=["host memory", "fake GPU"])
def memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineMemory]:
    if request.param == "host memory":
        yield HostMemory()
        return
    with device_memory(monkeypatch) as on_device:
        yield on_device
