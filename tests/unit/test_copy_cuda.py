"""`CudaCopier` with a driver in host memory, and streams and events that only take notes.

What a device does with them is for `tests/gpu` to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import STREAM, STREAMS, FakeCuda

from flexcache.errors import MissingDependencyError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers import copy_cuda
from flexcache.transfer.workers.copy_choice import CopyWay
from flexcache.transfer.workers.copy_cuda import CudaCopier
from flexcache.transfer.workers.copy_driver import CudaDriver, SourceOrder

BLOCK = 4096
NUM_BLOCKS = 8


class FakeStream:
    def __init__(self, handle: int, notes: list[tuple[object, ...]]) -> None:
        self.cuda_stream = handle
        self._notes = notes

    def wait_event(self, event: object) -> None:
        self._notes.append(("wait", self.cuda_stream, event))

    def synchronize(self) -> None:
        self._notes.append(("synchronize", self.cuda_stream))


class Rig:
    """A copier, what it is attached to, and the order of what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, segment: HostSegment) -> None:
        self.cuda = FakeCuda()
        self.notes: list[tuple[object, ...]] = []
        handles = iter(STREAMS)
        rig = self

        class FakeEvent:
            def record(self, stream: FakeStream) -> None:
                rig.notes.append(("record", stream.cuda_stream, self))

        fake = SimpleNamespace(
            Stream=lambda device: FakeStream(next(handles), self.notes),
            Event=FakeEvent,
            stream=contextlib.nullcontext,
            current_stream=lambda device: FakeStream(1, self.notes),
        )
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(CudaDriver, "load", lambda: CudaDriver(self.cuda))
        self.segment = segment
        self.device = np.random.default_rng(0).integers(0, 256, BLOCK * NUM_BLOCKS, dtype=np.uint8)
        self.copier = CudaCopier(torch.device("cpu"))

    def start(self, kind: OpKind, gpu: list[int], host: list[int], after: object = None) -> object:
        on_gpu = self.device.ctypes.data + np.array(gpu, np.int64) * BLOCK
        on_host = self.segment.address + np.array(host, np.int64) * BLOCK
        to, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        return self.copier.start(to, source, np.full(len(gpu), BLOCK), kind, after)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with HostSegment.create(BLOCK, NUM_BLOCKS) as segment:
        segment.map()
        rig = Rig(monkeypatch, segment)
        yield rig
        rig.copier.close()
        assert not rig.cuda.registered


def test_a_store_and_a_load_bring_blocks_back_each_on_its_own_stream(rig: Rig) -> None:
    rig.copier.attach(rig.segment)
    before = rig.device.reshape(NUM_BLOCKS, BLOCK).copy()
    rig.start(OpKind.D2H, [5, 0, 2], [1, 6, 3])
    rig.device[:] = 0
    rig.start(OpKind.H2D, [4, 7], [3, 1])
    after = rig.device.reshape(NUM_BLOCKS, BLOCK)
    assert np.array_equal(after[[4, 7]], before[[2, 5]])
    assert not after[[0, 1, 2, 3, 5, 6]].any()
    assert len(set(rig.cuda.batch_streams)) == 2


def test_what_a_store_reads_is_read_in_order_and_what_a_load_reads_may_be_read_early(
    rig: Rig,
) -> None:
    rig.copier.attach(rig.segment)
    rig.start(OpKind.D2H, [0], [0])
    rig.start(OpKind.H2D, [0], [0])
    assert [order for _, order, _ in rig.cuda.batches] == [SourceOrder.STREAM, SourceOrder.ANY]


def test_an_op_waits_for_its_event_first_and_its_own_event_comes_last(rig: Rig) -> None:
    rig.copier.attach(rig.segment)
    fence = rig.copier.fence()
    rig.notes.clear()
    landed = rig.start(OpKind.H2D, [0, 3], [1, 2], fence)
    (stream,) = rig.cuda.batch_streams
    assert rig.notes == [("wait", stream, fence), ("record", stream, landed)]


def test_an_op_without_blocks_has_an_event_too(rig: Rig) -> None:
    rig.copier.attach(rig.segment)
    landed = rig.start(OpKind.H2D, [], [])
    assert rig.notes[-1] == ("record", STREAM, landed)
    assert rig.cuda.batches == []


def test_neighbours_are_one_copy_but_not_over_two_pinned_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_cuda, "_PIN_STEP", 3 * BLOCK)
    rig.copier.attach(rig.segment)
    assert len(rig.cuda.registered) == 3
    rig.start(OpKind.D2H, list(range(8)), list(range(8)))
    assert [copies for copies, _, _ in rig.cuda.batches] == [3]
    assert bytes(rig.segment.block(7)) == rig.device[7 * BLOCK :].tobytes()


def test_a_refused_op_is_over_before_it_is_said_to_have_failed(rig: Rig) -> None:
    rig.copier.attach(rig.segment)
    rig.cuda.refused_copy = 1
    with pytest.raises(RuntimeError, match="number 1"):
        rig.start(OpKind.H2D, [0, 2], [0, 2])
    assert rig.notes[-1] == ("synchronize", STREAM)
    rig.cuda.refused_copy = None
    rig.start(OpKind.H2D, [0, 2], [0, 2])
    assert rig.cuda.batches


def test_a_pool_that_cannot_be_pinned_is_used_as_it_is(rig: Rig) -> None:
    rig.cuda.most_registered = 0
    rig.copier.attach(rig.segment)
    assert not rig.copier.is_pinned
    assert rig.copier.ways == (CopyWay.ENGINE,)
    rig.start(OpKind.D2H, [4], [2])
    assert bytes(rig.segment.block(2)) == rig.device[4 * BLOCK : 5 * BLOCK].tobytes()


def test_closing_waits_for_both_streams_before_it_unpins(rig: Rig) -> None:
    rig.copier.attach(rig.segment)
    assert rig.copier.is_pinned
    rig.notes.clear()
    rig.copier.close()
    assert rig.notes == [("synchronize", stream) for stream in STREAMS]
    assert not rig.cuda.registered


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is here")
def test_a_machine_without_the_driver_is_told_what_is_missing() -> None:
    with pytest.raises(MissingDependencyError, match="NVIDIA's driver"):
        CudaDriver.load()
