"""Memory near a device. The nodes are a stand-in for /sys; policies are the kernel's own."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cluster import running_cluster
from engine_memory import device_memory
from mutants import Mutant, check_seen

from flexcache.client.lent_tensors import Attachment
from flexcache.doctor.machine import check_numa, judge_numa
from flexcache.doctor.subject import Level, Subject
from flexcache.storage import machine
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.worker_process import WorkerConfig, map_segments

BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 8
GPU = "bus/pci/devices/0000:3b:00.0/numa_node"
SECOND_GPU = "bus/pci/devices/0000:3c:00.0/numa_node"


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with memory, of which only the first is real; a GPU on each."""
    monkeypatch.setattr(machine, "SYSFS", tmp_path)
    write(tmp_path, "devices/system/node/has_memory", "0-1\n")
    write(tmp_path, GPU, "0\n")
    write(tmp_path, SECOND_GPU, "1\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(BLOCK_BYTES, NUM_BLOCKS) as segment:
        yield segment


def policies() -> dict[int, str]:
    """Return the memory policies of all host pools that this process maps, by address."""
    gc.collect()  # what other tests have left
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    return {int(line[0], 16): line[1] for line in lines if "flexcache-host-pool" in " ".join(line)}


def num_bytes(segment: HostSegment) -> int:
    """Return how much of a segment exists."""
    return os.fstat(segment.fd).st_blocks * 512


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-1\n", 2), ("0,2-3,8\n", 4), ("\n", 1)])
def test_nodes_are_those_with_memory(sysfs: Path, text: str, count: int) -> None:
    write(sysfs, "devices/system/node/has_memory", text)
    assert machine.count_nodes() == count


def test_a_kernel_that_tells_no_nodes_has_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "SYSFS", tmp_path)
        assert machine.count_nodes() == 1
        assert machine.node_of_pci("0000:3B:00.0") is None


def test_a_device_has_the_node_that_its_bus_address_has(sysfs: Path) -> None:
    assert machine.node_of_pci("0000:3B:00.0") == 0
    assert machine.node_of_pci("0000:3C:00.0") == 1
    write(sysfs, GPU, "-1\n")
    assert machine.node_of_pci("0000:3B:00.0") is None
    assert machine.node_of_pci("0000:3D:00.0") is None


def test_pages_are_to_be_made_on_the_node_by_whichever_process(segment: HostSegment) -> None:
    with HostSegment.open(segment.ref()) as other:
        other.map(populate=False)
        assert policies()[other.address] == "default"
        segment.map(node=0)
        assert policies()[other.address] == policies()[segment.address] == "prefer:0"
        assert num_bytes(other) == segment.size


def test_a_segment_for_no_node_in_particular_has_no_policy(segment: HostSegment) -> None:
    segment.map()
    assert policies()[segment.address] == "default"


def test_a_node_that_the_kernel_refuses_is_logged_and_the_segment_is_mapped(
    segment: HostSegment, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        segment.map(node=1000)
    assert num_bytes(segment) == segment.size
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("host_pool_not_bound node=1000")


def test_pages_are_made_by_threads_that_run_on_the_node(
    sysfs: Path, segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(os.sched_getaffinity(0))
    write(sysfs, "devices/system/node/node0/cpulist", f"{last}\n")
    seen: list[set[int]] = []
    stay_on = machine.stay_on

    def spy(node: int) -> None:
        stay_on(node)
        seen.append(os.sched_getaffinity(0))

    monkeypatch.setattr(machine, "stay_on", spy)
    before = os.sched_getaffinity(0)
    segment.map(node=0)
    assert seen
    assert all(cpus == {last} for cpus in seen)
    assert os.sched_getaffinity(0) == before


def test_a_thread_stays_where_it_may_run_if_none_of_the_nodes_cpus_are_its(sysfs: Path) -> None:
    write(sysfs, "devices/system/node/node0/cpulist", "5000-5003\n")
    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=lambda: machine.stay_on(0))
    thread.start()
    thread.join()
    machine.stay_on(0)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("nodes", "share"), [("0", 1), ("0-1", 0)])
def test_workers_leave_pages_to_the_ranks_where_it_matters_which_process_makes_them(
    sysfs: Path, segment: HostSegment, nodes: str, share: int
) -> None:
    write(sysfs, "devices/system/node/has_memory", nodes)
    fd = os.dup(segment.fd)
    [mapped] = map_segments(WorkerConfig("", "", [fd], [segment.stride], NUM_BLOCKS, "", ""))
    assert num_bytes(segment) == share * segment.size
    mapped.block(0)[:] = b"\1" * mapped.stride  # usable all the same
    mapped.close()


def test_a_rank_puts_its_pool_on_the_node_of_its_gpu(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_memory(monkeypatch) as memory:
        nodes = [CudaCopier(torch.device("cuda", index)).numa_node for index in range(2)]
        assert nodes == [0, 1]
        before = policies()
        with running_cluster(memory=memory) as cluster:
            assert {policies()[at] for at in policies().keys() - before} == {"prefer:0"}
            expected = cluster.read([1])
            assert cluster.put(list(range(16)), [1]).mask.all()
            assert cluster.get(list(range(16)), [2]).mask.all()
            assert cluster.read([2]) == expected


def test_a_pool_that_is_wherever_its_pages_were_touched_first_is_seen(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = Mutant(
        "M5: the pool is bound to no node", Attachment, "__init__",
        "segment.map(show_life, node=copier.numa_node)", "segment.map(show_life)",
        test_a_rank_puts_its_pool_on_the_node_of_its_gpu,
    )  # fmt: skip
    check_seen(mutant, lambda _: nullcontext({}), monkeypatch, sysfs=sysfs)


def test_a_host_with_one_node_is_asked_for_nothing(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(sysfs, "devices/system/node/has_memory", "0")
    with device_memory(monkeypatch) as memory:
        memory.gpu.refuse("cuDeviceGetPCIBusId")
        assert CudaCopier(torch.device("cuda", 0)).numa_node is None
        before = policies()
        with running_cluster(memory=memory):
            assert {policies()[at] for at in policies().keys() - before} == {"default"}


def test_a_driver_that_does_not_tell_its_bus_costs_no_copier(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_memory(monkeypatch) as memory:
        memory.gpu.refuse("cuDeviceGetPCIBusId")
        assert CudaCopier(torch.device("cuda", 0)).numa_node is None


def test_the_doctor_says_whether_memory_can_be_bound(sysfs: Path) -> None:
    [finding] = check_numa(Subject())
    assert finding.level is Level.OK
    assert "2 NUMA nodes; a rank's part" in finding.text
    refused = judge_numa(2, "Operation not permitted")
    assert refused.level is Level.WARNING
    assert "Operation not permitted" in refused.text
    assert "one NUMA node" in judge_numa(1, "").text
