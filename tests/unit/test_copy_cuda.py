"""`CudaCopier` on a fake GPU: bytes, order, threads, devices, and what fails.

The driver is asynchronous: no copy has landed because a call has returned.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from fake_gpu import (
    NOT_SUPPORTED,
    FakeEvent,
    FakeGpu,
    FakeKernel,
    FakeTorchCuda,
    Memory,
    fake_gpu,
    fake_hip_gpu,
)

from flexcache.errors import DeviceLostError, MissingDependencyError, StorageError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer import copy_ways, cuda_copier
from flexcache.transfer.copier import Runs
from flexcache.transfer.copy_ways import SIZES, CopyChoice, CopyCost, CopyWay
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.cuda_driver import CudaDriver, SourceOrder

BLOCK = 4096
NUM_BLOCKS = 64
KINDS = (OpKind.H2D, OpKind.D2H)
BATCH, SINGLE, KERNEL = "cuMemcpyBatchAsync", "cuMemcpyAsync", "kernel"


class Rig:
    """A copier, and what it copies between.

    Attributes:
        memory: The device's side, `NUM_BLOCKS` blocks of random bytes.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, segment: HostSegment, device: int = 0
    ) -> None:
        monkeypatch.setattr(copy_ways, "_ROUNDS", 1)  # each costs the fake a quarter of a second
        monkeypatch.setattr(copy_ways, "_WARM_UP_S", 0.0)
        self.gpu = gpu
        self.torch = FakeTorchCuda(gpu)
        self.torch.install(monkeypatch)
        self.kernel = FakeKernel(self.torch)
        self._put_kernel = lambda module: monkeypatch.setitem(
            sys.modules, "flexcache.transfer.copy_kernel", module
        )
        self._put_kernel(None)  # as without Triton
        self.segment = segment
        self.memory: Memory = gpu.allocate(BLOCK * NUM_BLOCKS, device)
        self.blocks = self.memory.seen.reshape(NUM_BLOCKS, BLOCK)
        self.blocks[:] = np.random.default_rng(0).integers(0, 256, self.blocks.shape, np.uint8)
        self._of = torch.device("cuda", device)
        self.copier = CudaCopier(self._of)

    def add_kernel(self) -> FakeKernel:
        self._put_kernel(self.kernel)
        return self.kernel

    def attach(self, *, version: int = 13_000) -> None:
        """Attach, and forget what that took."""
        self.gpu.set_version(version)
        self.copier = CudaCopier(self._of)
        self.copier.attach(self.segment)
        self.gpu.forget_copy_calls()
        self.kernel.num_ops = 0

    def start(
        self, kind: OpKind, gpu: list[int], host: list[int], after: object = None, **options: object
    ) -> FakeEvent:
        on_gpu = self.memory.address + np.array(gpu, np.int64) * BLOCK
        on_host = self.segment.address + np.array(host, np.int64) * BLOCK
        to, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        return self.copier.start(Runs(to, source, np.full(len(gpu), BLOCK)), kind, after, **options)

    def copy(self, kind: OpKind, gpu: list[int], host: list[int], **options: object) -> None:
        """Start copies and wait until they have landed."""
        self.start(kind, gpu, host, **options).synchronize()

    def on_host(self, block: int) -> bytes:
        return bytes(self.segment.block(block))

    def check_copies(self, num_blocks: int = 3) -> None:
        """Store and load this many blocks, none of which are neighbours."""
        before = self.blocks.copy()
        sources = list(range(0, 2 * num_blocks, 2))
        self.copy(OpKind.D2H, sources, sources[::-1])
        self.blocks[:] = 0
        self.copy(OpKind.H2D, sources, sources[::-1])
        assert np.array_equal(self.blocks[sources], before[sources])

    def pinned(self) -> dict[int, int]:
        """Pinned pieces of the segment: address to size."""
        end, pieces = self.segment.address + self.segment.size, self.gpu.registered.items()
        return {at: size for at, size in pieces if self.segment.address <= at < end}

    def streams(self) -> set[int]:
        """Streams on which copies were queued."""
        return {call.stream for call in self.gpu.copy_calls}


