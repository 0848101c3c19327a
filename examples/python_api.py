"""Store the KV of a prompt and load it back, with nothing but the Python API.

    python examples/python_api.py

Needs neither vLLM nor a GPU: CPU tensors stand for an engine's paged KV cache.
"""

import torch

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

model = ModelConfig("my-model", num_layers=2, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
config = CacheConfig.from_env(num_cpu_blocks=256)  # and FLEXCACHE_*; CacheConfig(...) ignores them
kv = {f"layer.{i}": torch.randn(64, 2, 16, 4, 64).bfloat16() for i in range(2)}
with (
    KVManager(model, config) as manager,  # in the engine's scheduler
    KVTPClient(manager.endpoint) as client,  # in each of its workers
):
    client.register_kv_caches(kv)
    manager.wait_ready(30)

    tokens = list(range(64))
    task, mask = manager.put_async(tokens, slot_mapping=range(64))
    manager.wait([task])  # the GPU slots may be reused now
    task, mask = manager.get_async(tokens, slot_mapping=range(512, 576))
    print(manager.wait([task])[task].status, int(mask.sum()), "tokens")
