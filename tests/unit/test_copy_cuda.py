"""`CudaCopier` with a driver in host memory, and streams and events that only record calls.

What a device does with them is for `tests/gpu` to see.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from fake_cuda import NOT_SUPPORTED, STREAM, STREAMS, FakeCuda
from fake_torch_cuda import FakeTorchCuda

from flexcache.errors import DeviceLostError, MissingDependencyError, StorageError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers import copy_cuda
from flexcache.transfer.workers.copy_choice import CopyChoice, CopyWay
from flexcache.transfer.workers.copy_cuda import CudaCopier
from flexcache.transfer.workers.copy_driver import CudaDriver, SourceOrder

BLOCK = 4096
NUM_BLOCKS = 64
KINDS = (OpKind.H2D, OpKind.D2H)


class FakeKernel:
    """In place of the module `copy_kernel`.

    Attributes:
        error: Raised instead of copying, once there were `sound_ops`.
        corrupts: Whether it copies wrong bytes.
        compile: Called before the first copies.
    """

    MIN_RUNS = 32

    def __init__(self, torch_cuda: FakeTorchCuda) -> None:
        self.error: Exception | None = None
        self.sound_ops = 0
        self.corrupts = False
        self.compile: Callable[[], None] = lambda: None
        self.num_ops = 0
        self._torch = torch_cuda

    def takes(self, to: np.ndarray, start: np.ndarray, sizes: np.ndarray) -> bool:
        return not ((to | start | sizes) % 16).any()

    def copy_runs(
        self, to: np.ndarray, start: np.ndarray, sizes: np.ndarray, device: torch.device
    ) -> None:
        assert self._torch.current_device() == device.index
        assert self._torch.current_stream().cuda_stream in self._torch.cuda.streams
        if not self.num_ops:
            self.compile()
        if self.error is not None and self.num_ops >= self.sound_ops:
            raise self.error
        self.num_ops += 1
        for target, source, size in zip(to.tolist(), start.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size - 16 * self.corrupts)


class Rig:
    """A copier, what it is attached to, and the order of its calls."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, segment: HostSegment, device: int = 0
    ) -> None:
        self.cuda = FakeCuda(contexts={device})  # the engine's own
        self.torch = FakeTorchCuda(self.cuda)
        self.torch.install(monkeypatch)
        self.notes = self.torch.notes
        self.kernel = FakeKernel(self.torch)
        monkeypatch.setattr(CudaDriver, "load", lambda: CudaDriver(self.cuda))
        self._put_kernel = lambda module: monkeypatch.setitem(
            sys.modules, "flexcache.transfer.workers.copy_kernel", module
        )
        self._put_kernel(None)  # as without Triton
        self.segment = segment
        self.device = np.random.default_rng(0).integers(0, 256, BLOCK * NUM_BLOCKS, dtype=np.uint8)
        self.cuda.device_memory.append((self.device.ctypes.data, self.device.nbytes))
        self._of = torch.device("cuda", device)
        self.copier = CudaCopier(self._of)

    def add_kernel(self) -> FakeKernel:
        self._put_kernel(self.kernel)
        return self.kernel

    def attach(self, *, version: int = 13_000) -> None:
        """Attach, and forget what that took."""
        if version != self.cuda.version:
            self.cuda.version = version
            self.copier = CudaCopier(self._of)
        self.copier.attach(self.segment)
        self.notes.clear()
        self.cuda.batches.clear()
        self.cuda.batch_streams.clear()
        self.cuda.num_single_copies = 0
        self.kernel.num_ops = 0

    def start(
        self, kind: OpKind, gpu: list[int], host: list[int], after: object = None, **options: object
    ) -> object:
        on_gpu = self.device.ctypes.data + np.array(gpu, np.int64) * BLOCK
        on_host = self.segment.address + np.array(host, np.int64) * BLOCK
        to, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        return self.copier.start(to, source, np.full(len(gpu), BLOCK), kind, after, **options)

    def check_copies(self, num_blocks: int = 3) -> None:
        """Store and load this many blocks, none of which are neighbours."""
        before = self.device.reshape(NUM_BLOCKS, BLOCK).copy()
        sources = list(range(0, 2 * num_blocks, 2))
        self.start(OpKind.D2H, sources, sources[::-1])
        self.device[:] = 0
        self.start(OpKind.H2D, sources, sources[::-1])
        after = self.device.reshape(NUM_BLOCKS, BLOCK)
        assert np.array_equal(after[sources], before[sources])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with HostSegment.create(BLOCK, NUM_BLOCKS) as segment:
        segment.map()
        rig = Rig(monkeypatch, segment)
        yield rig
        rig.copier.close()
        assert rig.cuda.is_lost or not rig.cuda.registered


