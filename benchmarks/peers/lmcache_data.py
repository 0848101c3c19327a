"""The DRAM and disk tiers of LMCache 0.5.6's server, measured with LMCache's own worker code.

    python benchmarks/peers/lmcache_data.py [DIRECTORY]      # in LMCache's environment

As in `lmcache_server.py` the server runs as released, in shared-memory mode: the engine's worker
gathers its KV blocks into the server's pool and scatters them back. Disk is its native file-system
adapter with O_DIRECT, in DIRECTORY (none: no disk). The last line of stdout is one JSON object:
samples in GB/s, and of one large memcpy of the same bytes, and of reads of the same files by one
thread with O_DIRECT, taken in turn with them.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmcache_server import CHUNK, REPLY, prepare, running_server

LAYERS, HEADS, BLOCK, HEAD = 32, 8, 16, 128  # 64 KiB per layer and block, 2 MiB per block
TOKENS = 2048
BLOCKS = TOKENS // BLOCK
BLOCK_BYTES = LAYERS * HEADS * BLOCK * 2 * HEAD * 2
ROUND_BYTES = BLOCKS * BLOCK_BYTES
ROUNDS = 8
POOL_GB = 3 * ROUND_BYTES / 1e9
LIMIT = 120
SETTLE_S = 20.0


class Worker:
    """An engine's worker with a KV cache of its own, in the layout of flash attention: of those
    that LMCache takes the one that it copies fastest."""

    def __init__(self, url: str) -> None:
        import torch
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
            EngineDrivenTransferContext,
        )
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._make_key = IPCCacheServerKey
        self._client: Any = RequestClientFactory.create(url)
        shape = (2, 2 * BLOCKS, BLOCK, HEADS, HEAD)
        self.kv = {
            f"layer.{i}": torch.randint(-9, 9, shape).to(torch.bfloat16) for i in range(LAYERS)
        }
        self._transfer = EngineDrivenTransferContext(1, self._client)
        self._transfer.register(self.kv, "bench", 1, CHUNK // BLOCK, REPLY)
        order = random.Random(0).sample(range(BLOCKS), BLOCKS)
        self.source, self.target = order, [BLOCKS + block for block in order]
        self._requests = 0

    def store(self, tokens: tuple[int, ...]) -> float:
        """Seconds to store the source blocks."""
        request, started = self._begin(), time.perf_counter()
        key = self._key(request, tokens, 0)
        done = self._transfer.submit_store("", key, self.kv, [self.source], None, CHUNK // BLOCK)
        took = time.perf_counter() - started
        if not done.result(timeout=REPLY):
            raise RuntimeError("LMCache did not store the blocks")
        self._call("end_session", request)
        return took

    def retrieve(self, tokens: tuple[int, ...]) -> tuple[float, float]:
        """Seconds until the lookup has everything in DRAM, and until the target blocks have it."""
        for layer in self.kv.values():
            layer[:, BLOCKS:] = 0
        request, started = self._begin(), time.perf_counter()
        self._call("lookup", self._key(request, tokens), 1)
        found = self._call("wait_prefetch_status", request, REPLY)
        in_dram = time.perf_counter() - started
        if found != TOKENS // CHUNK:
            raise RuntimeError(f"LMCache found {found} chunks, not {TOKENS // CHUNK}")
        key = self._key(request, tokens, 0)
        done = self._transfer.submit_retrieve("", key, self.kv, [self.target], None, CHUNK // BLOCK)
        took = time.perf_counter() - started
        self._call("end_session", request)
        same = all(layer[:, self.target].equal(layer[:, self.source]) for layer in self.kv.values())
        if not (done.result(timeout=REPLY) and same):
            raise RuntimeError("LMCache did not give back what was stored")
        return in_dram, took

    def drop_dram(self) -> None:
        self._call("clear", False)

    def close(self) -> None:
        self._transfer.close()
        self._client.close()

    def _begin(self) -> str:
        self._requests += 1
        return f"data-{self._requests}"

    def _key(self, request: str, tokens: tuple[int, ...], worker: int | None = None) -> Any:
        return self._make_key("bench", 1, worker, tokens, 0, TOKENS, request, num_kv_readers=1)

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._client, name)(*args).result(timeout=REPLY)


class Bound:
    """What the machine does with as many bytes."""

    def __init__(self) -> None:
        import numpy as np

        self._source = np.ones(ROUND_BYTES, np.uint8)
        self._target = np.empty_like(self._source)
        self._buffer = mmap.mmap(-1, BLOCK_BYTES)

    def memcpy(self) -> float:
        started = time.perf_counter()
        self._target[:] = self._source
        return time.perf_counter() - started

    def read(self, files: list[Path]) -> float:
        """Seconds to read as many bytes from the files past the page cache, a block at a time."""
        started, left = time.perf_counter(), ROUND_BYTES
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            stop = min(left, os.fstat(fd).st_size)
            for offset in range(0, stop, BLOCK_BYTES):
                os.preadv(fd, [self._buffer], offset)
            left -= stop
            os.close(fd)
        assert left == 0
        return time.perf_counter() - started


def wait_for_files(directory: Path, size: int) -> list[Path]:
    """The files of a store, once all their bytes are there."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        files = sorted(directory.rglob("*.data"))
        if sum(path.stat().st_size for path in files) >= size:
            return files
        time.sleep(0.02)
    raise RuntimeError(f"LMCache has not written its blocks within {SETTLE_S:g} s")


