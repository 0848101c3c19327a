"""An engine with window and state groups over tensors of this process, beside its manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cluster import until

from flexcache import CacheConfig, KVGroup, KVManager, KVStatus, KVTPClient, ModelConfig

PATIENCE_S = 60.0
NUM_GPU_BLOCKS = 200
NUM_LAYERS = 2

GEMMA_LIKE = (KVGroup("window", 32, 40), KVGroup("full", 16), KVGroup("window", 32, 40))
"""Two dense blocks per position of 32 tokens; a tail of two windows of two blocks: two units."""
STATE_LIKE = (KVGroup("full", 32), KVGroup("state", 32))
STATES_ONLY = (KVGroup("state", 32),)
LLAMA_LIKE = (KVGroup("chunked", 32, 128), KVGroup("full", 32))
ALL_LIKE = [GEMMA_LIKE, STATE_LIKE, STATES_ONLY, LLAMA_LIKE]


@dataclass
class TailedEngine:
    """A manager and its rank. Each group takes its blocks from one pool, as engines do."""

    manager: KVManager
    groups: tuple[KVGroup, ...]
    kv: dict[str, torch.Tensor]
    next_block: int = 0

    def take(self, count: int) -> list[int]:
        """Take GPU blocks that no other request has."""
        taken = [(self.next_block + i) % NUM_GPU_BLOCKS for i in range(count)]
        self.next_block += count
        return taken

    def tables(self, num_tokens: int, start: int = 0) -> list[list[int]]:
        """Take the blocks of a prompt: dense ones from token ``start`` on, tails at its end."""
        return [
            self.take((num_tokens - start) // group.tokens_per_block)
            if group.is_dense
            else self.take(group.num_needed(num_tokens))
            for group in self.groups
        ]

    def read(self, tables: Sequence[Sequence[int]]) -> list[list[bytes]]:
        return [
            [
                b"".join(t[block].view(torch.uint8).numpy().tobytes() for t in self.kv.values())
                for block in table
            ]
            for table in tables
        ]

    def wipe(self) -> None:
        for tensor in self.kv.values():
            tensor.zero_()

    def put(self, tokens: np.ndarray, tables: list[list[int]], first: int = 0) -> KVStatus:
        """Store a whole prompt and its tail; the dense tables begin at token ``first``."""
        task, mask = self.manager.put_match(tokens, tail_at=len(tokens))
        begin = int(mask.argmax()) if mask.any() else len(tokens)
        given = [
            table[(begin - first) // group.tokens_per_block :] if group.is_dense else table
            for group, table in zip(self.groups, tables, strict=True)
        ]
        self.manager.launch([task], group_blocks=[given])
        return self.manager.wait([task], PATIENCE_S, completely=True)[task].status

    def get(self, tokens: np.ndarray, start: int = 0) -> tuple[int, list[list[bytes]], KVStatus]:
        """Load what is cached behind ``start``; return where the hit ends, and what came."""
        wanted = np.ones(len(tokens), dtype=np.bool_)
        wanted[:start] = False
        task, mask = self.manager.get_match(tokens, wanted)
        if not mask.any():
            return 0, [], self.manager.wait([task], PATIENCE_S)[task].status
        stop = int(mask.nonzero()[0][-1]) + 1
        assert mask.nonzero()[0].tolist() == list(range(start, stop))
        tables = self.tables(stop, start)
        self.manager.launch([task], group_blocks=[tables])
        status = self.manager.wait([task], PATIENCE_S, completely=True)[task].status
        return stop, self.read(tables), status


def model_of(groups: tuple[KVGroup, ...]) -> ModelConfig:
    return ModelConfig("tailed", NUM_LAYERS, 2, 16, torch.float32, groups=groups)


@contextlib.contextmanager
def tailed_engine(
    groups: tuple[KVGroup, ...], awaits_tiers: bool = True, **settings: Any
) -> Iterator[TailedEngine]:
    config = CacheConfig(**{"tokens_per_block": 32, "num_cpu_blocks": 64, **settings})
    tokens_per_block = 16 if groups == GEMMA_LIKE else 32
    shape = (NUM_GPU_BLOCKS, 2, tokens_per_block, 2, 16)
    kv = {f"layer.{i}": torch.rand(shape) for i in range(NUM_LAYERS)}
    with (
        KVManager(model_of(groups), config) as manager,
        KVTPClient(manager.endpoint) as rank,
    ):
        rank.register_kv_caches(kv)
        manager.wait_ready(PATIENCE_S)
        if awaits_tiers:
            until(lambda: all(t["available"] for t in manager.stats()["tiers"].values()))
        yield TailedEngine(manager, groups, kv)
        manager.check()
        if config.endpoint is None:
            until(lambda: not any(t["leased"] for t in manager.stats()["tiers"].values()))
