"""`KVRouter`: requests go to the worker that will answer them soonest."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec
import pytest

from flexcache.errors import ConfigError
from flexcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from flexcache.router import EventSource, KVRouter, RouteRequest, Tier, WorkerSpec, WorkerState
from flexcache.router.dispatcher import LEASE_S
from flexcache.router.messages import told
from flexcache.router.router import prefill_id

BLOCK = 16
PROMPT = list(range(1000, 1000 + 20 * BLOCK))
CACHE = "tcp://cache"


def worker(name: str, *further: str, events: bool = True) -> WorkerSpec:
    own = (f"tcp://{name}",) if events else ()
    return WorkerSpec(
        name=name, url=f"http://{name}", sources=tuple(EventSource(s) for s in (*own, *further))
    )


def make_router(*names: str, **options: object) -> KVRouter:
    router = KVRouter(**options)  # type: ignore[arg-type]
    router.set_workers([worker(name) for name in names])
    return router


def stored(
    tokens: Sequence[int], medium: str = "GPU", block_size: int = BLOCK, seed: int = 0
) -> EventBatch:
    """The event of a prompt's blocks, named by their ends."""
    num_blocks = len(tokens) // block_size
    names = [
        hash((seed, *tokens[: (i + 1) * block_size])) & (1 << 64) - 1 for i in range(num_blocks)
    ]
    whole = list(tokens[: num_blocks * block_size])
    event = BlockStored(list(names), None, whole, block_size, None, medium, None)
    return EventBatch(0.0, [event])


def removed(batch: EventBatch, first: int) -> EventBatch:
    event = batch.events[0]
    assert isinstance(event, BlockStored)
    return EventBatch(0.0, [BlockRemoved(event.block_hashes[first:], event.medium)])


def request(
    tokens: Sequence[int] | None = PROMPT, request_id: str = "r", **more: object
) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        num_tokens=len(tokens) if tokens is not None else 300,
        token_ids=tokens,
        **more,  # type: ignore[arg-type]
    )


def test_a_prompt_goes_where_its_blocks_are() -> None:
    router = make_router("a", "b", "c")
    router.apply("tcp://b", stored(PROMPT))
    decision = router.choose(request(), 0.0)
    assert decision is not None
    assert decision.worker == "b"
    # The last token is computed in any case, so the last block is of no use.
    assert decision.matched == {Tier.GPU: 19 * BLOCK, Tier.DRAM: 0, Tier.DISK: 0}
    assert set(decision.others) == {"a", "c"}
    router.check()


def test_a_token_counts_for_the_fastest_tier_that_has_it() -> None:
    router = make_router("a")
    prompt = [*PROMPT, 1]
    router.apply("tcp://a", stored(prompt[: 5 * BLOCK]))
    router.apply("tcp://a", stored(prompt[: 12 * BLOCK], "CPU"))
    router.apply("tcp://a", stored(prompt, "STORAGE"))
    decision = router.choose(request(prompt), 0.0)
    assert decision is not None
    assert decision.matched == {Tier.GPU: 5 * BLOCK, Tier.DRAM: 7 * BLOCK, Tier.DISK: 8 * BLOCK}
    assert decision.matched_tokens == 20 * BLOCK


def test_a_prompt_that_only_a_shared_cache_has_goes_by_load() -> None:
    for busy, idle in (("a", "b"), ("b", "a")):
        router = KVRouter()
        router.set_workers([worker("a", CACHE), worker("b", CACHE), worker("c")])
        router.apply(CACHE, stored(PROMPT, "CPU"))
        router.set_state(idle, WorkerState.DOWN)
        router.set_state("c", WorkerState.DOWN)
        other = router.choose(request(list(range(5000)), "other"), 0.0)
        assert other is not None
        assert other.worker == busy
        router.set_state(idle, WorkerState.UP)
        router.set_state("c", WorkerState.UP)
        decision = router.choose(request(), 0.0)
        assert decision is not None
        assert decision.worker == idle
        assert decision.matched == {Tier.GPU: 0, Tier.DRAM: 19 * BLOCK, Tier.DISK: 0}


