"""`CudaCopier` on a GPU: bytes, order, threads, graphs, pinning."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gpu_machines import Machine

from flexcache.doctor.gpu_driver import GpuTried, TrialRequest, run_child
from flexcache.errors import ConfigError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer import cuda_copier
from flexcache.transfer.copier import Runs
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.cuda_driver import CudaDriver

KINDS = (OpKind.H2D, OpKind.D2H)
SLOT = 16 << 10
NUM_SLOTS = 512


@dataclass
class Memory:
    """Random bytes on both sides, and a copier between them."""

    segment: HostSegment
    host: torch.Tensor
    device: torch.Tensor
    copier: CudaCopier

    def runs(self, kind: OpKind, count: int, sizes: np.ndarray) -> Runs:
        """Make this many copies of these sizes between slots, in random order."""
        random = np.random.default_rng(count)
        on_host = self.host.data_ptr() + random.permutation(NUM_SLOTS)[:count] * SLOT
        on_device = self.device.data_ptr() + random.permutation(NUM_SLOTS)[:count] * SLOT
        to, start = (on_device, on_host) if kind is OpKind.H2D else (on_host, on_device)
        return Runs(to, start, sizes)

    def expected(self, kind: OpKind, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what host and device must hold after the copies."""
        host, device = self.host.clone(), self.device.cpu()
        target, source = (device, host) if kind is OpKind.H2D else (host, device)
        bases = [self.device.data_ptr(), self.host.data_ptr()]
        to_base, start_base = bases if kind is OpKind.H2D else bases[::-1]
        for to, start, size in zip(*(array.tolist() for array in runs), strict=True):
            to, start = to - to_base, start - start_base
            target[to : to + size] = source[start : start + size]
        return host, device


@pytest.fixture
def memory(machine: Machine) -> Iterator[Memory]:
    with open_memory(machine) as memory:
        yield memory


@contextmanager
def open_memory(machine: Machine, hugepages: str = "transparent") -> Iterator[Memory]:
    torch.manual_seed(0)
    with HostSegment.create(SLOT, NUM_SLOTS, hugepages) as segment:
        segment.map()
        memory = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        host.random_(0, 256)
        device = torch.empty(segment.size, dtype=torch.uint8, device=machine.device)
        device.random_(0, 256)
        torch.cuda.synchronize()
        copier = CudaCopier(machine.device)
        copier.attach(segment)
        yield Memory(segment, host, device, copier)
        copier.close()


def check_copies(memory: Memory, kind: OpKind, way: CopyWay | None = None) -> None:
    """Copy 300 runs, and compare both sides."""
    runs = memory.runs(kind, 300, np.full(300, 8192, np.int64))
    host, device = memory.expected(kind, runs)
    memory.copier.start(runs, kind, memory.copier.fence(), way=way).synchronize()
    assert torch.equal(memory.device.cpu(), device)
    assert torch.equal(memory.host, host)


SIZES = {
    "words": lambda n: np.random.default_rng(n).integers(1, 1024, n) * 16,
    "odd bytes": lambda n: np.random.default_rng(n).integers(1, SLOT, n),
    "whole slots": lambda n: np.full(n, SLOT),
}


def needs(copier: CudaCopier, way: CopyWay) -> None:
    """Skip the test if the driver is too old for the copy path, or Triton is missing."""
    (verdict,) = (verdict for verdict in copier.verdicts if verdict.way is way)
    if verdict.missing:
        pytest.skip(str(verdict))


@pytest.mark.parametrize("way", CopyWay)
def test_each_way_passes_the_self_test(memory: Memory, way: CopyWay) -> None:
    needs(memory.copier, way)
    assert [str(v) for v in memory.copier.verdicts if v.failures] == []


@pytest.mark.parametrize("way", [None, *CopyWay])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_arrive_and_no_others_change(
    memory: Memory, kind: OpKind, way: CopyWay | None
) -> None:
    if way is not None:
        needs(memory.copier, way)
    for sizes, count in itertools.product(SIZES, [0, 1, 33, 500]):
        if way is CopyWay.KERNEL and sizes == "odd bytes":
            continue  # the kernel takes whole words only
        memory.host.random_(0, 256)
        runs = memory.runs(kind, count, SIZES[sizes](count).astype(np.int64))
        host, device = memory.expected(kind, runs)
        memory.copier.start(runs, kind, memory.copier.fence(), way=way).synchronize()
        assert torch.equal(memory.device.cpu(), device), (sizes, count)
        assert torch.equal(memory.host, host), (sizes, count)


