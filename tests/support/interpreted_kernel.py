"""The copy kernel itself on a fake GPU: Triton's interpreter runs it when its stream comes to it.

Only for processes with TRITON_INTERPRET=1: Triton decides at import.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint64
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import DeviceTensor
from fake_torch_cuda import FakeTorchCuda

from flexcache.transfer import copy_kernel


class InterpretedKernel:
    """In place of the module `copy_kernel`: the same, but its kernel is queued on the fake GPU.

    Attributes:
        num_ops: Number of launches.
    """

    def __init__(self, torch_cuda: FakeTorchCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ops = 0
        self._torch = torch_cuda
        self._compiled = copy_kernel.copy_tiles
        monkeypatch.setattr(copy_kernel, "copy_tiles", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(copy_kernel, name)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._queue, grid)

    def _queue(
        self, grid: tuple[int], table: torch.Tensor, scratch: DeviceTensor, num_runs: int,
        *constants: int, **options: int,
    ) -> None:  # fmt: skip
        assert table.is_contiguous()
        self.num_ops += 1
        address, size = table.data_ptr(), table.nbytes

        def run() -> None:
            found = (ctypes.c_int64 * (size // 8)).from_address(self._seen_at(address))
            rows = np.array(found).reshape(3, -1)
            for row in rows[:2]:
                row[:] = [self._seen_at(each) for each in row.tolist()]
            lines = torch.from_numpy(rows)
            self._compiled[grid](lines, scratch.seen(), num_runs, *constants, **options)

        self._torch.gpu.queue(self._torch.current_stream().handle, run)

    def _seen_at(self, address: int) -> int:
        """Return where a test may touch what the device sees at an address."""
        return int(self._torch.gpu.loaded.fake_seen_at(c_uint64(address)))
