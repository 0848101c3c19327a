"""Puts during a request, by reference to its GPU blocks, in a real vLLM engine in this process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import Engine, make_prompt
from probe_connector import compare_probes
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

pytestmark = pytest.mark.runners
BLOCK = 32
_seeds = itertools.count(9001)


class Gates:
    """The gates of the worker's tasks, as long as they are kept shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = get_kv_transfer_group()._worker.client
        self._patch = monkeypatch
        self._waiting: list[int] = []
        monkeypatch.setattr(self._client, "open_gates", self._waiting.extend)

    def open(self) -> None:
        self._patch.undo()
        self._client.open_gates(self._waiting)


@pytest.fixture(autouse=True)
def _clean(engine: Engine) -> Iterator[None]:
    engine.forget_all()
    for path in engine.probe_dir.glob("*.jsonl"):
        path.unlink()
    yield
    engine.settle()
    engine.manager.check()
    engine.scheduler.connector._scheduler.check_idle()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    worker = get_kv_transfer_group()._worker
    deadline_s = time.monotonic() + 60
    while worker._stores and time.monotonic() < deadline_s:
        worker.take_received()  # after a reset no step does that
    assert not (worker._stores or worker.client.wait_ended(0))


@pytest.fixture
def gates(engine: Engine) -> Iterator[Gates]:
    with pytest.MonkeyPatch.context() as patch:
        shut = Gates(patch)
        yield shut
        shut.open()
        engine.drain()


def start(
    engine: Engine, request_id: str, prompt: list[int], max_tokens: int, **hints: Any
) -> None:
    params = {f"flexcache_{name}": hint for name, hint in hints.items()}
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )  # fmt: skip
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)


def step_until_pinned(engine: Engine) -> None:
    for _ in range(10):
        if num_pinned(engine):
            return
        engine.llm.llm_engine.step()
    raise AssertionError("nothing is being stored")


def num_pinned(engine: Engine) -> int:
    return sum(map(len, engine.scheduler.connector._scheduler.puts._pinned.values()))


def num_used(engine: Engine) -> int:
    """GPU blocks in use, but for those that vLLM frees once a step in flight has ended."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    late = [block for _, blocks in engine.scheduler.deferred_frees for block in blocks]
    num_late = sum(block.ref_cnt == 1 for block in late)
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) - num_late


def num_stored(engine: Engine) -> int:
    return int(engine.manager.stats()["tiers"]["CPU"]["indexed"])


def copied_blocks(engine: Engine) -> int:
    return int(engine.manager.stats()["ops"]["D2H"]["blocks"])


def serve_again(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt came from a cache other than the GPU's."""
    engine.forget_gpu()
    output = engine.generate(prompt)
    assert compare_probes(engine.probe_dir)["different"] == []
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_a_prompt_is_stored_while_its_answer_is_generated(engine: Engine) -> None:
    prompt = make_prompt(200, next(_seeds))
    start(engine, "long", prompt, max_tokens=1500)
    step_until_pinned(engine)
    while num_pinned(engine):
        engine.llm.llm_engine.step()
    (request,) = engine.scheduler.running
    assert request.num_output_tokens < 1400
    assert num_stored(engine) == 200 // BLOCK
    engine.llm.llm_engine.abort_request(["long"])


def test_a_prompt_computed_in_several_steps_is_stored_after_the_last(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 96)
    start(engine, "chunks", make_prompt(300, next(_seeds)), max_tokens=1500)
    computed = []
    while not num_pinned(engine):
        engine.llm.llm_engine.step()
        computed.append(engine.scheduler.running[0].num_computed_tokens)
    assert computed == [96, 192, 288]
    assert num_pinned(engine) == 300 // BLOCK
    engine.llm.llm_engine.abort_request(["chunks"])


def test_the_answer_is_stored_at_the_end_and_nothing_twice(engine: Engine) -> None:
    prompt, before = make_prompt(200, next(_seeds)), copied_blocks(engine)
    first = engine.generate(prompt, max_tokens=100)
    engine.settle()
    assert copied_blocks(engine) - before == num_stored(engine) == (200 + 99) // BLOCK
    follow_up = prompt + list(first.outputs[0].token_ids) + [7]
    assert serve_again(engine, follow_up)[1] == (200 + 99) // BLOCK * BLOCK


