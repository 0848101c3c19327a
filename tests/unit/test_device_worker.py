"""DeviceWorker over a real host segment and real tensors, and with copies that land later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_memory import DeviceMemory, EngineMemory
from overlaid import OverlaidTensors

from flexcache.client.lent_tensors import LentTensors
from flexcache.errors import DeviceLostError, UnsupportedLayoutError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout, bytes_per_index, describe_kv_caches
from flexcache.transfer import cpu_copier, device_worker
from flexcache.transfer.copier import ComputePoint, Copier, CopyPermit, Runs, open_copier
from flexcache.transfer.cpu_copier import CpuCopier
from flexcache.transfer.device_worker import DeviceWorker, InFlight
from flexcache.transfer.messages import Done, Execute, name_blocks, pack_ids

Tensors = dict[str, torch.Tensor]

NUM_GPU_BLOCKS = 7
NUM_HOST_BLOCKS = 5


def make_tensors() -> Tensors:
    """Two layers with K and V apart; no two blocks are alike."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"layer {i}": torch.randn((NUM_GPU_BLOCKS, 2, 16, 2, 8), generator=generator)
        for i in range(2)
    }


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that reports, which have the time that a load took, are equal."""
    monkeypatch.setattr(device_worker, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def tensors(memory: EngineMemory) -> Tensors:
    """The engine's tensors, of which a worker knows only the addresses."""
    return memory.place(make_tensors())


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    block_bytes = bytes_per_index(make_tensors())
    with HostSegment.create(block_bytes, NUM_HOST_BLOCKS) as segment:
        segment.map()
        yield segment


@pytest.fixture
def landed() -> Iterator[int]:
    """An eventfd that says that queued copies have landed."""
    event = os.eventfd(0, os.EFD_NONBLOCK)
    yield event
    os.close(event)


@pytest.fixture
def worker(
    memory: EngineMemory, tensors: Tensors, segment: HostSegment, landed: int
) -> Iterator[DeviceWorker]:
    """A worker that copies for real: in host memory, several ops on a thread of native code; or on
    a fake GPU."""
    with open_worker(memory, [layout_of(memory.lend(tensors))], segment, landed) as worker:
        yield worker


@contextmanager
def open_worker(
    memory: EngineMemory, layouts: Sequence[BlockLayout], segment: HostSegment,
    landed: int | None = None, **options: Any,
) -> Iterator[DeviceWorker]:  # fmt: skip
    copier = open_copier(memory.device, options.get("permit"), landed=landed)
    copier.attach(segment, lambda: None)
    wait_for_queue(copier)
    worker = DeviceWorker(layouts, segment, copier, **options)
    yield worker
    worker.close()


def wait_for_queue(copier: Copier) -> None:
    """Wait until what is copied by a queue is: until then, copies are made at once."""
    queue = copier._queue if isinstance(copier, CpuCopier) else None
    while queue is not None and not queue.is_ready():
        time.sleep(0.001)


def layout_of(tensors: Tensors) -> BlockLayout:
    return describe_kv_caches(tensors, bytes_per_index(tensors))


def cpu_worker(tensors: Tensors, segment: HostSegment) -> DeviceWorker:
    copier = open_copier(torch.device("cpu"))
    assert isinstance(copier, CpuCopier)
    copier.attach(segment)
    return DeviceWorker([layout_of(tensors)], segment, copier)


def order(
    op_id: int, kind: OpKind, src: Sequence[int], dst: Sequence[int], gated: bool = False,
    task_id: int = 1,
) -> Execute:  # fmt: skip
    """Make an order for an op; its task is 1 by default."""
    return Execute(
        op_id, kind, pack_ids(np.array(src, np.int64)), pack_ids(np.array(dst, np.int64)),
        task_id, gated,
    )  # fmt: skip


def store(op_id: int, src: Sequence[int], dst: Sequence[int], gated: bool = False) -> Execute:
    return order(op_id, OpKind.D2H, src, dst, gated)


def load(op_id: int, src: Sequence[int], dst: Sequence[int], gated: bool = False) -> Execute:
    return order(op_id, OpKind.H2D, src, dst, gated)


def run_dry(worker: DeviceWorker) -> list[Done]:
    """Return everything the worker reports until it has no more work."""
    done = worker.advance()
    while worker.has_work:
        done.extend(worker.advance())
    return done


def snapshot(tensors: Tensors, segment: HostSegment) -> tuple[bytes, ...]:
    gpu = [tensor.numpy().tobytes() for tensor in tensors.values()]
    return (*gpu, *(bytes(segment.block(i)) for i in range(segment.num_blocks)))


# -- bytes ---------------------------------------------------------------------------------------


def test_blocks_come_back_byte_for_byte_in_other_slots_and_nothing_else_changes(
    tensors: Tensors, worker: DeviceWorker
) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    worker.execute(store(1, [6, 0, 3], [4, 1, 2]))
    assert run_dry(worker) == [Done(1, 3)]
    for tensor, original in zip(tensors.values(), before.values(), strict=True):
        assert torch.equal(tensor, original)
    worker.execute(load(2, [2, 4, 1], [1, 2, 5]))
    assert run_dry(worker) == [Done(2, 3)]
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[1, 2, 5]], before[name][[3, 6, 0]])
        assert torch.equal(tensor[[0, 3, 4, 6]], before[name][[0, 3, 4, 6]])


def test_a_host_block_is_the_layers_bytes_one_after_the_other(
    tensors: Tensors, segment: HostSegment, worker: DeviceWorker
) -> None:
    worker.execute(store(1, [5], [3]))
    run_dry(worker)
    expected = b"".join(tensor[5].numpy().tobytes() for tensor in tensors.values())
    assert bytes(segment.block(3))[: len(expected)] == expected
    assert not any(bytes(segment.block(3))[len(expected) :])
    assert not any(bytes(segment.block(2)))
    assert not any(bytes(segment.block(4)))


