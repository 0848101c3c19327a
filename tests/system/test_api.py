"""The public API's promises, at its edges."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster, joined_kv, running_cluster

import flexcache
import flexcache.errors
from flexcache import CacheConfig, KVManager, KVResponse, KVStatus, KVTPClient, ModelConfig
from flexcache.client.rank import ClientState
from flexcache.errors import ClosedError


def test_the_public_names_exist() -> None:
    own = ("KVManager", "KVTPClient", "KVResponse", "KVStatus", "ModelConfig", "CacheConfig",
           "KVGroup", "Pin", "RequestInfo", "TierName")  # fmt: skip
    errors = [
        name for name, value in vars(flexcache.errors).items()
        if isinstance(value, type) and issubclass(value, flexcache.errors.FlexCacheError)
    ]  # fmt: skip
    assert "ServerLostError" in errors
    for name in (*own, *errors):
        assert getattr(flexcache, name).__name__ == name
        assert name in dir(flexcache)
    with pytest.raises(AttributeError, match="no attribute 'KVCache'"):
        _ = flexcache.KVCache  # type: ignore[attr-defined]


def test_a_ranks_client_is_closed_at_the_end_of_its_with_block() -> None:
    with running_cluster() as cluster:
        cluster.clients.pop().close()
        with KVTPClient(cluster.manager.endpoint) as client:
            client.register_kv_caches(cluster.kv[0])
            client.wait_registered(30)
            assert client.state is ClientState.SERVING
        assert client.state is ClientState.CLOSED


def test_responses_are_equal_if_all_their_fields_are() -> None:
    def response(*mask: bool, error: str | None = None) -> KVResponse:
        return KVResponse(KVStatus.SUCCESS, np.array(mask, dtype=np.bool_), error)

    first = response(True, False)
    assert first == first
    assert first == response(True, False)
    assert first != response(True, True)
    assert first != response(True)
    assert first != response(True, False, error="lost")
    assert first != KVResponse(KVStatus.FAILED, first.mask)
    assert first != (first.status, first.mask, first.error)
    with pytest.raises(TypeError, match="unhashable type: 'KVResponse'"):
        hash(first)


def test_importing_needs_neither_vllm_nor_cuda_nor_liburing_and_names_what_is_missing() -> None:
    script = """
import sys
for missing in ("vllm", "liburing", "numba", "cuda", "obstore", "mooncake"):
    sys.modules[missing] = None
import flexcache
import flexcache.errors
from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
import torch
from flexcache.errors import MissingDependencyError
from flexcache.storage.block_io import io_uring_problem, open_block_io
try:
    import flexcache.storage.block_io as uring
    uring.UringBlockIO(4)
except MissingDependencyError as error:
    assert "liburing" in str(error), error
else:
    raise SystemExit("liburing was not missed")
try:
    import flexcache.integration.vllm
except MissingDependencyError as error:
    assert "vLLM" in str(error), error
else:
    raise SystemExit("vllm was not missed")
model = ModelConfig("m", 2, 2, 16, torch.float32)
kv = {"a": torch.rand(8, 2, 16, 2, 16), "b": torch.rand(8, 2, 16, 2, 16)}
with KVManager(model, CacheConfig(num_cpu_blocks=8)) as manager:
    client = KVTPClient(manager.endpoint)
    client.register_kv_caches(kv)
    manager.wait_ready(30)
    task, mask = manager.put_async(list(range(64)), list(range(64)))
    assert manager.wait([task], 30)[task].mask.all()
    client.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_worker_processes_start_without_torch() -> None:
    script = "import sys, flexcache.transfer.disk_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_a_prompt_shorter_than_a_block_is_an_empty_match(num_tokens: int) -> None:
    with running_cluster() as cluster:
        for match in (cluster.manager.get_match, cluster.manager.put_match):
            task_id, mask = match(list(range(num_tokens)))
            assert mask.shape == (num_tokens,)
            assert not mask.any()
            response = cluster.manager.wait([task_id], 60)[task_id]
            assert response.status is KVStatus.NOT_FOUND
        assert cluster.num_leased() == 0


