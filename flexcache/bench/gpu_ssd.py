"""SSD and a CUDA device, past DRAM: blocks by GPUDirect Storage, beside plain I/O of the same size.

Bytes are verified on the device as they are in an engine, and once more here.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from flexcache.bench.gpu_pool import Pool, open_pool
from flexcache.bench.raw_disk import raw_disks
from flexcache.bench.results import Result, Unsupported
from flexcache.bench.ssd import beside_raw
from flexcache.errors import NoDirectPathError
from flexcache.storage.block_io import Direction, open_block_io
from flexcache.transfer.copier import CopyPermit
from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.ops import Transfer

BLOCK_BYTES = 2 << 20
_DEPTH = 32


class DirectDisk:
    """All blocks of a pool's tensors, and the same blocks in a file."""

    def __init__(self, pool: Pool, io: CudaDirectIO, fd: int) -> None:
        self._pool = pool
        self._io = io
        self._fd = fd
        self._checksums = [0] * pool.num_blocks

    def run(self, direction: Direction) -> float:
        """Write or read all blocks; return GB/s.

        Raises:
            AssertionError: A block failed.
        """
        left = deque(range(self._pool.num_blocks))
        num_running = 0
        began = time.perf_counter()
        while left or num_running:
            count = min(len(left), self._io.depth - num_running)
            self._io.submit([self._transfer(left.popleft(), direction) for _ in range(count)])
            num_running += count
            for ended in self._io.reap():
                if ended.error is not None:
                    raise AssertionError(ended.error)
                num_running -= 1
                if direction is Direction.WRITE:
                    self._checksums[ended.token] = ended.checksum
        return self._pool.num_blocks * BLOCK_BYTES / (time.perf_counter() - began) / 1e9

    def check(self) -> None:
        """Raise `AssertionError` unless blocks come back byte for byte."""
        before = [layer.cpu() for layer in self._pool.layers]
        self.run(Direction.WRITE)
        for layer in self._pool.layers:
            layer.fill_(0)
        torch.cuda.synchronize()
        self.run(Direction.READ)
        for layer, expected in zip(self._pool.layers, before, strict=True):
            assert torch.equal(layer.cpu(), expected), "wrong bytes past DRAM"

    def _transfer(self, block: int, direction: Direction) -> Transfer:
        [addresses] = self._pool.layout.gpu_addresses(np.array([block]))
        expected = self._checksums[block] if direction is Direction.READ else 0
        return Transfer(
            block, 2, direction, self._fd, block * BLOCK_BYTES, BLOCK_BYTES, addresses,
            self._pool.layout.sizes, expected,
        )  # fmt: skip


def past_dram(path: Path, op_bytes: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure writes and reads of blocks past DRAM.

    Raises:
        Unsupported: There is no such path here.
    """
    with ExitStack() as stack:
        try:
            fd = os.open(path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as refusal:
            raise Unsupported(f"O_DIRECT in {path}: {refusal.strerror}") from None
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, op_bytes)
        pool = stack.enter_context(open_pool(BLOCK_BYTES, op_bytes, seed))
        try:
            io = CudaDirectIO(pool.device, pool.copier, [fd], BLOCK_BYTES, _DEPTH, CopyPermit())
        except NoDirectPathError as reason:
            raise Unsupported(str(reason)) from None
        stack.callback(io.close)
        if io.through_host:
            raise Unsupported(io.through_host)
        disk = DirectDisk(pool, io, fd)
        disk.check()
        host_io = open_block_io("auto", _DEPTH)
        stack.callback(host_io.close)
        raw = raw_disks(path, op_bytes, BLOCK_BYTES, host_io)
        yield from beside_raw({"SSD and GPU past DRAM": disk.run}, raw, rounds)