def test_a_host_block_may_hold_several_gpu_blocks_and_some_may_be_skipped(
    memory: EngineMemory, tensors: Tensors
) -> None:
    def on_gpu(block: int) -> bytes:
        return b"".join(tensor[block].numpy().tobytes() for tensor in tensors.values())

    def numbers(op: Execute) -> list[Done]:
        worker.execute(op)
        return run_dry(worker)

    size = bytes_per_index(tensors)
    with HostSegment.create(2 * size, NUM_HOST_BLOCKS) as segment, ExitStack() as held:
        segment.map()
        layout, options = layout_of(memory.lend(tensors)), {"blocks_per_unit": 2, "may_skip": True}
        worker = held.enter_context(open_worker(memory, [layout], segment, **options))
        expected = {block: on_gpu(block) for block in range(NUM_GPU_BLOCKS)}
        assert numbers(store(1, [6, 0, -1, 3, 4, -1], [4, 1, 2])) == [Done(1, 3)]
        for host, first, second in ((4, 6, 0), (1, None, 3), (2, 4, None)):
            data = bytes(segment.block(host))[: 2 * size]
            assert data[:size] == (bytes(size) if first is None else expected[first])
            assert data[size:] == (bytes(size) if second is None else expected[second])
        assert numbers(load(2, [1, 4], [-1, 5, 2, -1])) == [Done(2, 2)]
        assert [on_gpu(block) for block in (5, 2)] == [expected[3], expected[6]]
        untouched = [0, 1, 3, 4, 6]
        assert [on_gpu(block) for block in untouched] == [expected[b] for b in untouched]
        assert numbers(load(3, [1], [-1, -1])) == [Done(3, 1)]
        [refused] = numbers(load(4, [1], [5]))
        assert "1 GPU blocks do not pair with 1 host blocks" in (refused.error or "")
        [refused] = numbers(load(5, [1], [5, -2]))
        assert "lies outside" in (refused.error or "")


def test_an_op_without_blocks_is_done_at_once(worker: DeviceWorker) -> None:
    worker.execute(store(1, [], []))
    assert run_dry(worker) == [Done(1, 0)]


@pytest.mark.parametrize("kind", [OpKind.H2D, OpKind.D2H])
@pytest.mark.parametrize(
    ("gpu", "host", "complaint"),
    [
        ([0, NUM_GPU_BLOCKS], [0, 1], f"a GPU block lies outside of [0, {NUM_GPU_BLOCKS})"),
        ([0, -1], [0, 1], f"a GPU block lies outside of [0, {NUM_GPU_BLOCKS})"),
        ([0, 2**40], [0, 1], f"a GPU block lies outside of [0, {NUM_GPU_BLOCKS})"),
        ([0, 1], [0, NUM_HOST_BLOCKS], f"a host block lies outside of [0, {NUM_HOST_BLOCKS})"),
        ([0, 1], [0, -1], f"a host block lies outside of [0, {NUM_HOST_BLOCKS})"),
        ([0, 1], [0], "2 GPU blocks do not pair with 1 host blocks"),
        ([0], [0, 1], "1 GPU blocks do not pair with 2 host blocks"),
    ],
)
def test_an_order_that_would_miss_the_pools_is_refused_and_moves_nothing(
    tensors: Tensors,
    segment: HostSegment,
    kind: OpKind,
    gpu: list[int],
    host: list[int],
    complaint: str,
    worker: DeviceWorker,
) -> None:
    before = snapshot(tensors, segment)
    src, dst = (host, gpu) if kind is OpKind.H2D else (gpu, host)
    worker.execute(order(1, kind, src, dst))
    assert run_dry(worker) == [Done(1, 0, error=complaint)]
    assert snapshot(tensors, segment) == before
    worker.execute(order(2, kind, src[:1], dst[:1]))
    assert run_dry(worker) == [Done(2, 1)]


# -- turns ---------------------------------------------------------------------------------------


def test_loads_go_before_stores_and_each_in_the_order_of_their_arrival(
    segment: HostSegment,
) -> None:
    tensors = make_tensors()
    worker = cpu_worker(tensors, segment)
    worker.execute(store(1, [0], [0]))
    worker.execute(store(2, [1], [1]))
    worker.execute(load(3, [2], [2]))
    worker.execute(load(4, [3], [3]))
    assert [done.op_id for done in run_dry(worker)] == [3, 4, 1, 2]


