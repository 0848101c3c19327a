"""A whole cache whose engine's KV is on a fake GPU: order, layers, and a device that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import PATIENCE_S, Cluster, load_by_layer, running_cluster, until
from engine_memory import DeviceMemory, device_memory
from fake_gpu import FakeGpu, FakeStream, Memory

from flexcache import KVStatus, KVTPClient
from flexcache.client import rank, rank_ops
from flexcache.client.rank import ClientState


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    with device_memory(monkeypatch) as memory:
        yield memory


def test_blocks_change_places_many_times_and_stay_what_they_were(
    memory: DeviceMemory, tmp_path: Path
) -> None:
    random = np.random.default_rng(2)
    with running_cluster([tmp_path], memory=memory) as cluster:
        tokens = np.arange(12 * 16)
        places = random.permutation(64)[:12].tolist()
        expected = cluster.read(places)
        assert cluster.put(tokens, places).mask.all()
        for turn in range(12):
            if turn % 3 == 2:
                cluster.manager.clear("CPU")
            cluster.wipe(places)
            places = random.permutation(64)[:12].tolist()
            assert cluster.get(tokens, places).mask.all()
            assert cluster.read(places) == expected


def test_a_rank_of_the_second_gpu_uses_no_other(memory: DeviceMemory) -> None:
    second = DeviceMemory(memory.gpu, memory.torch, device=1)
    compute = memory.torch.Stream(second.device)
    with memory.torch.stream(compute), running_cluster(memory=second) as cluster:
        tokens, blocks, others = np.arange(64), [0, 1, 2, 3], [9, 8, 7, 6]
        expected = cluster.read(blocks)
        assert cluster.put(tokens, blocks).mask.all()
        assert cluster.get(tokens, others).mask.all()
        assert cluster.read(others) == expected
        assert memory.gpu.contexts == {1}


def queue_step(memory: DeviceMemory, compute: FakeStream, cluster: Cluster) -> int:
    """Queue a step that writes 7 to the first four blocks, once the result is fired."""
    step = memory.gpu.hold(compute.handle)
    for tensor in memory.lend(cluster.kv[0]).values():
        written = Memory(tensor.data_ptr(), np.empty(tensor[:4].nbytes, np.uint8))
        memory.gpu.fill(compute.handle, written, 7)
    return step


def check_stored_with_step(gpu: FakeGpu, step: int, cluster: Cluster, task_id: int) -> None:
    """Check that a put waits for the step, and stores what it writes."""
    blocks = [0, 1, 2, 3]
    until(lambda: gpu.copy_calls)
    gpu.wait_quiet()
    assert not cluster.manager.try_wait([task_id])
    gpu.fire(step)
    assert cluster.manager.wait([task_id], 60)[task_id].mask.all()
    cluster.wipe(blocks)
    assert cluster.get(np.arange(64), blocks).mask.all()
    assert set(b"".join(cluster.read(blocks))) == {7}


def test_a_gated_store_takes_what_the_queued_step_will_have_written(memory: DeviceMemory) -> None:
    gpu, torch_cuda = memory.gpu, memory.torch
    with running_cluster(memory=memory) as cluster:
        tokens, blocks = np.arange(64), [0, 1, 2, 3]
        task_id, _ = cluster.manager.put_match(tokens)
        cluster.manager.launch([task_id], [cluster.slots(blocks)], gated=True)
        gpu.forget_copy_calls()
        compute = torch_cuda.Stream(memory.device)
        with torch_cuda.stream(compute):
            step = queue_step(memory, compute, cluster)
            cluster.clients[0].open_gates([task_id])
        check_stored_with_step(memory.gpu, step, cluster, task_id)


def test_a_store_without_a_gate_takes_what_is_queued_on_the_stream_of_the_engine(
    memory: DeviceMemory,
) -> None:
    gpu, torch_cuda = memory.gpu, memory.torch
    compute = torch_cuda.Stream(memory.device)
    with torch_cuda.stream(compute), running_cluster(memory=memory) as cluster:
        tokens, blocks = np.arange(64), [0, 1, 2, 3]
        gpu.forget_copy_calls()
        step = queue_step(memory, compute, cluster)
        task_id, _ = cluster.manager.put_async(tokens, cluster.slots(blocks))
        check_stored_with_step(memory.gpu, step, cluster, task_id)


def write_kv(cluster: Cluster, blocks: list[int]) -> None:
    """Compute something else, as an engine does whose blocks are its own."""
    for tensor in cluster.kv[0].values():
        tensor.view(torch.uint8)[blocks] = 7


@pytest.mark.parametrize("is_put", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("end", [KVTPClient.weights_changed, KVTPClient.close])
def test_what_is_in_flight_has_landed_when_the_engine_has_its_blocks_back(
    end: Callable[[KVTPClient], None], is_put: bool, memory: DeviceMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module, patience in ((rank_ops, "_LAND_PATIENCE_S"), (rank, "_CLOSE_PATIENCE_S")):
        monkeypatch.setattr(module, patience, PATIENCE_S)
    gpu, ended = memory.gpu, threading.Event()
    with running_cluster(memory=memory) as cluster:
        tokens, blocks = np.arange(64), [0, 1, 2, 3]
        if not is_put:
            assert cluster.put(tokens, blocks).mask.all()
        begin = cluster.manager.put_async if is_put else cluster.manager.get_async
        gpu.forget_copy_calls()
        gpu.freeze()
        task_id, mask = begin(tokens, cluster.slots(blocks))
        assert mask.all()
        until(lambda: gpu.copy_calls)

        def end_and_go_on() -> None:
            end(cluster.clients[0])
            write_kv(cluster, blocks)
            ended.set()

        ending = threading.Thread(target=end_and_go_on)
        ending.start()
        assert not ended.wait(0.3)  # it is never over before the copies are: this is no deadline
        gpu.thaw()
        ending.join()
        gpu.wait_idle()
        assert set(b"".join(cluster.read(blocks))) == {7}
        assert not cluster.manager.wait([task_id], PATIENCE_S)[task_id].mask.any()


def test_each_layer_has_arrived_when_the_engine_computes_with_it(memory: DeviceMemory) -> None:
    with running_cluster(memory=memory, num_cpu_blocks=64) as cluster:
        blocks = list(range(20))
        tokens = np.arange(20 * 16)
        expected = cluster.read(blocks)
        cluster.put(tokens, blocks)
        for _ in range(3):
            cluster.wipe(blocks)
            assert load_by_layer(cluster, tokens, blocks) == expected


def test_a_device_that_is_lost_ends_its_tasks_and_leaves_the_cache_to_others(
    memory: DeviceMemory,
) -> None:
    with running_cluster(memory=memory) as cluster:
        tokens, blocks = np.arange(4 * 16), [0, 1, 2, 3]
        memory.gpu.set_faults(lost_after_copies=0)
        response = cluster.put(tokens, blocks)
        assert response.status is not KVStatus.SUCCESS
        [client] = cluster.clients
        until(lambda: client.state is ClientState.REFUSED)
        assert cluster.num_leased() == 0
