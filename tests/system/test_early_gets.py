"""Gets whose blocks are still being loaded early, in this process and at a server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster, until

from flexcache import TierName
from flexcache.protocol.endpoints import private_endpoint

NUM_BLOCKS = 24
BLOCKS = range(NUM_BLOCKS)
TOKENS = np.arange(NUM_BLOCKS * 16)


@pytest.fixture(params=["in this process", "at a server"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A prompt is on SSD, and nowhere else."""
    settings: dict[str, object] = {"op_timeout_s": 600.0, "skip_slow_loads": False}
    settings["match_ttl_s"] = 3600.0
    if request.param == "at a server":
        settings["endpoint"] = private_endpoint()
    with running_cluster([tmp_path], **settings) as cluster:  # type: ignore[arg-type]
        cluster.put(TOKENS, BLOCKS)
        cluster.manager.clear("CPU")
        yield cluster


def test_a_get_waits_for_what_is_being_read_and_loads_the_rest_itself(cluster: Cluster) -> None:
    manager = cluster.manager
    disk = manager.stats()["workers"]["disk"]
    os.kill(disk, signal.SIGSTOP)
    try:
        prefetch = manager.prefetch_nowait(TOKENS)
        assert prefetch is not None
        assert manager.get_match_by_tier(TOKENS, awaits_loads=True) is None
        does_not_wait = manager.get_match_by_tier(TOKENS)
        assert does_not_wait is not None
        assert does_not_wait[2] == {TierName.SSD: len(TOKENS)}
        manager.cancel([does_not_wait[0]])
    finally:
        os.kill(disk, signal.SIGCONT)
    manager.wait([prefetch], WAIT_S)
    found = manager.get_match_by_tier(TOKENS, awaits_loads=True)
    assert found is not None
    task_id, _, sources = found
    assert sum(sources.values()) == len(TOKENS)
    assert sources[TierName.CPU] > 0
    stored = cluster.read(BLOCKS)
    cluster.wipe(BLOCKS)
    manager.launch([task_id], [cluster.slots(BLOCKS)])
    assert manager.wait([task_id], WAIT_S, completely=True)[task_id].mask.all()
    assert cluster.read(BLOCKS) == stored
    early = manager.stats()["early_loads"]
    assert early == {"open_blocks": 0, "early": 0, "late": sources[TierName.CPU] // 16, "wasted": 0}


def test_what_has_landed_for_a_request_that_is_cancelled_is_let_go(cluster: Cluster) -> None:
    manager = cluster.manager
    prefetch = manager.prefetch_async(TOKENS)
    manager.wait([prefetch], WAIT_S)
    until(lambda: manager.stats()["early_loads"]["open_blocks"] == NUM_BLOCKS)
    manager.cancel([prefetch])
    until(lambda: manager.stats()["early_loads"]["open_blocks"] == 0)
    assert manager.stats()["early_loads"]["wasted"] == NUM_BLOCKS
    manager.cancel([prefetch])
    assert cluster.get(TOKENS, BLOCKS).mask.all()


def test_a_cancelled_early_load_keeps_nothing(cluster: Cluster) -> None:
    manager = cluster.manager
    disk = manager.stats()["workers"]["disk"]
    os.kill(disk, signal.SIGSTOP)
    try:
        prefetch = manager.prefetch_async(TOKENS)
        manager.cancel([prefetch])
    finally:
        os.kill(disk, signal.SIGCONT)
    manager.wait([prefetch], WAIT_S)
    until(lambda: not manager.stats()["tasks"]["running"])
    until(lambda: manager.stats()["early_loads"]["open_blocks"] == 0)
    assert cluster.num_leased() == 0
    assert cluster.get(TOKENS, BLOCKS).mask.all()
