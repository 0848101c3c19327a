"""Share KV through an S3 bucket: a second cache, as on another host, finds what the first stored.

    pip install ".[object-store]"
    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
    python examples/s3_store.py 's3://bucket/prefix?region=us-east-1'

Any store that speaks S3's protocol will do: add `&endpoint=http://127.0.0.1:8333` for a local one.
With vLLM the same URL goes into FLEXCACHE_REMOTE_URL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig

MODEL = ModelConfig("my-model", num_layers=2, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
TOKENS = list(range(256))


@contextmanager
def host(url: str, kv: dict[str, torch.Tensor]) -> Iterator[KVManager]:
    """Run an engine's cache with an empty DRAM tier above the store."""
    config = CacheConfig(num_cpu_blocks=256, remote_url=url)
    with KVManager(MODEL, config) as manager, KVTPClient(manager.endpoint) as client:
        client.register_kv_caches(kv)
        manager.wait_ready(60)
        yield manager


def make_kv(fill: float) -> dict[str, torch.Tensor]:
    """Make the paged KV cache of an engine: 64 blocks of 16 tokens, for each of two layers."""
    return {f"layer.{i}": torch.full((64, 2, 16, 4, 64), fill).bfloat16() for i in range(2)}


def attempts(seconds: float = 60) -> Iterator[None]:
    """Try again for a while.

    The store is connected in the background and asked with short deadlines; what it does not answer
    in time counts as a miss. An engine computes then. This script would rather wait.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.1)
    sys.exit("the store does not answer")


def main(url: str) -> None:
    with host(url, make_kv(1.0)) as manager:
        for _ in attempts():
            task, _ = manager.put_async(TOKENS, slot_mapping=range(256))
            manager.wait([task], timeout=60, completely=True)  # the write to the store included
            if manager.stats()["tiers"]["REMOTE"]["indexed"] == 16:  # blocks of 16 tokens
                break

    kv = make_kv(0.0)
    with host(url, kv) as manager:
        for _ in attempts():
            task, mask = manager.get_async(TOKENS, slot_mapping=range(256))
            response = manager.wait([task], timeout=60)[task]
            if mask.all() and response.status is KVStatus.SUCCESS:
                break
        loaded = all(bool((layer[:16] == 1.0).all()) for layer in kv.values())
        print(f"{response.status}: {int(mask.sum())} tokens, the first host's bytes: {loaded}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
