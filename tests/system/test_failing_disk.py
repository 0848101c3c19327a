"""Devices that really fail: EIO from a truncated loop device, ENOSPC from a full one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running_cluster
from disk_io import IO_KINDS, io_engine, refuse_direct
from loop_disk import loop_disk, unmount

from flexcache import KVStatus
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import locate_slot

TOKENS = np.arange(24 * 16)
OTHER_TOKENS = TOKENS[: 8 * 16] + 10_000
SOURCE = list(range(24))
TARGET = list(range(24, 48))


@pytest.fixture(params=IO_KINDS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return io_engine(request.param, monkeypatch)


def worker_of(cluster: Cluster) -> tuple[int, int]:
    """Return the disk worker's process, and how often it was replaced."""
    stats = cluster.manager.stats()
    return stats["workers"]["disk"], stats["worker_restarts"].get("disk", 0)


def offset_of(cluster: Cluster, position: int) -> int:
    """Return the offset in the data file of a block of the prompt stored last."""
    with cluster.server.lock, cluster.server.session() as session:
        *_, run = session.cache.tiers.lower[0].index._runs.values()
        slot = int(run.blocks[position])
    assert cluster.server.hub.cache is not None
    pool = cluster.server.hub.cache.store.disk_pool
    assert pool is not None
    return locate_slot(slot, pool.data_fds, pool.slot_bytes)[1]


def test_a_disk_that_lost_its_end_costs_the_blocks_there_and_no_worker(
    engine: str, tmp_path: Path
) -> None:
    with (
        loop_disk(tmp_path, 16 << 20) as disk,
        running_cluster([disk.path], io_engine=engine) as cluster,
    ):
        manager, worker = cluster.manager, worker_of(cluster)
        expected, others = cluster.read(SOURCE[:9]), cluster.read(SOURCE[:8])
        cluster.put(OTHER_TOKENS, SOURCE[:8])
        cluster.put(TOKENS, SOURCE)
        manager.clear("CPU")
        disk.cut_at(disk.path / DATA_FILE, offset_of(cluster, 9))

        cluster.wipe(TARGET)
        response = cluster.get(TOKENS, TARGET)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == 9 * 16
        assert "Input/output error" in (response.error or "")
        assert cluster.read(TARGET[:9]) == expected
        stats = manager.stats()
        assert stats["dropped_blocks"]["ssd_bad_block"] > 0
        assert stats["tiers"]["SSD"]["indexed"] == 8 + 9

        assert cluster.get(OTHER_TOKENS, TARGET[:8]).mask.all()
        assert cluster.read(TARGET[:8]) == others
        manager.clear("CPU")
        assert cluster.get(TOKENS, TARGET).mask.sum() == 9 * 16

        assert cluster.put(TOKENS + 20_000, SOURCE).mask.all()  # DRAM took all of it
        stats = manager.stats()
        assert stats["dropped_blocks"]["ssd_write_failed"] == 24
        assert stats["tiers"]["SSD"]["indexed"] == 8 + 9
        assert cluster.get(TOKENS + 20_000, TARGET).mask.all()
        assert worker_of(cluster) == worker
        assert cluster.num_leased() == 0


def test_a_disk_that_is_lost_entirely_is_a_miss_and_kills_no_worker(
    engine: str, tmp_path: Path
) -> None:
    with (
        loop_disk(tmp_path, 16 << 20) as disk,
        running_cluster([disk.path], io_engine=engine) as cluster,
    ):
        manager, worker, expected = cluster.manager, worker_of(cluster), cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
        manager.clear("CPU")
        disk.cut_at(disk.path / DATA_FILE, 0)
        response = cluster.get(TOKENS, TARGET)
        assert not response.mask.any()
        assert "Input/output error" in (response.error or "")
        assert manager.stats()["tiers"]["SSD"]["indexed"] == 0
        assert cluster.get(TOKENS, TARGET).status is KVStatus.NOT_FOUND

        assert cluster.put(TOKENS, SOURCE).mask.all()
        assert manager.stats()["dropped_blocks"]["ssd_write_failed"] == 24
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        assert worker_of(cluster) == worker
        assert cluster.num_leased() == 0


def test_a_disk_without_room_keeps_what_fits_and_the_worker(engine: str, tmp_path: Path) -> None:
    with (
        loop_disk(tmp_path, 1 << 19) as disk,
        running_cluster([disk.path], io_engine=engine) as cluster,
    ):
        worker, expected = worker_of(cluster), cluster.read(SOURCE)
        for turn in range(2):
            assert cluster.put(TOKENS + 10_000 * turn, SOURCE).mask.all()  # DRAM took all of it
        stats = cluster.manager.stats()
        kept = stats["tiers"]["SSD"]["indexed"]
        assert 0 < kept < 24
        assert stats["dropped_blocks"]["ssd_write_failed"] == 48 - kept
        cluster.manager.clear("CPU")
        found = [cluster.get(TOKENS + 10_000 * turn, TARGET).mask.sum() for turn in range(2)]
        assert sum(found) == kept * 16
        assert cluster.get(TOKENS, TARGET).mask.sum() == found[0]
        assert cluster.read(TARGET[: found[0] // 16]) == cluster.read(SOURCE[: found[0] // 16])
        assert cluster.read(SOURCE) == expected
        assert worker_of(cluster) == worker
        assert cluster.num_leased() == 0


def test_a_full_tmpfs_drops_what_did_not_fit_and_keeps_the_rest(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with running_cluster([tmp_path], io_engine=engine) as cluster:
            worker, expected = worker_of(cluster), cluster.read(SOURCE)
            response = cluster.put(TOKENS, SOURCE)
            assert response.mask.all()  # DRAM took all of it
            stats = cluster.manager.stats()
            kept = stats["tiers"]["SSD"]["indexed"]
            assert 0 < kept < 24
            assert stats["dropped_blocks"]["ssd_write_failed"] > 0
            cluster.wipe(SOURCE)
            assert cluster.get(TOKENS, SOURCE).mask.all()
            assert cluster.read(SOURCE) == expected
            cluster.manager.clear("CPU")
            assert cluster.get(TOKENS, SOURCE).mask.sum() == kept * 16
            assert worker_of(cluster) == worker
            assert cluster.num_leased() == 0
    finally:
        unmount(tmp_path)