def test_only_whole_wanted_blocks_count_and_what_is_cached_is_skipped() -> None:
    with running_cluster() as cluster:
        manager = cluster.manager
        tokens = np.arange(100)
        task_id, mask = manager.put_match(tokens)
        assert mask.sum() == 96
        manager.launch([task_id], [cluster.slots(range(6))])
        manager.wait([task_id], 30, completely=True)
        longer = np.arange(150)
        task_id, mask = manager.put_match(longer)
        assert not mask[:96].any()
        assert mask[96:144].all()
        assert not mask[144:].any()
        manager.cancel([task_id])
        wanted = np.ones(100, dtype=bool)
        wanted[:32] = False
        task_id, mask = manager.get_match(tokens, wanted)
        assert mask.nonzero()[0].tolist() == list(range(32, 96))
        manager.cancel([task_id])
        wanted[:40] = False  # not on a block border: the block it cuts is not supplied
        task_id, mask = manager.get_match(tokens, wanted)
        assert mask.nonzero()[0].tolist() == list(range(48, 96))
        manager.cancel([task_id])


def test_a_range_of_positions_serves_in_place_of_a_mask() -> None:
    with running_cluster() as cluster:
        manager, tokens = cluster.manager, np.arange(64)
        for stop in (32, 64):  # of the second half's prompt, the first is cached
            put, stored = manager.put_async(tokens, cluster.slots(range(stop // 16)), range(stop))
            assert stored.nonzero()[0].tolist() == list(range(stop - 32, stop))
            manager.wait([put], 30, completely=True)
        half_cached = np.concatenate((tokens[:32], tokens[32:] + 1000))
        mask = np.arange(64) >= 16
        for needed in (range(16, 64), mask):
            get, loaded = manager.get_async(half_cached, cluster.slots(range(4, 7)), needed)
            assert loaded.nonzero()[0].tolist() == list(range(16, 32))
            assert manager.wait([get], 30)[get].status is KVStatus.SUCCESS


def test_bad_arguments_change_nothing() -> None:
    with running_cluster() as cluster:
        manager, tokens = cluster.manager, np.arange(64)
        before = manager.stats()["tiers"]
        for bad in (
            lambda: manager.get_match(tokens, np.ones(63, dtype=bool)),
            lambda: manager.get_match(tokens, np.ones(64)),
            lambda: manager.put_match(np.zeros((2, 8), dtype=int)),
            lambda: manager.put_match(np.arange(64.0)),
            lambda: manager.put_async(tokens, np.arange(63)),
            lambda: manager.put_async(tokens, np.arange(64) + 3),
            lambda: manager.put_async(tokens, np.arange(64)[::-1].copy()),
            lambda: manager.put_async(tokens, np.arange(64) - 16),
            lambda: manager.get_match(tokens, namespace=7),  # type: ignore[arg-type]
            lambda: manager.clear("GPU"),
            lambda: manager.get_match(tokens, block_keys=[bytes(41)] * 4),
            lambda: manager.get_match(tokens, block_keys=[1, 2, 3, 4]),  # type: ignore[list-item]
            lambda: manager.put_match(tokens, block_keys=["keys"] * 4),  # type: ignore[list-item]
            lambda: manager.put_match(tokens, block_keys=[b"1", b"2", 3]),  # type: ignore[list-item]
            lambda: manager.put_match(tokens, priority="high"),  # type: ignore[arg-type]
            lambda: manager.put_match(tokens, priority=1.5),  # type: ignore[arg-type]
            lambda: manager.put_match(tokens, ttl_s="10"),  # type: ignore[arg-type]
            lambda: manager.put_match(tokens, ttl_s=-1.0),
            lambda: manager.put_match(tokens, ttl_s=float("inf")),
            lambda: manager.put_match(tokens, ttl_s=10**400),
            lambda: manager.session_hint("a", returns_in_s=10**400),
            lambda: manager.report_prefill(0.0),
        ):
            with pytest.raises(ValueError):
                bad()
        for unknown in (manager.cancel, manager.wait, manager.try_wait):
            with pytest.raises(KeyError):
                unknown([999_999])
        assert manager.stats()["tiers"] == before
        assert cluster.num_leased() == 0


def test_a_prompt_with_a_higher_priority_outlives_the_others() -> None:
    with running_cluster(num_cpu_blocks=8) as cluster:
        manager = cluster.manager
        prompts = [np.arange(64) + 1000 * number for number in range(4)]
        for number, tokens in enumerate(prompts):
            task_id, _ = manager.put_async(
                tokens, cluster.slots(range(4)), priority=int(number == 1), ttl_s=5.0
            )
            assert manager.wait([task_id], 30)[task_id].status is KVStatus.SUCCESS
        kept = []
        for tokens in prompts:
            task_id, mask = manager.get_match(tokens)
            manager.cancel([task_id])
            kept.append(bool(mask.all()))
        assert kept == [False, True, False, True]


def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    ssd = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path)]}
    with running_cluster(num_cpu_blocks=32, **ssd) as cluster:
        manager, tokens = cluster.manager, np.arange(100)

        def put(**hints: Any) -> int:
            task_id, mask = manager.put_async(tokens, np.arange(96), range(96), **hints)
            manager.wait([task_id], 30, completely=True)
            matched, by_match = manager.put_match(tokens, **hints)
            manager.cancel([matched])
            assert not by_match.any()
            tiers = manager.stats()["tiers"]
            assert tiers["CPU"]["indexed"] == tiers["SSD"]["indexed"]
            assert int(mask.sum()) % 16 == 0
            return int(tiers["CPU"]["indexed"])

        assert put(store=False) == put(max_store_tokens=15) == put(max_store_tokens=0) == 0
        assert put(store=False, max_store_tokens=50) == 0
        assert put(max_store_tokens=50) == 3
        assert put(store=False) == put(max_store_tokens=16) == 3
        task_id, mask = manager.put_match(tokens, range(64, 96), max_store_tokens=70)
        manager.cancel([task_id])
        assert not mask.any()
        assert put(max_store_tokens=1000) == 6