def test_each_advance_on_the_cpu_copies_for_so_many_ops_that_enough_bytes_are_copied(
    segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    monkeypatch.setattr(device_worker, "_TURN_BYTES", 2 * bytes_per_index(tensors))
    worker = cpu_worker(tensors, segment)
    for op_id in range(1, 4):
        worker.execute(load(op_id, [op_id], [op_id]))
    assert worker.advance() == [Done(1, 1), Done(2, 1)]
    assert worker.has_work
    assert not worker.only_waits
    assert worker.advance() == [Done(3, 1)]
    assert not worker.has_work
    assert worker.advance() == []


# -- gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [store, load])
def test_a_gated_op_waits_until_its_gate_is_opened(
    tensors: Tensors, segment: HostSegment, make: Callable[..., Execute], worker: DeviceWorker
) -> None:
    before = snapshot(tensors, segment)
    worker.execute(make(1, [0, 1], [2, 3], gated=True))
    assert worker.advance() == []
    assert not worker.has_work
    worker.gates.open([2])
    assert worker.advance() == []
    assert snapshot(tensors, segment) == before
    worker.gates.open([1])
    assert run_dry(worker) == [Done(1, 2)]
    assert snapshot(tensors, segment) != before


def test_a_gate_that_is_open_lets_later_ops_of_its_task_through(worker: DeviceWorker) -> None:
    worker.gates.open([1])
    worker.execute(load(1, [0], [0], gated=True))
    worker.execute(load(2, [1], [1], gated=True))
    assert run_dry(worker) == [Done(1, 1), Done(2, 1)]


def test_all_ops_behind_one_gate_go_in_the_order_of_their_arrival(worker: DeviceWorker) -> None:
    for op_id in (1, 2, 3):
        worker.execute(load(op_id, [0], [op_id], gated=True))
    worker.execute(order(4, OpKind.H2D, [0], [4], gated=True, task_id=2))
    worker.gates.open([1])
    assert [done.op_id for done in run_dry(worker)] == [1, 2, 3]
    worker.gates.open([2])
    assert [done.op_id for done in run_dry(worker)] == [4]


def test_a_gate_that_was_closed_again_holds_back_what_comes_later(worker: DeviceWorker) -> None:
    worker.gates.open([1, 2])
    worker.gates.forget([1, 99])
    worker.execute(load(1, [0], [0], gated=True))
    assert run_dry(worker) == []
    worker.gates.open([1])
    assert run_dry(worker) == [Done(1, 1)]


def test_a_gate_may_be_opened_by_another_thread(worker: DeviceWorker) -> None:
    worker.execute(load(1, [0], [0], gated=True))
    thread = threading.Thread(target=worker.gates.open, args=([1],))
    thread.start()
    thread.join()
    assert run_dry(worker) == [Done(1, 1)]


# -- drops ---------------------------------------------------------------------------------------

DROPPED = "dropped before it started"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("make", [store, load])
def test_an_op_dropped_before_its_start_ends_once_with_nothing_moved(
    tensors: Tensors,
    segment: HostSegment,
    make: Callable[..., Execute],
    gated: bool,
    worker: DeviceWorker,
) -> None:
    before = snapshot(tensors, segment)
    worker.execute(make(1, [0], [1], gated=gated))
    worker.drop(1)
    worker.drop(1)
    assert worker.has_work
    assert run_dry(worker) == [Done(1, 0, error=DROPPED)]
    worker.gates.open([1])
    worker.drop(1)
    assert run_dry(worker) == []
    assert not worker.has_work
    assert snapshot(tensors, segment) == before


def test_the_others_behind_a_gate_and_in_the_queues_stay_when_one_is_dropped(
    worker: DeviceWorker,
) -> None:
    for op_id in (1, 2, 3):
        worker.execute(load(op_id, [0], [op_id]))
        worker.execute(load(10 + op_id, [0], [op_id], gated=True))
    worker.drop(2)
    worker.drop(12)
    done = run_dry(worker)
    assert done[:2] == [Done(2, 0, error=DROPPED), Done(12, 0, error=DROPPED)]
    assert done[2:] == [Done(1, 1), Done(3, 1)]
    worker.gates.open([1])
    assert run_dry(worker) == [Done(11, 1), Done(13, 1)]


def test_a_drop_and_an_opened_gate_at_once_end_the_op_once(worker: DeviceWorker) -> None:
    worker.execute(load(1, [0], [0], gated=True))
    worker.gates.open([1])
    worker.drop(1)
    assert run_dry(worker) == [Done(1, 0, error=DROPPED)]


def test_a_drop_of_an_unknown_or_ended_op_does_nothing(worker: DeviceWorker) -> None:
    worker.execute(load(1, [0], [0]))
    assert run_dry(worker) == [Done(1, 1)]
    worker.drop(1)
    worker.drop(99)
    assert run_dry(worker) == []
    worker.execute(load(2, [0], [0]))
    assert run_dry(worker) == [Done(2, 1)]


# -- copies that land later ----------------------------------------------------------------------


class FakeFence:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_past = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_past

    def wait(self) -> None:
        self.num_waits += 1


class LateCopier:
    """Accepts copies and moves nothing until the test lets them land."""

    wakes = False

    def __init__(self) -> None:
        self.moment = "the start"
        self.closed = False
        self.refusal: str | None = None
        self.num_bytes: list[int] = []
        self.started: list[tuple[OpKind, str, FakeFence]] = []

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        pass

    def fence(self) -> FakeFence:
        return FakeFence(self.moment)

    def start(
        self, runs: Runs, kind: OpKind, after: FakeFence | None, urgent: bool = False,
        alone: bool = False,
    ) -> FakeFence:  # fmt: skip
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        assert len({len(each) for each in runs}) == 1
        landing = FakeFence("a landing")
        self.num_bytes.append(runs.num_bytes)
        self.started.append((kind, after.name if after is not None else "nothing", landing))
        return landing

    def may_start(self, kind: OpKind, after: object) -> bool:
        return True

    def queue(self, kind: OpKind) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def late_worker(segment: HostSegment) -> tuple[DeviceWorker, LateCopier]:
    copier = LateCopier()
    return DeviceWorker([layout_of(make_tensors())], segment, copier), copier


def test_an_op_is_done_only_when_its_copies_have_landed(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0, 1], [0, 1]))
    assert worker.advance() == []
    assert worker.has_work
    assert worker.only_waits
    assert worker.advance() == []
    copier.started[0][2].is_past = True
    assert worker.advance() == [Done(1, 2)]
    assert not worker.has_work
    assert worker.advance() == []


def test_the_next_op_starts_while_the_one_before_is_on_its_way(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(store(1, [0], [0]))
    worker.execute(store(2, [1], [1]))
    worker.advance()
    assert not worker.only_waits
    worker.advance()
    assert worker.only_waits
    assert len(copier.started) == 2
    copier.started[0][2].is_past = True
    assert worker.advance() == [Done(1, 1)]
    copier.started[1][2].is_past = True
    assert worker.advance() == [Done(2, 1)]


def test_a_store_does_not_wait_for_the_end_of_a_stream_of_loads(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(store(1, [0], [0]))
    for op_id in range(2, 10, 2):  # twice as many as start
        worker.execute(load(op_id, [1], [1]))
        worker.execute(load(op_id + 1, [1], [1]))
        worker.advance()
    assert [kind for kind, *_ in copier.started] == 3 * [OpKind.H2D] + [OpKind.D2H]


def test_ops_of_a_direction_are_reported_in_their_order(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0], [0]))
    worker.execute(load(2, [1], [1]))
    worker.execute(store(3, [2], [2]))
    for _ in range(3):
        assert worker.advance() == []
    for _, _, landing in copier.started[1:]:
        landing.is_past = True
    assert worker.advance() == [Done(3, 1)]
    copier.started[0][2].is_past = True
    assert worker.advance() == [Done(1, 1), Done(2, 1)]


def test_a_drop_of_an_op_on_its_way_lets_it_land(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0], [0]))
    worker.advance()
    worker.drop(1)
    assert worker.advance() == []
    copier.started[0][2].is_past = True
    assert worker.advance() == [Done(1, 1)]


