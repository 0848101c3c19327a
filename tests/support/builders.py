"""Prompts spelled as words: a letter is a block, and a block's key is the word up to its letter.

So a key says what its block must hold, and two words share blocks as far as they share letters.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.block_pool import BlockIds
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiered_cache import CacheSizes, TieredCache, build_cache
from flexcache.config import CacheConfig
from flexcache.ids import BlockKey, RootId, TaskKind

ROOT = RootId(b"a-model")
OTHER_ROOT = RootId(b"another-model")
ROOTS = (ROOT, OTHER_ROOT)


def make_cache(
    host: int, ssd: int = 0, remote: int = 0, *, chunk: int = 2, backlog: int = 1000,
    policy: str = "write_through", tokens_per_block: int | None = None,
    skip_slow_loads: bool = False, past_dram: str = "auto", keeps_on_host: bool = True,
    write_blocks_per_s: float | None = None, retention_s: float | None = None,
    tells_locality: bool = False, peers: bool = False,
) -> TieredCache:  # fmt: skip
    """Build a cache of tiny tiers as a server does; with a block size it keeps a journal.

    With the policy ``write_back`` two dirty blocks are enough to be written.
    """
    write_mb_s = None if write_blocks_per_s is None else write_blocks_per_s / 1e6  # of one byte
    config = CacheConfig(
        num_cpu_blocks=host,
        remote_url="memory://" if remote else None,
        peer_endpoint="tcp://127.0.0.1:9600" if peers else None,
        ssd_past_dram=past_dram,  # type: ignore[arg-type]
        ssd_write_policy=policy,  # type: ignore[arg-type]
        remote_write_policy=policy,  # type: ignore[arg-type]
        eviction_policy="lru",
        skip_slow_loads=skip_slow_loads,
        ssd_write_mb_s=write_mb_s,
        remote_write_mb_s=write_mb_s,
        retention_s=retention_s,
        kv_events=tokens_per_block is not None,
        kv_events_locality=tells_locality,
        tokens_per_block=tokens_per_block or 16,
    )
    cache = build_cache(
        config,
        CacheSizes(
            host,
            ssd,
            chunk,
            backlog,
            keeps_on_host,
            max_dirty=2,
            num_remembered=remote or (30 if peers else 1),
        ),
    )  # fmt: skip
    for tier in cache.tiers.beyond:
        tier.can_be_asked = True
    return cache


def key_of(word: str) -> BlockKey:
    """Key of the last block of ``word``."""
    return BlockKey(word.encode())


def keys_of(word: str, start: int = 0) -> list[BlockKey]:
    """Keys of the blocks of ``word`` from ``start`` on."""
    return [key_of(word[:end]) for end in range(start + 1, len(word) + 1)]


def prompt(word: str, root: RootId = ROOT) -> EngineBlockKeys:
    return EngineBlockKeys(root, keys_of(word), len(word))


def get_of(keys: EngineBlockKeys, start: int = 0) -> Prompt:
    """A get of all blocks that have keys, from ``start`` on."""
    return Prompt(TaskKind.GET, keys, start, keys.num_blocks, 0)


def put_of(keys: EngineBlockKeys, start: int = 0) -> Prompt:
    """A put likewise."""
    return Prompt(TaskKind.PUT, keys, start, keys.num_blocks, 0)


def prefixes(word: str) -> list[str]:
    """All prefixes but the empty one, shortest first."""
    return [word[:end] for end in range(1, len(word) + 1)]


def words(alphabet: str, length: int) -> list[str]:
    """Every word of exactly this length."""
    return ["".join(letters) for letters in product(alphabet, repeat=length)]


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, dtype=np.int64)