def measure_dram(worker: Worker) -> dict[str, list[float]]:
    """Seconds of each way, round by round; the first two warm everything up."""
    bound, source = Bound(), random.Random(1)
    seconds: dict[str, list[float]] = {"memcpy": [], "store": [], "retrieve": []}
    for number in range(-2, ROUNDS):
        tokens = tuple(source.choices(range(100_000), k=TOKENS))
        took = bound.memcpy(), worker.store(tokens), worker.retrieve(tokens)[1]
        worker.drop_dram()
        if number >= 0:
            for times, value in zip(seconds.values(), took, strict=True):
                times.append(value)
    return seconds


def measure_disk(worker: Worker, directory: Path) -> dict[str, list[float]]:
    """The same for reads."""
    bound, source = Bound(), random.Random(2)
    seconds: dict[str, list[float]] = {"raw read": [], "disk to DRAM": []}
    for number in range(-2, ROUNDS):
        tokens = tuple(source.choices(range(100_000), k=TOKENS))
        worker.store(tokens)
        files = wait_for_files(directory, ROUND_BYTES)
        worker.drop_dram()
        # A disk that had to work just before may be slower: each is the first in every other round.
        if number % 2:
            took = bound.read(files), worker.retrieve(tokens)[0]
        else:
            took = (worker.retrieve(tokens)[0], bound.read(files))[::-1]
        for path in files:
            path.unlink()
        worker.drop_dram()
        if number >= 0:
            for times, value in zip(seconds.values(), took, strict=True):
                times.append(value)
    return seconds


@contextmanager
def running_worker(options: Sequence[str] = ()) -> Iterator[Worker]:
    with tempfile.TemporaryFile() as log, running_server(log, POOL_GB, options) as url:
        worker = Worker(url)
        yield worker
        worker.close()


def main() -> int:
    prepare(LIMIT)
    report: dict[str, Any] = {"peer": "lmcache", "gb_per_s": {}, "error": None}
    try:
        report["peer"] = f"lmcache {version('lmcache')}"
        with running_worker() as worker:
            seconds = measure_dram(worker)
        if len(sys.argv) > 1:
            signal.alarm(LIMIT)  # the end of a server took it back
            adapter = {"type": "fs_native", "base_path": sys.argv[1], "use_odirect": True}
            with running_worker(["--l2-adapter", json.dumps(adapter)]) as worker:
                seconds |= measure_disk(worker, Path(sys.argv[1]))
        report["gb_per_s"] = {
            name: [ROUND_BYTES / s / 1e9 for s in times] for name, times in seconds.items()
        }
    except Exception:
        report["error"] = traceback.format_exc()
    print(json.dumps(report))
    sys.stdout.flush()
    os._exit(report["error"] is not None)  # not held up by threads of its client


if __name__ == "__main__":
    main()
