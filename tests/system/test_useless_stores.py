"""A cache that sees nothing come back stores nothing, until something does: bytes and counters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster

from flexcache.cache.reuse_watch import MIN_MISSED_BLOCKS
from flexcache.protocol.runtime import private_endpoint

NUM_BLOCKS = 8
CAPACITY = 6 * NUM_BLOCKS
NUM_PROMPTS = 2 * CAPACITY // NUM_BLOCKS
"""Each tier is filled and replaced by as many."""


def tokens_of(prompt: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    return np.arange(num_blocks * 16) + 1_000_000 * prompt


def serve(cluster: Cluster, prompt: int) -> int:
    """Get a prompt and store it; return how many blocks were found."""
    tokens, slots = tokens_of(prompt), cluster.slots(range(NUM_BLOCKS))
    found, mask = cluster.manager.get_async(tokens, slots)
    stored, _ = cluster.manager.put_async(tokens, slots)
    cluster.manager.wait([found, stored], WAIT_S, completely=True)
    return int(mask.sum()) // 16


def num_skipped(cluster: Cluster) -> int:
    return int(cluster.manager.stats()["dropped_blocks"].get("nothing_returns", 0))


def look_up_in_vain(cluster: Cluster, prompt: int) -> None:
    task_id, mask = cluster.manager.get_match(tokens_of(prompt, MIN_MISSED_BLOCKS))
    assert not mask.any()
    cluster.manager.cancel([task_id])


@pytest.mark.parametrize("has_ssd", [False, True])
@pytest.mark.parametrize("at_server", [False, True])
@pytest.mark.parametrize("skips", [True, False])
def test_stores_end_and_begin_again(
    has_ssd: bool, at_server: bool, skips: bool, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"endpoint": private_endpoint()} if at_server else {}
    if has_ssd:
        settings |= {"ssd_cache_dirs": [str(tmp_path)], "num_ssd_blocks": CAPACITY}
    with running_cluster(
        num_cpu_blocks=CAPACITY, skip_useless_stores=skips, skip_slow_loads=False, **settings
    ) as cluster:
        look_up_in_vain(cluster, 1000)
        assert sum(serve(cluster, prompt) for prompt in range(NUM_PROMPTS)) == 0
        assert num_skipped(cluster) == 0

        assert serve(cluster, 100) == 0
        assert num_skipped(cluster) == (NUM_BLOCKS if skips else 0)
        assert serve(cluster, 100) == (0 if skips else NUM_BLOCKS)
        assert serve(cluster, 100) == NUM_BLOCKS
        assert serve(cluster, 101) == 0
        assert serve(cluster, 101) == NUM_BLOCKS
        assert num_skipped(cluster) == (NUM_BLOCKS if skips else 0)
