"""Loads that begin while a request waits for room, and hints about sessions, in a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import until
from engines import Engine, make_prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm import SamplingParams

from flexcache.config import CacheConfig
from flexcache.integration.vllm.calls import NoMatch
from flexcache.integration.vllm.early_loads import _MAX_UNDER_WAY, WINDOW, EarlyLoads, EarlyLookUps
from flexcache.integration.vllm.gets import Gets
from flexcache.integration.vllm.weights import Names

NUM_TOKENS = 640
NUM_BLOCKS = NUM_TOKENS // 32


class Calls:
    """Records what is begun and cancelled; a store that has yet to answer delays the first ones."""

    def __init__(self, num_pending: int = 0) -> None:
        self.num_pending = num_pending
        self.begun: list[tuple[str, int]] = []
        self.cancelled: list[int] = []
        self.withdrawn: list[str] = []

    def prefetch(self, request: Any, num_on_gpu: int) -> int | None:
        if self.num_pending:
            self.num_pending -= 1
            return None
        self.begun.append((request.request_id, num_on_gpu))
        return len(self.begun)

    def cancel(self, task_id: int) -> None:
        self.cancelled.append(task_id)


def early_loads(calls: Calls, is_on: bool = True) -> EarlyLoads:
    return EarlyLoads(calls, is_on, True, calls.withdrawn.append)  # type: ignore[arg-type]


def a_request(name: str, num_blocks: int = 4) -> Any:
    return SimpleNamespace(request_id=name, block_hashes=list(range(num_blocks)))


def test_the_first_in_line_are_loaded_for_and_the_next_when_vllm_asks() -> None:
    calls = Calls()
    early = early_loads(calls)
    names = [f"r{number}" for number in range(WINDOW + 2)]
    for name in names:
        early.arrived(a_request(name))
    early.asked("r0")  # it is scheduled in the step of its arrival
    early.begin()
    early.begin()
    assert [name for name, _ in calls.begun] == names[1 : WINDOW + 1]
    early.asked("r1")
    early.begin()
    assert [name for name, _ in calls.begun] == names[1:]
    early.check()


def test_a_request_that_ends_is_cancelled_and_one_that_loads_is_not() -> None:
    calls = Calls()
    early = early_loads(calls)
    for name in ("aborted", "loaded", "gone before"):
        early.arrived(a_request(name))
    early.ended("gone before")
    early.begin()
    early.loaded("loaded")
    early.ended("loaded")
    early.ended("aborted")
    assert (calls.begun, calls.cancelled) == ([("aborted", 0), ("loaded", 0)], [1])
    early.arrived(a_request("later"))
    early.begin()
    early.cancel()
    assert calls.cancelled == [1, 3]
    early.check()


def test_what_waits_for_the_store_is_tried_again_in_order() -> None:
    calls = Calls(num_pending=2)
    early = early_loads(calls)
    early.arrived(a_request("first"))
    early.arrived(a_request("second"))
    early.begin()
    assert calls.begun == []
    early.begin()
    assert [name for name, _ in calls.begun] == ["first", "second"]


def test_blocks_that_vllm_has_are_not_asked_for() -> None:
    calls = Calls()
    early = early_loads(calls)
    on_gpu = {0, 1, 2}
    early.block_pool = SimpleNamespace(
        get_cached_block=lambda key, groups: [key] if key in on_gpu else None
    )
    early.arrived(a_request("a", num_blocks=8))
    early.begin()
    on_gpu.clear()
    early.arrived(a_request("b", num_blocks=8))
    early.begin()
    assert calls.begun == [("a", 3), ("b", 0)]


def test_without_a_tier_below_dram_nothing_is_begun() -> None:
    calls = Calls()
    early = early_loads(calls, is_on=False)
    early.arrived(a_request("a"))
    early.begin()
    assert calls.begun == []
    early.is_on = True  # a get of a shared cache has found something on SSD
    early.arrived(a_request("b"))
    early.begin()
    assert calls.begun == [("b", 0)]


def test_a_request_that_vllm_has_no_room_for_is_loaded_for_once() -> None:
    calls = Calls()
    early = early_loads(calls)
    early.arrived(a_request("behind"))
    for _ in range(3):
        early.asked("first")
        early.found_below(a_request("first"))
        early.asked("has room")
        early.found_below(a_request("has room"))
        early.loaded("has room")
        early.begin()
    assert [name for name, _ in calls.begun] == ["first", "behind"]
    assert calls.withdrawn == ["first", "behind"]
    early.check()


@pytest.mark.parametrize("is_loading", [True, False])
def test_only_what_waits_for_a_store_is_looked_up_on_arrival(is_loading: bool) -> None:
    looked_up: list[str] = []
    cache = SimpleNamespace(
        names=Names(lambda: 0, can_lose_loads=True),
        match=lambda *arguments: NoMatch.UNDECIDED,
        prefetch=lambda *arguments: 1,
        look_up=lambda request: looked_up.append(request.request_id),
    )
    tables = SimpleNamespace(has_groups=False, has_tails=False)
    config = CacheConfig(num_cpu_blocks=8, endpoint="ipc:///none")
    gets = Gets(cache, 32, tables, None, None, config, has_siblings=False)  # type: ignore[arg-type]
    if is_loading:
        gets.early_loads.is_on = True
        gets.arrived(a_request("loaded for"))
        gets.early_loads.begin()
    asking = SimpleNamespace(request_id="asks", num_tokens=64, block_hashes=[], lora_request=None)
    assert gets.num_matched_tokens(asking, 0) == (None, False)
    gets.arrived(a_request("next"))
    assert looked_up == ([] if is_loading else ["next"])


@pytest.fixture
def one_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine.forget_all()
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", 1)
    yield engine
    engine.drain()
    engine.connector._scheduler.check_idle()


def add(engine: Engine, request_id: str, prompt: list[int], max_tokens: int, **hints: Any) -> None:
    params = {f"flexcache_{name}": hint for name, hint in hints.items()}
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )  # fmt: skip
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)


def run(engine: Engine, request_id: str) -> tuple[list[int], int]:
    """Step until a request ends; return its tokens, and how many of its prompt were cached."""
    while engine.scheduler.has_requests():
        for output in engine.llm.llm_engine.step():
            if output.request_id.startswith(request_id) and output.finished:
                return list(output.outputs[0].token_ids), output.num_cached_tokens
    raise AssertionError("it did not end")


def on_ssd_only(engine: Engine, prompt: list[int]) -> list[int]:
    """Have a prompt on SSD and nowhere else; return its next tokens."""
    tokens = list(engine.generate(prompt).outputs[0].token_ids)
    engine.settle()
    engine.forget_gpu()
    engine.manager.clear("CPU")
    return tokens


def early_stats(engine: Engine) -> dict[str, int]:
    return dict(engine.manager.stats()["early_loads"])


def test_blocks_on_ssd_are_in_dram_when_their_request_has_room(one_at_a_time: Engine) -> None:
    engine = one_at_a_time
    prompt = make_prompt(NUM_TOKENS + 1, 91)
    expected = on_ssd_only(engine, prompt)
    before = early_stats(engine)
    add(engine, "runs", make_prompt(100, 92), 200)
    engine.llm.llm_engine.step()
    add(engine, "waits", prompt, 8)
    engine.llm.llm_engine.step()
    assert early_stats(engine)["open_blocks"] == NUM_BLOCKS
    until(lambda: engine.manager.stats()["tiers"]["CPU"]["indexed"] >= NUM_BLOCKS)
    hits = engine.manager.stats()["engine"]["hit_blocks"]
    tokens, cached = run(engine, "waits")
    assert (tokens, cached) == (expected, NUM_TOKENS)
    found = engine.manager.stats()["engine"]["hit_blocks"]
    assert found["CPU"] - hits.get("CPU", 0) == NUM_BLOCKS
    assert found.get("SSD", 0) == hits.get("SSD", 0)
    after = early_stats(engine)
    assert after["early"] - before["early"] == NUM_BLOCKS
    assert after["open_blocks"] == 0


def test_namespaces_share_no_blocks_and_their_own_come_back(one_at_a_time: Engine) -> None:
    engine = one_at_a_time
    prompt = make_prompt(NUM_TOKENS + 1, 89)
    expected, cached = [], []
    for number, namespace in enumerate(("team-a", "team-b", "team-a", "team-b", "")):
        add(engine, f"{number} asks", prompt, 8, namespace=namespace)
        tokens, num_cached = run(engine, f"{number} asks")
        expected.append(tokens)
        cached.append(num_cached)
        engine.settle()
        engine.forget_gpu()
    assert cached == [0, 0, NUM_TOKENS, NUM_TOKENS, 0]
    assert expected == expected[:1] * 5


def test_a_request_that_asks_too_soon_waits_for_its_blocks(
    one_at_a_time: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one_at_a_time
    prompt = make_prompt(NUM_TOKENS + 1, 93)
    expected = on_ssd_only(engine, prompt)
    before = early_stats(engine)
    add(engine, "runs", make_prompt(100, 94), 3)
    engine.llm.llm_engine.step()
    add(engine, "waits", prompt, 8)
    with (
        engine.server.lock,
        engine.server.session() as tasks,
    ):  # its reads do not end before vLLM has asked
        op_done = tasks.op_done
    held: list[tuple[Any, Any]] = []
    monkeypatch.setattr(tasks, "op_done", lambda *done, **more: held.append((done, more)))
    asks = 0
    answer = engine.connector._scheduler.gets.num_matched_tokens

    def release() -> None:
        with engine.server.lock, engine.server.session():
            monkeypatch.setattr(tasks, "op_done", op_done)
            for done, more in held:
                op_done(*done, **more)
            held.clear()

    def vllm_asks(request: Any, num_computed: int) -> Any:
        nonlocal asks
        answered = answer(request, num_computed)
        if request.num_prompt_tokens == len(prompt) and answered[0] is None:
            asks += 1
        if asks >= 2 and held:
            release()
        return answered

    monkeypatch.setattr(engine.connector._scheduler.gets, "num_matched_tokens", vllm_asks)
    try:
        assert run(engine, "waits") == (expected, NUM_TOKENS)
    finally:
        release()  # of a get that waited in vain, too, or the engine never settles
    assert asks >= 2
    after = early_stats(engine)
    assert after["late"] - before["late"] == NUM_BLOCKS
    assert after["open_blocks"] == 0


def test_an_aborted_request_is_no_longer_loaded_for(one_at_a_time: Engine) -> None:
    engine = one_at_a_time
    prompt = make_prompt(NUM_TOKENS + 1, 95)
    on_ssd_only(engine, prompt)
    add(engine, "runs", make_prompt(100, 96), 50)
    engine.llm.llm_engine.step()
    add(engine, "waits", prompt, 8)
    before = early_stats(engine)
    begun = engine.connector._scheduler.gets.early_loads.num_begun
    engine.llm.llm_engine.step()
    assert engine.connector._scheduler.gets.early_loads.num_begun == begun + 1
    engine.llm.llm_engine.abort_request(["waits"])
    run(engine, "runs")
    until(lambda: not engine.manager.stats()["tasks"]["running"])
    assert not engine.connector._scheduler.gets.early_loads._tasks
    after = early_stats(engine)
    assert (after["early"], after["late"]) == (before["early"], before["late"])


def test_a_session_is_over_with_the_request_that_says_so(one_at_a_time: Engine) -> None:
    engine = one_at_a_time
    before = engine.manager.stats()["sessions"]
    prompt = make_prompt(NUM_TOKENS, 97)
    add(engine, "first", prompt, 40, session_id="chat")
    tokens, _ = run(engine, "first")
    add(engine, "last", prompt + tokens, 40, session_id="chat", session_over=True)
    run(engine, "last")
    engine.settle()
    after = engine.manager.stats()["sessions"]
    assert after["over"] - before["over"] == 1
    num_stored = (NUM_TOKENS + 79) // 32  # in DRAM and on SSD
    retired = after["retired_blocks"] - before["retired_blocks"]
    assert retired >= 2 * num_stored, "some twice: its last put comes after the hint"
    add(engine, "after all", prompt, 8, session_id="chat")
    run(engine, "after all")
    returned = engine.manager.stats()["sessions"]["returned_sessions"]
    assert returned - before["returned_sessions"] == 1


# -- look-ups --------------------------------------------------------------------------------------


TIMEOUT_S = 1.0


class EarlyLookUpsMachine(RuleBasedStateMachine):
    """Compares it with a list of arrivals and a list of what is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.real = EarlyLookUps(TIMEOUT_S)
        self.waiting: list[str] = []
        self.under_way: list[tuple[str, float]] = []
        self.now = 0.0
        self.count = self.begun = self.cancelled = 0

    @rule(number=st.integers(1, 12))
    def arrive(self, number: int) -> None:
        for _ in range(number):
            self.count += 1
            self.real.arrived(SimpleNamespace(request_id=str(self.count)))
            self.waiting.append(str(self.count))

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.under_way = [entry for entry in self.under_way if entry[1] > self.now]
        room = _MAX_UNDER_WAY - len(self.under_way)
        due, self.waiting = self.waiting[:room], self.waiting[room:]
        assert [request.request_id for request in self.real.take_due(self.now)] == due
        self.under_way += [(request_id, self.now + TIMEOUT_S) for request_id in due]
        self.begun += len(due)

    @rule(number=st.integers(1, 40), has_ended=st.booleans())
    def leave(self, number: int, has_ended: bool) -> None:
        request_id = str(number)
        under_way = [entry for entry in self.under_way if entry[0] != request_id]
        was_known = request_id in self.waiting or under_way != self.under_way
        self.under_way = under_way
        self.waiting = [other for other in self.waiting if other != request_id]
        (self.real.ended if has_ended else self.real.asked)(request_id)
        self.cancelled += has_ended and was_known

    @invariant()
    def agrees(self) -> None:
        self.real.check()
        assert (self.real.num_begun, self.real.num_cancelled) == (self.begun, self.cancelled)


