"""Engines of different tensor-parallel sizes that read each other's blocks, from every tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster, random_like, running_cluster
from test_remote_tier import until_it_stores

from flexcache import ModelConfig

TOKENS = np.arange(12 * 16)
SOURCE = [3, 1, 41, 5, 9, 2, 6, 53, 50, 20, 21, 22]
TARGET = [10, 60, 12, 13, 30, 31, 16, 17, 33, 34, 35, 36]
NUM_BLOCKS = 64
SIZES = [1, 2, 4, 1]
"""Tensor-parallel sizes: each reads what the one before it has written."""

Tensors = dict[str, torch.Tensor]
Whole = dict[str, torch.Tensor]
"""KV tensors of a whole model, of which each rank has its part."""
Part = Callable[[torch.Tensor, ModelConfig, int], torch.Tensor]
"""What a rank has of a tensor."""


@contextmanager
def engine(
    model: ModelConfig, whole: Whole, part: Part, ssd: Path | None = None, **settings: Any
) -> Iterator[Cluster]:
    """Run an engine whose ranks hold their parts of these tensors."""
    ranks = itertools.count()

    def make_kv(model: ModelConfig, tokens: int) -> Tensors:
        rank = next(ranks)
        return {name: part(tensor, model, rank).clone() for name, tensor in whole.items()}

    settings = {"num_cpu_blocks": 192, "skip_slow_loads": False, **settings}
    ssd_dirs = [] if ssd is None else [ssd]
    with running_cluster(ssd_dirs, model=model, make_kv=make_kv, **settings) as cluster:
        yield cluster


def all_of(tensor: torch.Tensor, model: ModelConfig, rank: int) -> torch.Tensor:
    return tensor


def expect(cluster: Cluster, whole: Whole, part: Part, tier: str) -> None:
    """Load the prompt from a tier; compare each rank's blocks with its part of the model's."""
    cluster.wipe(TARGET)
    assert cluster.get(TOKENS, TARGET).mask.all()
    assert cluster.manager.stats()["hit_blocks"] == {tier: len(SOURCE)}
    for rank, kv in enumerate(cluster.kv):
        for name, tensor in kv.items():
            held = part(whole[name], cluster.manager.model_config, rank)
            assert torch.equal(tensor[TARGET].view(torch.uint8), held[SOURCE].view(torch.uint8))


@pytest.mark.parametrize("tier", ["SSD", "REMOTE"])
def test_kv_that_all_ranks_hold_is_read_by_any_number_of_ranks(tier: str, tmp_path: Path) -> None:
    whole = {f"layer.{i}": random_like(NUM_BLOCKS, 16, 144, dtype=torch.bfloat16) for i in range(3)}
    one = ModelConfig("mla", 3, 1, 144, torch.bfloat16, use_mla=True)
    settings: dict[str, Any] = {"ssd": tmp_path} if tier == "SSD" else {
        "remote_url": f"file://{tmp_path}", "remote_lookup_timeout_s": 30.0,
        "remote_timeout_s": 30.0, "server_timeout_s": 120.0,
    }  # fmt: skip
    for number, tp_size in enumerate(SIZES):
        with engine(replace(one, tp_size=tp_size), whole, all_of, **settings) as cluster:
            if tier == "REMOTE":
                until_it_stores(cluster)
            if number == 0:
                assert cluster.put(TOKENS, SOURCE).mask.all()
            else:
                expect(cluster, whole, all_of, tier)
