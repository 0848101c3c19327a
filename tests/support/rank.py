"""A rank in its own process, with KV tensors in a file. Run by test_stopped_ranks.py.

    python rank.py ENDPOINT FILE ENGINE_ID SERVER_TIMEOUT_S

It prints each state that its client comes to, and ends with its input.
"""

from __future__ import annotations

import sys
import threading
import time

import torch

from flexcache import KVTPClient, ModelConfig

TOKENS_PER_BLOCK = 16
NUM_BLOCKS = 256
MODEL = ModelConfig("stopped", 16, 8, 128, torch.bfloat16)
BLOCK_BYTES = TOKENS_PER_BLOCK * MODEL.token_size_in_bytes  # 1 MiB
KV_BYTES = NUM_BLOCKS * BLOCK_BYTES


def map_kv(path: str) -> torch.Tensor:
    """Map all bytes as another process sees them too."""
    return torch.from_file(path, shared=True, size=KV_BYTES, dtype=torch.uint8)


def report(client: KVTPClient) -> None:
    known = None
    while True:
        if client.state is not known:
            known = client.state
            print(known.name, flush=True)
        time.sleep(0.01)


def main(endpoint: str, path: str, engine_id: str, server_timeout_s: str) -> None:
    shape = (NUM_BLOCKS, MODEL.num_layers, 2, TOKENS_PER_BLOCK, 8, 128)
    blocks = map_kv(path).view(MODEL.dtype).view(shape)
    client = KVTPClient(endpoint, engine_id=engine_id, server_timeout_s=float(server_timeout_s))
    client.register_kv_caches({f"layer.{i}": blocks[:, i] for i in range(MODEL.num_layers)})
    threading.Thread(target=report, args=(client,), daemon=True).start()
    sys.stdin.read()
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
