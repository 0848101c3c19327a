"""An engine whose KV follows from its weights, its adapter and the tokens, as a real one's does.

So every byte that it loads can be compared with what it would have computed itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from cluster import PATIENCE_S, as_bytes

from flexcache import CacheConfig, KVManager, KVResponse, KVTPClient, ModelConfig
from flexcache.cache.prompt import Mask

TOKENS_PER_BLOCK = 4
NUM_GPU_BLOCKS = 32
MODEL = ModelConfig("weighted", 2, 2, 8, torch.float32, tp_size=2)


def tokens_of(prompt: str) -> np.ndarray:
    """Tokens of a prompt that is spelled as a word: a letter is a block."""
    return np.repeat([ord(letter) for letter in prompt], TOKENS_PER_BLOCK)


@cache
def content_of(weights: str, adapter: str, prefix: str, layer: str, rank: int) -> bytes:
    """What a rank computes for a layer of the last block of ``prefix``."""
    name = repr((weights, adapter, prefix, layer, rank)).encode()
    size = TOKENS_PER_BLOCK * MODEL.token_size_in_bytes // MODEL.num_layers // MODEL.num_ranks
    return np.random.default_rng(list(hashlib.sha256(name).digest())).bytes(size)


def digest_of(adapter: str) -> str:
    """The digest of an adapter of these bytes; empty without an adapter."""
    return hashlib.sha256(adapter.encode()).hexdigest()[:16] if adapter else ""


class WeightedEngine:
    """A manager, its two ranks, and their KV tensors.

    Attributes:
        weights: Stands for the bytes of its weights.
        adapters: Stand for the bytes of the adapters that it has loaded.

    Args:
        version: Names the weights before the manager is started.
    """

    def __init__(
        self, config: CacheConfig, engine_id: str, weights: str = "base", version: str | None = None
    ) -> None:
        self.weights = weights
        self.adapters: set[str] = set()
        self.manager = KVManager(MODEL, config, engine_id=engine_id)
        if version is not None:
            self.manager.new_weights(version)
        shape = (NUM_GPU_BLOCKS, 2, TOKENS_PER_BLOCK, 1, MODEL.head_size)
        self.kv = [
            {f"layer.{i}": torch.zeros(shape) for i in range(MODEL.num_layers)}
            for _ in range(MODEL.num_ranks)
        ]
        self.clients = [
            KVTPClient(
                self.manager.endpoint,
                rank=rank,
                engine_id=engine_id,
                holds_adapter=lambda digest: digest in map(digest_of, self.adapters),
            )
            for rank in range(MODEL.num_ranks)
        ]
        self.manager.start()
        for client, kv in zip(self.clients, self.kv, strict=True):
            client.register_kv_caches(kv)

    def wait_ready(self) -> None:
        self.manager.wait_ready(PATIENCE_S)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.manager.shutdown()

    # -- what a model does -----------------------------------------------------------------------

    def compute(self, prompt: str, blocks: Sequence[int], adapter: str = "") -> None:
        """Fill GPU blocks as a prefill of the prompt does."""
        for rank, name, tensor in self._tensors():
            for length, block in enumerate(blocks, 1):
                data = content_of(self.weights, adapter, prompt[:length], name, rank)
                flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
                tensor[block] = flat.view(tensor[block].shape)

    def wipe(self, blocks: Sequence[int]) -> None:
        for _, _, tensor in self._tensors():
            for block in blocks:
                tensor[block].zero_()

    def num_right(self, prompt: str, blocks: Sequence[int], adapter: str = "") -> int:
        """How many of the prompt's first blocks hold what the model computes now."""
        for length, block in enumerate(blocks, 1):
            for rank, name, tensor in self._tensors():
                expected = content_of(self.weights, adapter, prompt[:length], name, rank)
                if as_bytes(tensor[block]) != expected:
                    return length - 1
        return len(blocks)

    def snapshot(self) -> list[bytes]:
        return [as_bytes(tensor) for _, _, tensor in self._tensors()]

    def _tensors(self) -> list[tuple[int, str, torch.Tensor]]:
        return [(rank, *item) for rank, kv in enumerate(self.kv) for item in kv.items()]

    # -- what its adapter does -------------------------------------------------------------------

    def update(self, weights: str, version: str | None = None) -> None:
        """Load other weights, as every rank notices."""
        for client in self.clients:
            client.weights_changed(version)
        self.weights = weights

    def put(
        self, prompt: str, adapter: str = "", weights: int | None = None, start: int = 0
    ) -> tuple[Mask, KVResponse]:
        """Compute a prompt and store it, on all tiers."""
        blocks = range(start, start + len(prompt))
        self.compute(prompt, blocks, adapter)
        task_id, mask = self.manager.put_async(
            tokens_of(prompt), slots(blocks), adapter=digest_of(adapter), weights=weights
        )
        return mask, self.manager.wait([task_id], PATIENCE_S, completely=True)[task_id]

    def get(self, prompt: str, adapter: str = "", start: int = 0) -> int:
        """Load what is cached of a prompt; return how many blocks, all of them compared."""
        blocks = range(start, start + len(prompt))
        self.wipe(blocks)
        task_id, _ = self.manager.get_async(
            tokens_of(prompt), slots(blocks), adapter=digest_of(adapter)
        )
        answer = self.manager.wait([task_id], PATIENCE_S, completely=True)[task_id]
        found = int(answer.mask.sum()) // TOKENS_PER_BLOCK
        right = self.num_right(prompt, blocks[:found], adapter)
        assert right == found, f"block {right} of {prompt!r} is another model's"
        return found


def slots(blocks: Sequence[int]) -> np.ndarray:
    return (np.asarray(blocks)[:, None] * TOKENS_PER_BLOCK + np.arange(TOKENS_PER_BLOCK)).ravel()