@pytest.mark.parametrize("end", ["abort", "preemption"])
def test_a_running_answer_is_stored_at_intervals_and_at_its_end(
    end: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval, scheduler = 2 * BLOCK, engine.scheduler
    puts = scheduler.connector._scheduler.puts
    points = dataclasses.replace(puts._points, answer_interval=interval)
    monkeypatch.setattr(puts, "_points", points)
    prompt = make_prompt(200, next(_seeds))
    start(engine, "long", prompt, max_tokens=180)
    step_until_pinned(engine)
    (request,) = scheduler.running
    while request.num_output_tokens < 160 or num_pinned(engine):
        engine.llm.llm_engine.step()
    num_lost = request.num_tokens - num_stored(engine) * BLOCK
    assert num_lost < interval + 10  # steps in which the last ones are copied
    if end == "abort":
        engine.llm.llm_engine.abort_request(["long"])
        num_known = request.num_computed_tokens - request.num_in_flight_tokens
        engine.settle()
        assert num_stored(engine) == num_known // BLOCK
    else:
        scheduler._preempt_request(scheduler.running.pop(), 0.0)
        engine.settle()
        assert num_stored(engine) == (200 + 179) // BLOCK
    follow_up = [*prompt, *request.output_token_ids, 7]
    assert serve_again(engine, follow_up)[1] == num_stored(engine) * BLOCK


def test_hints_keep_an_answer_out_of_the_cache_or_pin_its_prompt(engine: Engine) -> None:
    start(engine, "private", make_prompt(200, next(_seeds)), 60, store=False)
    engine.settle()
    tiers = engine.manager.stats()["tiers"]
    assert [tier["indexed"] for tier in tiers.values()] == [0, 0]
    start(engine, "short", make_prompt(200, next(_seeds)), 60, max_store_tokens=100)
    engine.settle()
    assert num_stored(engine) == 100 // BLOCK
    prompt, before = make_prompt(200, next(_seeds)), engine.manager.stats()["control"]["calls"]
    start(engine, "pinned", prompt, 60, pin_ttl_s=600)
    engine.settle()
    assert engine.manager.stats()["tiers"]["CPU"]["pinned"] == 200 // BLOCK
    start(engine, "stored", prompt, 8, pin_ttl_s=600)
    engine.settle()
    calls = engine.manager.stats()["control"]["calls"]
    assert calls["pin"] - before.get("pin", 0) == 2
    assert engine.manager.stats()["tiers"]["CPU"]["pinned"] == 200 // BLOCK


def test_a_put_is_matched_only_if_there_is_something_new(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[range] = []
    cache = engine.scheduler.connector._scheduler._cache
    match_put = cache.match_put

    def note(request: Any, first: int, stop: int, has_tail: bool) -> Any:
        offered.append(range(first, stop))
        return match_put(request, first, stop, has_tail)

    monkeypatch.setattr(cache, "match_put", note)
    prompt = make_prompt(200, next(_seeds))
    engine.generate(prompt, max_tokens=8)
    assert offered == [range(6)]  # no block is completed by the answer
    engine.generate(make_prompt(200, next(_seeds)), max_tokens=40)
    assert offered[1:] == [range(6), range(6, 7)]
    engine.forget_gpu()
    engine.generate(prompt, max_tokens=8)
    assert offered[3:] == [range(6)]  # loaded, then offered at its end


def test_what_was_evicted_while_its_request_ran_is_stored_at_the_end(engine: Engine) -> None:
    prompt = make_prompt(200, next(_seeds))
    start(engine, "long", prompt, max_tokens=100)
    step_until_pinned(engine)
    while num_pinned(engine):
        engine.llm.llm_engine.step()
    with engine.server.lock, engine.server.session() as tasks:
        while tasks.sessions.num_open:  # until it is on SSD too
            engine.server.state.changed.wait(0.05)
    engine.manager.clear("SSD")
    assert engine.manager.clear("CPU") == 6
    engine.settle()
    assert num_stored(engine) == (200 + 99) // BLOCK


def test_no_request_outlives_its_answer_while_blocks_are_pinned(
    engine: Engine, gates: Gates
) -> None:
    prompt = make_prompt(300, next(_seeds))
    cold = list(engine.generate(prompt).outputs[0].token_ids)
    scheduler = engine.scheduler
    for _ in range(3):
        engine.llm.llm_engine.step()
    assert not scheduler.requests
    assert scheduler.connector.has_pending_push_work()
    assert scheduler.connector.has_pending_block_frees()
    assert scheduler.has_requests()
    assert num_used(engine) == num_pinned(engine) == 9
    assert num_stored(engine) == 0
    gates.open()
    engine.drain()
    assert not scheduler.connector.has_pending_push_work()
    assert serve_again(engine, prompt) == (cold, 288)


def test_blocks_of_an_aborted_request_stay_until_they_are_copied(
    engine: Engine, gates: Gates
) -> None:
    prompt = make_prompt(300, next(_seeds))
    start(engine, "aborted", prompt, max_tokens=1000, pin_ttl_s=600)
    step_until_pinned(engine)
    engine.llm.llm_engine.abort_request(["aborted"])
    assert num_used(engine) == num_pinned(engine) == 9
    others = [make_prompt(1000, next(_seeds)) for _ in range(6)]
    engine.generate_all(others, max_tokens=2)
    gates.open()
    engine.drain()
    assert engine.manager.stats()["tiers"]["CPU"]["pinned"] == 9
    cold = list(engine.generate(prompt).outputs[0].token_ids)
    assert serve_again(engine, prompt) == (cold, 288)


def test_blocks_of_a_preempted_request_stay_until_they_are_copied(
    engine: Engine, gates: Gates
) -> None:
    start(engine, "preempted", make_prompt(300, next(_seeds)), max_tokens=60)
    step_until_pinned(engine)
    scheduler = engine.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert num_used(engine) == num_pinned(engine) == 9
    for _ in range(3):
        engine.llm.llm_engine.step()
    assert num_pinned(engine) >= 9
    gates.open()
    engine.settle()
    assert num_stored(engine) == (300 + 59) // BLOCK
    assert compare_probes(engine.probe_dir)["different"] == []


def test_a_reset_stores_nothing_that_has_not_begun(engine: Engine, gates: Gates) -> None:
    prompt = make_prompt(300, next(_seeds))
    engine.generate(prompt)
    for _ in range(3):
        engine.llm.llm_engine.step()
    assert num_pinned(engine) == 9
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert num_used(engine) == num_stored(engine) == 0
    assert engine.generate(prompt).num_cached_tokens == 0


def test_a_reset_waits_for_copies_under_way(engine: Engine) -> None:
    engine.generate(make_prompt(300, next(_seeds)))
    engine.llm.llm_engine.step()
    assert engine.llm.reset_prefix_cache()
    assert num_stored(engine) == 9


def test_a_reset_before_a_put_is_launched_ends_it(engine: Engine) -> None:
    start(engine, "long", make_prompt(300, next(_seeds)), max_tokens=60)
    step_until_pinned(engine)
    while num_pinned(engine):
        engine.llm.llm_engine.step()
    while engine.scheduler.requests:
        engine.llm.llm_engine.step()
    assert num_pinned(engine) == 11 - 9  # the answer's blocks; the prompt's have been stored
    assert engine.llm.reset_prefix_cache()
    engine.drain()
    assert num_stored(engine) == 9


def test_a_reset_with_requests_under_way_succeeds(engine: Engine, gates: Gates) -> None:
    prompt = make_prompt(300, next(_seeds))
    start(engine, "reset", prompt, max_tokens=60)
    step_until_pinned(engine)
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert num_stored(engine) == 0
    gates.open()
    engine.settle()
    assert num_stored(engine) == (300 + 59) // BLOCK
    assert serve_again(engine, prompt)[1] == 288


def test_vllm_does_not_wait_for_ever_for_blocks_that_are_not_copied(
    engine: Engine, gates: Gates
) -> None:
    for name in ("first", "second"):
        start(engine, name, make_prompt(300, next(_seeds)), max_tokens=200)
    step_until_pinned(engine)
    first, second = engine.scheduler.requests.values()
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks())
    deadline_s = time.monotonic() + 60
    while not first.is_finished() and time.monotonic() < deadline_s:
        engine.llm.llm_engine.step()
    assert first.is_finished()
    assert second.num_preemptions
    pool.free_blocks(held)


def test_a_put_that_cannot_be_launched_pins_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ValueError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "launch", refuse)
        engine.generate(make_prompt(300, next(_seeds)), max_tokens=60)
        engine.drain()
    assert num_stored(engine) == 0


def test_a_disk_worker_killed_while_blocks_are_pinned_costs_nothing_but_the_disk(
    engine: Engine, gates: Gates
) -> None:
    prompt = make_prompt(300, next(_seeds))
    cold = list(engine.generate(prompt).outputs[0].token_ids)
    os.kill(engine.manager.stats()["workers"]["disk"], signal.SIGKILL)
    gates.open()
    engine.drain()
    assert serve_again(engine, prompt) == (cold, 288)
    engine.manager.wait_ready(120)  # it is started again