def test_odd_bytes_are_never_given_to_the_kernel(memory: Memory) -> None:
    runs = memory.runs(OpKind.H2D, 500, np.full(500, 1001, np.int64))
    assert memory.copier.choose(runs, OpKind.H2D) is not CopyWay.KERNEL


def test_a_store_runs_after_the_work_that_writes_its_source(
    machine: Machine, memory: Memory
) -> None:
    check_copies(memory, OpKind.D2H)  # the first copies of a process may have to wait
    machine.fill(memory.device, 1)  # a kernel's first use loads it, once the device is idle
    torch.cuda.current_stream().synchronize()  # which the next one does not wait for
    runs = memory.runs(OpKind.D2H, 300, np.full(300, 4096, np.int64))
    with machine.busy():
        machine.fill(memory.device, 7)
        landed = memory.copier.start(runs, OpKind.D2H, memory.copier.fence())
        assert not landed.query()
    landed.synchronize()
    for to in (runs[0] - memory.host.data_ptr()).tolist():
        assert (memory.host[to : to + 4096] == 7).all()


def test_a_load_runs_after_the_work_that_still_reads_its_target(
    machine: Machine, memory: Memory
) -> None:
    runs = memory.runs(OpKind.H2D, 300, np.full(300, 4096, np.int64))
    before = memory.device.cpu()
    _, after = memory.expected(OpKind.H2D, runs)
    with machine.busy():
        read = machine.read(memory.device)
        landed = memory.copier.start(runs, OpKind.H2D, memory.copier.fence())
    landed.synchronize()
    assert torch.equal(read(), before)
    assert torch.equal(memory.device.cpu(), after)


