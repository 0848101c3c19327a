"""Faults, injected for real: processes killed, bytes flipped, disks filled, ranks gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import Cluster, joined_kv, random_like, running_cluster, until
from disk_io import refuse_direct

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.errors import ConfigError, RegistrationError, UnsupportedLayoutError
from flexcache.server.server import KVServer
from flexcache.storage import pool_directory
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import locate_slot

TOKENS = np.arange(24 * 16)
SOURCE = list(range(24))


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def slot_of(cluster: Cluster, position: int) -> int:
    with cluster.server.lock, cluster.server.session() as tasks:
        return int(next(iter(tasks.cache.tiers.lower[0].index._runs.values())).blocks[position])


def rejected(cluster: Cluster) -> int:
    return sum(cluster.manager.stats()["counters"]["rejected_messages"].values())


def place_of(cluster: Cluster, position: int) -> tuple[int, int]:
    """Return the offset of a prompt's block in the data file, and its length."""
    assert cluster.server.hub.cache is not None
    pool = cluster.server.hub.cache.store.disk_pool
    assert pool is not None
    _, offset = locate_slot(slot_of(cluster, position), pool.data_fds, pool.slot_bytes)
    return offset, pool.slot_bytes


def test_a_flipped_byte_on_ssd_costs_the_blocks_behind_it_and_nothing_else(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        expected = cluster.read(SOURCE[:9])
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        flip_byte(tmp_path / DATA_FILE, place_of(cluster, 9)[0] + 123)
        cluster.wipe(SOURCE)
        response = cluster.get(TOKENS, SOURCE)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == 9 * 16
        assert "checksum" in (response.error or "")
        assert cluster.read(SOURCE[:9]) == expected
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 9
        assert cluster.num_leased() == 0


def test_a_truncated_ssd_file_is_a_short_read_and_a_shorter_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        os.truncate(tmp_path / DATA_FILE, place_of(cluster, 5)[0] + 100)
        response = cluster.get(TOKENS, SOURCE)
        assert response.mask.sum() == 5 * 16
        assert "bytes moved" in (response.error or "")


def test_swapped_slots_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        (one, size), (two, _) = place_of(cluster, 2), place_of(cluster, 3)
        content = (tmp_path / DATA_FILE).read_bytes()
        with (tmp_path / DATA_FILE).open("r+b") as file:
            for here, there in ((one, two), (two, one)):
                file.seek(here)
                file.write(content[there : there + size])
        assert cluster.get(TOKENS, SOURCE).mask.sum() == 2 * 16


def test_killing_the_disk_worker_is_a_miss_and_then_a_restart(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        pid = cluster.manager.stats()["workers"]["disk"]
        os.kill(pid, signal.SIGSTOP)  # so that the ops are with it when it dies
        task_id, mask = cluster.manager.get_async(TOKENS, cluster.slots(SOURCE))
        assert mask.all()
        os.kill(pid, signal.SIGKILL)
        response = cluster.manager.wait([task_id], 60)[task_id]
        assert response.status is KVStatus.FAILED
        assert "disk" in (response.error or "")
        cluster.manager.check()
        cluster.manager.wait_ready(30)
        assert cluster.manager.stats()["worker_restarts"]["disk"] >= 1
        cluster.wipe(SOURCE)
        assert cluster.get(TOKENS, SOURCE).mask.all()  # the SSD tier's content is still there
        assert cluster.read(SOURCE) == expected
        assert cluster.num_leased() == 0


@pytest.mark.whole
def test_a_disk_worker_that_hangs_is_replaced_after_the_deadline(tmp_path: Path) -> None:
    with running_cluster([tmp_path], op_timeout_s=10.0) as cluster:
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        os.kill(cluster.manager.stats()["workers"]["disk"], signal.SIGSTOP)
        response = cluster.get(TOKENS, SOURCE)
        assert response.status is KVStatus.FAILED
        assert "deadline" in (response.error or "")
        cluster.manager.wait_ready(30)
        assert cluster.get(TOKENS, SOURCE).mask.all()


def test_killing_the_disk_worker_again_and_again_loses_nothing(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        rng = np.random.default_rng(7)
        for turn in range(6):
            tokens = np.arange(16 * 16) + 1000 * turn
            blocks = list(range(16))
            expected = cluster.read(blocks)
            task_id, _ = cluster.manager.put_async(tokens, cluster.slots(blocks))
            if rng.random() < 0.5:
                cluster.manager.wait([task_id], 60)
            pid = cluster.manager.stats()["workers"].get("disk")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            cluster.manager.wait([task_id], 60, completely=True)
            cluster.manager.check()
            cluster.wipe(blocks)
            response = cluster.get(tokens, blocks)
            assert response.mask.all()  # DRAM has it in any case
            assert cluster.read(blocks) == expected
        assert cluster.num_leased() == 0


def test_an_engine_hits_nothing_while_a_rank_is_away_and_again_when_it_is_back() -> None:
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16, tp_size=2)
    with running_cluster(model=model) as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
        cluster.clients[1].close()
        until(lambda: not cluster.manager.is_ready())
        assert cluster.get(TOKENS, SOURCE).status is KVStatus.NOT_FOUND
        with pytest.raises(TimeoutError, match="rank 1"):
            cluster.manager.wait_ready(0.01)
        cluster.add_client(1, cluster.kv[1])
        cluster.manager.wait_ready(30)
        cluster.wipe(SOURCE)
        assert cluster.get(TOKENS, SOURCE).mask.all()
        assert cluster.read(SOURCE) == expected


def test_a_rank_process_killed_while_ops_are_with_it_leaves_nothing_leased() -> None:
    script = """
import os, sys, signal, torch
from flexcache import KVTPClient
kv = {f"layer.{i}": torch.zeros((64, 2, 16, 4, 32), dtype=torch.bfloat16) for i in range(3)}
client = KVTPClient(sys.argv[1], tp_rank=0)
client.register_kv_caches(kv)
client.wait_registered(30)
print("up", flush=True)
sys.stdin.read()
"""
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16)
    with KVManager(model, CacheConfig(num_cpu_blocks=48)) as manager:
        for _ in range(2):
            rank = subprocess.Popen(
                [sys.executable, "-c", script, manager.endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert rank.stdin is not None
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"up\n"
            manager.wait_ready(30)
            os.kill(rank.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, rank.pid, os.WSTOPPED)  # all its threads
            task_id, mask = manager.put_async(TOKENS, np.arange(len(TOKENS)))
            assert mask.all()
            os.kill(rank.pid, signal.SIGKILL)
            response = manager.wait([task_id], 60, completely=True)[task_id]
            assert response.status is KVStatus.FAILED
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
            manager.check()
            assert manager.stats()["tiers"]["CPU"]["free"] == 48


def test_cancelling_while_bytes_move_answers_once_they_have_landed(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        for turn in range(40):
            tokens = TOKENS + 10_000 * turn
            task_id, _ = cluster.manager.put_async(tokens, cluster.slots(SOURCE))
            cluster.manager.cancel([task_id])
            response = cluster.manager.wait([task_id], 30, completely=True)[task_id]
            assert response.status in (KVStatus.CANCELLED, KVStatus.SUCCESS)
            cluster.manager.check()
            assert cluster.num_leased() == 0
        assert cluster.put(TOKENS + 10**6, SOURCE).mask.all()


def test_a_rank_with_another_model_is_refused_with_both_sides_named() -> None:
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16)
    with KVManager(model, CacheConfig(num_cpu_blocks=8)) as manager:
        client = KVTPClient(manager.endpoint)
        client.register_kv_caches(
            joined_kv(ModelConfig("other", 5, 4, 32, torch.bfloat16), tokens=16)
        )
        with pytest.raises(RegistrationError, match="24576 in the cache"):
            manager.wait_ready(30)
        with pytest.raises(RegistrationError, match="layers=3"):
            client.wait_registered(30)
        client.close()


def test_a_second_client_for_a_rank_is_refused_by_name() -> None:
    with running_cluster() as cluster:
        second = KVTPClient(cluster.manager.endpoint)
        second.register_kv_caches(cluster.kv[0])
        claimed = f"rank 0 of engine 'dp0' is claimed by process {os.getpid()} and process"
        with pytest.raises(TimeoutError, match=claimed):
            second.wait_registered(5)
        with pytest.raises(RegistrationError, match=claimed):
            cluster.manager.wait_ready(30)
        assert not cluster.put(TOKENS, SOURCE).mask.any()
        second.close()
        until(cluster.manager.is_ready)
        assert cluster.put(TOKENS, SOURCE).mask.all()


def test_an_unknown_layout_is_refused_at_once_by_name() -> None:
    client = KVTPClient("ipc:///nowhere.sock")
    overlapping = random_like(1, 2, 16, 4, 32, dtype=torch.bfloat16).expand(8, -1, -1, -1, -1)
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.0"):
        client.register_kv_caches({"layer.0": overlapping})
    client.close()


def test_two_servers_on_one_endpoint_are_refused_by_name() -> None:
    with running_cluster() as cluster:
        second = KVServer(CacheConfig(num_cpu_blocks=4), cluster.manager.endpoint)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            second.start()


def test_two_caches_in_one_directory_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_directory, "_LOCK_PATIENCE_S", 0.0)
    with running_cluster([tmp_path]):
        second = KVManager(
            ModelConfig("test", 1, 1, 8, torch.bfloat16),
            CacheConfig(num_cpu_blocks=4, num_ssd_blocks=4, ssd_cache_dirs=[str(tmp_path)]),
        )
        with pytest.raises(ConfigError, match="in use by another FlexCache process"):
            second.start()


def test_malformed_messages_are_counted_and_harmless() -> None:
    import zmq

    with running_cluster() as cluster:
        rng = np.random.default_rng(3)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(cluster.manager.endpoint)
            for size in (0, 1, 7, 300, 70_000):
                socket.send(rng.bytes(size))
                socket.send_multipart([b"", rng.bytes(size)])
            until(lambda: rejected(cluster) >= 10)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        assert cluster.get(TOKENS, SOURCE).mask.all()