def test_a_store_and_a_load_bring_blocks_back_each_on_its_own_stream(rig: Rig) -> None:
    rig.attach()
    before = rig.device.reshape(NUM_BLOCKS, BLOCK).copy()
    rig.start(OpKind.D2H, [5, 0, 2], [1, 6, 3])
    rig.device[:] = 0
    rig.start(OpKind.H2D, [4, 7], [3, 1])
    after = rig.device.reshape(NUM_BLOCKS, BLOCK)
    assert np.array_equal(after[[4, 7]], before[[2, 5]])
    assert not np.delete(after, [4, 7], axis=0).any()
    assert len(set(rig.cuda.batch_streams)) == 2


def test_stores_read_in_stream_order_and_loads_may_read_early(
    rig: Rig,
) -> None:
    rig.attach()
    rig.start(OpKind.D2H, [0], [0])
    rig.start(OpKind.H2D, [0], [0])
    assert [order for _, order, _ in rig.cuda.batches] == [SourceOrder.STREAM, SourceOrder.ANY]


def test_an_op_waits_for_its_event_first_and_its_own_event_comes_last(rig: Rig) -> None:
    rig.attach()
    fence = rig.copier.fence()
    rig.notes.clear()
    landed = rig.start(OpKind.H2D, [0, 3], [1, 2], fence)
    (stream,) = rig.cuda.batch_streams
    assert rig.notes == [("wait", stream, fence), ("record", stream, landed)]


def test_an_op_without_blocks_has_an_event_too(rig: Rig) -> None:
    rig.attach()
    landed = rig.start(OpKind.H2D, [], [])
    assert rig.notes[-1] == ("record", STREAM, landed)
    assert rig.cuda.batches == []


def test_neighbours_are_one_copy_but_not_over_two_pinned_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_cuda, "_PIN_STEP", 24 * BLOCK)
    rig.attach()
    assert len(rig.cuda.registered) == 3
    rig.start(OpKind.D2H, list(range(64)), list(range(64)))
    assert [copies for copies, _, _ in rig.cuda.batches] == [3]
    assert bytes(rig.segment.block(7)) == rig.device[7 * BLOCK : 8 * BLOCK].tobytes()


def test_a_refused_op_has_ended_before_its_failure_is_reported(rig: Rig) -> None:
    rig.attach()
    rig.cuda.refused_copy = 1
    with pytest.raises(RuntimeError, match="number 1"):
        rig.start(OpKind.H2D, [0, 2], [0, 2])
    assert rig.notes[-1] == ("synchronize", STREAM)
    rig.cuda.refused_copy = None
    rig.start(OpKind.H2D, [0, 2], [0, 2])
    assert rig.cuda.batches


def test_a_pool_that_cannot_be_pinned_is_used_as_it_is(rig: Rig) -> None:
    rig.cuda.most_registered = 0
    rig.attach()
    assert not rig.copier.is_pinned
    assert rig.copier.ways == (CopyWay.BATCH,)
    rig.start(OpKind.D2H, [4], [2])
    assert bytes(rig.segment.block(2)) == rig.device[4 * BLOCK : 5 * BLOCK].tobytes()


def test_closing_waits_for_both_streams_before_it_unpins(rig: Rig) -> None:
    rig.attach()
    assert rig.copier.is_pinned
    rig.copier.close()
    assert rig.notes == [("synchronize", stream) for stream in STREAMS]
    assert not rig.cuda.registered


# -- the second GPU ------------------------------------------------------------------------------


def test_a_rank_of_the_second_gpu_makes_no_context_on_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a thread of its own, which begins on device 0 as a rank's does."""
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            with HostSegment.create(BLOCK, NUM_BLOCKS) as segment:
                segment.map()
                rig = Rig(monkeypatch, segment, device=1)
                rig.add_kernel()
                rig.attach()
                rig.check_copies()
                rig.start(OpKind.H2D, [1], [1], way=CopyWay.KERNEL)
                rig.copier.close()
                assert rig.cuda.contexts == {1}
                assert rig.torch.current_device() == rig.cuda.current_device == 1
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert problems == []