@pytest.fixture(params=[fake_gpu, fake_hip_gpu], ids=["CUDA", "HIP"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with request.param(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(BLOCK, NUM_BLOCKS) as segment:
        segment.map()
        yield segment


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, segment: HostSegment) -> Iterator[Rig]:
    rig = Rig(monkeypatch, gpu, segment)
    yield rig
    rig.copier.close()
    assert gpu.is_lost or not gpu.registered


def test_a_store_and_a_load_bring_blocks_back_each_on_its_own_stream(rig: Rig) -> None:
    rig.attach()
    before = rig.blocks.copy()
    rig.copy(OpKind.D2H, [5, 0, 2], [1, 6, 3])
    rig.blocks[:] = 0
    rig.copy(OpKind.H2D, [4, 7], [3, 1])
    assert np.array_equal(rig.blocks[[4, 7]], before[[2, 5]])
    assert not np.delete(rig.blocks, [4, 7], axis=0).any()
    assert len(rig.streams()) == 2


def test_stores_read_in_stream_order_and_loads_may_read_early(rig: Rig) -> None:
    rig.attach()
    rig.start(OpKind.D2H, [0], [0])
    rig.start(OpKind.H2D, [0], [0])
    orders = [call.order for call in rig.gpu.copy_calls]
    assert orders == [SourceOrder.STREAM, SourceOrder.ANY]


@pytest.mark.parametrize("way", [None, CopyWay.SINGLE, CopyWay.KERNEL])
def test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded(
    rig: Rig, way: CopyWay | None
) -> None:
    rig.add_kernel()
    rig.attach()
    compute = rig.torch.Stream(torch.device("cuda", 0))
    with rig.torch.stream(compute):
        step = rig.gpu.hold(compute.handle)
        rig.gpu.fill(compute.handle, rig.memory, 7)
        fence = rig.copier.fence()
    landed = rig.start(OpKind.D2H, [0, 2, 4], [1, 3, 5], fence, way=way)
    rig.gpu.wait_quiet()
    assert not landed.query()
    assert not any(rig.on_host(1))
    rig.gpu.fire(step)
    landed.synchronize()
    assert all(rig.on_host(block) == bytes([7]) * BLOCK for block in (1, 3, 5))


def test_a_load_overwrites_only_what_the_model_has_read(rig: Rig) -> None:
    rig.attach()
    compute = rig.torch.Stream(torch.device("cuda", 0))
    with rig.torch.stream(compute):
        step = rig.gpu.hold(compute.handle)
        fence = rig.copier.fence()
    before = rig.blocks.copy()
    landed = rig.start(OpKind.H2D, [0, 2], [1, 3], fence)
    store = rig.start(OpKind.D2H, [5], [5])
    store.synchronize()  # a store does not wait for a load
    rig.gpu.wait_quiet()
    assert not landed.query()
    assert np.array_equal(rig.blocks, before)
    rig.gpu.fire(step)
    landed.synchronize()
    assert not rig.blocks[[0, 2]].any()


def test_landed_is_what_has_landed(rig: Rig) -> None:
    rig.attach()
    for way in (CopyWay.BATCH, CopyWay.SINGLE):
        rig.gpu.freeze()
        landed = rig.start(OpKind.D2H, [0, 2], [1, 3], way=way)
        rig.gpu.wait_quiet()
        assert not landed.query()
        rig.gpu.thaw()
        landed.synchronize()
        assert landed.query()
        assert rig.on_host(1) == rig.blocks[0].tobytes()


def test_an_op_without_blocks_has_an_event_too(rig: Rig) -> None:
    rig.attach()
    rig.start(OpKind.H2D, [], []).synchronize()
    assert rig.gpu.copy_calls == []


def test_neighbours_are_one_copy_but_not_over_two_pinned_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copier, "_PIN_STEP", 24 * BLOCK)
    rig.attach()
    assert len(rig.gpu.registered) == 3
    rig.copy(OpKind.D2H, list(range(64)), list(range(64)))
    assert rig.gpu.batches == [3]
    assert rig.on_host(7) == rig.blocks[7].tobytes()


def test_a_load_by_layer_is_not_behind_other_loads(rig: Rig) -> None:
    rig.attach()
    compute = rig.torch.Stream(torch.device("cuda", 0))
    with rig.torch.stream(compute):
        step = rig.gpu.hold(compute.handle)
        fence = rig.copier.fence()
    behind = rig.start(OpKind.H2D, [0], [0], fence)
    rig.start(OpKind.H2D, [2], [1], urgent=True).synchronize()
    assert not behind.query()
    assert not rig.blocks[2].any()
    rig.gpu.fire(step)
    behind.synchronize()
    priorities = [call.priority for call in rig.gpu.copy_calls]
    assert priorities[0] > priorities[1]


def test_no_stream_of_torch_is_ours(rig: Rig) -> None:
    rig.attach()
    rig.check_copies()
    theirs = {rig.torch.Stream(torch.device("cuda", 0)).cuda_stream for _ in range(64)}
    assert not rig.streams() & theirs


def test_a_closed_copier_leaves_neither_streams_nor_a_context(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, contexts = rig.gpu.num_streams, rig.gpu.contexts
    rig.attach()
    assert rig.gpu.num_streams == streams + 3
    rig.copier.close()
    assert rig.gpu.num_streams == streams
    rig.gpu.refuse("cuStreamCreate", from_call=3)
    with pytest.raises(RuntimeError, match="StreamCreate"):
        rig.attach()
    assert rig.gpu.num_streams == streams
    if not torch.version.hip:  # there a device has its context to the end
        assert rig.gpu.contexts == contexts


def test_a_refused_op_has_ended_before_its_failure_is_reported(rig: Rig) -> None:
    rig.attach()
    rig.gpu.refuse(SINGLE, from_call=3)
    rig.gpu.set_speed(late_us=20_000)
    with pytest.raises(RuntimeError, match=r"\(801\)"):
        rig.start(OpKind.D2H, [0, 2, 4], [1, 3, 5], way=CopyWay.SINGLE)
    assert rig.on_host(1) == rig.blocks[0].tobytes()  # what had been queued has landed
    assert rig.on_host(3) == rig.blocks[2].tobytes()
    assert not any(rig.on_host(5))
    rig.gpu.refuse_nothing()
    rig.check_copies()


def test_a_refused_copy_of_a_batch_is_named(rig: Rig) -> None:
    rig.attach()
    rig.gpu.set_faults(refused_run=1)
    with pytest.raises(RuntimeError, match="number 1"):
        rig.start(OpKind.H2D, [0, 2], [0, 2])
    rig.gpu.set_faults(refused_run=-1)
    rig.check_copies()


def test_a_pool_that_cannot_be_pinned_is_used_as_it_is(rig: Rig) -> None:
    rig.gpu.set_faults(most_pinned=0)
    rig.attach()
    assert not rig.copier.is_pinned
    assert rig.copier.ways == (CopyWay.BATCH,)
    rig.copy(OpKind.D2H, [4], [2])
    assert rig.on_host(2) == rig.blocks[4].tobytes()


@pytest.mark.parametrize("version", [13_000, 12_000])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_of_a_pool_that_is_partly_pinned_all_blocks_are_copied(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, has_kernel: bool, version: int
) -> None:
    monkeypatch.setattr(cuda_copier, "_PIN_STEP", 8 * BLOCK)
    monkeypatch.setattr(CopyChoice, "prefers_kernel", lambda *_: True)
    if has_kernel:
        rig.add_kernel().MIN_RUNS = 1
    register, end = CudaDriver.register, rig.segment.address + rig.segment.size

    def refuse_the_last_pieces(driver: CudaDriver, address: int, size: int) -> None:
        if end - 24 * BLOCK <= address < end:
            raise RuntimeError("no more memory can be pinned")
        register(driver, address, size)

    monkeypatch.setattr(CudaDriver, "register", refuse_the_last_pieces)
    rig.attach(version=version)
    assert sum(rig.pinned().values()) == 32 * BLOCK
    everything = list(range(NUM_BLOCKS))
    expected = rig.blocks.copy()
    for places in (everything[::-1], everything):  # neighbours are one copy, but not over the end
        rig.copy(OpKind.D2H, everything, places)
        rig.blocks[:] = 0
        rig.copy(OpKind.H2D, everything, places)
        assert np.array_equal(rig.blocks, expected)
    assert bool(rig.kernel.num_ops) is has_kernel
    assert rig.gpu.num_single_copies if version < 12_080 else rig.gpu.batches


def test_closing_waits_for_copies_before_it_unpins(rig: Rig) -> None:
    rig.attach()
    assert rig.copier.is_pinned
    rig.gpu.set_speed(late_us=20_000)
    expected = rig.blocks[0].tobytes()
    rig.start(OpKind.D2H, [0], [1])
    rig.start(OpKind.H2D, [4], [3])
    rig.copier.close()  # memory unpinned in use would be a violation
    assert rig.on_host(1) == expected
    assert not rig.blocks[4].any()
    assert not rig.gpu.registered


def test_copies_do_not_void_a_graph_that_another_thread_captures(rig: Rig) -> None:
    rig.attach()
    compute = rig.torch.Stream(torch.device("cuda", 0))
    rig.gpu.begin_capture(compute.handle)
    landed = rig.start(OpKind.D2H, [0], [1])
    while not landed.query():
        pass
    assert rig.gpu.end_capture(compute.handle)
    rig.gpu.begin_capture(compute.handle)
    rig.copier.close()
    assert rig.gpu.end_capture(compute.handle)


# -- the second GPU ------------------------------------------------------------------------------


def test_a_rank_of_the_second_gpu_makes_no_context_on_the_first(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, segment: HostSegment
) -> None:
    """On a thread of its own, which begins on device 0 as a rank's does."""
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            rig = Rig(monkeypatch, gpu, segment, device=1)
            rig.add_kernel()
            rig.attach()
            rig.check_copies()
            rig.copy(OpKind.H2D, [1], [1], way=CopyWay.KERNEL)
            rig.copier.close()
            assert gpu.contexts == {1}
            assert rig.torch.current_device() == 1
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert problems == []


def test_a_thread_that_never_used_the_second_gpu_can_copy_to_it(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, segment: HostSegment
) -> None:
    rig = Rig(monkeypatch, gpu, segment, device=1)
    rig.attach()
    thread = threading.Thread(target=rig.copy, args=(OpKind.D2H, [3], [2]))
    thread.start()
    thread.join()
    assert rig.on_host(2) == rig.blocks[3].tobytes()
    rig.copier.close()
    assert gpu.contexts == {1}


# -- the self-test -------------------------------------------------------------------------------


def failed(rig: Rig) -> dict[CopyWay, set[OpKind]]:
    return {v.way: set(v.failures) for v in rig.copier.verdicts if v.failures}


def test_all_ways_that_pass_are_known_and_the_batch_comes_before_single_copies(rig: Rig) -> None:
    rig.add_kernel()
    rig.attach()
    assert [v.way for v in rig.copier.verdicts if v.passed] == list(CopyWay)
    assert rig.copier.ways == (CopyWay.BATCH, CopyWay.KERNEL)
    rig.check_copies()
    assert len(rig.gpu.batches) == 2


def test_the_self_test_looks_at_bytes_only_when_they_have_landed(rig: Rig) -> None:
    rig.add_kernel()
    rig.gpu.set_speed(late_us=5_000)
    rig.attach()
    assert failed(rig) == {}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 1])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_batch_that_is_refused_leaves_single_copies_and_is_named(
    rig: Rig, code: int, has_kernel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if has_kernel:
        rig.add_kernel()
    rig.gpu.refuse(BATCH, code)
    rig.attach()
    assert failed(rig) == {CopyWay.BATCH: set(KINDS)}
    assert rig.copier.ways == (CopyWay.SINGLE, *([CopyWay.KERNEL] * has_kernel))
    rig.check_copies()
    assert rig.gpu.num_single_copies == 6
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all("batched copy" in line and f"({code})" in line for line in warnings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_least", [1, 2])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_batch_that_copies_wrong_bytes_is_never_used(
    rig: Rig, kind: OpKind, at_least: int, is_pinned: bool
) -> None:
    rig.gpu.corrupt(BATCH, to_device=kind is OpKind.H2D, at_least=at_least)
    if not is_pinned:
        rig.gpu.set_faults(most_pinned=0)
    rig.attach()
    assert rig.copier.is_pinned is is_pinned
    assert failed(rig) == {CopyWay.BATCH: {kind}}
    rig.check_copies()
    assert (rig.gpu.batches, rig.gpu.num_single_copies) == ([], 6)


def test_single_copies_that_fail_leave_the_batch(rig: Rig) -> None:
    rig.gpu.refuse(SINGLE)
    rig.attach()
    assert failed(rig) == {CopyWay.SINGLE: set(KINDS)}
    rig.check_copies()


class CompilationError(Exception):
    """Like Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("fault", ["compiler", "bytes", "memory"])
def test_a_kernel_that_fails_or_copies_wrong_bytes_leaves_the_copy_engine(
    rig: Rig, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyChoice, "prefers_kernel", lambda *_: True)
    kernel = rig.add_kernel()
    if fault == "bytes":
        rig.gpu.corrupt(KERNEL, to_device=True)
    else:
        kernel.error = CompilationError("no") if fault == "compiler" else torch.OutOfMemoryError()
    rig.attach()
    assert failed(rig) == {CopyWay.KERNEL: set(KINDS)}
    assert rig.copier.ways == (CopyWay.BATCH,)
    rig.check_copies(32)
    assert kernel.num_ops == 0


def refuse_the_copy_engine(rig: Rig) -> None:
    for name in (BATCH, SINGLE):
        rig.gpu.refuse(name)


def test_a_kernel_alone_copies_whole_words_and_refuses_the_rest(rig: Rig) -> None:
    rig.add_kernel()
    refuse_the_copy_engine(rig)
    rig.attach()
    assert rig.copier.ways == (CopyWay.KERNEL,)
    rig.check_copies()
    one = np.array([1])
    with pytest.raises(RuntimeError, match="whole words"):
        rig.copier.start(Runs(one, one, one), OpKind.H2D, None)


@pytest.mark.parametrize("fault", ["bytes", "refused"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_device_without_a_working_copy_method_is_refused_with_each_failure(
    rig: Rig, fault: str, is_pinned: bool
) -> None:
    rig.add_kernel().error = CompilationError("no ptxas")
    for name in (BATCH, SINGLE):
        if fault == "bytes":
            for kind in KINDS:
                rig.gpu.corrupt(name, to_device=kind is OpKind.H2D)
        else:
            rig.gpu.refuse(name)
    if not is_pinned:
        rig.gpu.set_faults(most_pinned=0)
    with pytest.raises(StorageError) as caught:
        rig.copier.attach(rig.segment)
    said = str(caught.value)
    what = "bytes differ" if fault == "bytes" else "(801)"
    assert said.count(what) == 4
    for name in ("batched copy: H2D", "single copies: H2D", "kernel"):
        assert name in said
    assert ("CompilationError: no ptxas" in said) is is_pinned
    assert not rig.gpu.registered
    rig.copier.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_self_test_leaves_the_pool_as_it_is_and_gives_its_own_memory_back(
    rig: Rig, is_pinned: bool
) -> None:
    rig.add_kernel()
    if not is_pinned:
        rig.gpu.set_faults(most_pinned=0)
    pool = np.frombuffer((ctypes.c_uint8 * rig.segment.size).from_address(rig.segment.address))
    before, device = pool.copy(), rig.blocks.copy()
    rig.attach()
    assert np.array_equal(pool, before)
    assert np.array_equal(rig.blocks, device)
    assert list(rig.pinned()) == [rig.segment.address] * is_pinned
    assert len(rig.gpu.registered) == 2 * is_pinned  # and the kernel's tables


@pytest.mark.parametrize("lacks", ["Triton", "pinning", "mapping"])
def test_where_the_kernel_cannot_be_tried_the_reason_is_kept(rig: Rig, lacks: str) -> None:
    if lacks != "Triton":
        rig.add_kernel()
    if lacks == "pinning":
        rig.gpu.set_faults(most_pinned=0)
    if lacks == "mapping":
        rig.gpu.refuse("cuMemHostGetDevicePointer")
    rig.attach()
    (kernel,) = (v for v in rig.copier.verdicts if v.way is CopyWay.KERNEL)
    assert ("copy_kernel" in kernel.missing) is (lacks == "Triton")
    assert ("cannot map" in kernel.missing) is (lacks != "Triton")
    rig.check_copies()


def test_an_older_driver_gets_copies_one_by_one(rig: Rig) -> None:
    rig.attach(version=12_070)
    assert rig.copier.ways == (CopyWay.SINGLE,)
    rig.check_copies()
    assert (rig.gpu.num_single_copies, rig.gpu.batches) == (6, [])


def test_a_rank_sends_heartbeats_while_a_kernel_compiles(rig: Rig) -> None:
    life = threading.Semaphore(0)
    threads: set[int] = set()
    lived: list[bool] = []

    def show_life() -> None:
        threads.add(threading.get_ident())
        life.release()

    # It ends only when that was seen; one sign is of the pinning before it.
    rig.add_kernel().compile = lambda: lived.extend(life.acquire(timeout=60) for _ in range(4))
    rig.copier.attach(rig.segment, show_life)
    assert lived == [True] * 4
    assert threads == {threading.get_ident()}


def test_a_batch_that_fails_while_it_is_timed_is_named_and_the_kernel_is_not_used(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.add_kernel()
    rig.gpu.set_faults(refused_run=200)  # so many are in no batch of the self-test
    rig.attach()
    assert failed(rig) == {}
    assert rig.copier.ways == (CopyWay.BATCH,)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "copies_not_timed" in line
    assert "MemcpyBatchAsync of 2048 copies" in line
    rig.check_copies()


def test_ops_use_the_number_of_programs_that_was_quick_enough(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = rig.add_kernel()

    speeds = {0: 50e9, 4: 20e9, 8: 50e9, 12: 52e9}

    def measure(ways: Mapping[int, Callable[[int, int], object]]) -> dict[int, CopyCost]:
        for number, copy in ways.items():
            copy(1, 4096)
            assert number in (0, kernel.programs)
        return costs_of(speeds)

    monkeypatch.setattr(cuda_copier, "measure_costs", measure)
    rig.attach()
    rig.copy(OpKind.D2H, [0], [0], way=CopyWay.KERNEL)
    assert kernel.programs == 8


def costs_of(speeds: Mapping[int, float]) -> dict[int, CopyCost]:
    """Return costs of the engine (0) and of the kernel's numbers of programs, by their bytes/s."""
    return {
        number: CopyCost(0.0, tuple(size / speed for size in SIZES))
        for number, speed in speeds.items()
    }


EVEN = list(range(0, NUM_BLOCKS, 2))  # as many as the kernel takes, and no neighbours
ODD = [block + 1 for block in EVEN]


def test_a_table_is_left_alone_until_its_copies_have_landed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op for which there is no room meanwhile is left to the engine."""
    monkeypatch.setattr(cuda_copier, "_MOST_RUNS", len(EVEN) + 8)
    monkeypatch.setattr(cuda_copier, "_RUNS_PER_TABLE", len(EVEN))
    monkeypatch.setattr(
        cuda_copier, "measure_costs", lambda ways: costs_of(dict.fromkeys(ways, 9e9))
    )
    monkeypatch.setattr(CopyChoice, "prefers_kernel", lambda *_: True)
    kernel = rig.add_kernel()
    rig.attach()
    pinned = rig.gpu.registered
    rig.gpu.freeze()
    first = rig.start(OpKind.D2H, EVEN, EVEN)
    second = rig.start(OpKind.D2H, ODD, ODD)
    rig.gpu.thaw()
    first.synchronize()
    second.synchronize()
    assert (kernel.num_ops, rig.gpu.batches) == (1, [len(ODD)])
    assert all(rig.on_host(block) == rig.blocks[block].tobytes() for block in range(NUM_BLOCKS))
    for number in (2, 3, 4):
        rig.copy(OpKind.H2D, EVEN, ODD)
        assert kernel.num_ops == number
    assert np.array_equal(rig.blocks[EVEN], rig.blocks[ODD])
    assert rig.gpu.registered == pinned


def test_small_copies_wait_for_room_in_the_kernels_tables_rather_than_for_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copier, "PIECE_RUNS", len(EVEN))
    monkeypatch.setattr(cuda_copier, "_MOST_RUNS", len(EVEN) + 8)
    monkeypatch.setattr(cuda_copier, "_RUNS_PER_TABLE", len(EVEN))
    monkeypatch.setattr(
        cuda_copier, "measure_costs", lambda ways: costs_of(dict.fromkeys(ways, 9e9))
    )
    monkeypatch.setattr(CopyChoice, "prefers_kernel", lambda *_: True)
    rig.add_kernel()
    rig.attach()
    rig.gpu.freeze()
    landed = rig.start(OpKind.D2H, EVEN, EVEN)
    assert not rig.copier.may_start(OpKind.D2H, None)
    assert rig.copier.may_start(OpKind.H2D, None)  # a lane has tables of its own
    rig.gpu.thaw()
    landed.synchronize()
    assert rig.copier.may_start(OpKind.D2H, None)


# -- what fails ----------------------------------------------------------------------------------


def test_a_kernel_that_finds_no_memory_for_an_op_leaves_it_and_all_others_to_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CopyChoice, "prefers_kernel", lambda *_: True)
    kernel = rig.add_kernel()
    rig.attach()
    rig.check_copies(32)
    assert kernel.num_ops == 2
    kernel.error = torch.OutOfMemoryError("no room for a table")
    caplog.clear()
    rig.check_copies(32)
    rig.check_copies(32)
    assert kernel.num_ops == 2
    assert len(rig.gpu.batches) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert "copy_way_given_up way=kernel" in line
    assert "no room for a table" in line


def test_an_op_of_a_kernel_alone_ends_with_its_error_whatever_the_class(rig: Rig) -> None:
    kernel = rig.add_kernel()
    refuse_the_copy_engine(rig)
    rig.attach()
    kernel.error = CompilationError("no ptxas")
    with pytest.raises(RuntimeError, match="CompilationError: no ptxas"):
        rig.start(OpKind.H2D, [0], [0])
    kernel.error = None
    rig.check_copies()


def test_a_lost_device_is_reported_as_lost_and_closing_the_copier_does_not_raise(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.attach()
    rig.gpu.set_faults(is_lost=True)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="cuda:0 no longer works"):
            rig.start(OpKind.H2D, [0], [0])
    caplog.clear()
    rig.copier.close()
    rig.copier.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 8  # bind, three streams to wait for, the pool, three streams
    assert any("host_pool_still_pinned" in line for line in said)


def test_an_error_that_comes_after_the_call_ends_the_wait_for_its_landing(rig: Rig) -> None:
    rig.attach()
    rig.gpu.set_faults(lost_after_copies=1)
    landed = rig.start(OpKind.D2H, [0], [0])
    landed.synchronize()
    rig.gpu.freeze()
    landed = rig.start(OpKind.D2H, [0], [0])
    rig.gpu.thaw()
    with pytest.raises(RuntimeError, match="CUDA error"):
        landed.synchronize()
    with pytest.raises(RuntimeError, match="CUDA error"):
        landed.query()


def test_a_kernel_that_kills_the_device_in_the_self_test_fails_the_attach(rig: Rig) -> None:
    kernel = rig.add_kernel()
    kernel.compile = lambda: rig.gpu.set_faults(is_lost=True)
    with pytest.raises(DeviceLostError, match="kernel, H2D: cuda:0 no longer works"):
        rig.copier.attach(rig.segment)
    rig.copier.close()


def test_an_attach_that_fails_half_way_leaves_nothing_pinned(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copier, "_PIN_STEP", BLOCK)

    def lose_link() -> None:
        if len(rig.gpu.registered) == 3:
            raise OSError("the link is gone")

    with pytest.raises(OSError, match="the link is gone"):
        rig.copier.attach(rig.segment, lose_link)
    assert not rig.gpu.registered
    rig.copier.close()
    rig.attach()
    rig.check_copies()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is here")
def test_without_the_driver_the_error_names_what_is_missing() -> None:
    with pytest.raises(MissingDependencyError, match="the NVIDIA driver"):
        CudaDriver.load()
