"""Conversations of coding agents as the router reads them; `tests/vllm/test_router_agents.py`
compares their tokens with the engine's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizers import make_tokenizer
from test_router_tokens import Reader

from flexcache.router import KVRouter, RouteRequest, WorkerSpec, WorkerState
from flexcache.router.chooser import Source, Turn
from flexcache.router.proxy.transfers import with_kv_source
from flexcache.router.tokens.body import with_pin

Body = dict[str, Any]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PICTURE = {"type": "base64", "media_type": "image/png", "data": "A" * 5000}
OTHER_PICTURE = {**PICTURE, "data": "B" * 5000}
SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tokenizer=str(make_tokenizer(tmp_path_factory.mktemp("t"), "chatml")))
    yield made
    made.close()


def shown(source: Body) -> Body:
    return {"role": "user", "content": [{"type": "image", "source": source}]}


def keys(reader: Reader, path: str, body: Body) -> list[bytes]:
    return [turn.key for turn in reader.read(path, body).turns]


def test_a_conversation_whose_tokens_are_known_is_no_text(reader: Reader) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    request = reader.read(f"{MESSAGES}?beta=true", body)
    assert request.token_ids is not None and not request.turns
    assert reader.read(RESPONSES, {"input": "x"}).token_ids is not None


@pytest.mark.parametrize(
    ("path", "body", "is_begun"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": "x"}, shown(PICTURE)]}, True),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "new"}]}]}, False),
        (MESSAGES, {"messages": [], "tools": [{"type": "web_search", "name": "w"}]}, False),
        (RESPONSES, {"input": [SEALED]}, False),
        (RESPONSES, {"input": [{"type": "compaction", "summary": "x"}]}, False),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, False),
        (RESPONSES, {"input": "x", "truncation": "auto"}, False),
    ],
)
def test_what_cannot_be_converted_is_known_by_its_text(
    reader: Reader, path: str, body: Body, is_begun: bool
) -> None:
    request = reader.read(path, body)
    assert (request.token_ids is not None) == is_begun
    assert [turn.num_tokens for turn in request.turns] == sorted(
        turn.num_tokens for turn in request.turns
    )
    assert request.turns and request.turns[-1].num_tokens <= request.num_tokens < 2000


def test_a_later_turn_begins_as_the_one_before(reader: Reader) -> None:
    marked = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    first: Body = {
        "model": "m", "system": [billing, {"type": "text", "text": "s"}],
        "messages": [shown(PICTURE), {"role": "user", "content": [marked]}],
    }  # fmt: skip
    later = copy.deepcopy(first)
    later["system"][0]["text"] = "x-anthropic-billing-header: cch=2"
    later["messages"][1]["content"] = "look"  # its marker has gone on
    later["messages"] += [{"role": "assistant", "content": "seen"}, {"role": "user", "content": []}]
    before = keys(reader, MESSAGES, first)
    assert keys(reader, MESSAGES, later)[: len(before)] == before
    assert len(set(before)) == 3

    for change in (
        {"model": "n"},
        {"cache_salt": "s"},
        {"messages": [shown(OTHER_PICTURE), *first["messages"][1:]]},
    ):
        assert keys(reader, MESSAGES, first | change)[-1] != before[-1]
    other = keys(reader, MESSAGES, first | {"messages": [shown(OTHER_PICTURE)]})
    assert other[0] == before[0] and other[1] != before[1]


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({"x-session-id": "a", "thread-id": "b"}, {}, "a"),
        ({"session-id": "c", "thread-id": "b"}, {}, "b"),  # Codex, a sub-agent
        ({"session-id": "c"}, {"prompt_cache_key": "k"}, "c"),
        ({"x-claude-code-session-id": "d"}, {"metadata": {"user_id": "u"}}, "d"),
        ({}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"session_id": "s", "prompt_cache_key": "k"}, "s"),
        ({"thread-id": ""}, {}, None),
    ],
)
def test_the_conversation_is_named_as_clients_name_it(
    reader: Reader, headers: dict[str, str], body: Body, name: str | None
) -> None:
    assert reader.read(RESPONSES, {"input": "x", **body}, headers).session_id == name


def test_the_user_names_the_conversation_if_nothing_else_does(reader: Reader) -> None:
    said = [{"role": "user", "content": "x"}]
    body = {"messages": said, "metadata": {"user_id": "u"}}
    assert reader.read(MESSAGES, body).session_id == "u"
    assert reader.read(MESSAGES, body | {"metadata": {"user_id": 7}}).session_id is None


# -- where such a conversation goes ---------------------------------------------------------------


def make_router(policy: str = "ours") -> KVRouter:
    router = KVRouter(policy=policy)
    router.set_workers([WorkerSpec(name=name, url=f"http://{name}", sources=()) for name in "abc"])
    return router


def asked(request_id: str, said: list[int], num_tokens: int = 100) -> RouteRequest:
    """A conversation of turns of a thousand tokens each."""
    turns = [Turn(repr(said[: i + 1]).encode(), 1000 * (i + 1)) for i in range(len(said))]
    more = 1000 * len(said) + num_tokens
    return RouteRequest(request_id=request_id, num_tokens=more, turns=turns)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=12))
def test_a_conversation_goes_where_the_most_of_it_went(chats: list[list[int]]) -> None:
    router = make_router("lmetric")  # which spreads nothing among idle engines
    went: dict[tuple[int, ...], str] = {}
    for number, said in enumerate(chats):
        decision = router.choose(asked(str(number), said), 0.0)
        assert decision is not None
        known = [went.get(tuple(said[: i + 1])) for i in reversed(range(len(said)))]
        expected = next((name for name in known if name is not None), None)
        assert (decision.reason == "conversation") == (decision.worker == expected)
        if expected is not None:
            assert decision.worker == expected
        assert decision.matched_tokens == 0  # nothing is known
        for i in range(len(said)):
            went[tuple(said[: i + 1])] = decision.worker
        router.ended(str(number), 1.0)
        router.check()


def test_a_busy_engine_loses_its_conversation_and_one_that_is_gone_too() -> None:
    router = make_router()
    first = router.choose(asked("1", [1, 2]), 0.0)
    assert first is not None
    crowd = RouteRequest(request_id="crowd", num_tokens=50_000)
    for name in {"a", "b", "c"} - {first.worker}:
        router.set_state(name, WorkerState.DOWN)
    router.choose(crowd, 0.0)
    for name in "abc":
        router.set_state(name, WorkerState.UP)
    second = router.choose(asked("2", [1, 2, 3]), 0.0)
    assert second is not None and second.worker != first.worker and second.reason == "load"

    router.set_workers([WorkerSpec(name=first.worker, url="http://x", sources=())])
    third = router.choose(asked("3", [1, 2, 3, 4]), 0.0)
    assert third is not None and third.worker == first.worker
    router.check()


# -- cache_control ---------------------------------------------------------------------------------

PIN = "flexcache_pin_ttl_s"
P2P = Source("offloading", "10.0.0.7", 5710)
EPHEMERAL = {"type": "ephemeral"}


def marked(text: str = "x", **marker: Any) -> Body:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **marker}}


@pytest.mark.parametrize(
    ("body", "ttl_s"),
    [
        ({"messages": [{"role": "user", "content": [marked()]}]}, 300),
        ({"messages": [{"role": "user", "content": [marked(ttl="1h"), marked(ttl="5m")]}]}, 3600),
        ({"messages": [], "system": [marked(ttl="5m")]}, 300),
        ({"messages": [], "tools": [{"name": "t", "cache_control": {"type": "ephemeral"}}]}, 300),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [marked(ttl="1h")]}]}]}, 3600),
        ({"messages": [{"role": "tool", "content": "x", "cache_control": EPHEMERAL}]}, 300),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"type": [1]}}]}, None),
        ({"messages": [], "cache_control": {"type": "ephemeral"}}, 300),
        ({"messages": [{"role": "user", "content": [marked(ttl="1y")]}]}, None),
        ({"messages": [{"role": "user", "content": 'says "cache_control": {"ttl": "1h"}'}]}, None),
        ({"messages": [{"role": "user", "content": [marked()]}], "system": 7}, None),
        ({"messages": [{"role": "user", "content": [{"cache_control": 5}]}]}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/chat/completions"])
def test_markers_become_a_pin(path: str, body: Body, ttl_s: int | None) -> None:
    raw = json.dumps(body | {"seed": 12345678901234567890, "x": 1e5}).encode()
    translated = with_pin(path, raw)
    if ttl_s is None:
        assert translated == raw
        return
    expected = json.loads(raw) | {"kv_transfer_params": {PIN: ttl_s}}
    assert json.loads(translated) == expected
    asked = json.dumps(body | {"kv_transfer_params": {"a": 1, PIN: 7}}).encode()
    assert with_pin(path, asked) == asked  # the client's own
    other = json.dumps(body | {"kv_transfer_params": {"a": 1}}).encode()
    assert json.loads(with_pin(path, other))["kv_transfer_params"] == {"a": 1, PIN: ttl_s}


def test_a_marked_prompt_may_be_fetched_from_another_engine() -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": [marked()]}]}).encode()
    told = json.loads(with_kv_source(MESSAGES, with_pin(MESSAGES, raw), P2P, "r"))
    source = {"kv_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 5710}
    expected = {PIN: 300, "remote_kv_source": source}
    assert told == {**json.loads(raw), "kv_transfer_params": expected}


def test_other_bodies_are_not_touched() -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": [marked()]}]}).encode()
    assert with_pin("/v1/responses", raw) is raw
    assert with_pin("/v1/messages/count_tokens", raw) is raw
    assert with_pin("/v1/messages", b'"cache_control" [') == b'"cache_control" ['
    deep = b'{"messages": ' + b'[{"content": ' * 5000 + b'"cache_control"'
    assert with_pin("/v1/messages", deep) is deep