def with_lookahead(tokens: Sequence[int], batch: EventBatch) -> EventBatch:
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    ends = [BLOCK * (at + 1) for at in range(len(event.block_hashes))]
    following = [[tokens[end]] for end in ends]
    return EventBatch(0.0, [msgspec.structs.replace(event, lookahead_token_ids=following)])


def test_a_prompt_that_branches_at_a_block_finds_one_less_where_a_draft_looks_ahead() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", with_lookahead(PROMPT, stored(PROMPT[: 10 * BLOCK])))
    router.apply("tcp://b", stored(PROMPT[: 10 * BLOCK]))
    branch = PROMPT[: 10 * BLOCK] + [7] * 2 * BLOCK
    router.set_state("b", WorkerState.DOWN)
    decision = router.choose(request(branch), 0.0)  # expected by "a" from now on
    assert decision is not None and decision.matched_tokens == 9 * BLOCK
    router.set_state("b", WorkerState.UP)
    another = branch[: 11 * BLOCK] + [8] * 2 * BLOCK
    matched = {each.worker: each.matched[Tier.GPU] for each in router.scores(request(another), 0.0)}
    assert matched == {"a": 10 * BLOCK, "b": 10 * BLOCK}
    router.check()


def test_a_session_of_before_is_known_from_what_its_engine_stored() -> None:
    router = make_router("a", "b")
    router.set_workers([worker("a", CACHE), worker("b", CACHE)])

    def tell(source: str, session: str) -> None:
        (event,) = stored([3] * BLOCK).events
        assert isinstance(event, BlockStored)
        event = msgspec.structs.replace(event, session_id=session)
        router.apply(source, EventBatch(0.0, [event]))

    for number in range(20):
        tell(f"tcp://{'ab'[number % 2]}", str(number))
        tell(CACHE, "a session of the cache")
    for number in range(20):
        decision = router.choose(request(None, str(number), session_id=str(number)), 0.0)
        assert decision is not None and decision.worker == "ab"[number % 2]
        router.ended(str(number), 0.0)
        other = f"tcp://{'ba'[number % 2]}"
        tell(other, str(number))  # late: this router knows better
        assert router._sessions[str(number)] == decision.worker
    assert "a session of the cache" not in router._sessions


