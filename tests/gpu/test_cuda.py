"""KV tensors on a CUDA device. Skipped, with the reason, without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import joined_kv, running_cluster

from flexcache import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def on_gpu(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in joined_kv(model, tokens).items()}


@pytest.mark.parametrize("num_blocks", [1, 7, 40])
def test_blocks_come_back_from_dram_and_from_ssd(num_blocks: int, tmp_path: Path) -> None:
    with running_cluster([tmp_path], make_kv=on_gpu) as cluster:
        tokens = np.arange(num_blocks * 16)
        source = np.random.default_rng(0).permutation(64)[:num_blocks].tolist()
        before = {
            (rank, name, block): tensor[block].clone()
            for rank, kv in enumerate(cluster.kv)
            for name, tensor in kv.items()
            for block in source
        }
        torch.cuda.synchronize()
        assert cluster.put(tokens, source).mask.all()
        for clear in (False, True):
            if clear:
                cluster.manager.clear("CPU")
            cluster.wipe(source)
            torch.cuda.synchronize()
            assert cluster.get(tokens, source).mask.all()
            for (rank, name, block), expected in before.items():
                assert torch.equal(
                    cluster.kv[rank][name][block].view(torch.uint8), expected.view(torch.uint8)
                )


def test_a_gated_copy_runs_after_the_queued_work_of_the_compute_stream() -> None:
    with running_cluster(make_kv=on_gpu) as cluster:
        tokens, blocks = np.arange(64), [0, 1, 2, 3]
        task_id, _ = cluster.manager.put_match(tokens)
        cluster.manager.launch([task_id], [cluster.slots(blocks)], gated=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # the write below is queued, not done
            for tensor in cluster.kv[0].values():
                tensor[:4].view(torch.uint8).fill_(7)
            cluster.clients[0].open_gates([task_id])
        cluster.manager.wait([task_id], 30)
        cluster.wipe(blocks)
        torch.cuda.synchronize()
        cluster.get(tokens, blocks)
        for tensor in cluster.kv[0].values():
            assert (tensor[:4].view(torch.uint8) == 7).all()