def test_a_gated_op_is_ordered_after_the_moment_its_gate_was_opened(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0], [0], gated=True))
    copier.moment = "the end of step 7"
    worker.gates.open([1])
    copier.moment = "the end of step 8"
    worker.advance()
    worker.execute(load(2, [1], [1], gated=True))
    worker.advance()
    worker.execute(order(3, OpKind.H2D, [2], [2], task_id=2))  # not gated
    worker.advance()
    after = [moment for _, moment, _ in copier.started]
    assert after == ["the end of step 7", "the end of step 7", "the end of step 8"]


def test_a_copy_that_cannot_start_fails_its_op_and_the_worker_goes_on(
    segment: HostSegment,
) -> None:
    worker, copier = late_worker(segment)
    copier.refusal = "CUDA error: invalid argument"
    worker.execute(load(1, [0], [0]))
    assert run_dry(worker) == [Done(1, 0, error="CUDA error: invalid argument")]
    copier.refusal = None
    worker.execute(load(2, [0], [0]))
    worker.advance()
    copier.started[0][2].is_past = True
    assert worker.advance() == [Done(2, 1)]


def test_nothing_more_is_started_on_a_device_that_is_lost(
    segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, copier = late_worker(segment)
    num_started = 0

    def lose(*copies: object) -> None:
        nonlocal num_started
        num_started += 1
        raise DeviceLostError("no device")

    monkeypatch.setattr(copier, "start", lose)
    for op_id in range(1, 4):
        worker.execute(load(op_id, [op_id], [op_id]))
    assert worker.advance() == [Done(1, 0, error="no device")]
    assert num_started == 1
    assert worker.failure == "no device"
    worker.close()
    assert [done.op_id for done in worker.abandon("left")] == [2, 3]


@pytest.mark.parametrize("name", ["meta", "xpu:1"])
def test_memory_that_nothing_here_can_copy_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=name):
        open_copier(torch.device(name))


def test_closing_the_worker_closes_its_copier(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.close()
    assert copier.closed


# -- copies in flight ----------------------------------------------------------------------------


@pytest.fixture
def one_block_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op is copied block by block, with at most two blocks of a direction in flight."""
    size = bytes_per_index(make_tensors())
    for name in ("_PIECE_BYTES", "_LARGE_PIECE_BYTES"):
        monkeypatch.setattr(device_worker, name, size)
    for name in ("MOST_BYTES", "BESIDE_LAYERS"):
        monkeypatch.setattr(device_worker, name, size + 1)


def land(copier: LateCopier, *places: int) -> None:
    for place in places:
        copier.started[place][2].is_past = True


@pytest.mark.usefixtures("one_block_pieces")
def test_a_large_op_is_queued_in_pieces_and_few_are_in_flight(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0, 1, 2, 3], [0, 1, 2, 3]))
    worker.execute(store(2, [4], [4]))
    for _ in range(5):
        assert worker.advance() == []
    kinds = [kind for kind, _, _ in copier.started]
    assert kinds == [OpKind.H2D, OpKind.H2D, OpKind.D2H]
    assert worker.only_waits
    land(copier, 0)
    worker.advance()
    assert not worker.only_waits
    worker.advance()
    assert len(copier.started) == 4
    land(copier, 1, 2, 3)
    assert worker.advance() == [Done(2, 1)]
    worker.advance()
    land(copier, 4)
    assert worker.advance() == [Done(1, 4)]
    assert not worker.has_work
    assert len(copier.started) == 5


@pytest.mark.usefixtures("one_block_pieces")
@pytest.mark.parametrize("end", ["drop", "revoke", "refuse"])
def test_an_op_that_must_not_go_on_ends_when_what_was_queued_has_landed(
    segment: HostSegment, end: str
) -> None:
    copier, words = LateCopier(), memoryview(bytearray(16)).cast("Q")
    permit = CopyPermit(words)
    worker = DeviceWorker([layout_of(make_tensors())], segment, copier, permit)
    worker.execute(load(1, [0, 1, 2, 3], [0, 1, 2, 3]))
    worker.advance()
    if end == "drop":
        worker.drop(1)
    elif end == "revoke":
        words[0] = 1
    else:
        copier.refusal = "CUDA error: invalid argument"
    assert worker.advance() == []
    assert len(copier.started) == 1
    assert worker.has_work
    land(copier, 0)
    [done] = run_dry(worker)
    assert (done.op_id, done.num_ok) == (1, 0)
    assert done.error
    assert worker.abandon("over") == []


@pytest.mark.usefixtures("one_block_pieces")
def test_a_load_by_layer_does_not_wait_for_a_large_load(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    worker.execute(load(1, [0, 1, 2, 3], [0, 1, 2, 3]))
    for _ in range(3):
        worker.advance()
    assert len(copier.started) == 2
    watched = worker.gates.load_by_layer(2, 1)
    worker.execute(order(5, OpKind.H2D, [4], [4], gated=True, task_id=2))
    worker.advance()
    assert len(copier.started) == 3
    assert watched.wait_all(0)
    land(copier, 2)
    assert worker.advance() == [Done(5, 1)]
    assert [done.op_id for done in worker.abandon("over")] == [1]


def test_more_is_queued_until_the_engine_waits_for_loads_by_layer(
    segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the link stays busy while the thread that queues it waits for the interpreter."""
    size = bytes_per_index(make_tensors())
    monkeypatch.setattr(device_worker, "_PIECE_BYTES", size)
    monkeypatch.setattr(device_worker, "_LARGE_PIECE_BYTES", 2 * size)
    monkeypatch.setattr(device_worker, "BESIDE_LAYERS", size)
    monkeypatch.setattr(device_worker, "MOST_BYTES", 4 * size)
    worker, copier = late_worker(segment)

    def queued_of(op: Execute) -> list[int]:
        """Return the blocks of each piece that is queued before one has landed."""
        copier.started.clear()
        copier.num_bytes.clear()
        worker.execute(op)
        while not worker.only_waits:
            assert worker.advance() == []
        queued = [each // size for each in copier.num_bytes]
        while worker.has_work:
            land(copier, *range(len(copier.started)))
            worker.advance()
        return queued

    blocks = list(range(NUM_HOST_BLOCKS))
    for op in (load(1, blocks, blocks), store(2, blocks, blocks)):
        assert queued_of(op) == [2, 2]
    worker.gates.load_by_layer(3, 1)
    worker.gates.end_layer_load(3)
    for op in (load(4, blocks, blocks), store(5, blocks, blocks)):
        assert queued_of(op) == [1]


@pytest.mark.usefixtures("one_block_pieces")
def test_an_op_in_pieces_brings_all_blocks_back(
    tensors: Tensors, segment: HostSegment, worker: DeviceWorker
) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    worker.execute(store(1, [6, 0, 3, 1], [4, 1, 2, 0]))
    assert run_dry(worker) == [Done(1, 4)]
    worker.execute(load(2, [2, 4, 1, 0], [1, 2, 5, 4]))
    assert run_dry(worker) == [Done(2, 4)]
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[1, 2, 5, 4]], before[name][[3, 6, 0, 1]])
        assert torch.equal(tensor[[0, 3, 6]], before[name][[0, 3, 6]])


