"""`KVManager.reset`: nothing that was stored before it is found after it, wherever it was then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running_cluster, until
from stores import s3_server
from test_shared import Member, members

from flexcache import CacheConfig, KVStatus

BLOCKS = 16
NUM_PROMPTS = 4
SETTINGS = {"num_ssd_blocks": 256, "transfer_chunk_mb": 0.01}


def tokens(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1 << 15, BLOCKS * 16)


def gpu_blocks(number: int) -> list[int]:
    return list(range(BLOCKS * number, BLOCKS * (number + 1)))


def num_found(cluster: Cluster, numbers: Sequence[int]) -> int:
    found = 0
    for number in numbers:
        task_id, mask = cluster.manager.get_match(tokens(number))
        cluster.manager.cancel([task_id])
        found += int(mask.sum()) // 16
    return found


def put_without_waiting_for_tiers_below(cluster: Cluster) -> None:
    """Store prompts up to DRAM; their writes to tiers below have only begun."""
    ids = []
    for number in range(NUM_PROMPTS):
        task_id, _ = cluster.manager.put_async(tokens(number), cluster.slots(gpu_blocks(number)))
        ids.append(task_id)
    answers = cluster.manager.wait(ids, 60.0)
    assert all(answer.status is KVStatus.SUCCESS for answer in answers.values())


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_being_written_at_a_reset_is_not_found_after_it(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.cache.tiered_cache.MAX_DIRTY", 0.2)
    numbers = range(NUM_PROMPTS)
    settings = {**SETTINGS, "ssd_write_policy": policy}
    with (
        s3_server() as store,
        running_cluster([tmp_path], num_cpu_blocks=80, remote_url=store.url, **settings) as cluster,
    ):
        put_without_waiting_for_tiers_below(cluster)
        cluster.manager.reset()
        assert num_found(cluster, numbers) == 0
        for kv in cluster.kv:  # the weights are others now, and so is the KV
            for tensor in kv.values():
                tensor.add_(1)
        stored = [cluster.read(gpu_blocks(number)) for number in numbers]
        for number in numbers:
            assert cluster.put(tokens(number), gpu_blocks(number)).status is KVStatus.SUCCESS
            cluster.wipe(gpu_blocks(number))
            assert cluster.get(tokens(number), gpu_blocks(number)).mask.all()
            assert cluster.read(gpu_blocks(number)) == stored[number]
    with running_cluster([tmp_path], num_cpu_blocks=80, **settings) as cluster:
        assert num_found(cluster, numbers) == 0


def test_a_load_that_runs_at_a_reset_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=20, **SETTINGS) as cluster:
        for number in range(NUM_PROMPTS):
            cluster.put(tokens(number), gpu_blocks(number))
        task_id, _ = cluster.manager.get_async(tokens(0), cluster.slots(gpu_blocks(0)))
        cluster.manager.reset()
        answer = cluster.manager.wait([task_id], 60.0, completely=True)[task_id]
        assert answer.status in (KVStatus.SUCCESS, KVStatus.CANCELLED)
        assert num_found(cluster, range(NUM_PROMPTS)) == 0
        assert cluster.num_leased() == 0


def test_a_reserved_slot_does_not_bring_back_what_it_held(tmp_path: Path) -> None:
    """The SSD is full, so an open put has evicted a block whose record is still there."""
    settings = {**SETTINGS, "num_ssd_blocks": NUM_PROMPTS * BLOCKS}
    with running_cluster([tmp_path], num_cpu_blocks=80, **settings) as cluster:
        for number in range(NUM_PROMPTS):
            cluster.put(tokens(number), gpu_blocks(number))
        task_id, mask = cluster.manager.put_match(tokens(NUM_PROMPTS))
        assert mask.any()
        cluster.manager.reset()
        cluster.manager.cancel([task_id])
    with running_cluster([tmp_path], num_cpu_blocks=80, **settings) as cluster:
        assert num_found(cluster, range(NUM_PROMPTS + 1)) == 0


def test_recording_on_ssd_goes_on_after_a_reset(tmp_path: Path) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=80, **SETTINGS) as cluster:
        cluster.put(tokens(0), gpu_blocks(0))
        cluster.manager.reset()
        cluster.put(tokens(1), gpu_blocks(1))
    with running_cluster([tmp_path], num_cpu_blocks=80, **SETTINGS) as cluster:
        assert num_found(cluster, range(2)) == 0, "they had other names"
        tier = cluster.manager.stats()["tiers"]["SSD"]
        assert tier["indexed"] + tier.get("restoring", 0) == BLOCKS


def test_what_an_engine_stores_after_its_reset_another_does_not_load() -> None:
    """A rolling update: the first engine has other weights, the second not yet."""
    config = CacheConfig(num_cpu_blocks=256)
    zero, one = Member(config, dp_rank=0), Member(config, dp_rank=1)
    with members(zero, one):
        zero.manager.reset()
        for tensor in zero.kv.values():
            tensor.fill_(7)
        slots = np.arange(16 * 4)

        def put() -> bool:
            task_id, _ = zero.manager.put_async(tokens(0)[:64], slots)
            return zero.manager.wait([task_id], 60)[task_id].status is KVStatus.SUCCESS

        until(put)  # right after a start one may be dropped
        task_id, mask = one.manager.get_match(tokens(0)[:64])
        one.manager.cancel([task_id])
        assert not mask.any(), "KV of other weights"
        task_id, mask = zero.manager.get_match(tokens(0)[:64])
        zero.manager.cancel([task_id])
        assert mask.all()


_KILLED = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[3]]
from pathlib import Path
from cluster import running_cluster
import test_resets as resets

with running_cluster([Path(sys.argv[1])], num_cpu_blocks=80, **resets.SETTINGS) as cluster:
    resets.put_without_waiting_for_tiers_below(cluster)
    cluster.manager.reset()
    print("reset", flush=True)
    sys.stdin.read()
"""


def test_a_kill_right_after_a_reset_brings_nothing_back(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(here.parents[1] / "support")]
    process = subprocess.Popen(
        [*command, str(here.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = iter(process.stdout.readline, b"")
    assert any(line == b"reset\n" for line in lines)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with running_cluster([tmp_path], num_cpu_blocks=80, **SETTINGS) as cluster:
        assert num_found(cluster, range(NUM_PROMPTS)) == 0
