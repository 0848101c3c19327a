"""Restarts of an SSD tier that is too large to be indexed at once: real files, real ranks.

Here `at once` are a few blocks, and the rest follows when the test lets it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, ops, running_cluster, until

from flexcache import KVStatus
from flexcache.cache import tiered_cache

BLOCKS = 4
NUM_PROMPTS = 10
SSD_BLOCKS = BLOCKS * NUM_PROMPTS


def tokens(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1 << 15, BLOCKS * 16)


def slots_of(number: int) -> list[int]:
    """GPU blocks of a prompt's own."""
    return list(range(BLOCKS * number, BLOCKS * (number + 1)))


def fill(where: Path) -> list[list[bytes]]:
    """Store prompts one after the other; returns their bytes."""
    with running_cluster([where], num_ssd_blocks=SSD_BLOCKS) as cluster:
        for number in range(NUM_PROMPTS):
            assert cluster.put(tokens(number), slots_of(number)).status is KVStatus.SUCCESS
        return [cluster.read(slots_of(number)) for number in range(NUM_PROMPTS)]


def ssd(cluster: Cluster) -> dict[str, int]:
    return {"restoring": 0, **cluster.manager.stats()["tiers"]["SSD"]}


def num_found(cluster: Cluster, number: int) -> int:
    task_id, mask = cluster.manager.get_match(tokens(number))
    cluster.manager.cancel([task_id])
    return int(mask.sum()) // 16


def found(cluster: Cluster) -> list[int]:
    """Return how many blocks of each prompt are found."""
    return [num_found(cluster, number) for number in range(NUM_PROMPTS)]


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two prompts are found at once; no others follow."""
    monkeypatch.setattr(tiered_cache, "_RESTORED_AT_ONCE", BLOCKS + 17)
    monkeypatch.setattr(tiered_cache, "_RESTORED_A_TURN", BLOCKS)
    monkeypatch.setattr(tiered_cache, "_RESTORE_PAUSE_S", 3600.0)
    return monkeypatch


def test_the_prompts_used_last_are_loaded_before_the_others_can_be_found(
    tmp_path: Path, two_at_once: pytest.MonkeyPatch
) -> None:
    stored = fill(tmp_path)
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert found(cluster) == [0] * (NUM_PROMPTS - 2) + [BLOCKS, BLOCKS]
        assert ssd(cluster)["restoring"] == SSD_BLOCKS - 2 * BLOCKS
        last = NUM_PROMPTS - 1
        cluster.wipe(slots_of(last))
        assert cluster.get(tokens(last), slots_of(last)).mask.all()
        assert cluster.read(slots_of(last)) == stored[last]


def test_all_prompts_return_in_the_end_beside_puts_of_the_same(
    tmp_path: Path, two_at_once: pytest.MonkeyPatch
) -> None:
    stored = fill(tmp_path)
    two_at_once.setattr(tiered_cache, "_RESTORE_PAUSE_S", 0.05)
    with running_cluster([tmp_path], num_ssd_blocks=2 * SSD_BLOCKS, num_cpu_blocks=8) as cluster:
        for number in (0, 3, 20):  # two that return too, and a new one; 0 is stored differently
            cluster.put(tokens(number), slots_of(number % 16))
        written = {0: cluster.read(slots_of(0)), 3: cluster.read(slots_of(3))}
        until(lambda: not ssd(cluster)["restoring"])
        assert found(cluster) == [BLOCKS] * NUM_PROMPTS
        for number in range(NUM_PROMPTS):
            cluster.wipe(slots_of(number))
            assert cluster.get(tokens(number), slots_of(number)).mask.all()
            assert cluster.read(slots_of(number)) in (stored[number], written.get(number))
        assert ops(cluster)["DISK2H"] >= SSD_BLOCKS - 2 * BLOCKS


def test_what_is_cleared_before_it_could_be_found_does_not_return(
    tmp_path: Path, two_at_once: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert cluster.manager.clear("SSD") == SSD_BLOCKS
        assert (ssd(cluster)["restoring"], ssd(cluster)["free"]) == (0, SSD_BLOCKS)
    two_at_once.undo()
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert found(cluster) == [0] * NUM_PROMPTS


def test_a_reset_drops_what_cannot_be_found_yet_too(
    tmp_path: Path, two_at_once: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert ssd(cluster)["restoring"]
        cluster.manager.reset()
        two_at_once.setattr(tiered_cache, "_RESTORE_PAUSE_S", 0.0)
        assert ssd(cluster)["restoring"] == 0
        assert found(cluster) == [0] * NUM_PROMPTS
    two_at_once.undo()
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert found(cluster) == [0] * NUM_PROMPTS


def test_what_could_not_be_found_yet_survives_another_restart(
    tmp_path: Path, two_at_once: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert num_found(cluster, 0) == 0
    two_at_once.undo()
    with running_cluster([tmp_path], num_ssd_blocks=SSD_BLOCKS) as cluster:
        assert found(cluster) == [BLOCKS] * NUM_PROMPTS
