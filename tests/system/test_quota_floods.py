"""Quotas of namespaces, from the setting to what floods of others leave alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster, until

from flexcache.protocol.endpoints import private_endpoint

NUM_BLOCKS = 8
NUM_PROMPTS = 3
NUM_FLOODS = 20
"""Prompts of the other namespace, each as long: far more than everything holds."""
CAPACITY = 6 * NUM_BLOCKS


def tokens_of(prompt: int) -> np.ndarray:
    return np.arange(NUM_BLOCKS * 16) + 10_000 * prompt


def ask(cluster: Cluster, namespace: str, prompt: int) -> int:
    """Get a prompt and store it; return how many blocks were found."""
    tokens, slots = tokens_of(prompt), cluster.slots(range(NUM_BLOCKS))
    found, mask = cluster.manager.get_async(tokens, slots, namespace=namespace)
    stored, _ = cluster.manager.put_async(tokens, slots, namespace=namespace)
    cluster.manager.wait([found, stored], WAIT_S, completely=True)
    return int(mask.sum()) // 16


def flood(cluster: Cluster, namespace: str) -> None:
    for prompt in range(NUM_FLOODS):
        ask(cluster, namespace, 100 + prompt)


def num_found(cluster: Cluster, namespace: str) -> int:
    return sum(ask(cluster, namespace, prompt) for prompt in range(NUM_PROMPTS))


@pytest.fixture(params=["in this process", "at a server"])
def endpoint(request: pytest.FixtureRequest) -> dict[str, str]:
    return {} if request.param == "in this process" else {"endpoint": private_endpoint()}


@pytest.mark.parametrize("quotas", ["quiet=50%", None])
def test_a_flood_of_one_namespace_leaves_anothers_hits_alone(
    endpoint: dict[str, str], quotas: str | None
) -> None:
    with running_cluster(num_cpu_blocks=CAPACITY, quotas=quotas, **endpoint) as cluster:
        assert num_found(cluster, "quiet") == 0
        flood(cluster, "loud")
        kept = num_found(cluster, "quiet")
        assert kept == (NUM_PROMPTS * NUM_BLOCKS if quotas else 0)
        parts = cluster.manager.stats()["tiers"]["CPU"].get("quotas")
        if quotas is None:
            assert parts is None
            return
        half, flooded = CAPACITY // 2, NUM_FLOODS * NUM_BLOCKS
        asked = 2 * NUM_PROMPTS * NUM_BLOCKS
        assert parts == {
            "quiet": {"quota": half, "used": half, "evicted": 0, "hit": half, "missed": asked // 2},
            "*": {
                "quota": half, "used": half, "evicted": flooded - half, "hit": 0,
                "missed": flooded,
            },
        }  # fmt: skip


def test_on_ssd_quotas_outlive_the_server(tmp_path: Path) -> None:
    settings = {
        "num_cpu_blocks": 2 * NUM_BLOCKS, "num_ssd_blocks": CAPACITY, "quotas": "quiet=50%",
        "ssd_cache_dirs": [str(tmp_path)], "skip_slow_loads": False, "eviction_policy": "lru",
    }  # fmt: skip
    with running_cluster(**settings) as cluster:
        num_found(cluster, "quiet")
        ssd = cluster.manager.stats()["tiers"]["SSD"]["quotas"]
        assert ssd["quiet"]["used"] == NUM_PROMPTS * NUM_BLOCKS
    with running_cluster(**settings) as cluster:
        until(lambda: cluster.manager.stats()["tiers"]["SSD"]["available"])
        ssd = cluster.manager.stats()["tiers"]["SSD"]["quotas"]
        assert ssd["quiet"]["used"] == NUM_PROMPTS * NUM_BLOCKS, "they are known to be its own"
        flood(cluster, "loud")
        assert num_found(cluster, "quiet") == NUM_PROMPTS * NUM_BLOCKS
