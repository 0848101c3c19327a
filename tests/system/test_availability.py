"""A tier whose worker is away answers miss, and dirty blocks wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running_cluster
from test_faults import SOURCE, TOKENS, until

from flexcache import KVStatus

PROMPTS = [TOKENS[: 8 * 16] + 1000 * number for number in range(5)]
BLOCKS = list(range(8))


def is_up(cluster: Cluster) -> bool:
    return "disk worker" not in cluster.server.health()["missing"]


def num_deaths(cluster: Cluster) -> int:
    return int(cluster.manager.stats()["counters"]["worker_deaths"].get("disk", 0))


def kill_disk_worker(cluster: Cluster) -> None:
    """Kill it, and wait until the server has noticed."""
    before = num_deaths(cluster)
    os.kill(cluster.manager.stats()["workers"]["disk"], signal.SIGKILL)
    until(lambda: num_deaths(cluster) > before)


@pytest.mark.whole
def test_no_get_fails_once_the_death_of_the_disk_worker_was_noticed(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
        seen: list[KVStatus] = []
        for _ in range(5):  # the back-off doubles: for seconds in all there is no worker
            kill_disk_worker(cluster)
            while not is_up(cluster):
                cluster.manager.clear("CPU")
                seen.append(cluster.get(TOKENS, SOURCE).status)
        assert set(seen) <= {KVStatus.NOT_FOUND, KVStatus.SUCCESS}
        assert KVStatus.NOT_FOUND in seen
        cluster.manager.clear("CPU")
        cluster.wipe(SOURCE)
        assert cluster.get(TOKENS, SOURCE).mask.all()
        assert cluster.read(SOURCE) == expected


def test_with_write_back_all_dirty_blocks_are_written_when_the_disk_worker_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.server.loop._DRAIN_TIMEOUT_S", 60.0)
    monkeypatch.setattr("flexcache.cache.tiered_cache.MAX_DIRTY", 0.1)
    with running_cluster([tmp_path], ssd_write_policy="write_back") as cluster:
        for tokens in PROMPTS:
            until(lambda: is_up(cluster))
            kill_disk_worker(cluster)
            cluster.put(tokens, BLOCKS)
        until(lambda: is_up(cluster))
        assert not cluster.manager.stats()["dropped_blocks"]
    check_all_is_on_ssd(tmp_path)


def test_a_server_that_stops_waits_for_the_disk_worker_to_write_dirty_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.server.loop._DRAIN_TIMEOUT_S", 60.0)
    with running_cluster([tmp_path], ssd_write_policy="write_back") as cluster:
        for tokens in PROMPTS:
            cluster.put(tokens, BLOCKS)
        kill_disk_worker(cluster)
    check_all_is_on_ssd(tmp_path)


def test_a_server_that_stops_starts_a_disk_worker_that_is_in_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.server.loop._DRAIN_TIMEOUT_S", 60.0)
    monkeypatch.setattr("flexcache.processes._FIRST_BACKOFF_S", 3600.0)
    with running_cluster([tmp_path], ssd_write_policy="write_back") as cluster:
        for tokens in PROMPTS:
            cluster.put(tokens, BLOCKS)
        kill_disk_worker(cluster)
    check_all_is_on_ssd(tmp_path)


def check_all_is_on_ssd(path: Path) -> None:
    with running_cluster([path]) as cluster:
        for tokens in PROMPTS:
            task_id, mask = cluster.manager.get_match(tokens)
            assert np.all(mask)
            cluster.manager.cancel([task_id])
            assert cluster.get(tokens, BLOCKS).mask.all()
