"""Ranks of one engine that hold different KV: stages of several sizes, replicas that share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import NUM_GPU_BLOCKS, WAIT_S, Cluster, random_like, running_cluster, until

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
from flexcache.errors import ConfigError, RegistrationError
from flexcache.protocol.endpoints import private_endpoint
from flexcache.storage.pool_directory import DATA_FILE

SIZE = 16
TOKENS = np.arange(12 * SIZE)
SOURCE = [3, 1, 41, 5, 9, 2, 6, 53, 50, 20, 21, 22]
TARGET = [10, 60, 12, 13, 30, 31, 16, 17, 33, 34, 35, 36]
TP_SIZE = 2
LAYER_BYTES = 2 * SIZE * 2 * 32 * 2  # K and V, tokens, heads, head size, bytes
Tensors = dict[str, torch.Tensor]


def model_of(layers: Sequence[int], replicas: int = 1) -> ModelConfig:
    """A model whose stages have these numbers of layers, two ranks to a stage."""
    return ModelConfig(
        "staged", sum(layers), 4, 32, torch.bfloat16,
        tp_size=TP_SIZE, pp_size=len(layers), kv_replicas=replicas, sized_by_ranks=True,
    )  # fmt: skip


def make_ranks(layers: Sequence[int], replicas: int = 1) -> list[Tensors]:
    """KV tensors of every rank; replicas hold equal bytes."""
    ranks: list[Tensors] = []
    first = 0
    for count in layers:
        for tp_rank in range(TP_SIZE):
            if tp_rank % replicas:
                ranks.append({name: tensor.clone() for name, tensor in ranks[-1].items()})
                continue
            ranks.append({
                f"layer.{layer}": random_like(NUM_GPU_BLOCKS, 2, SIZE, 2, 32, dtype=torch.bfloat16)
                for layer in range(first, first + count)
            })  # fmt: skip
        first += count
    return ranks


def staged_cluster(
    layers: Sequence[int], ssd_dirs: Sequence[Path] = (), replicas: int = 1, **settings: Any
) -> AbstractContextManager[Cluster]:
    kv = iter(make_ranks(layers, replicas))
    return running_cluster(
        ssd_dirs, model=model_of(layers, replicas), make_kv=lambda *_: next(kv), **settings
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("layers", [(3, 1), (1, 2, 3)])
def test_unequal_stages_come_back_from_dram_and_ssd_byte_for_byte(
    layers: Sequence[int], replicas: int, tmp_path: Path
) -> None:
    with staged_cluster(layers, [tmp_path], replicas) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        for tier in ("DRAM", "SSD"):
            cluster.wipe(TARGET)
            assert cluster.get(TOKENS, TARGET).mask.all()
            assert cluster.read(TARGET) == expected, tier
            cluster.manager.clear("CPU")
        stats = cluster.manager.stats()
        num_shards = TP_SIZE // replicas
        assert stats["ops"]["D2H"]["bytes"] == 12 * sum(layers) * LAYER_BYTES * num_shards
        slot_bytes = sum(layers) * LAYER_BYTES * num_shards  # whole pages
        assert (tmp_path / DATA_FILE).stat().st_size == 4096 + 96 * slot_bytes


def test_unequal_stages_come_back_from_a_remote_store_to_another_engine(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_cpu_blocks": 192,
        "remote_url": f"file://{tmp_path}",
        "remote_lookup_timeout_s": 5.0,
        "server_timeout_s": 12.0,
        "skip_slow_loads": False,
    }
    with ExitStack() as stack:

        def engine(*layers: int) -> Cluster:
            cluster = stack.enter_context(staged_cluster(layers, **settings))
            until(lambda: not cluster.server.health()["missing"])  # it may not be connected yet
            return cluster

        one = engine(3, 1)
        expected = one.read(SOURCE)
        until(lambda: one.put(TOKENS, SOURCE) and count_files(tmp_path) == 12)
        other = engine(3, 1)
        until(lambda: other.get(TOKENS, TARGET).mask.all())
        assert other.read(TARGET) == expected
        assert not engine(2, 2).get(TOKENS, TARGET).mask.any()  # other bytes have other names


def count_files(directory: Path) -> int:
    return sum(path.is_file() and "models" not in path.parts for path in directory.rglob("*"))


def test_a_restart_finds_its_own_split_of_the_layers_and_refuses_another(tmp_path: Path) -> None:
    with staged_cluster((3, 1), [tmp_path]) as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
    with staged_cluster((3, 1), [tmp_path]) as cluster:
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
    with pytest.raises(RegistrationError) as refused, staged_cluster((2, 2), [tmp_path]):
        pass
    assert str(refused.value).count("3xbfloat16") == 2  # once for each rank of the first stage
    with staged_cluster((2, 2), [tmp_path], ssd_on_mismatch="clear") as cluster:
        assert not cluster.get(TOKENS, TARGET).mask.any()
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
        cluster.manager.clear("CPU")
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected


def test_before_its_ranks_have_told_their_sizes_a_cache_misses() -> None:
    ranks = make_ranks((3, 1))
    with KVManager(model_of((3, 1)), CacheConfig(num_cpu_blocks=48)) as manager:
        task_id, mask = manager.get_match(TOKENS)
        assert not mask.any()
        put, mask = manager.put_async(TOKENS, np.arange(len(TOKENS)))
        assert not mask.any()
        assert {r.status.name for r in manager.wait([task_id, put], 0).values()} == {"NOT_FOUND"}
        manager.cancel([task_id])
        manager.report_prefill(1000.0)
        assert manager.clear("CPU") == 0
        assert not manager.is_ready()
        manager.check()
        clients = [KVTPClient(manager.endpoint, rank=rank) for rank in range(4)]
        for client, kv in zip(clients[:3], ranks, strict=False):
            client.register_kv_caches(kv)
        until(lambda: manager._transport.server.hub.greeter.missing("") == ["rank 3"])
        clients[3].register_kv_caches(ranks[3])
        manager.wait_ready(WAIT_S)
        again, mask = manager.put_async(TOKENS, np.arange(len(TOKENS)))
        assert mask.all()
        assert manager.wait([again], WAIT_S)[again].mask.all()
        assert again > put > task_id
        for client in clients:
            client.close()


def test_a_size_that_does_not_fit_the_ranks_blocks_is_refused_when_they_are_known() -> None:
    ranks = make_ranks((1,))
    with KVManager(model_of((1,)), CacheConfig(cpu_cache_gb=1e-6)) as manager:
        clients = [KVTPClient(manager.endpoint, rank=rank) for rank in range(2)]
        for client, kv in zip(clients, ranks, strict=True):
            client.register_kv_caches(kv)
        with pytest.raises(ConfigError, match="cpu_cache_gb"):
            manager.wait_ready(WAIT_S)
        until(lambda: all("cpu_cache_gb" in str(client.error) for client in clients))
        for client in clients:
            client.close()


def test_a_shared_server_takes_the_sizes_of_the_first_engines_ranks() -> None:
    endpoint = private_endpoint("unequal")
    model, config = model_of((3, 1), replicas=2), CacheConfig(num_cpu_blocks=48)
    with ExitStack() as stack:
        engines = []
        for _ in range(2):
            manager = stack.enter_context(KVManager(model, config, endpoint=endpoint))
            ranks = make_ranks((3, 1), replicas=2)
            for rank, kv in enumerate(ranks):
                client = stack.enter_context(KVTPClient(manager.endpoint, rank=rank))
                client.register_kv_caches(kv)
            engines.append((manager, ranks))
        for manager, _ in engines:
            manager.wait_ready(WAIT_S)
        (one, stored), (other, loaded) = engines
        slots = np.arange(4 * SIZE)
        task_id, mask = one.put_async(TOKENS[: 4 * SIZE], slots)
        assert mask.all()
        assert one.wait([task_id], WAIT_S)[task_id].mask.all()
        task_id, mask = other.get_async(TOKENS[: 4 * SIZE], slots + 8 * SIZE)
        assert mask.all()
        assert other.wait([task_id], WAIT_S)[task_id].mask.all()
        for kv, from_kv in zip(loaded, stored, strict=True):
            for name, tensor in kv.items():
                assert torch.equal(
                    tensor[8:12].view(torch.uint8), from_kv[name][:4].view(torch.uint8)
                )
        stranger = KVManager(replace(model, kv_replicas=1), config, endpoint=endpoint)
        with stranger, pytest.raises(RegistrationError, match=r"tp=2,pp=2.*holds .*tp=1,pp=2"):
            stranger.wait_ready(WAIT_S)