@pytest.mark.parametrize("version", [13_000, 12_000])
@pytest.mark.parametrize("memory", ["fake GPU"], indirect=True)
def test_a_store_to_memory_that_is_not_pinned_holds_up_no_load(
    memory: DeviceMemory, tensors: Tensors, segment: HostSegment, version: int
) -> None:
    memory.gpu.set_version(version)
    memory.gpu.set_faults(most_pinned=0)
    fill(segment)
    before = tensors["layer 0"][3].numpy().tobytes()
    compute = memory.torch.Stream(memory.device)
    with open_worker(memory, [layout_of(memory.lend(tensors))], segment) as worker:
        with memory.torch.stream(compute):
            step = memory.gpu.hold(compute.handle)
            worker.gates.open([1])
        too_late = threading.Timer(30, memory.gpu.fire, [step])  # for a worker that waits for it
        too_late.start()
        worker.execute(order(1, OpKind.D2H, [3], [2], gated=True, task_id=1))
        assert worker.advance() == []  # it would not return before the step has ended
        assert worker.has_work
        assert worker.only_waits
        worker.execute(order(2, OpKind.H2D, [1], [5], task_id=2))
        done: list[Done] = []
        while not done:
            done = worker.advance()
        assert done == [Done(2, 1)]
        assert has_come(tensors["layer 0"], 5, 1)
        assert too_late.is_alive()
        too_late.cancel()
        memory.gpu.fire(step)
        assert run_dry(worker) == [Done(1, 1)]
        assert bytes(segment.block(2)).startswith(before)


# -- loads by layer ------------------------------------------------------------------------------


@pytest.fixture
def part_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_worker, "_MIN_PART_BYTES", 0)


def fill(segment: HostSegment) -> None:
    for i in range(segment.num_blocks):
        segment.block(i)[:] = bytes([i + 1]) * len(segment.block(i))


def has_come(tensor: torch.Tensor, gpu: int, host: int) -> bool:
    return tensor[gpu].numpy().tobytes() == bytes([host + 1]) * tensor[gpu].nbytes


@pytest.mark.usefixtures("part_per_layer")
def test_a_load_by_layer_copies_one_layer_of_all_blocks_per_turn(segment: HostSegment) -> None:
    fill(segment)
    tensors = make_tensors()
    worker = cpu_worker(tensors, segment)
    watched = worker.gates.load_by_layer(1, 2)
    assert not watched.wait_layer("layer 0", 0)
    worker.execute(load(7, [3, 1], [0, 5], gated=True))
    assert worker.advance() == []
    assert worker.has_work
    assert watched.wait_layer("layer 0", 0)
    assert not watched.wait_layer("layer 1", 0)
    assert has_come(tensors["layer 0"], 0, 3)
    assert has_come(tensors["layer 0"], 5, 1)
    assert not has_come(tensors["layer 1"], 0, 3)
    assert worker.advance() == [Done(7, 2)]
    assert watched.wait_layer("layer 1", 0)
    assert watched.wait_all(0)
    assert watched.wait_layer("a layer that is unknown", 0)
    assert has_come(tensors["layer 1"], 5, 1)
    assert not worker.has_work


@pytest.mark.usefixtures("part_per_layer")
def test_layers_of_blocks_in_one_piece_come_one_after_the_other(
    memory: EngineMemory, segment: HostSegment
) -> None:
    fill(segment)
    buffer = torch.stack(list(make_tensors().values()), 1)
    tensors = memory.place({f"layer {i}": layer for i, layer in enumerate(buffer.unbind(1))})
    layout = layout_of(memory.lend(tensors))
    assert len(layout.sizes) == 1
    with open_worker(memory, [layout], segment) as worker:
        watched = worker.gates.load_by_layer(1, 2)
        worker.execute(load(7, [3, 1], [0, 5], gated=True))
        assert worker.advance() == []
        assert watched.wait_layer("layer 0", 0)
        assert not watched.wait_layer("layer 1", 0)
        assert has_come(tensors["layer 0"], 0, 3)
        assert has_come(tensors["layer 0"], 5, 1)
        assert not has_come(tensors["layer 1"], 0, 3)
        assert [done.num_ok for done in run_dry(worker)] == [2]
        assert watched.wait_all(0)
        assert has_come(tensors["layer 1"], 5, 1)


@pytest.mark.usefixtures("part_per_layer")
def test_a_layer_is_there_when_the_engine_has_waited_for_it(
    tensors: Tensors, segment: HostSegment, worker: DeviceWorker
) -> None:
    fill(segment)
    watched = worker.gates.load_by_layer(1, 2)
    worker.execute(load(7, [3, 1], [0, 5], gated=True))
    copying = threading.Thread(target=run_dry, args=(worker,))
    copying.start()
    for name, tensor in tensors.items():
        assert watched.wait_layer(name, 60)
        assert has_come(tensor, 0, 3)
        assert has_come(tensor, 5, 1)
    copying.join()


