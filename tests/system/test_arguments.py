"""Wrong arguments of the public calls are refused by name, and nothing has changed afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster, running_cluster

from flexcache import CacheConfig, ClosedError, KVManager, KVStatus, KVTPClient, ModelConfig

MODEL = ModelConfig("m", 1, 1, 8, torch.float32)
CONFIG = CacheConfig(num_cpu_blocks=8)
TOKENS = np.arange(64)
HUGE = 10**400
NO_TIMEOUTS = ("a", [1], True, math.nan)
NO_RATES = ("x", None, True, [1], 0, -1, HUGE, math.inf, math.nan)
NO_RANKS = (-1, "x", None, 1.5, True, 2**70)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        cluster.await_copy_thread()  # it stays until the cluster is closed
        yield cluster


def name_of(value: object) -> str:
    return repr(value)[:20].replace("\n", " ")


def refused(call: Callable[[Any], object], named: str, *values: object) -> list[Any]:
    """One row per value that the call must refuse under this name."""
    return [pytest.param(call, value, named, id=f"{named} {name_of(value)}") for value in values]


def launched(**arguments: Any) -> Callable[[Cluster], object]:
    def launch(cluster: Cluster) -> object:
        task_id, _ = cluster.manager.put_match(TOKENS)
        try:
            return cluster.manager.launch([task_id], **arguments)
        finally:
            cluster.manager.cancel([task_id])

    return launch


@pytest.mark.parametrize(
    ("call", "value", "named"),
    [
        *refused(lambda c, v: c.manager.wait([], v), "timeout", *NO_TIMEOUTS),
        *refused(lambda c, v: c.manager.wait_ready(v), "timeout", *NO_TIMEOUTS),
        *refused(lambda c, v: c.clients[0].wait_registered(v), "timeout", *NO_TIMEOUTS),
        *refused(lambda c, v: c.clients[0].wait_ended(v), "timeout", *NO_TIMEOUTS),
        *refused(lambda c, v: c.clients[0].wait_held(1, 1, v), "timeout", *NO_TIMEOUTS),
        *refused(lambda c, v: c.manager.report_prefill(v), "tokens_per_s", *NO_RATES),
        *refused(lambda c, v: c.manager.clear(v), "CPU", None, 1, "cpu", "GPU", ["CPU"], "SSD"),
        *refused(lambda c, v: c.manager.wait(v), "task_ids", None, 5, [None], "ab", [[]], [1.0]),
        *refused(lambda c, v: c.manager.try_wait(v), "task_ids", None, 5, [None]),
        *refused(lambda c, v: c.manager.cancel(v), "task_ids", None, 5, [None]),
        *refused(lambda c, v: c.manager.launch(v, [TOKENS]), "task_ids", None, 5, [None]),
        *refused(
            lambda c, v: c.manager.get_match_by_tier(TOKENS, look_up=v), "look_up", "x", None, 2
        ),
        *refused(
            lambda c, v: c.manager.get_match_by_tier(TOKENS, awaits_loads=v), "awaits_loads",
            "x", None, 2,
        ),
        *refused(
            lambda c, v: c.manager.put_match(TOKENS, tail_at=v), "tail_at", "a", 16.0, [16], 16
        ),
        *refused(lambda c, v: c.manager.put_match(TOKENS, store=v), "store", "x", None, 0),
        *refused(
            lambda c, v: c.manager.put_match(TOKENS, max_store_tokens=v), "max_store_tokens",
            "x", -1, 16.0, True, HUGE,
        ),
        *refused(
            lambda c, v: launched(slot_mappings=v)(c), "slot_mappings",
            None, 5, [None], [range(63)], [range(1, 65)], [range(-64, 0)], [[[1], [2, 3]]],
        ),
        *refused(
            lambda c, v: launched(group_blocks=v)(c), "group_blocks",
            5, [None], [5], [[None]], [[[-1, 1, 2, 3]]], [[[0.5]]], [[[0], [1]]], [[[[1], [2, 3]]]],
        ),
        *refused(
            lambda c, v: launched(slot_mappings=[TOKENS], gated=v)(c), "gated", "x", None, 1
        ),
        *refused(
            lambda c, v: c.manager.put_async(TOKENS, v), "slot_mapping",
            None, range(63), TOKENS + 3, TOKENS - 64, [[1], [2, 3]],
        ),
    ],
)  # fmt: skip
def test_a_call_refuses_it(
    cluster: Cluster, call: Callable[[Cluster, object], object], value: object, named: str
) -> None:
    before = cluster.manager.stats()["tiers"]
    with pytest.raises(ValueError, match=named):
        call(cluster, value)
    after = cluster.manager.stats()["tiers"]
    assert [tier["indexed"] for tier in after.values()] == [
        tier["indexed"] for tier in before.values()
    ]
    assert cluster.num_leased() == 0


@pytest.mark.parametrize("timeout", [None, 30, 30.0, np.float32(30), HUGE, math.inf])
def test_a_long_timeout_is_one(cluster: Cluster, timeout: Any) -> None:
    cluster.manager.wait_ready(timeout)
    cluster.clients[0].wait_registered(timeout)
    task_id, _ = cluster.manager.put_async(TOKENS, cluster.slots(range(4)))
    response = cluster.manager.wait([np.uint64(task_id)], timeout)[task_id]  # type: ignore[list-item]
    assert response.status in (KVStatus.SUCCESS, KVStatus.NOT_FOUND)


@pytest.mark.parametrize("timeout", [-1, -1e-6, -HUGE])
def test_a_deadline_that_has_passed_is_no_error(cluster: Cluster, timeout: Any) -> None:
    cluster.manager.wait_ready(timeout)
    cluster.clients[0].wait_registered(timeout)
    task_id, _ = cluster.manager.put_match(TOKENS + 10**6)
    response = cluster.manager.wait([task_id], timeout)[task_id]
    assert response.status is KVStatus.TIMEOUT
    cluster.manager.cancel([task_id])


def manager(**changes: Any) -> KVManager:
    return KVManager(**{"model_config": MODEL, "cache_config": CONFIG, **changes})


def client(**changes: Any) -> KVTPClient:
    return KVTPClient(**{"endpoint": "ipc:///tmp/none", **changes})


@pytest.mark.parametrize(
    ("make", "argument", "values"),
    [
        (manager, "model_config", [None, CONFIG, {}]),
        (manager, "cache_config", [None, MODEL, {"num_cpu_blocks": 4}]),
        (manager, "endpoint", [5, "foo"]),
        (manager, "dp_rank", [*NO_RANKS, 1]),
        (manager, "engine_id", [5, None, "\ud800", "x" * 253]),
        (client, "endpoint", [None, 5, "foo"]),
        (client, "tp_rank", NO_RANKS),
        (client, "rank", [-1, "x", 1.5, True, 2**70]),
        (client, "dp_rank", NO_RANKS),
        (client, "engine_id", [5, None, "\ud800", "x" * 253]),
        (client, "server_timeout_s", NO_RATES),
        (client, "curve_keys", [5, "", "/nonexistent"]),
    ],
)
def test_a_constructor_refuses_it(
    make: Callable[..., object], argument: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=argument):
            make(**{argument: value})


def test_a_groups_size_may_be_unknown_to_its_engines(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/cache.sock"
    manager(endpoint=endpoint, dp_rank=7).shutdown()
    with pytest.raises(ValueError, match=r"dp_rank = 7: .* below 2"):
        KVManager(ModelConfig("m", 1, 1, 8, torch.float32, dp_size=2), CONFIG, dp_rank=7)


def test_an_engines_id_may_be_as_long_as_a_greeting_admits() -> None:
    kv = {"a": torch.zeros(8, 2, 16, 1, 8)}
    with manager(engine_id="x" * 252) as cache, client(endpoint=cache.endpoint) as rank:
        rank.register_kv_caches(kv)
        cache.wait_ready(60)


@pytest.mark.parametrize("kv_caches", [None, 5, [torch.zeros(1)], {1: torch.zeros(8, 2, 16, 1, 8)}])
def test_tensors_without_names_are_refused(kv_caches: Any) -> None:
    with client() as rank:
        with pytest.raises(ValueError, match=r"kv_caches = .*must be a dict from names"):
            rank.register_kv_caches(kv_caches)
        for dim, why in (("x", "must be the number of a dimension"), (0, "must differ")):
            with pytest.raises(ValueError, match=f"head_dim = {dim!r}: {why}|head_dim.*{why}"):
                rank.register_kv_caches({}, head_dim=dim)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="kv_replicas = 'x'"):
            rank.register_kv_caches({}, kv_replicas="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_cache_that_was_not_started_says_so(tmp_path: Path, is_shared: bool) -> None:
    cache = manager(endpoint=f"ipc://{tmp_path}/cache.sock") if is_shared else manager()
    calls: list[Callable[[], object]] = [
        lambda: cache.get_match(TOKENS),
        lambda: cache.put_match(TOKENS),
        lambda: cache.get_match_by_tier(TOKENS),
        lambda: cache.get_match_by_tier(TOKENS, look_up="only"),
        lambda: cache.prefetch_async(TOKENS),
        lambda: cache.wait_ready(0),
        lambda: cache.report_prefill(1.0),
        lambda: cache.session_hint("a", over=True),
        lambda: cache.clear("CPU"),
        cache.reset,
        cache.stats,
        cache.check,
    ]
    try:
        assert not cache.is_ready()
        for call in calls:
            with pytest.raises(ClosedError, match=r"call start\(\)"):
                call()
    finally:
        cache.shutdown()
    for call in calls:
        with pytest.raises(ClosedError, match="was shut down"):
            call()