TestEarlyLookUps = EarlyLookUpsMachine.TestCase
TestEarlyLookUps.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.fixture
def events(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the connector does: ("look up" | "vLLM asks", length of the prompt)."""
    side = engine.connector._scheduler
    seen: list[tuple[str, int]] = []
    ask = side.gets.num_matched_tokens

    def vllm_asks(request: Any, num_computed: int) -> Any:
        seen.append(("vLLM asks", request.num_prompt_tokens))
        return ask(request, num_computed)

    match = engine.manager.get_match_by_tier

    def look_up_only(tokens: Any, *mask: Any, look_up: Any, **keys: Any) -> Any:
        if look_up != "only":
            return match(tokens, *mask, look_up=look_up, **keys)
        seen.append(("look up", len(tokens)))
        return None

    monkeypatch.setattr(side.gets, "_has_store", True)
    monkeypatch.setattr(side.gets.early, "_timeout_s", 1e4)
    monkeypatch.setattr(side.gets, "num_matched_tokens", vllm_asks)
    monkeypatch.setattr(engine.manager, "get_match_by_tier", look_up_only)
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", 1)
    return seen


def test_a_request_that_has_to_wait_is_looked_up_when_it_arrives(
    engine: Engine, events: list[tuple[str, int]]
) -> None:
    add(engine, "runs", make_prompt(100, 100), 5)
    engine.llm.llm_engine.step()
    add(engine, "waits", make_prompt(200, 200), 5)
    for _ in range(2):
        engine.llm.llm_engine.step()
    assert events == [("look up", 100), ("vLLM asks", 100), ("look up", 200)]
    engine.drain()
    assert events[3:] and set(events[3:]) == {("vLLM asks", 200)}


def test_a_request_that_goes_before_its_turn_is_not_looked_up(
    engine: Engine, events: list[tuple[str, int]]
) -> None:
    early = engine.connector._scheduler.gets.early
    before = early.num_cancelled
    add(engine, "runs", make_prompt(100, 100), 5)
    engine.llm.llm_engine.step()
    for number in range(_MAX_UNDER_WAY + 1):
        add(engine, f"waits-{number}", make_prompt(200 + number, 200 + number), 5)
    asked = [length for what, length in events if what == "look up" and length >= 200]
    assert asked == [200 + number for number in range(_MAX_UNDER_WAY)]
    names = [f"waits-{number}" for number in range(_MAX_UNDER_WAY + 1)]
    engine.llm.llm_engine.abort_request(names[::-1])
    engine.drain()
    assert ("look up", 200 + _MAX_UNDER_WAY) not in events
    assert early.num_cancelled - before == _MAX_UNDER_WAY + 1
    early.check()


def test_without_a_store_nothing_is_looked_up(
    engine: Engine, events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.connector._scheduler.gets, "_has_store", False)
    add(engine, "runs", make_prompt(100, 100), 5)
    engine.drain()
    assert {what for what, _ in events} == {"vLLM asks"}
