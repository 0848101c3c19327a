"""The checksum kernels of a fake GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint64

import numpy as np
import torch
from fake_gpu import Memory
from fake_torch_cuda import FakeTorchCuda

from flexcache.storage.pieces import checksum


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
