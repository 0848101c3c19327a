"""Share KV through an S3 bucket: a second cache, as on another host, finds what the first stored.

    pip install "flexcache[object-store]"
    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
    python examples/s3_store.py 's3://bucket/prefix?region=us-east-1'

Any store that speaks S3's protocol will do: add `&endpoint=http://127.0.0.1:8333` for a local one.
With vLLM the same URL goes into FLEXCACHE_REMOTE_URL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

MODEL = ModelConfig("my-model", num_layers=2, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
TOKENS = list(range(256))


@contextmanager
def host(url: str, kv: dict[str, torch.Tensor]) -> Iterator[KVManager]:
    """Run an engine's cache with an empty DRAM tier above the store."""
    # A match waits this long at most for the store to say what it has.
    config = CacheConfig(num_cpu_blocks=256, remote_url=url, remote_lookup_timeout_s=1.0)
    with KVManager(MODEL, config) as manager, closing(KVTPClient(manager.endpoint)) as client:
        client.register_kv_caches(kv)
        manager.wait_ready(60)
        wait_for_store(manager)
        yield manager


def wait_for_store(manager: KVManager) -> None:
    """Wait until the store is connected. An engine need not: until then, everything is a miss."""
    deadline = time.monotonic() + 60
    while not manager.stats()["tiers"]["REMOTE"]["available"]:
        if time.monotonic() > deadline:
            sys.exit("the store does not answer")
        time.sleep(0.05)


def make_kv(fill: float) -> dict[str, torch.Tensor]:
    """Make the paged KV cache of an engine: 64 blocks of 16 tokens, for each of two layers."""
    return {f"layer.{i}": torch.full((64, 2, 16, 4, 64), fill).bfloat16() for i in range(2)}


def main(url: str) -> None:
    with host(url, make_kv(1.0)) as manager:
        task, _ = manager.put_async(TOKENS, slot_mapping=range(256))
        manager.wait([task], timeout=60, completely=True)  # until it is in the bucket, too

    kv = make_kv(0.0)
    with host(url, kv) as manager:
        task, mask = manager.get_async(TOKENS, slot_mapping=range(256))
        status = manager.wait([task], timeout=60)[task].status
        loaded = all(bool((layer[:16] == 1.0).all()) for layer in kv.values())
        print(f"{status}: {int(mask.sum())} tokens, the first host's bytes: {loaded}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
