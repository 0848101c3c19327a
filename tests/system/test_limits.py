"""What operators limit, in real servers: writes per second, and how long unused blocks stay."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from cluster import running_cluster, until
from ports import free_port

from flexcache.cache.write_back import BURST_S
from flexcache.logs import LogEvent
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import PoolDirectory
from flexcache.storage.slot_index import RECORD, SlotIndex

TOKENS = np.arange(24 * 16)
SOURCE = list(range(24))
NUM_SLOTS = 96
STATUS = (sys.executable, "-m", "flexcache.cli", "status", "--endpoint")


def test_no_more_is_written_to_ssd_than_the_limit_allows(tmp_path: Path) -> None:
    rate = 10e3  # bytes/s: a few blocks in ten seconds
    began = time.monotonic()
    with running_cluster([tmp_path], ssd_write_mb_s=rate / 1e6) as cluster:
        for number in range(40):
            assert cluster.put(TOKENS + 1000 * number, SOURCE[:4]).mask[: 4 * 16].all()
        stats = cluster.manager.stats()
        elapsed = time.monotonic() - began
        ssd, block_bytes = stats["tiers"]["SSD"], stats["block_bytes"]
        written = ssd["written_bytes"]
        assert block_bytes <= written <= rate * (BURST_S + elapsed) + block_bytes
        assert stats["dropped_blocks"]["ssd_write_throttled"] > 0
        assert ssd["write_limit_bytes_per_s"] == rate
        command = [*STATUS, cluster.manager.endpoint]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert "limits: SSD writes 0.01 MB/s" in shown.stdout
        # What was not written is served from DRAM all the same.
        assert cluster.get(TOKENS + 39_000, SOURCE[:4]).mask[: 4 * 16].all()


@pytest.mark.whole
def test_what_the_limit_keeps_from_being_written_at_a_stop_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flexcache")
    settings = {"ssd_write_policy": "write_back", "ssd_write_mb_s": 10e3 / 1e6}
    with running_cluster([tmp_path], **settings) as cluster:
        cluster.put(TOKENS, SOURCE)
        assert cluster.manager.stats()["tiers"]["SSD"]["dirty_blocks"] == 24
    events = [record.msg for record in caplog.records if isinstance(record.msg, LogEvent)]
    (lost,) = (event for event in events if event.name == "dirty_blocks_lost")
    assert lost.fields["tier"] == "SSD"
    with running_cluster([tmp_path]) as cluster:
        kept = cluster.manager.stats()["tiers"]["SSD"]["indexed"]
    assert 0 < kept == 24 - lost.fields["blocks"]


def test_unused_blocks_expire_while_no_request_comes(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    with running_cluster([tmp_path], retention_s=3.0, http_endpoint=http) as cluster:
        cluster.put(TOKENS, SOURCE)
        tiers = cluster.manager.stats
        until(lambda: not any(tier["indexed"] for tier in tiers()["tiers"].values()))
        assert not cluster.get(TOKENS, SOURCE).mask.any()
        assert tiers()["tiers"]["CPU"]["expired_blocks"] == 24
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=60) as page:
            metrics = page.read().decode()
        assert 'flexcache_tier_expired_blocks_total{tier="CPU"} 24.0' in metrics


@pytest.mark.parametrize(("age_s", "num_left"), [(0, 24), (3600, 0)])
def test_a_restart_takes_over_only_what_was_written_recently(
    tmp_path: Path, age_s: int, num_left: int
) -> None:
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, SOURCE)
    make_older(tmp_path, age_s)
    with running_cluster([tmp_path], retention_s=1800.0) as cluster:
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == num_left
        assert cluster.get(TOKENS, SOURCE).mask.sum() == num_left * 16


def make_older(directory: Path, age_s: int) -> None:
    """Make all slots of a pool look as if they had been written earlier."""
    opened = PoolDirectory(directory)
    header = opened.header()
    opened.close()
    assert header is not None
    pool = DiskPool([str(directory)], header.slot_bytes, NUM_SLOTS, direct_io=False)
    index = SlotIndex(pool.index_fds, pool.record_id)
    found = index.load(NUM_SLOTS).records
    assert len(found) == 24
    found["generation"] -= np.uint64(age_s * 1_000_000)
    index.write(found["slot"], found.view(RECORD))
    pool.close()