@pytest.mark.usefixtures("part_per_layer")
def test_a_load_that_was_given_up_writes_nothing_later(
    tensors: Tensors, segment: HostSegment, worker: DeviceWorker
) -> None:
    fill(segment)
    watched = worker.gates.load_by_layer(1, 1)
    worker.execute(load(7, [3], [0], gated=True))
    assert worker.advance() == []
    watched.give_up()
    for tensor in tensors.values():
        tensor[0] = 5
    assert [done.num_ok for done in run_dry(worker)] == [0]
    worker.close()  # whatever is in flight has landed
    assert all((tensor[0] == 5).all() for tensor in tensors.values())


def test_small_layers_are_copied_together(segment: HostSegment) -> None:
    tensors = make_tensors()
    worker = cpu_worker(tensors, segment)
    watched = worker.gates.load_by_layer(1, 1)
    worker.execute(load(7, [0], [0], gated=True))
    assert worker.advance() == [Done(7, 1)]
    assert watched.wait_all(0)


@pytest.mark.usefixtures("part_per_layer")
def test_loads_by_layer_take_turns_and_go_before_all_else(segment: HostSegment) -> None:
    tensors = make_tensors()
    worker = cpu_worker(tensors, segment)
    first, second = worker.gates.load_by_layer(1, 1), worker.gates.load_by_layer(2, 1)
    worker.execute(order(3, OpKind.D2H, [2], [2], task_id=3))
    worker.execute(order(4, OpKind.H2D, [3], [3], task_id=4))
    worker.execute(order(1, OpKind.H2D, [0], [0], gated=True, task_id=1))
    worker.execute(order(2, OpKind.H2D, [1], [1], gated=True, task_id=2))
    assert worker.advance() == []
    assert first.wait_layer("layer 0", 0)
    assert not second.wait_layer("layer 0", 0)
    assert worker.advance() == []
    assert second.wait_layer("layer 0", 0)
    assert not first.wait_all(0)
    assert worker.advance() == [Done(1, 1)]
    assert first.wait_all(0)
    assert not second.wait_all(0)
    assert [done.op_id for done in run_dry(worker)] == [2, 4, 3]
    assert second.wait_all(0)


def test_a_load_by_layer_that_was_dropped_or_cannot_be_copied_is_lost(worker: DeviceWorker) -> None:
    dropped, out_of_range, too_short = (worker.gates.load_by_layer(task, 1) for task in (1, 2, 3))
    worker.execute(load(1, [0], [0], gated=True))
    worker.drop(1)
    worker.execute(order(2, OpKind.H2D, [NUM_HOST_BLOCKS], [0], gated=True, task_id=2))
    worker.execute(order(3, OpKind.H2D, [0, 1], [0, 1], gated=True, task_id=3))
    done = run_dry(worker)
    assert [(d.op_id, d.num_ok) for d in done] == [(1, 0), (2, 0), (3, 0)]
    assert done[2].error == "2 of 1 blocks cannot be loaded layer by layer"
    for lost in (dropped, out_of_range, too_short):
        assert not lost.wait_all(60)


@pytest.mark.usefixtures("part_per_layer")
def test_nothing_is_copied_for_a_load_that_was_given_up(segment: HostSegment) -> None:
    fill(segment)
    tensors = make_tensors()
    worker = cpu_worker(tensors, segment)
    early, late = worker.gates.load_by_layer(1, 1), worker.gates.load_by_layer(2, 1)
    early.give_up()
    worker.execute(order(1, OpKind.H2D, [0], [0], gated=True, task_id=1))
    worker.execute(order(2, OpKind.H2D, [1], [1], gated=True, task_id=2))
    assert [(d.op_id, d.num_ok) for d in worker.advance()] == [(1, 0)]
    assert worker.advance() == []
    late.give_up()
    assert [(d.op_id, d.num_ok) for d in worker.advance()] == [(2, 0)]
    assert not worker.has_work
    assert not has_come(tensors["layer 0"], 0, 0)
    assert has_come(tensors["layer 0"], 1, 1)
    assert not has_come(tensors["layer 1"], 1, 1)


def test_a_load_by_layer_ends_with_its_task_and_with_the_worker(segment: HostSegment) -> None:
    worker, _ = late_worker(segment)
    ended, closed = worker.gates.load_by_layer(1, 1), worker.gates.load_by_layer(2, 1)
    assert worker.gates.end_layer_load(1)
    assert not worker.gates.end_layer_load(1)
    assert not worker.gates.end_layer_load(99)
    assert worker.gates.layer_loads == [2]
    assert not ended.wait_all(60)
    worker.close()
    assert not closed.wait_all(60)
    assert not worker.gates.load_by_layer(3, 1).wait_all(60)


@pytest.mark.usefixtures("part_per_layer")
def test_waiting_for_a_layer_queues_behind_its_copy_only(segment: HostSegment) -> None:
    worker, copier = late_worker(segment)
    watched = worker.gates.load_by_layer(1, 1)
    worker.execute(load(1, [0], [0], gated=True))
    assert worker.advance() == []
    assert worker.advance() == []
    first, second = (landing for _, _, landing in copier.started)
    assert watched.wait_layer("layer 0", 0)
    assert (first.num_waits, second.num_waits) == (1, 0)
    assert watched.wait_layer("layer 1", 0)
    assert (first.num_waits, second.num_waits) == (1, 1)
    first.is_past = True
    assert worker.advance() == []
    second.is_past = True
    assert worker.advance() == [Done(1, 1)]


@pytest.mark.usefixtures("part_per_layer")
def test_a_part_that_cannot_start_loses_the_load_and_giving_up_queues_behind_the_rest(
    segment: HostSegment,
) -> None:
    worker, copier = late_worker(segment)
    watched = worker.gates.load_by_layer(1, 1)
    worker.execute(load(1, [0], [0], gated=True))
    worker.advance()
    copier.refusal = "CUDA error: invalid argument"
    assert worker.advance() == []
    assert not watched.wait_layer("layer 0", 60)
    land(copier, 0)
    assert worker.advance() == [Done(1, 0, error="CUDA error: invalid argument")]
    watched.give_up()
    assert copier.started[0][2].num_waits == 1
    assert not worker.has_work


# -- groups --------------------------------------------------------------------------------------