def test_launching_twice_and_with_wrong_slots_is_refused() -> None:
    with running_cluster() as cluster:
        manager, tokens = cluster.manager, np.arange(64)
        task_id, _ = manager.put_match(tokens)
        with pytest.raises(ValueError, match="4 blocks, 3 were given"):
            manager.launch([task_id], [cluster.slots([0, 1, 2])])
        manager.launch([task_id], [cluster.slots([0, 1, 2, 3])])
        with pytest.raises(ValueError, match="launched before"):
            manager.launch([task_id], [cluster.slots([0, 1, 2, 3])])
        assert manager.wait([task_id], 30)[task_id].status is KVStatus.SUCCESS


def test_a_model_without_groups_may_be_given_the_ids_of_its_only_groups_blocks() -> None:
    with running_cluster() as cluster:
        manager, expected = cluster.manager, cluster.read([5, 3])
        task_id, _ = manager.put_match(np.arange(32))
        with pytest.raises(ValueError, match="blocks for 2 groups of a model without groups"):
            manager.launch([task_id], group_blocks=[[[5, 3], [1, 2]]])
        with pytest.raises(ValueError, match="must not be negative"):
            manager.launch([task_id], group_blocks=[[[5, -3]]])
        with pytest.raises(ValueError, match="needs slots for 2 blocks, 3 were given"):
            manager.launch([task_id], group_blocks=[[[5, 3, 1]]])
        with pytest.raises(ValueError, match="not both"):
            manager.launch([task_id], [cluster.slots([5, 3])], group_blocks=[[[5, 3]]])
        manager.launch([task_id], group_blocks=[[np.array([5, 3])]])
        assert manager.wait([task_id], 30)[task_id].mask.all()
        assert cluster.get(np.arange(32), [8, 9]).mask.all()
        assert cluster.read([8, 9]) == expected


def test_a_slot_beyond_the_engines_blocks_fails_and_touches_nothing() -> None:
    with running_cluster() as cluster:
        blocks = [*range(15), 64]
        task_id, _ = cluster.manager.put_async(np.arange(256), cluster.slots(blocks))
        response = cluster.manager.wait([task_id], 30)[task_id]
        assert response.mask.sum() == 128  # the chunk with the bad slot was refused whole
        assert "GPU block" in (response.error or "")


def test_wait_returns_timeout_and_the_task_goes_on() -> None:
    with running_cluster() as cluster:
        task_id, _ = cluster.manager.put_match(np.arange(64))
        assert cluster.manager.wait([task_id], 0)[task_id].status is KVStatus.TIMEOUT
        assert cluster.manager.try_wait([task_id]) == {}
        cluster.manager.launch([task_id], [cluster.slots([0, 1, 2, 3])])
        assert cluster.manager.wait([task_id], 30)[task_id].status is KVStatus.SUCCESS
        assert cluster.manager.try_wait([task_id])[task_id].status is KVStatus.SUCCESS


