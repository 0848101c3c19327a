"""A rank's worker on a GPU: blocks that come back, loads by layer, and what is left afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpu_machines import Machine, RealGpu

from flexcache.doctor.gpu_driver import ask_driver
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import bytes_per_index, describe_kv_caches
from flexcache.transfer import device_worker
from flexcache.transfer.copier import Runs, open_copier
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done, Execute, pack_ids

NUM_LAYERS, NUM_BLOCKS, PAGE = 4, 24, 8192
MUCH_MEMORY = 64 << 20

Tensors = dict[str, torch.Tensor]


@dataclass
class Rank:
    """Attributes:
    layers: The engine's tensors, of random bytes.
    """

    layers: Tensors
    worker: DeviceWorker

    def run(self, *orders: Execute) -> list[Done]:
        """Execute orders to their ends."""
        for order in orders:
            self.worker.execute(order)
        done = []
        while self.worker.has_work:
            done += self.worker.advance()
        return done

    def moves(self, *orders: Execute) -> list[tuple[int, int, str | None]]:
        """Execute orders; return how many blocks each moved, and what was wrong."""
        return [outcome(done) for done in self.run(*orders)]

    def read(self) -> Tensors:
        torch.cuda.synchronize()
        return {name: layer.cpu() for name, layer in self.layers.items()}

    def wipe(self) -> None:
        for layer in self.layers.values():
            layer.fill_(0)
        torch.cuda.synchronize()


@pytest.fixture(params=["layers apart", "blocks outermost"])
def rank(
    machine: Machine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rank]:
    monkeypatch.setattr(device_worker, "_MIN_PART_BYTES", 0)
    is_apart = request.param == "layers apart"
    shape = (NUM_LAYERS, NUM_BLOCKS, PAGE) if is_apart else (NUM_BLOCKS, NUM_LAYERS, PAGE)
    whole = torch.empty(shape, dtype=torch.uint8, device=machine.device)
    whole.random_(0, 256)
    torch.cuda.synchronize()
    parts = whole.unbind(0 if is_apart else 1)
    layers = {f"layer {index}": layer for index, layer in enumerate(parts)}
    with HostSegment.create(bytes_per_index(layers), NUM_BLOCKS) as segment:
        segment.map()
        copier = open_copier(machine.device)
        copier.attach(segment, lambda: None)
        layout = describe_kv_caches(layers, bytes_per_index(layers))
        rank = Rank(layers, DeviceWorker([layout], segment, copier))
        yield rank
        rank.worker.close()


def outcome(done: Done) -> tuple[int, int, str | None]:
    return done.op_id, done.num_ok, done.error


def order(op_id: int, kind: OpKind, src: np.ndarray, dst: np.ndarray) -> Execute:
    return Execute(op_id, kind, pack_ids(src), pack_ids(dst), op_id, gated=True)


def test_blocks_come_back_in_other_places_and_no_others_change(rank: Rank) -> None:
    random = np.random.default_rng(0)
    before = rank.read()
    source, host, target = (random.permutation(NUM_BLOCKS)[:17] for _ in range(3))
    rank.worker.gates.open([1])
    assert rank.moves(order(1, OpKind.D2H, source, host)) == [(1, 17, None)]
    rank.wipe()
    rank.worker.gates.open([2])
    assert rank.moves(order(2, OpKind.H2D, host, target)) == [(2, 17, None)]
    for name, found in rank.read().items():
        expected = torch.zeros_like(found)
        expected[target] = before[name][source]
        assert torch.equal(found, expected), name


def test_a_store_takes_what_the_queued_step_writes(machine: Machine, rank: Rank) -> None:
    blocks = np.arange(NUM_BLOCKS)
    with machine.busy():
        for layer in rank.layers.values():
            machine.fill(layer, 7)
        rank.worker.gates.open([1])
        rank.worker.execute(order(1, OpKind.D2H, blocks, blocks))
        assert rank.worker.advance() == []
    assert rank.run() == [Done(1, NUM_BLOCKS)]
    rank.wipe()
    rank.worker.gates.open([2])
    rank.run(order(2, OpKind.H2D, blocks, blocks))
    assert all((layer == 7).all() for layer in rank.read().values())


def test_the_time_of_a_promised_load_begins_when_the_compute_before_it_has_ended(
    machine: Machine, rank: Rank
) -> None:
    blocks = np.arange(NUM_BLOCKS)
    rank.worker.gates.open([1])
    rank.run(order(1, OpKind.D2H, blocks, blocks))
    for turn in range(2, 40):
        with machine.busy():
            load = rank.worker.gates.load_by_layer(turn, NUM_BLOCKS, is_promised=True)
            rank.worker.execute(order(turn, OpKind.H2D, blocks, blocks))
            while rank.worker.advance() or not load.is_over:
                pass  # all of it is queued behind the compute
            before_s = time.monotonic()
        [done] = rank.run()
        assert done.num_ok == NUM_BLOCKS
        assert done.seconds < time.monotonic() - before_s
        if done.seconds:  # it is not known if both ended between two looks
            return
    pytest.fail("no time was told")


def test_each_layer_is_there_for_the_work_that_is_queued_after_waiting_for_it(
    machine: Machine, rank: Rank
) -> None:
    blocks = np.arange(NUM_BLOCKS)
    before = rank.read()
    rank.worker.gates.open([1])
    rank.run(order(1, OpKind.D2H, blocks, blocks))
    for turn in range(2, 6):
        rank.wipe()
        load = rank.worker.gates.load_by_layer(turn, NUM_BLOCKS)
        rank.worker.execute(order(turn, OpKind.H2D, blocks, blocks))
        done = []
        while rank.worker.has_work and not rank.worker.only_waits:
            done += rank.worker.advance()
        reads = {}
        for name, layer in rank.layers.items():
            assert load.wait_layer(name, 60)
            reads[name] = machine.read(layer)
        for name, read in reads.items():
            assert torch.equal(read(), before[name]), name
        assert [*map(outcome, done), *rank.moves()] == [(turn, NUM_BLOCKS, None)]


@pytest.mark.parametrize("machine", ["a GPU"], indirect=True)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_rank_gives_its_memory_back_and_takes_none_of_other_gpus(machine: RealGpu) -> None:
    """The doctor's tests do the same on fake GPUs."""
    own = torch.empty(1, device=machine.device)  # the context is torch's

    def used() -> list[int]:
        torch.cuda.synchronize()
        found = [gpu.used_bytes for gpu in ask_driver().gpus]
        return [each for each in found if each is not None]

    with HostSegment.create(1 << 20, 512) as segment:
        segment.map()
        before = used()
        copier = CudaCopier(own.device)
        copier.attach(segment)
        attached = used()
        copier.close()
        torch.cuda.empty_cache()
        after = used()
    if not before:
        pytest.skip("the driver does not say how much memory is used")
    for index, first in enumerate(before):
        assert after[index] - first < MUCH_MEMORY
        assert index == own.device.index or attached[index] - first < MUCH_MEMORY


@pytest.mark.parametrize("machine", ["a GPU"], indirect=True)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("way", [CopyWay.BATCH, CopyWay.SINGLE])
def test_an_op_that_the_driver_refuses_fails_and_the_next_one_does_not(
    machine: RealGpu, way: CopyWay
) -> None:
    """Last of all, since a driver may end the process. `test_copy_cuda` does it on fake GPUs."""
    with HostSegment.create(PAGE, NUM_BLOCKS) as segment:
        segment.map()
        copier = CudaCopier(machine.device)
        copier.attach(segment)
        there = torch.empty(segment.size, dtype=torch.uint8, device=machine.device)
        offsets = np.arange(0, segment.size, 2 * PAGE)
        to, start = there.data_ptr() + offsets, segment.address + offsets
        sizes = np.full(len(offsets), PAGE)
        wrong = to.copy()
        wrong[len(to) // 2] = 0
        with pytest.raises(RuntimeError):
            copier.start(Runs(wrong, start, sizes), OpKind.H2D, None, way=way)
        copier.start(Runs(to, start, sizes), OpKind.H2D, copier.fence(), way=way).synchronize()
        copier.close()