@pytest.fixture
def overlaid(memory: EngineMemory) -> OverlaidTensors:
    """Attention, a group with one layer of it, and states in padded pages."""
    attention, fewer, states = {"a": 128, "b": 128}, {"c": 128}, {"d": 72, "e": 72}
    return OverlaidTensors([attention, fewer, states], NUM_GPU_BLOCKS, 128, memory.place)


def grouped(
    memory: EngineMemory, overlaid: OverlaidTensors, segment: HostSegment, blocks_per_unit: int = 1
) -> AbstractContextManager[DeviceWorker]:
    lent = LentTensors(memory.lend(overlaid.tensors), 0, "", overlaid.num_blocks, overlaid.layers)
    layouts = lent.layouts(256, len(overlaid.layers))
    return open_worker(memory, layouts, segment, blocks_per_unit=blocks_per_unit, may_skip=True)


def in_group(group: int, *blocks: int) -> list[int]:
    return name_blocks(group, np.array(blocks, np.int64)).tolist()


@pytest.mark.parametrize("blocks_per_unit", [1, 3])
def test_a_block_moves_its_groups_bytes_and_no_others(
    memory: EngineMemory, overlaid: OverlaidTensors, blocks_per_unit: int
) -> None:
    named = [*in_group(2, 6), *in_group(0, 0), *in_group(1, 3), *in_group(0, 5), -1, -1]
    stored = [(2, 6), (0, 0), (1, 3), (0, 5)]
    to = [4, 2, 1, 6]
    num_units = len(named) // blocks_per_unit
    expected = [overlaid.read(group, block) for group, block in stored]
    with HostSegment.create(256 * blocks_per_unit, num_units) as segment, ExitStack() as held:
        segment.map()
        worker = held.enter_context(grouped(memory, overlaid, segment, blocks_per_unit))
        before = overlaid.raw.clone()
        units = list(range(num_units))
        worker.execute(store(1, named, units))
        assert run_dry(worker) == [Done(1, num_units)]
        assert torch.equal(overlaid.raw, before)
        size = sum(len(bytes(segment.block(unit)).rstrip(b"\0")) > 0 for unit in units)
        assert size == (4 if blocks_per_unit == 1 else 2)
        back = [(group, block) for (group, _), block in zip(stored, to, strict=True)]
        around = [list(overlaid.untouched(group, block)) for group, block in back]
        worker.execute(load(2, units, [n for g, b in back for n in in_group(g, b)] + [-1, -1]))
        assert run_dry(worker) == [Done(2, num_units)]
        assert [overlaid.read(group, block) for group, block in back] == expected
        assert [list(overlaid.untouched(group, block)) for group, block in back] == around
        others = [b for b in range(NUM_GPU_BLOCKS) if b not in to]
        assert torch.equal(overlaid.raw[:, others], before[:, others])


def test_blocks_of_unknown_groups_are_refused(
    memory: EngineMemory, overlaid: OverlaidTensors
) -> None:
    with HostSegment.create(256, 2) as segment, ExitStack() as held:
        segment.map()
        worker = held.enter_context(grouped(memory, overlaid, segment))
        for named, complaint in (
            (in_group(3, 0), "a group's block lies outside of [0, 3)"),
            ([2**62], "a group's block lies outside of [0, 3)"),
            (in_group(2, NUM_GPU_BLOCKS), "a GPU block lies outside of [0, 7)"),
            ([-2], "a group's block lies outside of [0, 3)"),
        ):
            worker.execute(load(1, [0], named))
            [refused] = run_dry(worker)
            assert (refused.num_ok, refused.error) == (0, complaint)
        with pytest.raises(ValueError, match="several groups"):
            worker.gates.load_by_layer(1, 1)


def test_a_rank_without_layers_of_a_group_has_nothing_to_copy_of_it(
    memory: EngineMemory,
    overlaid: OverlaidTensors,
) -> None:
    overlaid.layers[1] = []
    with HostSegment.create(256, 2) as segment, ExitStack() as held:
        segment.map()
        worker = held.enter_context(grouped(memory, overlaid, segment))
        worker.execute(store(1, in_group(1, 4), [1]))
        assert run_dry(worker) == [Done(1, 1)]
        assert not any(bytes(segment.block(1)))
        expected = overlaid.read(2, 4)
        for op in (
            store(2, in_group(1, 3) + in_group(2, 4), [0, 1]),
            load(3, [0, 1], in_group(1, 3) + in_group(2, 5)),
        ):
            worker.execute(op)
            assert run_dry(worker) == [Done(op.op_id, 2)]
        assert overlaid.read(2, 5) == expected


def test_units_of_several_blocks_are_whole_without_tails(
    memory: EngineMemory, tensors: Tensors
) -> None:
    size = bytes_per_index(tensors)
    with HostSegment.create(2 * size, 1) as segment, ExitStack() as held:
        segment.map()
        layout = layout_of(memory.lend(tensors))
        worker = held.enter_context(open_worker(memory, [layout], segment, blocks_per_unit=2))
        expected = {name: tensor[[6, 0]].clone() for name, tensor in tensors.items()}
        for op in (store(1, [6, 0], [0]), load(2, [0], [2, 3])):
            worker.execute(op)
            assert run_dry(worker) == [Done(op.op_id, 1)]
        assert all(torch.equal(t[[2, 3]], expected[name]) for name, t in tensors.items())


def test_ops_that_are_queued_together_fail_if_their_task_is_revoked_meanwhile(
    memory: EngineMemory, tensors: Tensors, segment: HostSegment, landed: int
) -> None:
    if memory.device.type != "cpu":
        pytest.skip("what a GPU has been given cannot be recalled")
    words = memoryview(bytearray(16)).cast("Q")
    permit = CopyPermit(words)
    copier = open_copier(memory.device, permit, landed=landed)
    wait_for_queue(copier)
    worker = DeviceWorker([layout_of(tensors)], segment, copier, permit)
    worker.execute(order(1, OpKind.D2H, [0], [0], task_id=2))
    worker.execute(order(2, OpKind.D2H, [1], [1], task_id=3))
    worker.execute(order(3, OpKind.D2H, [2], [2], task_id=4))
    start, copies = copier.start, []

    def revoke_before_the_second(*arguments: Any) -> Any:
        copies.append(arguments)
        if len(copies) == 2:
            words[0] = 3  # between its check and the copy
        return start(*arguments)

    copier.start = revoke_before_the_second  # type: ignore[method-assign]
    done = {each.op_id: each for each in run_dry(worker)}
    worker.close()
    assert done[2].error
    assert done[2].num_ok == 0
    assert done[3] == Done(3, 1)
    assert worker.failure is None


