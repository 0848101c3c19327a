"""Logs of a running cache: changes of state, and nothing per request."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from cluster import READY_S, Cluster, running_cluster, until

from flexcache import CacheConfig, KVManager, ModelConfig
from flexcache.logs import LogEvent

TOKENS_PER_BLOCK = 16


def request(cluster: Cluster, number: int) -> None:
    tokens = [number] * TOKENS_PER_BLOCK
    cluster.put(tokens, [number % 8])
    cluster.get(tokens, [8 + number % 8])
    cluster.get([-1 - number] * TOKENS_PER_BLOCK, [0])  # a prompt that was never stored


def events_in(caplog: pytest.LogCaptureFixture) -> list[LogEvent]:
    """Return all events that were logged; a record of another kind fails here."""
    said = [record.msg for record in caplog.records if record.name.startswith("flexcache")]
    assert all(isinstance(event, LogEvent) for event in said), said
    return said


def test_two_hundred_requests_at_info_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flexcache")
    with running_cluster(
        [tmp_path], remote_url="memory://", remote_lookup_timeout_s=20.0, server_timeout_s=60.0
    ) as cluster:
        request(cluster, 0)
        before = {str(event) for event in events_in(caplog)}
        caplog.clear()
        for number in range(1, 201):
            request(cluster, number)
        assert cluster.manager.stats()["ended_tasks"]["get_success"] == 201
        # The remote worker may only now have come up: a change of state, said once.
        late = {event.name for event in events_in(caplog)}
    assert before
    assert late <= {"worker_began", "tier_available"}


def test_each_change_of_state_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flexcache")
    with running_cluster([tmp_path]) as cluster:
        request(cluster, 1)
        cluster.manager.clear("CPU")
        os.kill(cluster.manager.stats()["workers"]["disk"], signal.SIGKILL)
        while cluster.manager.stats()["worker_restarts"]["disk"] == 0:
            with cluster.server.lock, cluster.server.session():
                cluster.server.state.changed.wait(0.05)
        cluster.manager.wait_ready(READY_S)
        for client in cluster.clients:
            client.close()
        until(lambda: "rank_ended" in {event.name for event in events_in(caplog)})
    names = [event.name for event in events_in(caplog)]
    tiers = [(e.name, e.fields["tier"]) for e in events_in(caplog) if e.name.endswith("available")]
    assert tiers == [("tier_available", "SSD"), ("tier_unavailable", "SSD"),
                     ("tier_available", "SSD")]  # fmt: skip
    assert names.count("server_began") == names.count("server_ended") == 1
    assert names.count("rank_began") == names.count("rank_ended") == 1
    assert names.count("worker_began") == 2
    (died_event,) = (event for event in events_in(caplog) if event.name == "worker_died")
    assert died_event.fields["how"] == "killed by signal 9"
    (cleared,) = (event for event in events_in(caplog) if event.name == "tier_cleared")
    assert cleared.fields == {"tier": "CPU", "blocks": 1}


def test_writes_that_fail_are_trouble_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flexcache")
    with running_cluster([tmp_path]) as cluster:
        disk_worker = cluster.manager.stats()["workers"]["disk"]
        resource.prlimit(disk_worker, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for number in range(3):
            request(cluster, number)
        until(lambda: cluster.manager.stats()["dropped_blocks"].get("ssd_write_failed") == 3)
        (trouble,) = cluster.manager.stats()["trouble"]
        assert trouble.startswith("Writes to SSD failed in the last minute: ")
        until(lambda: "ops_failed" in {event.name for event in events_in(caplog)})
    (said,) = (event for event in events_in(caplog) if event.name == "ops_failed")
    assert said.fields["kind"] == "H2DISK"
    assert str(said.fields["error"]) in trouble


def test_a_store_that_is_lost_and_comes_back_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "flexcache")

    def names() -> list[str]:
        return [event.name for event in events_in(caplog)]

    with running_cluster(remote_url="memory://") as cluster:
        until(lambda: "tier_available" in names())
        os.kill(cluster.manager.stats()["workers"]["remote"], signal.SIGKILL)
        until(lambda: names().count("tier_available") == 2)
    said = [name for name in names() if name.startswith(("breaker_", "tier_"))]
    lost = ["breaker_opened", "tier_unavailable"]
    assert said == ["tier_available", *lost, "breaker_closed", "tier_available"]


def test_a_cache_that_is_closed_at_once_does_not_wait_for_its_disk_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker makes its imports, and would not hear of it for seconds."""
    config = CacheConfig(num_cpu_blocks=8, num_ssd_blocks=8, ssd_cache_dirs=[str(tmp_path)])
    with KVManager(ModelConfig("test", 3, 4, 32, torch.bfloat16), config):
        pass
    assert "worker_killed" not in {event.name for event in events_in(caplog)}
