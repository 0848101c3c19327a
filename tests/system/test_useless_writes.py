"""SSD receives nothing while nothing comes back, until something does: bytes and counters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster

from flexcache.cache.admission import MIN_MISSED_BLOCKS
from flexcache.protocol.endpoints import private_endpoint

NUM_BLOCKS = 8
CAPACITY = 6 * NUM_BLOCKS
NUM_PROMPTS = CAPACITY // NUM_BLOCKS
"""A tier is filled or replaced by as many."""


def tokens_of(prompt: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    return np.arange(num_blocks * 16) + 1_000_000 * prompt


def serve(cluster: Cluster, prompt: int) -> int:
    """Get a prompt and store it; return how many blocks were found."""
    tokens, slots = tokens_of(prompt), cluster.slots(range(NUM_BLOCKS))
    found, mask = cluster.manager.get_async(tokens, slots)
    stored, _ = cluster.manager.put_async(tokens, slots)
    cluster.manager.wait([found, stored], WAIT_S, completely=True)
    return int(mask.sum()) // 16


def serve_new(cluster: Cluster, prompts: range) -> None:
    assert sum(serve(cluster, prompt) for prompt in prompts) == 0


def num_skipped(cluster: Cluster) -> int:
    return int(cluster.manager.stats()["dropped_blocks"].get("ssd_nothing_returns", 0))


def look_up_in_vain(cluster: Cluster, prompt: int) -> None:
    task_id, mask = cluster.manager.get_match(tokens_of(prompt, MIN_MISSED_BLOCKS))
    assert not mask.any()
    cluster.manager.cancel([task_id])


@pytest.mark.whole
@pytest.mark.parametrize("at_server", [False, True])
@pytest.mark.parametrize("skips", [True, False])
def test_writes_end_and_begin_again(at_server: bool, skips: bool, tmp_path: Path) -> None:
    settings: dict[str, object] = {"endpoint": private_endpoint()} if at_server else {}
    settings |= {"ssd_cache_dirs": [str(tmp_path)], "num_ssd_blocks": CAPACITY}
    with running_cluster(
        num_cpu_blocks=CAPACITY // 2, skip_useless_ssd_writes=skips, skip_slow_loads=False,
        eviction_policy="lru", **settings,
    ) as cluster:  # fmt: skip
        look_up_in_vain(cluster, 1000)
        serve_new(cluster, range(2 * NUM_PROMPTS))
        assert num_skipped(cluster) == 0

        serve_new(cluster, range(100, 101))
        assert num_skipped(cluster) == (NUM_BLOCKS if skips else 0)
        assert serve(cluster, 100) == NUM_BLOCKS, "DRAM has it"

        look_up_in_vain(cluster, 1001)
        serve_new(cluster, range(200, 200 + NUM_PROMPTS))
        serve_new(cluster, range(300, 301 + NUM_PROMPTS // 2))
        assert serve(cluster, 300) == (0 if skips else NUM_BLOCKS), "DRAM has it no more"
        assert cluster.manager.stats()["tiers"]["SSD"].get("refused_returns") == (
            1 if skips else None
        )
        serve_new(cluster, range(400, 400 + NUM_PROMPTS // 2))
        assert serve(cluster, 300) == NUM_BLOCKS, "SSD has it"