def test_an_op_is_queued_for_the_thread_that_copies_if_nothing_comes_before_it(
    memory: EngineMemory, tensors: Tensors, worker: DeviceWorker
) -> None:
    is_queued = memory.device.type == "cpu"  # on a GPU a start may take long
    expected = {name: tensor[:3].clone() for name, tensor in tensors.items()}
    assert worker.queue(store(1, [0, 1], [0, 1])) == is_queued
    assert worker.has_work == is_queued
    if not is_queued:
        worker.execute(store(1, [0, 1], [0, 1]))
    worker.execute(store(2, [2], [2]))
    assert not worker.queue(store(3, [3], [3]))
    assert run_dry(worker) == [Done(1, 2), Done(2, 1)]
    worker.execute(load(4, [0, 1, 2], [3, 4, 5]))
    assert run_dry(worker) == [Done(4, 3)]
    assert all(torch.equal(t[3:6], expected[name]) for name, t in tensors.items())


def test_what_has_landed_takes_no_room_though_it_was_not_reported(
    memory: EngineMemory, worker: DeviceWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that launches requests may have the interpreter for long."""
    if memory.device.type != "cpu":
        pytest.skip("nothing is queued at once on a GPU")
    monkeypatch.setattr(device_worker, "MOST_BYTES", 1)
    monkeypatch.setattr(cpu_copier, "_MOST_BYTES", 1)
    deadline = time.monotonic() + 60
    for number in (1, 2, 3):
        while not worker.queue(store(number, [0], [0])):  # until the one before has landed
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert run_dry(worker) == [Done(1, 1), Done(2, 1), Done(3, 1)]


@pytest.mark.parametrize(
    "op",
    [
        store(1, [0], [0], gated=True),
        store(1, [0], [NUM_HOST_BLOCKS]),
        store(1, [NUM_GPU_BLOCKS], [0]),
        load(1, [0, 1], [0]),
        order(1, OpKind.DISK2D, [0], [0]),
    ],
)
def test_an_op_that_must_wait_or_fail_is_not_queued(worker: DeviceWorker, op: Execute) -> None:
    assert not worker.queue(op)
    assert not worker.has_work
    worker.execute(op)
    worker.drop(op.op_id)
    [done] = run_dry(worker)
    assert done.op_id == op.op_id
    assert done.num_ok == 0


def test_a_load_by_layer_and_an_op_of_several_pieces_are_not_queued(
    monkeypatch: pytest.MonkeyPatch, worker: DeviceWorker
) -> None:
    loading = worker.gates.load_by_layer(2, 1)
    assert not worker.queue(order(1, OpKind.H2D, [0], [0], task_id=2))
    loading.end()
    monkeypatch.setattr("flexcache.transfer.device_worker._PIECE_BYTES", 1)
    assert not worker.queue(store(3, [0], [0]))
    assert not worker.has_work


def test_an_op_of_a_revoked_task_is_not_queued(
    memory: EngineMemory, tensors: Tensors, segment: HostSegment, landed: int
) -> None:
    if memory.device.type != "cpu":
        pytest.skip("nothing is queued at once on a GPU")
    words = memoryview(bytearray(16)).cast("Q")
    permit, layout = CopyPermit(words), layout_of(tensors)
    with open_worker(memory, [layout], segment, landed, permit=permit) as worker:
        words[0] = 3
        refused, taken = (order(n, OpKind.D2H, [n], [n], task_id=n + 2) for n in (1, 2))
        assert not worker.queue(refused)
        assert worker.queue(taken)
        worker.execute(refused)
        done = {each.op_id: each for each in run_dry(worker)}
    assert done[1].error
    assert done[2] == Done(2, 1)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_op_that_was_interrupted_while_it_was_queued_may_be_executed_later(
    memory: EngineMemory, tensors: Tensors, segment: HostSegment, landed: int,
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool, interrupt: type[BaseException],
) -> None:  # fmt: skip
    """None of its first copies is being made when the interrupt, of any class that a signal handler
    may raise, passes on."""
    if memory.device.type != "cpu":
        pytest.skip("nothing is queued at once on a GPU")
    copy_loop = pytest.importorskip("flexcache.transfer.copy_loop")
    may_begin, make_copies, sleep = threading.Event(), copy_loop.make_copies, time.sleep
    ends: list[ComputePoint] = []

    def make_copies_later(*arguments: int) -> None:
        assert may_begin.wait(60)
        make_copies(*arguments)

    def begin_and_sleep(seconds: float) -> None:  # a thread that waits for copies
        may_begin.set()
        sleep(seconds)

    def be_interrupted(
        inside: InFlight, op: Any, num_bytes: int, end: ComputePoint, urgent: bool
    ) -> None:
        ends.append(end)
        if is_recorded:
            add(inside, op, num_bytes, end, urgent)
        raise interrupt

    monkeypatch.setattr(copy_loop, "make_copies", make_copies_later)
    monkeypatch.setattr(cpu_copier, "time", SimpleNamespace(sleep=begin_and_sleep))
    add = InFlight.add
    with open_worker(memory, [layout_of(tensors)], segment, landed) as worker:
        assert worker.queue(store(1, [0], [0]))
        with monkeypatch.context() as patched:
            patched.setattr(InFlight, "add", be_interrupted)
            with pytest.raises(interrupt):
                worker.queue(store(2, [1], [1]))
        assert [end.query() for end in ends] == [True]
        assert worker.queued_op is None
        worker.execute(store(2, [2], [1]))
        assert run_dry(worker) == [Done(1, 1), Done(2, 1)]
    expected = b"".join(tensor[2].numpy().tobytes() for tensor in tensors.values())
    assert bytes(segment.block(1))[: len(expected)] == expected
