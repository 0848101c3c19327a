"""The checksum kernels themselves on a fake GPU, run by Triton's interpreter.

Only for processes with TRITON_INTERPRET=1: Triton decides at import.
"""

from __future__ import annotations

from ctypes import c_uint64
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import DeviceTensor
from fake_torch_cuda import FakeTorchCuda

from flexcache.transfer.direct import digest_kernel


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