def test_guesses_do_not_end_with_the_gpu_where_the_caches_below_are_known() -> None:
    """Two engines without events, and a cache that they share."""
    router = KVRouter()
    shared = "http://cache:9470"
    specs = [WorkerSpec(name=name, url=f"http://{name}", cache_url=shared) for name in "ab"]
    router.set_workers(specs)
    for name in "ab":
        router.set_capacity(name, 4, BLOCK)
    router.set_lower_tiers(shared, {Tier.DRAM: 10, Tier.DISK: 100}, BLOCK)
    router.set_state("b", WorkerState.DOWN)
    prompts = [[number] * (4 * BLOCK) + [0] for number in range(4)]

    def serve(prompt: list[int], **reported: int) -> None:
        assert router.choose(request(prompt), 0.0) is not None
        router.first_token("r", 0.1)
        router.ended("r", 0.2, **reported)
        router.check()

    def found(worker: str) -> list[tuple[int, ...]]:
        each = [router.scores(request(prompt), 1.0) for prompt in prompts]
        of_worker = [next(s for s in scores if s.worker == worker) for scores in each]
        return [tuple(n // BLOCK for n in score.matched.values()) for score in of_worker]

    for prompt in prompts:
        serve(prompt)
    router.set_state("b", WorkerState.UP)
    assert found("a") == [(0, 0, 4), (0, 2, 2), (0, 4, 0), (4, 0, 0)]
    assert found("b") == [(0, 0, 4), (0, 2, 2), (0, 4, 0), (0, 4, 0)]
    router.set_state("b", WorkerState.DOWN)
    assert found("a")[3] == (4, 0, 0), "another engine has the cache still"
    serve(prompts[1], cached_tokens=0)  # the store had lost it, and what was used before
    assert found("a")[:2] == [(0, 0, 0), (4, 0, 0)]
    router.set_workers(specs[:1])
    router.set_state("a", WorkerState.DOWN)
    router.set_state("a", WorkerState.UP)
    assert found("a")[1] == (0, 0, 4), "its DRAM went with it"
    router.set_workers([worker("a")])
    assert found("a")[1] == (0, 0, 0)
    router.check()


def test_an_engine_fetches_from_one_that_has_clearly_more_if_both_have_a_p2p_tier() -> None:
    prompt = [*list(range(4096)), 7]
    router = KVRouter()

    def has_peers(*names: str) -> None:
        specs = [msgspec.structs.replace(worker(name), peer_port=5710) for name in names]
        router.set_workers(specs + [worker(name) for name in "abcd" if name not in names])

    def placed(only: str) -> str | None:
        decision = router.choose(request(prompt), 0.0, only=[only])
        assert decision is not None and decision.worker == only
        router.ended("r", 0.0)
        return decision.richer_peer

    has_peers("a", "b", "d")
    router.apply("tcp://a", stored(prompt[:1024]))
    router.apply("tcp://b", stored(prompt[:3072], "CPU"))
    router.apply("tcp://c", stored(prompt))  # has no p2p tier
    router.apply("tcp://d", stored(prompt, "STORAGE"))  # serves what is in its DRAM
    assert placed("a") == "b"
    assert placed("d") is None, "it has more itself"
    assert placed("c") is None, "it can fetch nothing"
    router.set_state("b", WorkerState.DOWN)
    assert placed("a") is None
    router.set_state("b", WorkerState.UP)
    router.apply("tcp://a", stored(prompt[: 1024 + BLOCK]))
    assert placed("a") is None, "not clearly more"
    has_peers()
    assert placed("a") is None


# -- requests that are divided between two workers -------------------------------------------------


def staged(*specs: tuple[str, str, str]) -> KVRouter:
    """A router of workers with a role and a way to transfer KV."""
    router = KVRouter()
    router.set_workers(
        [
            msgspec.structs.replace(worker(name), role=role, transfer=transfer)
            for name, role, transfer in specs
        ]
    )
    return router


def divided(router: KVRouter, *, tried: Collection[str] = (), name: str = "r") -> list[str]:
    """Place a long prompt; the workers that get it, one or two."""
    decision = router.choose(request(list(range(4000)), name), 0.0, tried=tried, may_divide=True)
    router.check()
    assert decision is not None
    return [each.worker for each in (decision.prefill, decision) if each is not None]


def decodes(router: KVRouter, worker: str, count: int) -> None:
    """Have requests run on a worker that have their first token."""
    for number in range(count):
        name, begun_s = f"{worker} {number}", float(number - count)
        assert router.choose(request([1], name), begun_s, only=[worker]) is not None
        router.first_token(name, begun_s + 0.05)


def test_another_worker_computes_a_prompt_where_that_is_sooner() -> None:
    router = staged(("p", "prefill", "flexcache"), ("d", "decode", "flexcache"))
    assert divided(router) == ["d"], "it is idle: to hand KV over would only take longer"
    router.ended("r", 0.0)
    decodes(router, "d", 20)
    assert divided(router) == ["p", "d"]
    assert router.running["r"].worker == "d"
    first = router.running[prefill_id("r", 0)]
    assert first.worker == "p" and first.work.new_tokens == 4000
    assert router.dispatcher.load.wait_s(0.0)[router.fleet["d"].number] <= 0, "nothing to compute"
    router.first_token(prefill_id("r", 0), 1.0)
    router.ended(prefill_id("r", 0), 1.0)
    router.first_token("r", 1.5)
    router.ended("r", 2.0)
    router.check()
    assert router.dispatcher.service_time.num_samples == 21, "none of the part that waited"
    assert router.counts.decisions["divided"] == 1


def test_another_router_counts_both_parts_of_a_divided_request_and_learns_from_neither() -> None:
    roles = ("p", "prefill", "flexcache"), ("d", "decode", "flexcache")
    router, other = staged(*roles), staged(*roles)
    decodes(router, "d", 20)
    assert divided(router) == ["p", "d"]
    for name in ("r", prefill_id("r", 0)):
        other.follow(told(router.running[name]), 0.0, owner="router-2", is_peers=True)
    wait_s = other.dispatcher.load.wait_s(0.0)
    assert wait_s[other.fleet["p"].number] > 0 and wait_s[other.fleet["d"].number] <= 0
    other.first_token("router-2 r", 9.0)
    running = replace(router.running["d 0"])
    assert told(running).has_first_token
    other.follow(told(running), 9.0, owner="router-2", is_peers=True)
    assert other.dispatcher.service_time.num_samples == 0, "when its token came is not known"
    other.check()


def test_only_those_that_can_take_its_kv_decode_what_a_worker_computes() -> None:
    router = staged(
        ("p", "prefill", "nixl"), ("c", "decode", "flexcache"), ("d", "both", "nixl"),
        ("q", "prefill", "sglang"),
    )  # fmt: skip
    decodes(router, "c", 20)
    decodes(router, "d", 20)
    assert divided(router) == ["p", "d"]
    router.ended("r", 0.0)
    router.ended(prefill_id("r", 0), 0.0)
    assert divided(router, tried=["p"]) in (["c"], ["d"]), "nothing takes what q computes"
    router.ended("r", 0.0)
    router.set_state("p", WorkerState.DOWN)
    assert len(divided(router)) == 1


def test_a_worker_that_computes_for_others_serves_whole_requests_only_if_it_must() -> None:
    router = staged(("p", "prefill", "flexcache"), ("d", "decode", "flexcache"))
    for number in range(20):
        decision = router.choose(request([1], str(number)), 0.0)
        assert decision is not None and decision.worker == "d"
    router.set_state("d", WorkerState.DOWN)
    assert divided(router) == ["p"]


def test_what_a_request_does_not_allow_is_not_divided() -> None:
    router = staged(("p", "prefill", "flexcache"), ("d", "decode", "flexcache"))
    decodes(router, "d", 20)
    whole = router.choose(request(list(range(4000))), 0.0)
    assert whole is not None and whole.prefill is None
    unknown = replace(request(None, "u"), num_tokens=4000)
    decision = router.choose(unknown, 0.0, may_divide=True)
    assert decision is not None and decision.prefill is None


def test_a_prompt_that_is_being_computed_counts_until_events_tell_of_it() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", stored([7] * BLOCK))  # the block size is known
    first = router.choose(request(request_id="1"), 0.0)
    assert first is not None

    def matched(now: float) -> dict[str, int]:
        return {score.worker: score.matched[Tier.GPU] for score in router.scores(request(), now)}

    other = next(iter(first.others))
    assert matched(0.1) == {first.worker: 19 * BLOCK, other: 0}
    router.first_token("1", 1.0)  # by now it would have been published
    assert matched(1.0) == {first.worker: 0, other: 0}
    router.check()


def test_the_blocks_of_a_worker_without_events_are_guessed() -> None:
    router = KVRouter()
    router.set_workers([worker(name, events=False) for name in "ab"])
    router.set_capacity("a", 100, 32)
    router.set_capacity("b", 100, 32)
    first = router.choose(request(request_id="1"), 0.0)
    assert first is not None
    assert first.matched_tokens == 0
    router.first_token("1", 1.0)
    router.ended("1", 2.0, cached_tokens=0)
    again = router.choose(request(request_id="2"), 3.0)
    assert again is not None
    assert (again.worker, again.matched_tokens) == (first.worker, 9 * 32)
    assert router.stats(3.0).workers[again.worker].is_approximate
    router.first_token("2", 3.0)
    router.ended("2", 3.0, cached_tokens=3 * 32)  # the engine has evicted the rest
    router.set_state(first.worker, WorkerState.DOWN)
    router.set_state(first.worker, WorkerState.UP)
    assert {score.matched[Tier.GPU] for score in router.scores(request(), 4.0)} == {0}
    router.check()


def test_removed_cleared_and_forgotten_blocks_no_longer_count() -> None:
    router = make_router("a")
    batch = stored([*PROMPT, 1])

    def matched() -> int:
        return next(iter(router.scores(request([*PROMPT, 1]), 0.0))).matched[Tier.GPU]

    router.apply("tcp://a", batch)
    router.apply("tcp://a", removed(batch, 10))
    assert matched() == 10 * BLOCK
    router.apply("tcp://a", EventBatch(0.0, [AllBlocksCleared()]))
    assert matched() == 0
    router.apply("tcp://a", batch)
    assert matched() == 20 * BLOCK
    router.forget("tcp://a")
    assert matched() == 0
    router.check()


def test_a_busy_holder_loses_to_an_idle_worker_once_waiting_costs_more_than_computing() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", stored(PROMPT[: 4 * BLOCK]))
    workers = []
    for number in range(6):
        decision = router.choose(request(request_id=str(number)), 0.0)
        assert decision is not None
        workers.append(decision.worker)
    assert workers[0] == "a"
    assert "b" in workers


def test_a_request_counts_as_load_until_it_ended() -> None:
    router = make_router("a", max_requests=1)
    assert router.choose(request(request_id="1"), 0.0) is not None
    assert router.choose(request(request_id="2"), 0.0) is None
    router.first_token("1", 1.0)
    assert router.choose(request(request_id="2"), 1.0) is None
    router.ended("1", 2.0)
    assert router.choose(request(request_id="2"), 2.0) is not None
    router.ended("2", 2.0)
    router.ended("2", 2.0)
    assert router.stats(2.0).workers["a"].requests == 0
    router.check()


def test_a_worker_that_is_down_or_draining_or_does_not_serve_the_model_is_not_chosen() -> None:
    router = make_router("a", "b", "c")
    router.apply("tcp://a", stored(PROMPT))
    router.set_state("a", WorkerState.DOWN)
    router.set_state("b", WorkerState.DRAINING)
    assert router.choose(request(request_id="1"), 0.0).worker == "c"  # type: ignore[union-attr]
    router.set_state("c", WorkerState.DOWN)
    assert router.choose(request(request_id="2"), 0.0) is None
    for name in "abc":
        router.set_state(name, WorkerState.UP)
    router.set_models("a", ["llama"])
    router.set_models("b", ["qwen"])
    router.set_models("c", ["qwen", "adapter"])
    decision = router.choose(request(request_id="3", model="adapter"), 0.0)
    assert decision is not None
    assert (decision.worker, decision.others) == ("c", ())
    # The engines answer for a model that none of them has listed: it may be a new adapter.
    assert router.choose(request(request_id="4", model="unknown"), 0.0) is not None


def test_a_model_whose_workers_are_away_is_not_served_by_others() -> None:
    router = make_router("a", "b", "c")
    router.set_models("a", ["llama"])
    router.set_models("b", ["qwen"])

    def worker_for(model: str) -> str | None:
        decision = router.choose(request(request_id=f"{model} {next(numbers)}", model=model), 0.0)
        return None if decision is None else decision.worker

    numbers = itertools.count()
    assert worker_for("qwen") == "b"
    assert worker_for("unknown") == "c"  # has not told what it serves
    router.set_state("b", WorkerState.DOWN)
    assert worker_for("qwen") is None
    router.set_workers([worker("a"), worker("c")])
    assert worker_for("qwen") is None
    router.set_models("c", ["qwen"])
    assert worker_for("qwen") == "c"
    router.set_models("c", ["other"])
    assert worker_for("qwen") is None
    router.check()


def test_models_that_none_lists_any_more_are_refused_and_adapters_are_not() -> None:
    router = make_router("a", "b")
    router.set_models("a", ["llama", "on demand"], ["on demand"])
    router.set_models("b", ["qwen"])
    router.set_models("a", ["llama 2"])  # restarted with another model
    assert router.choose(request(request_id="1", model="llama"), 0.0) is None
    assert router.choose(request(request_id="2", model="on demand"), 0.0) is not None
    router.set_models("b", ["qwen", "other adapter"], ["other adapter"])
    router.set_workers([worker("a")])
    assert router.choose(request(request_id="3", model="qwen"), 0.0) is None
    assert router.choose(request(request_id="4", model="other adapter"), 0.0) is not None


def test_an_adapter_that_is_named_with_its_model_goes_where_the_model_is() -> None:
    router = make_router("a", "b")
    router.set_models("a", ["s3://models:1"])
    router.set_models("b", ["other"])
    for number in range(10):
        decision = router.choose(request(request_id=str(number), model="s3://models:1:lora"), 0.0)
        assert decision is not None and decision.worker == "a"
    router.set_state("a", WorkerState.DOWN)
    assert router.choose(request(request_id="b", model="s3://models:1:lora"), 0.0) is None


def test_workers_that_failed_a_request_come_last() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", stored(PROMPT))
    decision = router.choose(request(), 0.0, tried=("a",))
    assert decision is not None
    assert decision.worker == "b"
    decision = router.choose(request(), 0.0, tried=("a", "b"))
    assert decision is not None
    assert decision.worker == "a"


def test_without_tokens_a_request_goes_by_load() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", stored(PROMPT))
    first = router.choose(request(None, "1"), 0.0)
    second = router.choose(request(None, "2"), 0.0)
    assert first is not None
    assert second is not None
    assert first.reason == second.reason == "load"
    assert first.worker != second.worker


def test_workers_come_and_go() -> None:
    router = make_router("a", "b")
    router.apply("tcp://a", stored(PROMPT))
    router.choose(request(), 0.0)
    router.set_workers([worker("b"), worker("c")])
    router.first_token("r", 1.0)
    router.ended("r", 2.0)
    decision = router.choose(request(), 3.0)
    assert decision is not None
    assert decision.matched_tokens == 0
    router.check()
    router.set_workers([worker("a"), worker("c")])
    assert router.choose(request(request_id="again"), 3.0) is not None
    router.check()
    with pytest.raises(ConfigError, match="twice"):
        router.set_workers([worker("a"), worker("a")])


def test_an_end_that_is_never_reported_comes_by_itself() -> None:
    router = make_router("a", "b")
    for number in range(2):
        assert router.choose(request(request_id=f"{number}"), float(number)) is not None
    router.running["1"].expires_s = 10.0
    assert not router.expire(9.9)
    assert [running.request_id for running in router.expire(10.0)] == ["1"]
    assert not router.expire(LEASE_S - 1)
    assert [running.request_id for running in router.expire(LEASE_S)] == ["0"]
    assert router.stats(LEASE_S).routing.expired_requests == 2
    router.check()


def test_a_request_runs_on_when_its_worker_is_gone_and_is_load_no_more() -> None:
    router = make_router("a", "b")
    for name in ("x", "y"):
        assert router.choose(request(request_id=name), 0.0) is not None
    gone = router.running["x"].worker
    router.set_workers([worker(name) for name in ("a", "b") if name != gone], 1.0)
    router.check()
    assert router.dispatcher.load.mean_requests == 0.5
    router.first_token("x", 2.0)
    router.ended("x", 3.0)
    router.check()
    assert set(router.running) == {"y"}


def test_another_routers_requests_are_load_too() -> None:
    router = make_router("a", "b")
    mine = router.choose(request(), 0.0)
    assert mine is not None
    other = make_router("a", "b")
    other.follow(told(router.running["r"]), 0.0, owner="router-2", is_peers=True)
    theirs = other.choose(request(request_id="x"), 0.0)
    assert theirs is not None
    assert theirs.worker != mine.worker
    other.ended("router-2 r", 1.0)
    other.check()
    assert set(other.running) == {"x"}


def test_predictions_are_compared_with_what_engines_report() -> None:
    router = make_router("a")
    router.apply("tcp://a", stored([*PROMPT, 1]))
    reports = {"exact": 20 * BLOCK, "over": 18 * BLOCK, "under": 21 * BLOCK, "unreported": None}
    for name, cached in reports.items():
        router.choose(request([*PROMPT, 1], name), 0.0)
        router.first_token(name, 1.0)
        router.ended(name, 2.0, cached_tokens=cached)
    router.choose(request(None, "unpredicted"), 0.0)
    router.first_token("unpredicted", 1.0)
    router.ended("unpredicted", 2.0, cached_tokens=5)
    counts = router.stats(3.0).routing.cached_tokens
    assert (counts.exact, counts.over, counts.under) == (1, 1, 1)
    assert (counts.unreported, counts.unpredicted) == (1, 1)
    assert counts.predicted_tokens == 60 * BLOCK
    assert counts.actual_tokens == 59 * BLOCK


def test_nothing_is_learned_from_when_the_body_of_a_whole_answer_came() -> None:
    router = make_router("a")
    for number in range(60):
        router.choose(request(list(range(300)), str(number)), float(number))
        router.first_token(str(number), number + 0.9, tells_time=False)
        router.ended(str(number), number + 0.9, cached_tokens=0)
    routing = router.stats(60.0).routing
    assert routing.service_time.samples == 0
    assert sum(routing.ttft.actual_s.counts) == 0
    assert routing.cached_tokens.exact == 60
    assert router.stats(60.0).workers["a"].requests == 0
    router.check()


def test_the_time_to_the_first_token_is_predicted_once_it_was_learned() -> None:
    router = make_router("a", "b")
    now = 0.0
    for number in range(60):
        tokens = list(range(number * 10_000, number * 10_000 + 100 * (1 + number % 7)))
        decision = router.choose(request(tokens, str(number)), now)
        assert decision is not None
        took_s = 0.02 + 1e-3 * len(tokens)
        router.first_token(str(number), now + took_s)
        router.ended(str(number), now + took_s)
        now += 1.0
    decision = router.choose(request(list(range(300)), "last"), now)
    assert decision is not None
    assert decision.ttft_s == pytest.approx(0.32, rel=0.1)
    stats = router.stats(now)
    assert stats.routing.service_time.is_learned
    assert sum(stats.routing.ttft.actual_s.counts) > 20
    router.check()


# -- what a cache is asked to load -----------------------------------------------------------------


def with_cache(name: str, rank: int | None = None) -> WorkerSpec:
    return WorkerSpec(
        name=name,
        url=f"http://{name}",
        data_parallel_rank=rank,
        sources=(EventSource(f"tcp://{name}"), EventSource(CACHE)),
        cache_url="http://cache:9470",
    )


def asked_block(router: KVRouter, sent: RouteRequest) -> int | None:
    """Return the block that a cache would be asked for, as if no request was running."""
    decision = router.choose(sent, 0.0)
    assert decision is not None
    router.first_token(sent.request_id, 0.1)
    router.ended(sent.request_id, 0.2)
    router.check()
    return decision.disk_block


def names_in(batch: EventBatch) -> list[object]:
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    return list(event.block_hashes)


def test_a_cache_is_asked_for_the_last_block_that_is_only_below_dram() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    below = stored(PROMPT, "STORAGE")
    assert asked_block(router, request([*PROMPT, 1])) is None
    router.apply(CACHE, below)
    assert asked_block(router, request([*PROMPT, 1])) == names_in(below)[-1]
    assert asked_block(router, request([*PROMPT[: 17 * BLOCK], 1])) == names_in(below)[16]
    router.apply(CACHE, removed(below, 18))
    assert asked_block(router, request([*PROMPT, 1])) == names_in(below)[17]
    router.forget(CACHE)
    assert asked_block(router, request([*PROMPT, 1])) is None


def test_little_below_dram_is_left_to_the_engine() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    below = stored(PROMPT, "STORAGE")
    router.apply(CACHE, below)
    assert asked_block(router, request([*PROMPT[: 15 * BLOCK], 1])) is None
    router.apply("tcp://a", stored(PROMPT[: 4 * BLOCK]))
    assert asked_block(router, request([*PROMPT, 1])) == names_in(below)[-1]
    router.apply(CACHE, stored(PROMPT[: 5 * BLOCK], "CPU"))
    assert asked_block(router, request([*PROMPT, 1])) is None


def test_what_the_router_cannot_know_is_not_asked_for() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    below = stored(PROMPT, "STORAGE")
    router.apply(CACHE, below)
    prompt = [*PROMPT, 1]
    assert asked_block(router, request(prompt, cache_salt="mine")) is None
    assert asked_block(router, request(prompt, adapter="lora")) is None
    assert asked_block(router, request(None)) is None
    # A worker whose cache is not named, and one whose blocks are guessed.
    router.set_workers([worker("a", CACHE)])
    assert asked_block(router, request(prompt)) is None
    router = KVRouter(approximate="always")
    router.set_workers([with_cache("a")])
    router.apply(CACHE, below)
    assert asked_block(router, request(prompt)) is None
    assert asked_block(router, request(prompt)) is None


def test_blocks_that_a_cache_restored_without_tokens_are_asked_for_once_these_are_known() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    below = stored(PROMPT, "STORAGE")
    names = names_in(below)
    bare = BlockStored(list(names), None, [], BLOCK, None, "STORAGE", None)  # type: ignore[arg-type]
    router.apply(CACHE, EventBatch(0.0, [bare]))
    assert asked_block(router, request([*PROMPT, 1])) is None
    in_dram = stored(PROMPT, "CPU")
    router.apply(CACHE, in_dram)
    router.apply(CACHE, removed(in_dram, 0))
    assert asked_block(router, request([*PROMPT, 1])) == names[-1]


def test_a_cache_that_tells_its_ssd_by_runs_is_asked_for_the_last_block_of_one() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    in_dram = stored(PROMPT, "CPU")
    names = names_in(in_dram)
    run = BlockStored([names[15]], None, [], BLOCK, None, "STORAGE", None, run_blocks=16)  # type: ignore[list-item]
    router.apply(CACHE, in_dram)
    router.apply(CACHE, EventBatch(0.0, [run]))
    assert asked_block(router, request([*PROMPT, 1])) is None
    router.apply(CACHE, removed(in_dram, 0))
    assert asked_block(router, request([*PROMPT, 1])) == names[15]
    assert asked_block(router, request([*PROMPT[: 15 * BLOCK], 1])) is None
    router.apply(CACHE, EventBatch(0.0, [BlockRemoved([names[15]], "STORAGE")]))  # type: ignore[list-item]
    assert asked_block(router, request([*PROMPT, 1])) is None


def test_each_cache_is_asked_by_its_own_name() -> None:
    """Engines with seeds of their own name equal blocks differently."""
    router = KVRouter()
    specs = [
        WorkerSpec(
            name=name,
            url=f"http://{name}",
            sources=(EventSource(f"tcp://{name}"),),
            cache_url=f"http://{name}:9470",
        )
        for name in ("a", "b")
    ]
    router.set_workers(specs)
    told = {name: stored(PROMPT, "STORAGE", seed=at) for at, name in enumerate("ab")}
    for name, batch in told.items():
        router.apply(f"tcp://{name}", batch)
    for name, batch in told.items():
        decision = router.choose(request([*PROMPT, 1], name), 0.0, only=[name])
        assert decision is not None
        assert decision.disk_block == names_in(batch)[-1]


def test_a_request_that_follows_at_once_asks_for_nothing_again() -> None:
    router = KVRouter()
    router.set_workers([with_cache("a")])
    router.apply(CACHE, stored(PROMPT, "STORAGE"))
    first = router.choose(request([*PROMPT, 1], "first"), 0.0)
    second = router.choose(request([*PROMPT, 1], "second"), 0.001)
    assert first is not None and second is not None
    assert first.disk_block is not None
    assert second.disk_block is None


def test_predicted_backlogs_are_the_seconds_that_engines_need_for_their_queues() -> None:
    """Against engines whose times are known: one prompt after the other, in the order they came."""
    a_request_s, a_token_s = 0.02, 1e-4
    rng = random.Random(3)
    router = make_router("a", "b")
    queues: dict[str, deque[tuple[str, float]]] = {"a": deque(), "b": deque()}
    began_s = dict.fromkeys(queues, 0.0)  # of the prompt that an engine computes
    needed: dict[str, float] = {}
    now, compared = 0.0, 0

    def next_end(name: str) -> float:
        return began_s[name] + queues[name][0][1] if queues[name] else math.inf

    for number in range(600):
        now += rng.expovariate(1 / 0.09)
        while (first := min(queues, key=next_end)) and next_end(first) <= now:
            began_s[first] = next_end(first)
            name, _ = queues[first].popleft()
            router.first_token(name, began_s[first])
            router.ended(name, began_s[first])
        if number > 300:  # it has learned
            backlogs = router.stats(now).workers
            for engine, queue in queues.items():
                computing_s = now - began_s[engine] if queue else 0.0
                real_s = sum(seconds for _, seconds in queue) - computing_s
                assert backlogs[engine].wait_s == pytest.approx(real_s, rel=0.05, abs=0.01)
                compared += real_s > 0.5
        prompt = [rng.randrange(1 << 20) for _ in range(rng.choice([200, 1000, 4000]))]
        wanted = request(prompt, str(number))
        needed[str(number)] = seconds = a_request_s + a_token_s * len(prompt)
        if number > 300:
            assert router.least_service_s(wanted) == pytest.approx(seconds, rel=0.05, abs=0.01)
        decision = router.choose(wanted, now)
        assert decision is not None
        if not queues[decision.worker]:
            began_s[decision.worker] = now
        queues[decision.worker].append((str(number), seconds))
    assert compared > 50, "queues were long enough to tell"
