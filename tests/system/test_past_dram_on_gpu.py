"""Blocks between a GPU's KV tensors and the SSD past DRAM, on a fake GPU and a fake libcufile."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, ops, running_cluster, until
from disk_io import require_direct
from engine_memory import DeviceMemory, device_memory
from fake_gpu import FakeDigests, Memory

from flexcache import KVStatus
from flexcache.client.rank import ClientState
from flexcache.transfer.direct.cufile import DeviceFiles

TOKENS = np.arange(12 * 16)
OTHERS = TOKENS + 1000
NUM_GPU_BLOCKS = 64


@contextmanager
def opened_memory(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[DeviceMemory]:
    require_direct(directory)
    with device_memory(patch) as memory:
        kernel = FakeDigests(memory.torch)
        patch.setitem(sys.modules, "flexcache.transfer.direct.digest_kernel", kernel)
        yield memory
        assert memory.gpu.num_files == 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DeviceMemory]:
    with opened_memory(monkeypatch, tmp_path) as memory:
        yield memory


def test_ssd_alone_keeps_every_byte_of_a_gpu(memory: DeviceMemory, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        places = random.permutation(NUM_GPU_BLOCKS)[:12].tolist()
        expected = cluster.read(places)
        assert cluster.put(TOKENS, places).mask.all()
        for _ in range(6):
            cluster.wipe(places)
            places = random.permutation(NUM_GPU_BLOCKS)[:12].tolist()
            assert cluster.get(TOKENS, places).mask.all()
            assert cluster.read(places) == expected
        assert ops(cluster) == {"D2DISK": 12, "COMMIT": 12, "DISK2D": 6 * 12}
        assert cluster.num_leased() == 0
        assert memory.gpu.num_bounced == 0
    assert memory.gpu.num_buffers == 0


def test_what_a_gpu_wrote_is_read_through_dram_and_the_other_way_round(
    memory: DeviceMemory, tmp_path: Path
) -> None:
    """Both have the same checksums."""
    source, target = list(range(12)), list(range(20, 32))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        expected, kv = cluster.read(source), cluster.kv
        assert cluster.put(TOKENS, source).mask.all()
    with running_cluster([tmp_path], ssd_past_dram="never", make_kv=lambda *_: kv[0]) as cluster:
        assert cluster.get(TOKENS, target).mask.all()
        assert cluster.read(target) == expected
        assert ops(cluster)["DISK2H"] == 12
        assert cluster.put(OTHERS, source).mask.all()
    with running_cluster(
        [tmp_path], memory=memory, ssd_past_dram="always", make_kv=lambda *_: kv[0]
    ) as cluster:
        cluster.wipe(target)
        expected = cluster.read(source)
        assert cluster.get(OTHERS, target).mask.all()
        assert cluster.read(target) == expected
        assert ops(cluster)["DISK2D"] == 12


def get_from_below(cluster: Cluster, target: list[int], expected: list[bytes]) -> None:
    """Have `TOKENS` loaded, none of them from DRAM."""
    cluster.manager.clear("CPU")
    cluster.wipe(target)
    assert cluster.get(TOKENS, target).mask.all()
    assert cluster.read(target) == expected


def test_beside_dram_both_ways_are_timed(memory: DeviceMemory, tmp_path: Path) -> None:
    source, target = list(range(12)), list(range(20, 32))
    with running_cluster([tmp_path], memory=memory) as cluster:
        expected = cluster.read(source)
        assert cluster.put(TOKENS, source).mask.all()
        for _ in range(8):
            get_from_below(cluster, target, expected)
        moved = ops(cluster)
        assert (moved["DISK2H"], moved["DISK2D"]) == (4 * 12, 4 * 12)


def test_a_store_waits_for_what_the_engine_has_queued(memory: DeviceMemory, tmp_path: Path) -> None:
    gpu, blocks = memory.gpu, [0, 1, 2, 3]
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        task_id, _ = cluster.manager.put_match(TOKENS[:64])
        cluster.manager.launch([task_id], [cluster.slots(blocks)], gated=True)
        compute = memory.torch.Stream(memory.device)
        with memory.torch.stream(compute):
            step = gpu.hold(compute.handle)
            for tensor in memory.lend(cluster.kv[0]).values():
                written = Memory(tensor.data_ptr(), np.empty(tensor[:4].nbytes, np.uint8))
                gpu.fill(compute.handle, written, 7)
            cluster.clients[0].open_gates([task_id])
        gpu.wait_quiet()
        assert not cluster.manager.try_wait([task_id])
        gpu.fire(step)
        assert cluster.manager.wait([task_id], 60, completely=True)[task_id].mask.all()
        cluster.wipe(blocks)
        assert cluster.get(TOKENS[:64], blocks).mask.all()
        assert set(b"".join(cluster.read(blocks))) == {7}


def test_bytes_that_are_spoiled_on_their_way_are_never_served(
    memory: DeviceMemory, tmp_path: Path
) -> None:
    source, target = list(range(12)), list(range(20, 32))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        assert cluster.put(TOKENS, source).mask.all()
        before = cluster.read(target)
        memory.gpu.corrupt("cuFileRead", to_device=True)
        response = cluster.get(TOKENS, target)
        assert response.status is KVStatus.FAILED
        assert "checksum mismatch" in (response.error or "")
        assert cluster.read(target) == before
        assert cluster.num_leased() == 0


def test_a_read_that_the_gpu_side_refuses_costs_no_block(
    memory: DeviceMemory, tmp_path: Path
) -> None:
    source, target = list(range(12)), list(range(20, 32))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        assert cluster.put(TOKENS, source).mask.all()
        expected = cluster.read(source)
        memory.gpu.refuse("cuFileRead", 5011)
        response = cluster.get(TOKENS, target)
        assert response.status is KVStatus.FAILED
        assert "the CUDA driver failed" in (response.error or "")
        assert "ssd_bad_block" not in cluster.manager.stats()["dropped_blocks"]
        memory.gpu.refuse_nothing()
        assert cluster.get(TOKENS, target).mask.all()
        assert cluster.read(target) == expected


def test_a_gpu_that_is_lost_ends_what_is_under_way(memory: DeviceMemory, tmp_path: Path) -> None:
    blocks = list(range(12))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        assert cluster.put(TOKENS, blocks).mask.all()
        memory.gpu.freeze()
        task_id, _ = cluster.manager.get_async(TOKENS, cluster.slots(blocks))
        memory.gpu.set_faults(is_lost=True)
        response = cluster.manager.wait([task_id], 60)[task_id]
        assert response.status is not KVStatus.SUCCESS
        [client] = cluster.clients
        until(lambda: client.state is ClientState.REFUSED)
        assert cluster.num_leased() == 0


def test_a_gpu_that_is_lost_before_file_io_begins_ends_it(
    memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = list(range(12))
    start = DeviceFiles.start

    def lose(files: DeviceFiles, *transfer: Any) -> None:
        memory.gpu.set_faults(is_lost=True)
        start(files, *transfer)

    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        assert cluster.put(TOKENS, blocks).mask.all()
        monkeypatch.setattr(DeviceFiles, "start", lose)
        task_id, _ = cluster.manager.get_async(TOKENS, cluster.slots(blocks))
        response = cluster.manager.wait([task_id], 60)[task_id]
        assert response.status is KVStatus.FAILED
        [client] = cluster.clients
        until(lambda: client.state is ClientState.REFUSED)


def test_cufile_in_its_compatibility_mode_is_not_chosen_beside_dram(
    memory: DeviceMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.gpu.be_compatible()
    source, target = list(range(12)), list(range(20, 32))
    caplog.set_level(logging.INFO, "flexcache")
    with running_cluster([tmp_path], memory=memory) as cluster:
        expected = cluster.read(source)
        assert cluster.put(TOKENS, source).mask.all()
        for _ in range(6):
            get_from_below(cluster, target, expected)
        assert ops(cluster)["DISK2H"] == 6 * 12
        assert "DISK2D" not in ops(cluster)
    [line] = [each.getMessage() for each in caplog.records if "no_direct_path" in each.getMessage()]
    assert "compatibility mode" in line


def test_without_a_dram_tier_the_compatibility_mode_is_used_with_a_warning(
    memory: DeviceMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.gpu.be_compatible()
    source = list(range(12))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        expected = cluster.read(source)
        assert cluster.put(TOKENS, source).mask.all()
        cluster.wipe(source)
        assert cluster.get(TOKENS, source).mask.all()
        assert cluster.read(source) == expected
    [warning] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "direct_path_through_host" in warning.getMessage()
    assert "nvidia-fs" in warning.getMessage()


def test_a_machine_without_cufile_stages_blocks_in_dram(
    memory: DeviceMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.gpu.refuse("cuFileDriverOpen", 5001)
    source, target = list(range(8)), list(range(20, 28))
    with running_cluster([tmp_path], memory=memory, num_cpu_blocks=0) as cluster:
        capacity = min(8, cluster.manager.stats()["tiers"]["CPU"]["capacity"])
        expected = cluster.read(source[:capacity])
        assert cluster.put(TOKENS, source).mask.sum() == capacity * 16
        cluster.wipe(target)
        assert cluster.get(TOKENS, target).mask.sum() == capacity * 16
        assert cluster.read(target[:capacity]) == expected[: capacity * 3]
        assert "D2DISK" not in ops(cluster)
    [warning] = [each for each in caplog.records if "no_direct_path" in each.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "eight chunks of a prompt" in warning.getMessage()