def test_cancel_before_the_launch_frees_the_blocks_and_is_idempotent() -> None:
    with running_cluster() as cluster:
        task_id, _ = cluster.manager.put_match(np.arange(64))
        assert cluster.num_leased() == 4
        cluster.manager.cancel([task_id])
        cluster.manager.cancel([task_id])
        assert cluster.num_leased() == 0
        assert cluster.manager.wait([task_id], 60)[task_id].status is KVStatus.CANCELLED
        assert cluster.put(np.arange(64), [0, 1, 2, 3]).mask.all()


def test_block_keys_replace_tokens_which_are_then_never_read() -> None:
    class Opaque:
        def __len__(self) -> int:
            return 70

    with running_cluster() as cluster:
        keys = [bytes([i]) * 32 for i in range(4)]
        manager = cluster.manager
        task_id, mask = manager.put_match(Opaque(), block_keys=keys)  # type: ignore[arg-type]
        assert mask.sum() == 64
        manager.launch([task_id], [cluster.slots([0, 1, 2, 3])])
        manager.wait([task_id], 30, completely=True)
        task_id, mask = manager.get_match(Opaque(), block_keys=keys)  # type: ignore[arg-type]
        assert mask.sum() == 64
        manager.cancel([task_id])


def test_gated_ops_wait_for_the_workers_gate() -> None:
    with running_cluster() as cluster:
        task_id, _ = cluster.manager.put_match(np.arange(64))
        cluster.manager.launch([task_id], [cluster.slots([0, 1, 2, 3])], gated=True)
        client = cluster.clients[0]
        assert not client.wait_ended(0.2)
        other, _ = cluster.manager.put_match(np.arange(64, 128))
        cluster.manager.launch([other], [cluster.slots([4, 5, 6, 7])], gated=True)
        client.open_gates([task_id])
        assert client.wait_ended(30)
        assert client.wait_ended(30, [other, task_id])
        assert not client.wait_ended(0.2, [other])  # though the end of another was not taken
        assert client.take_ended([task_id]) == {task_id: 4}
        assert client.take_ended([task_id]) == {}


def test_many_may_shut_down_and_close_at_once() -> None:
    for _ in range(5):
        cluster = Cluster(
            ModelConfig("test", 1, 1, 8, torch.uint8), CacheConfig(num_cpu_blocks=4), joined_kv
        )
        cluster.start()
        [client] = cluster.clients
        calls = [cluster.manager.shutdown, client.close] * 4
        barrier = threading.Barrier(len(calls))

        def end(call: Callable[[], None], barrier: threading.Barrier = barrier) -> None:
            barrier.wait(60.0)
            call()

        with ThreadPoolExecutor(len(calls)) as callers:
            list(callers.map(end, calls))
        assert client.state is ClientState.CLOSED
        with pytest.raises(ClosedError):
            cluster.manager.get_match(np.arange(16))


def test_shutdown_wakes_waiting_callers() -> None:
    model = ModelConfig("m", 1, 1, 8, torch.float32)
    cluster = Cluster(model, CacheConfig(num_cpu_blocks=8), joined_kv)
    cluster.start()
    task_id, _ = cluster.manager.put_match(np.arange(64))
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            cluster.manager.wait([task_id])
        except ClosedError as error:
            seen.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    cluster.manager.shutdown()
    waiter.join(30)
    assert len(seen) == 1
    cluster.stop()
    with pytest.raises(ClosedError):
        cluster.manager.get_match(np.arange(64))


def test_many_threads_may_use_one_manager(tmp_path: Path) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=32) as cluster:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                rng = np.random.default_rng(seed)
                for _ in range(20):
                    tokens = np.arange(int(rng.integers(1, 6)) * 16) + 100 * int(rng.integers(4))
                    blocks = [seed * 8 + i for i in range(len(tokens) // 16)]
                    (cluster.put if rng.random() < 0.5 else cluster.get)(tokens, blocks)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
        cluster.manager.check()
        assert cluster.num_leased() == 0


def test_a_pool_larger_than_memory_is_refused() -> None:
    model = ModelConfig("m", 1, 1, 8, torch.float32)
    with pytest.raises(flexcache.errors.ConfigError, match="larger than this machine's memory"):
        KVManager(model, CacheConfig(cpu_cache_gb=1e6))


def test_without_its_server_a_client_reports_that_nothing_arrived() -> None:
    with running_cluster() as cluster:
        task_id, _ = cluster.manager.put_match(np.arange(64))
        cluster.manager.launch([task_id], [cluster.slots([0, 1, 2, 3])], gated=True)
        client = cluster.clients[0]
        assert client.take_ended([task_id]) == {}
        client.close()
        assert client.take_ended([task_id]) == {task_id: 0}
