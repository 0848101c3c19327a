"""A GPU to run tests on: a fake one always, and a real one where there is one.

Tests use torch to allocate memory, to copy it from and to the host, and for streams and events. For
the rest, which the fake cannot do by torch, both have the same methods. Work is queued on the
calling thread's current stream.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_gpu import DeviceTensor, FakeGpu, FakeKernel, fake_gpu
from fake_gpu_process import TorchCuda, environment

LATE_US = 300.0
"""Copies to a fake GPU land up to this much later."""
_LONG = 400_000_000
"""Cycles of a GPU's clock: a fifth of a second."""


@dataclass
class Capture:
    """Attributes:
    is_intact: Whether the captured graph is valid, once the capture has ended."""

    is_intact: bool = False


class RealGpu:
    """The first device of this machine."""

    device = torch.device("cuda", 0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Work on a stream of its own, which is kept busy: what is queued comes later."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            torch.cuda._sleep(_LONG)
            yield

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Queue a kernel that writes a tensor."""
        tensor.fill_(value)

    def read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a kernel that reads a tensor; the result waits for it."""
        read = tensor.clone()
        stream = torch.cuda.current_stream()

        def wait() -> torch.Tensor:
            stream.synchronize()
            return read.cpu()

        return wait

    @contextmanager
    def capturing(self) -> Iterator[Capture]:
        capture = Capture()
        ones = torch.ones(1024, device=self.device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            twos = ones * 2
            yield capture
            threes = twos + 1
        graph.replay()
        torch.cuda.synchronize()
        capture.is_intact = bool((threes == 3).all())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def give_to_children(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let child processes find the GPU."""


class FakeMachine:
    """A fake GPU in this process; see `RealGpu` for its methods."""

    device = torch.device("cuda", 0)

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    @contextmanager
    def busy(self) -> Iterator[None]:
        stream = torch.cuda.Stream(self.device)
        held = self.gpu.hold(stream.handle)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self.gpu.fire(held)

    def fill(self, tensor: DeviceTensor, value: int) -> None:
        seen = tensor.seen()
        self.gpu.queue(torch.cuda.current_stream().handle, lambda: seen.fill_(value))

    def read(self, tensor: DeviceTensor) -> Callable[[], torch.Tensor]:
        seen, found = tensor.seen(), torch.empty(tensor.shape, dtype=tensor.dtype)
        stream = torch.cuda.current_stream()
        self.gpu.queue(stream.handle, lambda: found.copy_(seen))

        def wait() -> torch.Tensor:
            stream.synchronize()
            return found

        return wait

    @contextmanager
    def capturing(self) -> Iterator[Capture]:
        capture, stream = Capture(), torch.cuda.Stream(self.device)
        self.gpu.begin_capture(stream.handle)
        yield capture
        capture.is_intact = self.gpu.end_capture(stream.handle)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(
            start <= tensor.data_ptr() < start + size for start, size in self.gpu.registered.items()
        )

    def give_to_children(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in environment(directory).items():
            monkeypatch.setenv(name, value)


Machine = RealGpu | FakeMachine


@contextmanager
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    with fake_gpu(monkeypatch) as gpu:
        monkeypatch.setitem(os.environ, "FAKE_GPUS", "1")
        torch_cuda = TorchCuda(gpu)
        torch_cuda.install(monkeypatch)
        kernel = FakeKernel(torch_cuda)
        monkeypatch.setitem(sys.modules, "flexcache.transfer.copy_kernel", kernel)
        gpu.set_speed(late_us=LATE_US)
        yield FakeMachine(gpu)


@pytest.fixture(
    params=[
        "a fake GPU",
        pytest.param(
            "a GPU",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
            ],
        ),
    ]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if request.param == "a GPU":
        yield RealGpu()
        return
    with fake_machine(monkeypatch) as fake:
        yield fake
