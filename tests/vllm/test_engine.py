"""The connector in a real vLLM engine, scheduler and worker in this process."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engine, make_prompt
from paths import MODELS
from probe_connector import compare_probes
from vllm import SamplingParams

from flexcache.integration.adapter import LayerwiseRule
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import locate_slot

pytestmark = pytest.mark.runners
BLOCK = 32
_seeds = itertools.count(1)


@pytest.fixture(autouse=True)
def _clean(engine: Engine) -> Any:
    engine.forget_all()
    for path in engine.probe_dir.glob("*.jsonl"):
        path.unlink()
    yield
    engine.drain()
    engine.manager.check()


def assert_bytes_equal(engine: Engine, num_blocks: int) -> None:
    seen = compare_probes(engine.probe_dir)
    assert seen["loaded"] == num_blocks
    assert seen["different"] == []


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 63, 64, 65, 500])
def test_a_prompt_comes_back_from_dram_with_equal_tokens_and_bytes(
    engine: Engine, num_tokens: int
) -> None:
    prompt = make_prompt(num_tokens, next(_seeds))
    cold = engine.generate(prompt)
    engine.forget_gpu()
    warm = engine.generate(prompt)
    assert warm.num_cached_tokens == num_tokens // BLOCK * BLOCK
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert_bytes_equal(engine, num_tokens // BLOCK)


def test_a_prompt_comes_back_from_ssd_when_dram_was_cleared(engine: Engine) -> None:
    prompt = make_prompt(700, next(_seeds))
    cold = engine.generate(prompt)
    engine.settle()
    engine.forget_gpu()
    assert engine.manager.clear("CPU") >= 700 // BLOCK
    before = engine.manager.stats()["tiers"]["SSD"]["read_bytes"]
    warm = engine.generate(prompt)
    assert warm.num_cached_tokens == 672
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert_bytes_equal(engine, 21)
    block_bytes = engine.manager.stats()["block_bytes"]
    assert engine.manager.stats()["tiers"]["SSD"]["read_bytes"] - before == 21 * block_bytes


def test_a_shared_prefix_is_loaded_and_the_rest_computed(engine: Engine) -> None:
    shared = make_prompt(300, next(_seeds))
    engine.generate(shared + make_prompt(100, next(_seeds)))
    other = shared + make_prompt(90, next(_seeds))
    engine.forget_gpu()
    warm = engine.generate(other)
    assert warm.num_cached_tokens == 288
    assert_bytes_equal(engine, 9)
    engine.forget_all()
    cold = engine.generate(other)
    assert cold.num_cached_tokens == 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_local_prefix_is_not_loaded_again(engine: Engine) -> None:
    prompt = make_prompt(400, next(_seeds))
    cold = engine.generate(prompt)
    engine.forget_gpu()
    engine.generate(prompt[:200])  # brings six blocks back to the GPU
    warm = engine.generate(prompt)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert_bytes_equal(engine, 12)  # each of the twelve once


def test_generated_tokens_are_stored_too(engine: Engine) -> None:
    prompt = make_prompt(40, next(_seeds))
    first = engine.generate(prompt, max_tokens=100)
    engine.forget_gpu()
    follow_up = prompt + list(first.outputs[0].token_ids) + [7, 8, 9]
    assert engine.generate(follow_up).num_cached_tokens == 128
    assert_bytes_equal(engine, 4)


def test_prompts_longer_than_a_scheduling_chunk_are_stored_and_loaded_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 96)
    prompt = make_prompt(1000, next(_seeds))
    cold = engine.generate(prompt)
    engine.forget_gpu()
    warm = engine.generate(prompt)
    assert warm.num_cached_tokens == 992
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert_bytes_equal(engine, 31)


def test_a_batch_that_shares_a_prefix_is_served_exactly(engine: Engine) -> None:
    shared = make_prompt(256, next(_seeds))
    prompts = [{"prompt_token_ids": shared + make_prompt(100, next(_seeds))} for _ in range(6)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    cold = engine.llm.generate(prompts, sampling, use_tqdm=False)
    engine.forget_gpu()
    warm = engine.llm.generate(prompts, sampling, use_tqdm=False)
    assert [w.outputs[0].token_ids for w in warm] == [c.outputs[0].token_ids for c in cold]
    assert all(w.num_cached_tokens >= 352 - 32 for w in warm)
    assert compare_probes(engine.probe_dir)["different"] == []


def test_cache_salt_keeps_tenants_apart(engine: Engine) -> None:
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt, cache_salt="alice")
    engine.forget_gpu()
    assert engine.generate(prompt, cache_salt="bob").num_cached_tokens == 0
    engine.forget_gpu()
    assert engine.generate(prompt).num_cached_tokens == 0
    engine.forget_gpu()
    assert engine.generate(prompt, cache_salt="alice").num_cached_tokens == 192


def test_a_request_for_the_log_probabilities_of_its_prompt_loads_nothing(engine: Engine) -> None:
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt)
    engine.forget_gpu()
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    [asked] = engine.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    assert asked.num_cached_tokens == 0
    assert len(asked.prompt_logprobs) == len(prompt)


def test_resetting_the_connector_drops_every_tier(engine: Engine) -> None:
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt)
    engine.forget_all()
    assert engine.generate(prompt).num_cached_tokens == 0


def test_the_scheduler_asking_again_and_again_makes_one_task(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(200, next(_seeds))
    cold = engine.generate(prompt)
    engine.settle()
    engine.forget_gpu()
    side = engine.scheduler.connector._scheduler
    calls: list[int] = []
    ask = side.gets.num_matched_tokens

    def ask_often(request: Any, num_computed: int) -> int:
        answers = {ask(request, num_computed) for _ in range(200)}
        assert len(answers) == 1
        calls.append(1)
        return answers.pop()

    monkeypatch.setattr(side.gets, "num_matched_tokens", ask_often)
    before = sum(engine.manager.stats()["ended_tasks"].values())
    warm = engine.generate(prompt)
    engine.settle()
    assert calls
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert sum(engine.manager.stats()["ended_tasks"].values()) - before <= 2  # a get and a put


def flip_dram_byte(engine: Engine, block: int) -> None:
    segment = engine.server.hub.cache.store.segments[0]
    mine = HostSegment.open(segment.ref())
    mine.map()
    view = np.frombuffer(mine.block(block), dtype=np.uint8)
    view[1000] ^= 0xFF
    del view
    mine.close()


def test_negative_control_a_byte_flipped_in_dram_is_seen_by_the_comparison(engine: Engine) -> None:
    prompt = make_prompt(300, next(_seeds))
    engine.generate(prompt)
    engine.forget_gpu()
    with engine.server.lock, engine.server.session() as tasks:
        index = tasks.cache.tiers.host.index
        flipped = next(iter(index._runs.values())).blocks[4]
    flip_dram_byte(engine, int(flipped))
    engine.generate(prompt)
    assert len(compare_probes(engine.probe_dir)["different"]) == 1


def test_a_byte_flipped_on_ssd_is_noticed_and_the_rest_recomputed(engine: Engine) -> None:
    prompt = make_prompt(600, next(_seeds))
    cold = engine.generate(prompt)
    engine.settle()
    engine.forget_gpu()
    engine.manager.clear("CPU")
    server = engine.server
    with server.lock, server.session() as tasks:
        slot = int(next(iter(tasks.cache.tiers.lower[0].index._runs.values())).blocks[7])
    pool, directory = server.hub.cache.store.disk_pool, server.config.ssd_cache_dirs[0]
    _, offset = locate_slot(slot, pool.data_fds, pool.slot_bytes)
    with (Path(directory) / DATA_FILE).open("r+b") as file:
        file.seek(offset + 77)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    warm = engine.generate(prompt)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    seen = compare_probes(engine.probe_dir)
    assert seen["different"] == []
    assert 0 < seen["loaded"] <= 7


def test_a_load_that_fails_altogether_is_recomputed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(300, next(_seeds))
    cold = engine.generate(prompt)
    engine.forget_gpu()

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "promise", refuse)
        patch.setattr(engine.manager, "launch", refuse)
        warm = engine.generate(prompt)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert compare_probes(engine.probe_dir)["loaded"] == 0


def test_aborting_while_a_load_runs_frees_everything(engine: Engine) -> None:
    prompt = make_prompt(1500, next(_seeds))
    engine.generate(prompt)
    engine.settle()
    for steps_before_abort in range(4):
        engine.forget_gpu()
        engine.manager.clear("CPU")
        request_id = f"aborted-{steps_before_abort}"
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        for _ in range(steps_before_abort):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request([request_id])
        engine.settle()
        engine.manager.check()
        stats = engine.manager.stats()
        assert stats["tiers"]["CPU"]["leased"] == stats["tiers"]["SSD"]["leased"] == 0
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    engine.forget_gpu()
    assert engine.generate(prompt).num_cached_tokens == 1472


def test_a_prompt_loaded_right_before_an_update_is_answered_right(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(300, next(_seeds))
    cold = engine.generate(prompt)
    engine.forget_gpu()
    side, num_updates = engine.connector._scheduler, 0
    ended = side.transfers_ended

    def update_on_arrival(received: Collection[str], bad_blocks: Collection[int]) -> None:
        nonlocal num_updates
        ended(received, bad_blocks)
        if received:  # with the same weights: what was loaded is right, if it may not be used
            num_updates += 1
            path = str(MODELS / "tiny")
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    monkeypatch.setattr(side, "transfers_ended", update_on_arrival)
    monkeypatch.setattr(side.gets, "layerwise", LayerwiseRule("off", None))
    warm = engine.generate(prompt)
    assert num_updates == 1
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    engine.forget_gpu()
    assert engine.generate(prompt).num_cached_tokens == 0  # stored under neither name


def test_connector_statistics_are_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    side = engine.scheduler.connector._scheduler
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt)
    engine.forget_gpu()
    take, side._has_news = side.take_stats, True
    take()
    with monkeypatch.context() as patch:
        patch.setattr(side, "take_stats", lambda: None)
        engine.generate(prompt)
        engine.drain()
    stats = take()
    assert stats is not None
    assert stats.data["dram_hit_tokens"] == 192
    assert stats.data["loaded_bytes"] == 6 * engine.manager.stats()["block_bytes"]
    reduced = stats.reduce()
    assert 0 < reduced["external_hit_rate"] <= 1


def test_statistics_are_rarely_read_while_requests_run_and_complete_when_the_last_has_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = engine.scheduler.connector._scheduler
    read, while_busy = side._cache.read_counters, list[bool]()

    def note_and_read() -> Any:
        while_busy.append(bool(side._admitted))
        return read()

    monkeypatch.setattr("flexcache.integration.vllm.scheduler._STATS_INTERVAL_S", 1e4)
    monkeypatch.setattr(side._cache, "read_counters", note_and_read)
    monkeypatch.setattr(side, "_stats_due_s", 0.0)
    engine.generate_all([make_prompt(200, next(_seeds)) for _ in range(12)])
    engine.drain()
    assert while_busy.count(True) == 1
    assert not while_busy[-1]
    now = read()
    for counter in ("stored_tokens", "missed_tokens"):
        assert side._reported[counter] == now[counter]


def test_hits_are_counted_by_tier_in_vllms_own_prometheus_metrics(engine: Engine) -> None:
    from prometheus_client import REGISTRY

    def value(name: str) -> float:
        return sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == name
        )

    before = value("vllm:flexcache_dram_hit_tokens_total")
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt)
    engine.forget_gpu()
    engine.generate(prompt)
    engine.drain()
    assert value("vllm:flexcache_dram_hit_tokens_total") - before == 192
