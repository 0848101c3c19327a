"""Blocks that are stored come back byte for byte, whatever the engine's layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import NUM_GPU_BLOCKS, joined_kv, random_like, running_cluster
from disk_io import refuse_direct
from engine_memory import EngineMemory, device_memory

from flexcache import KVStatus, ModelConfig
from flexcache.storage.pool_directory import DATA_FILE

Tensors = dict[str, torch.Tensor]


def split_kv(model: ModelConfig, tokens: int) -> Tensors:
    heads = max(1, model.num_kv_heads // model.tp_size)
    shape = (2, NUM_GPU_BLOCKS, tokens, heads, model.head_size)
    return {f"layer.{i}": random_like(*shape, dtype=model.dtype) for i in range(model.num_layers)}


def heads_first_kv(model: ModelConfig, tokens: int) -> Tensors:
    heads = max(1, model.num_kv_heads // model.tp_size)
    shape = (NUM_GPU_BLOCKS, heads, tokens, 2 * model.head_size)
    return {f"layer.{i}": random_like(*shape, dtype=model.dtype) for i in range(model.num_layers)}


def one_buffer_layer_after_layer(model: ModelConfig, tokens: int) -> Tensors:
    heads = max(1, model.num_kv_heads // model.tp_size)
    shape = (model.num_layers, NUM_GPU_BLOCKS, heads, tokens, 2 * model.head_size)
    buffer = random_like(*shape, dtype=model.dtype)
    return {f"layer.{i}": buffer[i] for i in range(model.num_layers)}


def one_buffer_block_after_block(model: ModelConfig, tokens: int) -> Tensors:
    heads = max(1, model.num_kv_heads // model.tp_size)
    shape = (NUM_GPU_BLOCKS, model.num_layers, heads, tokens, 2 * model.head_size)
    buffer = random_like(*shape, dtype=model.dtype)
    return {f"layer.{i}": buffer[:, i] for i in range(model.num_layers)}


def latent_kv(model: ModelConfig, tokens: int) -> Tensors:
    shape = (NUM_GPU_BLOCKS, tokens, model.head_size)
    return {f"layer.{i}": random_like(*shape, dtype=model.dtype) for i in range(model.num_layers)}


LAYOUTS = pytest.mark.parametrize(
    ("make_kv", "block_dim", "dtype", "tokens_per_block"),
    [
        (joined_kv, 0, torch.bfloat16, 16),
        (split_kv, 1, torch.bfloat16, 32),
        (heads_first_kv, 0, torch.float8_e4m3fn, 128),
        (one_buffer_layer_after_layer, 0, torch.float32, 16),
        (one_buffer_block_after_block, 0, torch.bfloat16, 32),
    ],
)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@LAYOUTS
def test_every_layout_comes_back_from_dram_and_from_ssd(
    make_kv: Callable[[ModelConfig, int], Tensors],
    block_dim: int,
    dtype: torch.dtype,
    tokens_per_block: int,
    tp_size: int,
    tmp_path: Path,
) -> None:
    model = ModelConfig("grid", 3, 4, 32, dtype, tp_size=tp_size)
    round_trip(model, make_kv, block_dim, tokens_per_block, tmp_path)


@LAYOUTS
def test_every_layout_comes_back_to_a_gpu(
    make_kv: Callable[[ModelConfig, int], Tensors],
    block_dim: int,
    dtype: torch.dtype,
    tokens_per_block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelConfig("grid", 3, 4, 32, dtype, tp_size=2)
    with device_memory(monkeypatch) as memory:
        round_trip(model, make_kv, block_dim, tokens_per_block, tmp_path, memory=memory)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("tokens_per_block", [16, 128])
def test_latent_attention_is_stored_once_and_read_by_every_rank(
    tp_size: int, tokens_per_block: int, tmp_path: Path
) -> None:
    model = ModelConfig("mla", 3, 1, 144, torch.bfloat16, use_mla=True, tp_size=tp_size)
    stored = round_trip(model, latent_kv, 0, tokens_per_block, tmp_path, same_on_all=True)
    assert stored == 8 * tokens_per_block * 3 * 144 * 2  # one copy, not one per rank


def round_trip(
    model: ModelConfig,
    make_kv: Callable[[ModelConfig, int], Tensors],
    block_dim: int,
    tokens_per_block: int,
    ssd: Path,
    same_on_all: bool = False,
    memory: EngineMemory | None = None,
) -> int:
    with running_cluster(
        [ssd],
        model=model,
        memory=memory,
        make_kv=make_kv,
        block_dim=block_dim,
        tokens_per_block=tokens_per_block,
    ) as cluster:
        if same_on_all:
            for other in cluster.kv[1:]:
                for name, tensor in other.items():
                    tensor.copy_(cluster.kv[0][name])
        tokens = np.arange(8 * tokens_per_block)
        source = [3, 1, 41, 5, 9, 2, 6, 53]
        expected = cluster.read(source)
        assert cluster.put(tokens, source).mask.all()
        target = [10, 60, 12, 13, 30, 31, 16, 17]
        cluster.wipe(target)
        assert cluster.get(tokens, target).mask.all()
        assert cluster.read(target) == expected

        assert cluster.manager.clear("CPU") == 8
        cluster.wipe(target)
        response = cluster.get(tokens, target)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.all()
        assert cluster.read(target) == expected
        stats = cluster.manager.stats()
        assert stats["tiers"]["SSD"]["hit_blocks"] == 8
        return int(stats["ops"]["D2H"]["bytes"])


@pytest.mark.parametrize("num_dirs", [1, 3])
@pytest.mark.parametrize("io_engine", ["auto", "threads"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_ssd_directories_are_striped_whatever_the_io_engine(
    num_dirs: int, io_engine: str, direct_io: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct_io:
        refuse_direct(monkeypatch)
    dirs = [tmp_path / str(i) for i in range(num_dirs)]
    with running_cluster(dirs, io_engine=io_engine) as cluster:
        tokens = np.arange(40 * 16)
        source = list(range(40))
        expected = cluster.read(source)
        cluster.put(tokens, source)
        cluster.manager.clear("CPU")
        cluster.wipe(source)
        assert cluster.get(tokens, source).mask.all()
        assert cluster.read(source) == expected
        sizes = [(path / DATA_FILE).stat().st_size for path in dirs]
        assert len(set(sizes)) == 1


def test_half_in_dram_and_half_on_ssd_is_one_get(tmp_path: Path) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=64) as cluster:
        tokens = np.arange(32 * 16)
        source = list(range(32))
        expected = cluster.read(source)
        cluster.put(tokens, source)
        cluster.manager.clear("CPU")
        cluster.get(tokens[: 16 * 16], list(range(32, 48)))  # half of it is in DRAM again
        cluster.wipe(source)
        assert cluster.get(tokens, source).mask.all()
        assert cluster.read(source) == expected
        assert cluster.manager.stats()["tiers"]["SSD"]["hit_blocks"] == 32


def test_a_pool_too_small_serves_and_stores_the_prefix_that_fits(tmp_path: Path) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=10, num_ssd_blocks=64) as cluster:
        tokens = np.arange(32 * 16)
        source = list(range(32))
        expected = cluster.read(source)
        response = cluster.put(tokens, source)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == 10 * 16
        assert response.mask[: 10 * 16].all()
        # block after block the SSD tier takes more than DRAM could hold
        for stop in range(15, 33, 5):
            cluster.put(tokens[: stop * 16], list(range(stop)))
        on_ssd = cluster.manager.stats()["tiers"]["SSD"]["indexed"]
        cluster.manager.clear("CPU")
        cluster.wipe(source)
        response = cluster.get(tokens, source)
        served = int(response.mask.sum()) // 16
        assert 0 < served <= min(10, on_ssd)
        layers = len(expected) // 32
        got = cluster.read(source[:served])
        for layer in range(layers):
            assert (
                got[layer * served : (layer + 1) * served]
                == expected[layer * 32 : layer * 32 + served]
            )


def test_prefetch_brings_blocks_to_dram_without_gpu_slots(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        tokens = np.arange(12 * 16)
        expected = cluster.read(range(12))
        cluster.put(tokens, list(range(12)))
        cluster.manager.clear("CPU")
        task_id = cluster.manager.prefetch_async(tokens)
        assert cluster.manager.wait([task_id], 30)[task_id].mask.all()
        assert cluster.manager.stats()["tiers"]["CPU"]["indexed"] == 12
        read_before = cluster.manager.stats()["ops"]["DISK2H"]["blocks"]
        assert cluster.get(tokens, list(range(20, 32))).mask.all()
        assert cluster.read(range(20, 32)) == expected
        assert cluster.manager.stats()["ops"]["DISK2H"]["blocks"] == read_before


def test_namespaces_and_kinds_of_key_never_mix() -> None:
    with running_cluster() as cluster:
        manager, tokens = cluster.manager, np.arange(4 * 16)
        slots = cluster.slots([0, 1, 2, 3])
        keys = [bytes([i]) * 32 for i in range(4)]
        task, _ = manager.put_async(tokens, slots, namespace="alice")
        manager.wait([task], 30, completely=True)
        for options in ({}, {"namespace": "bob"}, {"namespace": ("alice", "")}):
            assert not manager.get_match(tokens, **options)[1].any()
        assert not manager.get_match(tokens, namespace="alice", block_keys=keys)[1].any()
        task, mask = manager.get_match(tokens, namespace="alice")
        assert mask.all()
        manager.cancel([task])
