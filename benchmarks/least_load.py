"""The least time to bring a prompt's KV to an engine: one memcpy, or one raw read, of its bytes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from flexcache.bench.dram import copy_at_once
from flexcache.bench.ssd import raw_disks
from flexcache.storage.block_io import QUEUE_DEPTH, Direction, open_block_io

READ_BYTES = 1 << 20


class LeastLoad:
    """Measures both, once per call of `measure`.

    Args:
        directory: For the file that is read, in pieces of `READ_BYTES`.
        num_bytes: Rounded up to whole pieces.

    Attributes:
        ms: Milliseconds of each measurement, by the tier that it is the least of.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.ms: dict[str, list[float]] = {"DRAM": [], "SSD": []}
        self._num_bytes = num_bytes = -(-num_bytes // READ_BYTES) * READ_BYTES
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)
        with ExitStack() as stack:
            io = open_block_io("auto", QUEUE_DEPTH)
            stack.callback(io.close)
            self._disks = raw_disks(directory, num_bytes, READ_BYTES, io)
            self._opened = stack.pop_all()

    def measure(self) -> None:
        started = time.perf_counter()
        copy_at_once(self._target, self._source)
        self.ms["DRAM"].append((time.perf_counter() - started) * 1e3)
        gb_per_s = max(disk.run(Direction.READ) for disk in self._disks)
        self.ms["SSD"].append(self._num_bytes / gb_per_s / 1e6)

    def close(self) -> None:
        self._opened.close()
