"""Look-ups that begin when a request arrives: which, how many, and before vLLM asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engines import Engine, make_prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm import SamplingParams

from flexcache.integration.vllm.early_loads import _MAX_UNDER_WAY, EarlyLookUps

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


def add(engine: Engine, request_id: str, num_tokens: int, **extra: Any) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, **extra)
    prompt = {"prompt_token_ids": make_prompt(num_tokens, num_tokens)}
    engine.llm.llm_engine.add_request(request_id, prompt, sampling)


def test_a_request_that_has_to_wait_is_looked_up_when_it_arrives(
    engine: Engine, events: list[tuple[str, int]]
) -> None:
    add(engine, "runs", 100)
    engine.llm.llm_engine.step()
    add(engine, "waits", 200)
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
    add(engine, "runs", 100)
    engine.llm.llm_engine.step()
    for number in range(_MAX_UNDER_WAY + 1):
        add(engine, f"waits-{number}", 200 + number)
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
    add(engine, "runs", 100)
    engine.drain()
    assert {what for what, _ in events} == {"vLLM asks"}
