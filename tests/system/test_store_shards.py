"""Engines of different tensor-parallel sizes that read each other's blocks, from every tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import (
    PATIENCE_S,
    Cluster,
    load_by_layer,
    ops,
    random_like,
    running_cluster,
    until,
)
from ports import free_range
from test_peers import is_ready
from test_remote_tier import until_it_stores

from flexcache import CacheConfig, KVGroup, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.errors import ConfigError, RegistrationError

NUM_TOKENS = 12 * 16
SOURCE = [3, 1, 41, 5, 9, 2, 6, 53, 50, 20, 21, 22]
TARGET = [10, 60, 12, 13, 30, 31, 16, 17, 33, 34, 35, 36]
NUM_BLOCKS = 64
SIZES = [1, 2, 4, 1]
"""Tensor-parallel sizes: each reads what the one before it has written."""
HEADS = 4
HEAD_DIMS = {"NHD": 3, "HND": 2}
STORE: dict[str, Any] = {
    "remote_lookup_timeout_s": 30.0, "remote_timeout_s": 30.0, "server_timeout_s": 120.0,
}  # fmt: skip

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
        if "remote_url" in settings:
            until_it_stores(cluster)
        yield cluster


def all_of(tensor: torch.Tensor, model: ModelConfig, rank: int) -> torch.Tensor:
    return tensor


def heads_of(dim: int) -> Part:
    """What ranks have that divide the heads, of which this dimension tells."""

    def part(tensor: torch.Tensor, model: ModelConfig, rank: int) -> torch.Tensor:
        distinct = model.tp_size // model.num_replicas
        size = tensor.shape[dim] // distinct
        return tensor.narrow(dim, rank // model.num_replicas * size, size)

    return part


def prompt(number: int) -> np.ndarray:
    return np.arange(NUM_TOKENS) + 100_000 * number


def put(cluster: Cluster, number: int) -> None:
    assert cluster.put(prompt(number), SOURCE).mask.all()


def expect(cluster: Cluster, whole: Whole, part: Part, tier: str, number: int) -> None:
    """Load a prompt from a tier; compare each rank's blocks with its part of the model's."""
    cluster.wipe(TARGET)
    assert cluster.get(prompt(number), TARGET).mask.all()
    assert cluster.manager.stats()["hit_blocks"][tier] == len(SOURCE)
    for rank, kv in enumerate(cluster.kv):
        for name, tensor in kv.items():
            held = part(whole[name], cluster.manager.model_config, rank)
            assert torch.equal(tensor[TARGET].view(torch.uint8), held[SOURCE].view(torch.uint8))


def misses(cluster: Cluster, number: int) -> bool:
    return not cluster.manager.get_match(prompt(number))[1].any()


@pytest.mark.parametrize("tier", ["SSD", "REMOTE"])
def test_kv_that_all_ranks_hold_is_read_by_any_number_of_ranks(tier: str, tmp_path: Path) -> None:
    whole = {f"layer.{i}": random_like(NUM_BLOCKS, 16, 144, dtype=torch.bfloat16) for i in range(3)}
    one = ModelConfig("mla", 3, 1, 144, torch.bfloat16, use_mla=True)
    for number, tp_size in enumerate(SIZES):
        with engine(replace(one, tp_size=tp_size), whole, all_of, **below(tier, tmp_path)) as each:
            if number:
                expect(each, whole, all_of, tier, number - 1)
            put(each, number)


def below(tier: str, directory: Path) -> dict[str, Any]:
    """Settings of an engine that has this tier below its DRAM."""
    if tier == "SSD":
        return {"ssd": directory}
    return {"remote_url": f"file://{directory}", **STORE}


def model_of(head_size: int = 32, **shape: Any) -> ModelConfig:
    return ModelConfig("cut", 3, HEADS, head_size, torch.bfloat16, **shape)


def whole_of(model: ModelConfig, order: str) -> Whole:
    """Tensors ``[block, K and V, token, head, content]``, or with heads before tokens."""
    inner = (16, HEADS) if order == "NHD" else (HEADS, 16)
    shape = (NUM_BLOCKS, 2, *inner, model.head_size)
    return {f"layer.{i}": random_like(*shape, dtype=torch.bfloat16) for i in range(3)}


@pytest.mark.parametrize("head_size", [32, 64])  # a shard fills whole pages, or does not
@pytest.mark.parametrize("order", HEAD_DIMS)
@pytest.mark.parametrize("tier", ["SSD", "REMOTE"])
def test_each_tensor_parallel_size_reads_what_another_has_stored(
    tier: str, order: str, head_size: int, tmp_path: Path
) -> None:
    model, dim = model_of(head_size), HEAD_DIMS[order]
    whole, part = whole_of(model, order), heads_of(dim)
    settings = {"store_shards": HEADS, "head_dim": dim, **below(tier, tmp_path)}
    if order == "HND":
        settings |= {"ssd_compression": "zstd", "remote_compression": "zstd"}
    for number, tp_size in enumerate(SIZES):
        with engine(replace(model, tp_size=tp_size), whole, part, **settings) as cluster:
            if number:
                expect(cluster, whole, part, tier, number - 1)
            put(cluster, number)
            expect(cluster, whole, part, "CPU", number)


@pytest.mark.parametrize("order", HEAD_DIMS)
def test_each_tensor_parallel_size_reads_the_dram_of_another(order: str) -> None:
    dim = HEAD_DIMS[order]
    whole, part = whole_of(model_of(), order), heads_of(dim)
    sizes = [1, 2, 4, 8]  # of eight ranks, two hold the same head
    addresses = [f"tcp://127.0.0.1:{free_range(2)}" for _ in sizes]
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(engine(
                model_of(tp_size=tp_size), whole, part, peers=addresses, peer_endpoint=address,
                store_shards=HEADS, head_dim=dim,
            ))
            for tp_size, address in zip(sizes, addresses, strict=True)
        ]  # fmt: skip
        for each in clusters:
            until(lambda each=each: is_ready(each, len(sizes) - 1))
        for number, (writer, reader) in enumerate(itertools.pairwise([*clusters, clusters[0]])):
            put(writer, number)
            before = reader.manager.stats()["hit_blocks"].get("PEER", 0)
            reader.wipe(TARGET)
            assert reader.get(prompt(number), TARGET).mask.all()
            assert reader.manager.stats()["hit_blocks"]["PEER"] == before + len(SOURCE)
            expect(reader, whole, part, "CPU", number)


def test_what_an_engine_without_the_setting_has_stored_stays_valid(tmp_path: Path) -> None:
    whole, part = whole_of(model_of(), "NHD"), heads_of(3)
    with engine(model_of(tp_size=2), whole, part, **below("REMOTE", tmp_path)) as cluster:
        put(cluster, 0)
    cut = {"store_shards": 2, "head_dim": 3, **below("REMOTE", tmp_path)}
    for tp_size in (2, 1):
        with engine(model_of(tp_size=tp_size), whole, part, **cut) as cluster:
            expect(cluster, whole, part, "REMOTE", 0)


def test_another_number_of_shards_or_order_is_another_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = whole_of(model_of(), "NHD")
    store = below("REMOTE", tmp_path)
    with engine(model_of(), whole, heads_of(3), store_shards=4, head_dim=3, **store) as cluster:
        put(cluster, 0)
    for settings in ({}, {"store_shards": 2, "head_dim": 3}):
        with engine(model_of(), whole, heads_of(3), **settings, **store) as cluster:
            assert misses(cluster, 0)
            assert not cluster.get(prompt(0), TARGET).mask.any()
    until(lambda: "stored_for_another_layout" in caplog.text)
    other = whole_of(model_of(), "HND")
    with engine(
        model_of(tp_size=2), other, heads_of(2), store_shards=4, head_dim=2, **store
    ) as cluster:
        assert misses(cluster, 0)


def test_heads_of_several_shards_are_loaded_layer_by_layer() -> None:
    whole = whole_of(model_of(), "HND")
    with engine(model_of(), whole, heads_of(2), store_shards=4, head_dim=2) as cluster:
        put(cluster, 0)
        expected = cluster.read(SOURCE)
        cluster.wipe(TARGET)
        assert load_by_layer(cluster, prompt(0), TARGET) == expected


@pytest.mark.parametrize("head_size", [32, 64])
def test_blocks_of_shards_go_past_dram_where_these_fill_pages(
    head_size: int, tmp_path: Path
) -> None:
    model = model_of(head_size)
    whole, part = whole_of(model, "NHD"), heads_of(3)
    cut: dict[str, Any] = {"store_shards": 4, "head_dim": 3, "ssd_past_dram": "always"}
    with engine(model, whole, part, tmp_path, **cut) as cluster:
        put(cluster, 0)
        cluster.manager.clear("CPU")
        expect(cluster, whole, part, "SSD", 0)
        assert ("DISK2D" in ops(cluster)) is (head_size == 64)
    with engine(replace(model, tp_size=2), whole, part, tmp_path, **cut) as cluster:
        expect(cluster, whole, part, "SSD", 0)
        put(cluster, 1)
    with engine(model, whole, part, tmp_path, **cut) as cluster:
        expect(cluster, whole, part, "SSD", 1)


# -- windows ---------------------------------------------------------------------------------------

GROUPS = (KVGroup("window", 32, 40), KVGroup("full", 16))
"""A window's block has twice the tokens of a full one's: units of two blocks."""


@contextmanager
def windowed_engine(tp_size: int, whole: Whole, store: Path) -> Iterator[tuple[KVManager, Any]]:
    model = model_of(tp_size=tp_size, groups=GROUPS, sized_by_ranks=True)
    config = CacheConfig(
        tokens_per_block=32, num_cpu_blocks=32, store_shards=HEADS, skip_slow_loads=False,
        **below("REMOTE", store),
    )  # fmt: skip
    with ExitStack() as stack:
        manager = stack.enter_context(KVManager(model, config))
        kv = [
            {name: heads_of(1)(tensor, model, rank).clone() for name, tensor in whole.items()}
            for rank in range(tp_size)
        ]
        for rank, tensors in enumerate(kv):
            client = stack.enter_context(KVTPClient(manager.endpoint, rank=rank))
            client.register_kv_caches(
                tensors, num_blocks=NUM_BLOCKS, groups=[["w"], ["f.0", "f.1"]], head_dim=1
            )
        manager.wait_ready(PATIENCE_S)
        yield manager, kv
        manager.check()


def test_windows_and_their_tails_are_shared_by_tensor_parallel_sizes(tmp_path: Path) -> None:
    whole = {
        name: random_like(NUM_BLOCKS, HEADS, tokens, 24, dtype=torch.bfloat16)
        for name, tokens in (("w", 32), ("f.0", 16), ("f.1", 16))
    }
    num_tokens = 32 * 3
    counts = [group.num_needed(num_tokens) for group in GROUPS]
    stored, loaded = ([list(range(first, first + n)) for n in counts] for first in (3, 30))

    def open_load(manager: KVManager) -> int:
        """Open a load of all, once the store's worker has told of it."""
        opened: list[int] = []

        def is_found() -> bool:
            task, mask = manager.get_match(np.arange(num_tokens + 1))
            if mask.sum() < num_tokens:
                manager.cancel([task])
                return False
            opened.append(task)
            return True

        until(is_found)
        return opened[0]

    def wait(manager: KVManager, task: int) -> None:
        done = manager.wait([task], PATIENCE_S, completely=True)[task]
        assert done.status is KVStatus.SUCCESS

    with windowed_engine(2, whole, tmp_path) as (manager, _):
        until(lambda: manager.stats()["tiers"]["REMOTE"]["available"])
        task, _ = manager.put_match(np.arange(num_tokens), tail_at=num_tokens)
        manager.launch([task], group_blocks=[stored])
        wait(manager, task)
    for tp_size in (1, 4):
        with windowed_engine(tp_size, whole, tmp_path) as (manager, kv):
            task = open_load(manager)
            for tensors in kv:
                for tensor in tensors.values():
                    tensor.zero_()
            manager.launch([task], group_blocks=[loaded])
            wait(manager, task)
            for rank, tensors in enumerate(kv):
                for name, tensor in tensors.items():
                    group = 0 if name == "w" else 1
                    held = heads_of(1)(whole[name], manager.model_config, rank)
                    assert torch.equal(
                        tensor[loaded[group]].view(torch.uint8),
                        held[stored[group]].view(torch.uint8),
                    )


# -- what is refused -------------------------------------------------------------------------------


def test_ranks_that_do_not_say_where_their_heads_are_are_refused_by_name() -> None:
    whole = whole_of(model_of(), "NHD")
    with (
        pytest.raises(RegistrationError, match=r"store_shards .*head_dim"),
        engine(model_of(), whole, heads_of(3), store_shards=2),
    ):
        pass
    with engine(model_of(tp_size=2), whole, heads_of(3), store_shards=2) as cluster:
        put(cluster, 0)  # nothing is cut


def test_states_are_refused_by_name() -> None:
    groups = KVGroup("full", 16), KVGroup("state", 16)
    model = model_of(groups=groups, sized_by_ranks=True)
    with pytest.raises(ConfigError, match=r"store_shards = 4: must be 1, .*states"):
        KVManager(model, CacheConfig(num_cpu_blocks=8, store_shards=4))