def test_a_store_does_not_wait_for_a_load(machine: Machine, memory: Memory) -> None:
    check_copies(memory, OpKind.D2H)
    half = NUM_SLOTS // 2 * SLOT
    slots = np.arange(NUM_SLOTS // 2) * SLOT
    whole = np.full(len(slots), SLOT, np.int64)
    on_device, on_host = memory.device.data_ptr() + slots, memory.host.data_ptr() + slots
    with machine.busy():
        load = memory.copier.start(
            Runs(on_device, on_host, whole), OpKind.H2D, memory.copier.fence()
        )
        store = memory.copier.start(Runs(on_host + half, on_device + half, whole), OpKind.D2H, None)
        store.synchronize()
        assert not load.query()
    load.synchronize()
    assert torch.equal(memory.device.cpu(), memory.host)


def test_a_thread_that_never_touched_cuda_can_copy(memory: Memory) -> None:
    runs = memory.runs(OpKind.H2D, 200, np.full(200, 8192, np.int64))
    _, device = memory.expected(OpKind.H2D, runs)
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            memory.copier.start(runs, OpKind.H2D, None).synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    assert failures == []
    assert torch.equal(memory.device.cpu(), device)


def test_copies_while_another_thread_captures_a_graph_leave_the_graph_intact(
    machine: Machine, memory: Memory
) -> None:
    runs = memory.runs(OpKind.H2D, 200, np.full(200, 8192, np.int64))
    failures: list[BaseException] = []
    capturing, copied = threading.Event(), threading.Event()

    def copy() -> None:
        try:
            assert capturing.wait(60)
            landed = memory.copier.start(runs, OpKind.H2D, None)
            while not landed.query():
                pass
        except BaseException as error:
            failures.append(error)
        finally:
            copied.set()

    thread = threading.Thread(target=copy)
    thread.start()
    with machine.capturing() as capture:
        capturing.set()
        assert copied.wait(60)
    thread.join()
    assert failures == []
    assert capture.is_intact


def test_the_segment_is_pinned_until_the_copier_is_closed(machine: Machine, memory: Memory) -> None:
    assert memory.copier._pinned is not None and memory.copier._pinned.is_reachable
    assert machine.is_pinned(memory.host)
    memory.copier.close()
    memory.copier.close()
    assert not machine.is_pinned(memory.host)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpinned_pool_is_tested_and_copied_anyway(
    machine: Machine, kind: OpKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(driver: CudaDriver, address: int, size: int) -> None:
        raise RuntimeError("refused by the test")

    monkeypatch.setattr(CudaDriver, "register", refuse)
    with open_memory(machine) as memory:
        assert not memory.copier.is_pinned
        assert memory.copier.ways
        check_copies(memory, kind)


@pytest.mark.parametrize("way", CopyWay)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_of_several_pinned_pieces_is_copied_by_each_way(
    machine: Machine, kind: OpKind, way: CopyWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copier, "_PIN_STEP", 50 * SLOT)
    with open_memory(machine) as memory:
        needs(memory.copier, way)
        assert memory.copier._pinned is not None
        assert len(memory.copier._pinned.starts) == 11
        everything = np.arange(NUM_SLOTS) * SLOT  # neighbours, which are joined within a piece
        sides = (memory.device.data_ptr(), memory.host.data_ptr())
        to, start = sides if kind is OpKind.H2D else sides[::-1]
        runs = Runs(to + everything, start + everything, np.full(NUM_SLOTS, SLOT, np.int64))
        host, device = memory.expected(kind, runs)
        memory.copier.start(runs, kind, memory.copier.fence(), way=way).synchronize()
        assert torch.equal(memory.device.cpu(), device)
        assert torch.equal(memory.host, host)


@pytest.mark.parametrize("kind", KINDS)
def test_reserved_huge_pages_are_pinned_and_copied(machine: Machine, kind: OpKind) -> None:
    with ExitStack() as held:
        try:
            memory = held.enter_context(open_memory(machine, "reserved"))
        except ConfigError as refusal:
            pytest.skip(str(refusal))
        assert memory.copier.is_pinned
        check_copies(memory, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_without_batches_copies_one_by_one(
    machine: Machine, kind: OpKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDriver, "_find_batch_copy", lambda _: None)
    with open_memory(machine) as memory:
        assert memory.copier.ways[0] is CopyWay.SINGLE
        check_copies(memory, kind)


def test_two_processes_pin_and_copy_one_segment(
    machine: Machine, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.give_to_children(tmp_path, monkeypatch)
    request = msgspec.json.encode(TrialRequest(0, memory.segment.ref()))
    outcome = run_child("flexcache.doctor.gpu_trial", request, 120)
    assert outcome.problem == ""
    tried = msgspec.json.decode(outcome.answer or b"", type=GpuTried)
    assert tried.is_pinned and not tried.refusal
    assert not any(way.failures for way in tried.ways)
    for kind in KINDS:  # of what the other has left
        check_copies(memory, kind)


ON_THE_LAST_DEVICE = """
import ctypes, threading, numpy as np, torch
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.cuda_copier import CudaCopier

last = torch.cuda.device_count() - 1
driver = ctypes.CDLL("libcuda.so.1")

def has_context(index):
    device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
    assert not driver.cuDeviceGet(ctypes.byref(device), index)
    assert not driver.cuDevicePrimaryCtxGetState(
        device, ctypes.byref(flags), ctypes.byref(is_active)
    )
    return bool(is_active.value)

def serve():
    with HostSegment.create(4096, 1024) as segment:
        segment.map()
        copier = CudaCopier(torch.device("cuda", last))
        copier.attach(segment)
        at = np.arange(0, segment.size, 4096)
        for way in copier.ways:
            runs = used.data_ptr() + at, segment.address + at, np.full(len(at), 2048)
            copier.start(runs, OpKind.H2D, copier.fence(), way=way).synchronize()
        copier.close()

used = torch.empty(4096 * 1024, dtype=torch.uint8, device=f"cuda:{last}")
assert not has_context(0)
thread = threading.Thread(target=serve)
thread.start()
thread.join()
assert has_context(last) and not has_context(0)
print("no context on device 0")
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_copier_of_another_gpu_makes_no_context_on_the_first() -> None:
    program = [sys.executable, "-c", ON_THE_LAST_DEVICE]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "no context on device 0\n", done.stderr
