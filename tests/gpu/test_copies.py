"""`CudaCopier` on a real device: bytes, order, threads, graphs. Skipped without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_choice import CopyWay
from flexcache.transfer.workers.copy_cuda import CudaCopier
from flexcache.transfer.workers.copy_driver import CudaDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

KINDS = (OpKind.H2D, OpKind.D2H)
SLOT = 64 << 10
NUM_SLOTS = 512
DEVICE = torch.device("cuda", 0)


@dataclass
class Memory:
    """Random bytes on both sides, and a copier between them."""

    segment: HostSegment
    host: torch.Tensor
    device: torch.Tensor
    copier: CudaCopier

    def runs(
        self, kind: OpKind, count: int, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make this many copies of these sizes between slots, in random order."""
        random = np.random.default_rng(count)
        on_host = self.host.data_ptr() + random.permutation(NUM_SLOTS)[:count] * SLOT
        on_device = self.device.data_ptr() + random.permutation(NUM_SLOTS)[:count] * SLOT
        to, start = (on_device, on_host) if kind is OpKind.H2D else (on_host, on_device)
        return to, start, sizes

    def expected(
        self, kind: OpKind, runs: tuple[np.ndarray, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
def memory() -> Iterator[Memory]:
    with open_memory() as memory:
        yield memory


@contextmanager
def open_memory() -> Iterator[Memory]:
    torch.manual_seed(0)
    with HostSegment.create(SLOT, NUM_SLOTS) as segment:
        segment.map()
        memory = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
        device = torch.randint(0, 256, host.shape, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        copier = CudaCopier(DEVICE)
        copier.attach(segment)
        yield Memory(segment, host, device, copier)
        copier.close()


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
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("count", [0, 1, 33, 500])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_arrive_and_no_others_change(
    memory: Memory, kind: OpKind, count: int, sizes: str, way: CopyWay | None
) -> None:
    if way is not None:
        needs(memory.copier, way)
    if way is CopyWay.KERNEL and sizes == "odd bytes":
        pytest.skip("the kernel takes whole words only")
    runs = memory.runs(kind, count, SIZES[sizes](count).astype(np.int64))
    host, device = memory.expected(kind, runs)
    memory.copier.start(*runs, kind, memory.copier.fence(), way=way).synchronize()
    assert torch.equal(memory.device.cpu(), device)
    assert torch.equal(memory.host, host)


def test_odd_bytes_are_never_given_to_the_kernel(memory: Memory) -> None:
    runs = memory.runs(OpKind.H2D, 500, np.full(500, 1001, np.int64))
    assert memory.copier.choose(*runs, OpKind.H2D) is not CopyWay.KERNEL


def test_a_store_runs_after_the_work_that_writes_its_source(memory: Memory) -> None:
    runs = memory.runs(OpKind.D2H, 300, np.full(300, 4096, np.int64))
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        torch.cuda._sleep(200_000_000)
        memory.device.fill_(7)
        fence = memory.copier.fence()
    landed = memory.copier.start(*runs, OpKind.D2H, fence)
    assert not landed.query()
    landed.synchronize()
    for to in (runs[0] - memory.host.data_ptr()).tolist():
        assert (memory.host[to : to + 4096] == 7).all()


def test_a_load_runs_after_the_work_that_still_reads_its_target(memory: Memory) -> None:
    runs = memory.runs(OpKind.H2D, 300, np.full(300, 4096, np.int64))
    before = memory.device.cpu()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        torch.cuda._sleep(200_000_000)
        read = memory.device.clone()
        fence = memory.copier.fence()
    _, after = memory.expected(OpKind.H2D, runs)
    memory.copier.start(*runs, OpKind.H2D, fence).synchronize()
    torch.cuda.synchronize()
    assert torch.equal(read.cpu(), before)
    assert torch.equal(memory.device.cpu(), after)


def test_a_store_does_not_wait_for_a_load(memory: Memory) -> None:
    half = NUM_SLOTS // 2 * SLOT
    slots = np.arange(NUM_SLOTS // 2) * SLOT
    whole = np.full(len(slots), SLOT, np.int64)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        torch.cuda._sleep(400_000_000)
        late = memory.copier.fence()
    on_device, on_host = memory.device.data_ptr() + slots, memory.host.data_ptr() + slots
    load = memory.copier.start(on_device, on_host, whole, OpKind.H2D, late)
    store = memory.copier.start(on_host + half, on_device + half, whole, OpKind.D2H, None)
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
            memory.copier.start(*runs, OpKind.H2D, None).synchronize()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    assert failures == []
    assert torch.equal(memory.device.cpu(), device)


def test_copies_while_another_thread_captures_a_graph_leave_the_graph_intact(
    memory: Memory,
) -> None:
    runs = memory.runs(OpKind.H2D, 200, np.full(200, 8192, np.int64))
    failures: list[BaseException] = []
    capturing, copied = threading.Event(), threading.Event()

    def copy() -> None:
        try:
            assert capturing.wait(60)
            landed = memory.copier.start(*runs, OpKind.H2D, None)
            while not landed.query():
                pass
        except BaseException as error:
            failures.append(error)
        finally:
            copied.set()

    thread = threading.Thread(target=copy)
    thread.start()
    x = torch.ones(1024, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        capturing.set()
        assert copied.wait(60)
        z = y + 1
    thread.join()
    assert failures == []
    graph.replay()
    torch.cuda.synchronize()
    assert (z == 3).all()


def test_the_segment_is_pinned_until_the_copier_is_closed(memory: Memory) -> None:
    assert memory.copier._pinned is not None and memory.copier._pinned.is_reachable
    assert memory.host.is_pinned()
    memory.copier.close()
    memory.copier.close()
    assert not memory.host.is_pinned()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpinned_pool_is_tested_and_copied_anyway(
    kind: OpKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(driver: CudaDriver, address: int, size: int) -> None:
        raise RuntimeError("refused by the test")

    monkeypatch.setattr(CudaDriver, "register", refuse)
    with open_memory() as memory:
        assert not memory.copier.is_pinned
        assert memory.copier.ways
        runs = memory.runs(kind, 300, np.full(300, 8192, np.int64))
        host, device = memory.expected(kind, runs)
        memory.copier.start(*runs, kind, memory.copier.fence()).synchronize()
        assert torch.equal(memory.device.cpu(), device)
        assert torch.equal(memory.host, host)


ON_THE_LAST_DEVICE = """
import ctypes, threading, torch
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_cuda import CudaCopier

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
        copier.close()

used = torch.empty(1, device=f"cuda:{last}")
assert not has_context(0)
thread = threading.Thread(target=serve)
thread.start()
thread.join()
assert has_context(last) and not has_context(0)
print("no context on device 0")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_a_copier_of_another_gpu_makes_no_context_on_the_first() -> None:
    program = [sys.executable, "-c", ON_THE_LAST_DEVICE]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "no context on device 0\n", done.stderr
