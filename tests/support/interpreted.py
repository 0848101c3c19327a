"""Kernels themselves on a fake GPU: Triton's interpreter runs each when its stream comes to it.

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
from fake_gpu import DeviceTensor, FakeTorchCuda

from flexcache.transfer.direct import digest_kernel


class InterpretedKernel:
    """In place of the module `copy_kernel`: the same, but its kernel is queued on the fake GPU.

    Attributes:
        num_ops: Number of launches.
    """

    def __init__(
        self, copy_kernel: Any, torch_cuda: FakeTorchCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.num_ops = 0
        self._torch = torch_cuda
        self._module = copy_kernel
        self._compiled = copy_kernel.copy_tiles
        monkeypatch.setattr(copy_kernel, "copy_tiles", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

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


class _Queued:
    """In place of a kernel: runs it, with the bytes that the device sees, in its stream's turn."""

    def __init__(self, kernel: Any, torch_cuda: FakeTorchCuda, *, has_table: bool) -> None:
        self._kernel = kernel
        self._torch = torch_cuda
        self._has_table = has_table

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._queue, grid)

    def _queue(self, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
        seen = [each.seen() if isinstance(each, DeviceTensor) else each for each in arguments]

        def run() -> None:
            table = [self._translate(seen[0])] if self._has_table else [seen[0]]
            self._kernel[grid](*table, *seen[1:], **options)

        self._torch.gpu.queue(self._torch.current_stream().handle, run)

    def _translate(self, addresses: torch.Tensor) -> torch.Tensor:
        """Return where a test may touch what the device sees at the addresses."""
        seen_at = self._torch.gpu.loaded.fake_seen_at
        return torch.tensor([seen_at(c_uint64(each)) for each in addresses.tolist()])


def interpret_digests(torch_cuda: FakeTorchCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `digest_kernel` launch its kernels on the fake GPU."""
    for name in ("add_up_groups", "chain_groups"):
        kernel = getattr(digest_kernel, name)
        queued = _Queued(kernel, torch_cuda, has_table=name == "add_up_groups")
        monkeypatch.setattr(digest_kernel, name, queued)
