"""Two engines share one cache server: what the first stores, the second loads.

    python examples/shared_server.py

Starts `flexcache server` on a private socket, then two engines. Here both run in this process and
keep their KV in CPU tensors; vLLM engines share a server likewise, by one FLEXCACHE_ENDPOINT:

    flexcache server --config cache.toml &
    FLEXCACHE_ENDPOINT=... vllm serve MODEL --port 8001 --kv-transfer-config '...' &
    FLEXCACHE_ENDPOINT=... vllm serve MODEL --port 8002 --kv-transfer-config '...' &
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

MODEL = ModelConfig("my-model", num_layers=2, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
TOKENS = list(range(256))


@contextmanager
def running_server(endpoint: str) -> Iterator[None]:
    """Run a server with a DRAM tier of 64 MB; engines wait until it serves."""
    command = [sys.executable, "-m", "flexcache.cli", "server", "--endpoint", endpoint]
    process = subprocess.Popen(command, env={**os.environ, "FLEXCACHE_CPU_CACHE_GB": "0.064"})
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def make_kv(fill: float) -> dict[str, torch.Tensor]:
    """Make the paged KV cache of an engine: 64 blocks of 16 tokens, for each of two layers."""
    return {f"layer.{i}": torch.full((64, 2, 16, 4, 64), fill).bfloat16() for i in range(2)}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{Path(directory) / 'cache.sock'}"
        with (
            running_server(endpoint),
            KVManager(MODEL, CacheConfig(endpoint=endpoint)) as first,
            KVManager(MODEL, CacheConfig(endpoint=endpoint)) as second,
            KVTPClient(first.endpoint) as first_rank,
            KVTPClient(second.endpoint) as second_rank,
        ):
            first_kv, second_kv = make_kv(1.0), make_kv(0.0)
            first_rank.register_kv_caches(first_kv)
            second_rank.register_kv_caches(second_kv)
            first.wait_ready(60)
            second.wait_ready(60)

            task, _ = first.put_async(TOKENS, slot_mapping=range(256))
            first.wait([task], timeout=60)
            task, mask = second.get_async(TOKENS, slot_mapping=range(512, 768))
            status = second.wait([task], timeout=60)[task].status

            loaded = all(bool((kv[32:48] == 1.0).all()) for kv in second_kv.values())
            print(f"{status}: {int(mask.sum())} tokens, the first engine's bytes: {loaded}")


if __name__ == "__main__":
    main()