def test_a_thread_that_never_used_the_second_gpu_can_copy_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostSegment.create(BLOCK, NUM_BLOCKS) as segment:
        segment.map()
        rig = Rig(monkeypatch, segment, device=1)
        rig.attach()
        thread = threading.Thread(target=rig.start, args=(OpKind.D2H, [3], [2]))
        thread.start()
        thread.join()
        assert bytes(segment.block(2)) == rig.device[3 * BLOCK : 4 * BLOCK].tobytes()
        rig.copier.close()
        assert rig.cuda.contexts == {1}


# -- the self-test -------------------------------------------------------------------------------


def failed(rig: Rig) -> dict[CopyWay, set[OpKind]]:
    return {v.way: set(v.failures) for v in rig.copier.verdicts if v.failures}


def test_all_ways_that_pass_are_known_and_the_batch_comes_before_single_copies(rig: Rig) -> None:
    rig.add_kernel()
    rig.attach()
    assert [v.way for v in rig.copier.verdicts if v.passed] == list(CopyWay)
    assert rig.copier.ways == (CopyWay.BATCH, CopyWay.KERNEL)
    rig.check_copies()
    assert len(rig.cuda.batches) == 2


def test_the_self_test_looks_at_bytes_only_when_they_have_landed(rig: Rig) -> None:
    rig.cuda.is_lazy = True
    rig.attach()
    assert failed(rig) == {}
    rig.start(OpKind.D2H, [4], [2])
    assert not any(rig.segment.block(2))
    rig.copier.close()
    assert bytes(rig.segment.block(2)) == rig.device[4 * BLOCK : 5 * BLOCK].tobytes()


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 1])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_batch_that_is_refused_leaves_single_copies_and_is_named(
    rig: Rig, code: int, has_kernel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if has_kernel:
        rig.add_kernel()
    rig.cuda.refuses["cuMemcpyBatchAsync"] = code
    rig.attach()
    assert failed(rig) == {CopyWay.BATCH: set(KINDS)}
    assert rig.copier.ways == (CopyWay.SINGLE, *([CopyWay.KERNEL] * has_kernel))
    rig.check_copies()
    assert rig.cuda.num_single_copies == 6
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all("batched copy" in line and f"({code})" in line for line in warnings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_least", [1, 2])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_batch_that_copies_wrong_bytes_is_never_used(
    rig: Rig, kind: OpKind, at_least: int, is_pinned: bool
) -> None:
    rig.cuda.corrupts = {("cuMemcpyBatchAsync", kind.name)}
    rig.cuda.corrupts_from = at_least
    if not is_pinned:
        rig.cuda.most_registered = 0
    rig.attach()
    assert rig.copier.is_pinned is is_pinned
    assert failed(rig) == {CopyWay.BATCH: {kind}}
    rig.check_copies()
    assert (rig.cuda.batches, rig.cuda.num_single_copies) == ([], 6)


def test_single_copies_that_fail_leave_the_batch(rig: Rig) -> None:
    rig.cuda.refuses["cuMemcpyAsync"] = NOT_SUPPORTED
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
    kernel.corrupts = fault == "bytes"
    if fault != "bytes":
        kernel.error = CompilationError("no") if fault == "compiler" else torch.OutOfMemoryError()
    rig.attach()
    assert failed(rig) == {CopyWay.KERNEL: set(KINDS)}
    assert rig.copier.ways == (CopyWay.BATCH,)
    rig.check_copies(32)
    assert kernel.num_ops == 0


def test_a_kernel_alone_copies_whole_words_and_refuses_the_rest(rig: Rig) -> None:
    rig.add_kernel()
    rig.cuda.refuses = dict.fromkeys(("cuMemcpyBatchAsync", "cuMemcpyAsync"), NOT_SUPPORTED)
    rig.attach()
    assert rig.copier.ways == (CopyWay.KERNEL,)
    rig.check_copies()
    one = np.array([1])
    with pytest.raises(RuntimeError, match="whole words"):
        rig.copier.start(one, one, one, OpKind.H2D, None)


@pytest.mark.parametrize("fault", ["bytes", "refused"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_device_without_a_working_copy_method_is_refused_with_each_failure(
    rig: Rig, fault: str, is_pinned: bool
) -> None:
    rig.add_kernel().error = CompilationError("no ptxas")
    for name in ("cuMemcpyBatchAsync", "cuMemcpyAsync"):
        if fault == "bytes":
            rig.cuda.corrupts |= {(name, kind.name) for kind in KINDS}
        else:
            rig.cuda.refuses[name] = NOT_SUPPORTED
    if not is_pinned:
        rig.cuda.most_registered = 0
    with pytest.raises(StorageError) as caught:
        rig.copier.attach(rig.segment)
    said = str(caught.value)
    what = "bytes differ" if fault == "bytes" else "CUDA_ERROR_NOT_SUPPORTED (801)"
    assert said.count(what) == 4
    for name in ("batched copy: H2D", "single copies: H2D", "kernel"):
        assert name in said
    assert ("CompilationError: no ptxas" in said) is is_pinned
    assert not rig.cuda.registered
    rig.copier.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_self_test_leaves_the_pool_as_it_is_and_gives_its_own_memory_back(
    rig: Rig, is_pinned: bool
) -> None:
    rig.add_kernel()
    if not is_pinned:
        rig.cuda.most_registered = 0
    pool = np.frombuffer((ctypes.c_uint8 * rig.segment.size).from_address(rig.segment.address))
    before, device = pool.copy(), rig.device.copy()
    rig.attach()
    assert np.array_equal(pool, before)
    assert np.array_equal(rig.device, device)
    assert list(rig.cuda.registered) == [rig.segment.address] * is_pinned


@pytest.mark.parametrize("lacks", ["Triton", "pinning", "mapping"])
def test_where_the_kernel_cannot_be_tried_the_reason_is_kept(rig: Rig, lacks: str) -> None:
    if lacks != "Triton":
        rig.add_kernel()
    if lacks == "pinning":
        rig.cuda.most_registered = 0
    if lacks == "mapping":
        rig.cuda.refuses["cuMemHostGetDevicePointer"] = NOT_SUPPORTED
    rig.attach()
    (kernel,) = (v for v in rig.copier.verdicts if v.way is CopyWay.KERNEL)
    assert ("copy_kernel" in kernel.missing) is (lacks == "Triton")
    assert ("cannot map" in kernel.missing) is (lacks != "Triton")
    rig.check_copies()


def test_an_older_driver_gets_copies_one_by_one(rig: Rig) -> None:
    rig.attach(version=12_070)
    assert rig.copier.ways == (CopyWay.SINGLE,)
    rig.check_copies()
    assert (rig.cuda.num_single_copies, rig.cuda.batches) == (6, [])


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
    rig.cuda.refused_copy = 200  # so many are in no batch of the self-test
    rig.attach()
    assert failed(rig) == {}
    assert rig.copier.ways == (CopyWay.BATCH,)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "copies_not_timed" in line
    assert "cuMemcpyBatchAsync of 256 copies" in line
    rig.check_copies()


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
    assert len(rig.cuda.batches) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert "copy_way_given_up way=kernel" in line
    assert "no room for a table" in line


def test_an_op_of_a_kernel_alone_ends_with_its_error_whatever_the_class(rig: Rig) -> None:
    kernel = rig.add_kernel()
    rig.cuda.refuses = dict.fromkeys(("cuMemcpyBatchAsync", "cuMemcpyAsync"), NOT_SUPPORTED)
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
    rig.cuda.is_lost = True
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="cuda:0 no longer works"):
            rig.start(OpKind.H2D, [0], [0])
    caplog.clear()
    rig.copier.close()
    rig.copier.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4  # bind, two streams, the pool
    assert any("host_pool_still_pinned" in line for line in said)


def test_a_kernel_that_kills_the_device_in_the_self_test_fails_the_attach(rig: Rig) -> None:
    kernel = rig.add_kernel()
    kernel.compile = lambda: setattr(rig.cuda, "is_lost", True)
    with pytest.raises(DeviceLostError, match="kernel, H2D: cuda:0 no longer works"):
        rig.copier.attach(rig.segment)
    rig.copier.close()


def test_an_attach_that_fails_half_way_leaves_nothing_pinned(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_cuda, "_PIN_STEP", BLOCK)

    def lose_link() -> None:
        if len(rig.cuda.registered) == 3:
            raise OSError("the link is gone")

    with pytest.raises(OSError, match="the link is gone"):
        rig.copier.attach(rig.segment, lose_link)
    assert not rig.cuda.registered
    rig.copier.close()
    rig.attach()
    rig.check_copies()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is here")
def test_without_the_driver_the_error_names_what_is_missing() -> None:
    with pytest.raises(MissingDependencyError, match="the NVIDIA driver"):
        CudaDriver.load()
