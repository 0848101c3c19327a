"""A cache that is stopped and started again still has its SSD blocks, byte for byte."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import PATIENCE_S, running_cluster
from test_shared import Member

from flexcache import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.server import KVServer
from flexcache.tasks.engine import KVTaskEngine

TOKENS = np.arange(24 * 16)
SOURCE = list(range(24))


@pytest.mark.parametrize(
    ("num_dirs", "ssd_sync"),
    [
        (2, "group"),
        pytest.param(1, "group", marks=pytest.mark.whole),
        pytest.param(1, "none", marks=pytest.mark.whole),
        pytest.param(2, "none", marks=pytest.mark.whole),
    ],
)
def test_a_new_cache_serves_what_the_previous_one_stored(
    num_dirs: int, ssd_sync: str, tmp_path: Path
) -> None:
    dirs = [tmp_path / str(i) for i in range(num_dirs)]
    with running_cluster(dirs, ssd_sync=ssd_sync) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
    with running_cluster(dirs, ssd_sync=ssd_sync) as cluster:
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 24
        assert cluster.get(TOKENS, SOURCE).mask.all()
        assert cluster.read(SOURCE) == expected
        longer = np.arange(30 * 16)
        assert cluster.put(longer, list(range(30))).mask.sum() == 6 * 16
    with running_cluster(dirs, ssd_sync=ssd_sync) as cluster:
        assert cluster.get(longer, list(range(30))).mask.all()


def test_engine_keys_and_namespaces_are_kept_apart(tmp_path: Path) -> None:
    keys = [bytes([i]) * 32 for i in range(24)]
    with running_cluster([tmp_path]) as cluster:
        slots = cluster.slots(SOURCE)
        task, _ = cluster.manager.put_async(TOKENS, slots, block_keys=keys, namespace="alice")
        cluster.manager.wait([task], 30, completely=True)
    with running_cluster([tmp_path]) as cluster:
        match = cluster.manager.get_match
        assert match(TOKENS, block_keys=keys, namespace="alice")[1].all()
        assert not match(TOKENS, block_keys=keys)[1].any()
        assert not match(TOKENS, namespace="alice")[1].any()


def test_a_smaller_tier_keeps_the_prefix_that_still_exists(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
    with running_cluster([tmp_path], num_ssd_blocks=10) as cluster:
        cluster.wipe(SOURCE)
        served = int(cluster.get(TOKENS, SOURCE).mask.sum()) // 16
        assert served == cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 10
        assert cluster.read(SOURCE[:10]) == [
            data for layer in range(3) for data in expected[layer * 24 : layer * 24 + 10]
        ]
    with running_cluster([tmp_path], num_ssd_blocks=200) as cluster:
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 10
        assert cluster.put(TOKENS, SOURCE).mask.all()


def test_another_model_of_the_same_block_size_shares_the_directory_and_no_block(
    tmp_path: Path,
) -> None:
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, SOURCE)
    other = ModelConfig("another", 3, 4, 32, torch.bfloat16)
    with running_cluster([tmp_path], model=other) as cluster:
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 24
        assert not cluster.manager.get_match(TOKENS)[1].any()


def test_another_block_size_is_refused_by_name_or_cleared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, SOURCE)
    other = ModelConfig("test", 5, 4, 32, torch.bfloat16)
    with (
        pytest.raises(ConfigError, match=f"doctor {tmp_path} --clear"),
        running_cluster([tmp_path], model=other),
    ):
        pass
    with (
        caplog.at_level(logging.WARNING),
        running_cluster([tmp_path], model=other, ssd_on_mismatch="clear") as cluster,
    ):
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 0
        assert "ssd_directory_cleared" in caplog.text
        assert cluster.put(TOKENS, SOURCE).mask.all()


def test_a_cache_that_failed_to_open_leaves_no_worker_and_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers run by then, and hold the directory."""
    restore, failures = KVTaskEngine.restore, [MemoryError()]

    def restore_at_last(self: KVTaskEngine, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return restore(self, *arguments)

    monkeypatch.setattr(KVTaskEngine, "restore", restore_at_last)
    config = CacheConfig(
        num_cpu_blocks=64, num_ssd_blocks=64, ssd_cache_dirs=[str(tmp_path / "ssd")]
    )
    server = KVServer(config, private_endpoint("opens-again"))
    server.start()
    member = Member(CacheConfig(endpoint=server.endpoint), engine_id="one")
    try:
        member.manager.wait_ready(PATIENCE_S)
        assert not failures
        member.load.put(1, 8)
        assert member.load.get(1, 8) == 8
    finally:
        member.close()
        server.shutdown()
