"""A fake GPU as AMD's: the driver of `fake_gpu` by HIP's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int

import pytest
import torch
from fake_gpu import FakeGpu, fake_gpu

from flexcache.transfer.hip_driver import HipDriver

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
