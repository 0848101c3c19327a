"""Ops of groups that overlay each other, by each way of copying to a GPU (a fake one)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_memory import DeviceMemory
from fake_gpu import fake_gpu
from overlaid import OverlaidTensors
from test_copy_cuda import BLOCK, NUM_BLOCKS, Rig, refuse_the_copy_engine
from test_device_worker import run_dry

from flexcache.client.lent_tensors import LentTensors
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done, Execute, name_blocks, pack_ids

PAGE, STATE = 1024, 656
GROUPS = [{"a": PAGE, "b": PAGE}, {"c": STATE, "d": STATE}]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with HostSegment.create(BLOCK, NUM_BLOCKS) as segment, fake_gpu(monkeypatch) as gpu:
        segment.map()
        rig = Rig(monkeypatch, gpu, segment)
        yield rig
        rig.copier.close()


@pytest.mark.parametrize("way", CopyWay)
def test_blocks_of_all_groups_of_an_op_come_back(rig: Rig, way: CopyWay) -> None:
    memory = DeviceMemory(rig.gpu, rig.torch)
    overlaid = OverlaidTensors(GROUPS, 8, PAGE, memory.place)
    if way is CopyWay.KERNEL:
        rig.add_kernel()
        refuse_the_copy_engine(rig)
    rig.attach(version=12_070 if way is CopyWay.SINGLE else 13_000)
    assert rig.copier.ways == (way,)
    lent = LentTensors(memory.lend(overlaid.tensors), 0, "", 8, overlaid.layers)
    worker = DeviceWorker(
        lent.layouts(2 * PAGE, 2), rig.segment, rig.copier, blocks_per_unit=2, may_skip=True
    )

    def move(kind: OpKind, gpu: list[tuple[int, int]], host: list[int]) -> None:
        named = [int(name_blocks(group, np.array([block]))[0]) for group, block in gpu]
        ends = [pack_ids(np.array(ids, np.int64)) for ids in (named, host)]
        src, dst = ends if kind is OpKind.D2H else ends[::-1]
        worker.execute(Execute(1, kind, src, dst, 1))
        assert run_dry(worker) == [Done(1, len(host))]

    stored = [(0, 5), (1, 2), (1, 7), (0, 0)]
    expected = [overlaid.read(group, block) for group, block in stored]
    before = overlaid.raw.clone()
    move(OpKind.D2H, stored, [9, 4])
    assert torch.equal(overlaid.raw, before)
    loaded = [(0, 1), (1, 3), (1, 6), (0, 4)]
    around = [list(overlaid.untouched(group, block)) for group, block in loaded]
    move(OpKind.H2D, loaded, [9, 4])
    assert [overlaid.read(group, block) for group, block in loaded] == expected
    assert [list(overlaid.untouched(group, block)) for group, block in loaded] == around
    copies = {
        CopyWay.BATCH: sum(rig.gpu.batches),
        CopyWay.SINGLE: rig.gpu.num_single_copies,
        CopyWay.KERNEL: 16 * (rig.kernel.num_ops == 2),
    }
    assert copies[way] == 2 * 4 * 2  # a layer's bytes of a block at a time
    worker.close()
