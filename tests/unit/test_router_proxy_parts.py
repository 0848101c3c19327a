"""The pure parts of the router's proxy: header fields, keys, retry budget, reported usage."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from multidict import CIMultiDict

from flexcache.errors import ConfigError
from flexcache.router.chooser import UNKNOWN, Usage
from flexcache.router.proxy import answers
from flexcache.router.proxy.answers import (
    AnswerReader,
    OutputWatch,
    headers_to_client,
    headers_to_engine,
    is_request_id,
)
from flexcache.router.proxy.clients import ApiKeys
from flexcache.router.proxy.proxy import RetryBudget
from flexcache.router.settings import ProxyConfig, read_api_keys

# -- header fields ---------------------------------------------------------------------------------


def test_fields_of_one_connection_are_not_passed_on() -> None:
    client = CIMultiDict(
        [
            ("Host", "router"),
            ("Connection", "keep-alive, X-Mine"),
            ("connection", "x-also-mine"),
            ("Keep-Alive", "timeout=5"),
            ("X-Mine", "1"),
            ("x-also-mine", "2"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "7"),
            ("TE", "trailers"),
            ("Trailer", "x"),
            ("Upgrade", "h2c"),
            ("Expect", "100-continue"),
            ("Proxy-Authorization", "secret"),
            ("X-Kept", "a"),
            ("X-Kept", "b"),
            ("Authorization", "Bearer mine"),
        ]
    )
    passed = headers_to_engine(client, {})
    assert list(passed.items()) == [
        ("X-Kept", "a"),
        ("X-Kept", "b"),
        ("Authorization", "Bearer mine"),
    ]


def test_added_fields_replace_the_clients() -> None:
    client = CIMultiDict({"X-Data-Parallel-Rank": "7", "Other": "o"})
    client.add("x-data-parallel-rank", "8")
    assert headers_to_engine(client, {"X-data-parallel-rank": "1"}).getall(
        "X-Data-Parallel-Rank"
    ) == ["1"]


@pytest.mark.parametrize("name", ["Authorization", "authorization"])
def test_an_engines_key_replaces_the_clients_however_it_was_sent(name: str) -> None:
    client = CIMultiDict({"Authorization": "Bearer client", "X-Api-Key": "client"})
    passed = headers_to_engine(client, {name: "Bearer engine"})
    assert passed == CIMultiDict({"Authorization": "Bearer engine"})


def test_an_answers_fields_are_kept_but_for_those_of_the_connection() -> None:
    engine = CIMultiDict(
        [
            ("Content-Type", "application/json"),
            ("Content-Length", "12"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("Connection", "close, x-hop"),
            ("X-Hop", "1"),
            ("Transfer-Encoding", "chunked"),
        ]
    )
    assert list(headers_to_client(engine).items()) == list(engine.items())[:4]


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("abc-1", True),
        ("x" * 200, True),
        ("x" * 201, False),
        ("", False),
        ("a b", False),
        ("a\r\nSet-Cookie: x", False),
        ("a\x00", False),
        ("\u00e9", False),
    ],
)
def test_a_request_id_is_printable_and_short(value: str, is_one: bool) -> None:
    assert is_request_id(value) == is_one


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "is_admitted"),
    [
        ({"Authorization": "Bearer one"}, True),
        ({"authorization": "bearer two"}, True),
        ({"X-API-Key": "two"}, True),
        ({"Authorization": "Bearer three"}, False),
        ({"Authorization": "Basic one"}, False),
        ({"Authorization": "one"}, False),
        ({"Authorization": "Bearer "}, False),
        ({"x-api-key": ""}, False),
        ({"Authorization": "Bearer \udcff"}, False),
        ({}, False),
    ],
)
def test_a_client_needs_one_of_the_keys(fields: dict[str, str], is_admitted: bool) -> None:
    assert ApiKeys(["one", "two"]).admit(CIMultiDict(fields)) == is_admitted


def test_without_keys_anyone_is_admitted() -> None:
    assert ApiKeys([]).admit({})


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nalpha\n\n  beta  \n")
    assert read_api_keys(path) == ["alpha", "beta"]


def test_a_file_without_keys_does_not_let_everyone_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="contains no key"):
        read_api_keys(path)
    with pytest.raises(ConfigError, match="api_key_file"):
        read_api_keys(tmp_path / "missing")


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\u00e9"])
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        ProxyConfig(api_keys=("good", key))


# -- retries --------------------------------------------------------------------------------------


@given(st.lists(st.booleans()), st.floats(0.0, 1.0), st.integers(0, 5))
def test_retries_stay_within_burst_and_share_of_requests(
    is_retry: list[bool], ratio: float, burst: int
) -> None:
    budget = RetryBudget(ratio, burst)
    num_requests = num_retries = 0
    for wants_retry in is_retry:
        if not wants_retry:
            budget.add_request()
            num_requests += 1
        elif budget.take_retry():
            num_retries += 1
        budget.check()
        assert num_retries <= burst + ratio * num_requests + 1e-6


def test_the_budget_fills_again() -> None:
    budget = RetryBudget(0.25, 1)
    assert budget.take_retry()
    for _ in range(4):
        assert not budget.take_retry()
        budget.add_request()
    assert budget.take_retry()
    assert not budget.take_retry()


# -- usage ----------------------------------------------------------------------------------------

VLLM = {
    "prompt_tokens": 40,
    "total_tokens": 43,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def read_usage(answer: bytes, cuts: list[int]) -> Usage:
    """Feed an answer, cut at some places."""
    reader = AnswerReader()
    places = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    for start, stop in pairwise(places):
        reader.feed(answer[start:stop])
    return reader.usage()


@given(st.lists(st.integers(0, 20_000), max_size=10), st.integers(0, 9_000), st.booleans())
def test_usage_is_found_however_the_answer_is_cut(
    cuts: list[int], length: int, is_stream: bool
) -> None:
    if is_stream:
        event = b'data: {"choices": [{"text": "x"}], "usage": null}\n\n'
        last = b"data: " + json.dumps({"choices": [], "usage": VLLM}).encode() + b"\n\n"
        answer = event * (length // len(event)) + last + b"data: [DONE]\n\n"
    else:
        answer = json.dumps(
            {"choices": [{"text": "x" * length}], "usage": VLLM, "kv_transfer_params": None}
        ).encode()
    assert read_usage(answer, cuts) == Usage(cached_tokens=32, prompt_tokens=40, output_tokens=3)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 1}, Usage(None, 5, 1)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, Usage(None, 5, None)),
        (
            {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2},
            Usage(0, 7, 2),
        ),
        ({"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": 4}, Usage(4, 11, 2)),
        (
            {"input_tokens": 0, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3},
            Usage(4, 7, None),
        ),
        ({"prompt_tokens": "many", "completion_tokens": -1}, UNKNOWN),
        ({"prompt_tokens": True}, UNKNOWN),
        ([1], UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_usage_of_other_apis_and_odd_values(usage: Any, found: Usage) -> None:
    assert read_usage(json.dumps({"usage": usage}).encode(), []) == found


def test_text_of_the_model_is_not_taken_for_usage() -> None:
    said = '"usage": {"prompt_tokens": 1000000}'
    answer = json.dumps({"usage": VLLM, "text": said}).encode()
    assert read_usage(answer, []).prompt_tokens == 40
    assert read_usage(json.dumps({"text": said}).encode(), []) == UNKNOWN


@given(st.binary(max_size=200))
def test_any_bytes_may_be_an_answer(answer: bytes) -> None:
    read_usage(b'"usage"' + answer, [])
    assert read_usage(answer, []) == UNKNOWN or b'"usage"' in answer


def test_a_long_stream_is_not_kept() -> None:
    reader = AnswerReader()
    reader.feed(json.dumps({"usage": VLLM}).encode())
    assert reader.usage().prompt_tokens == 40
    for _ in range(100):
        reader.feed(b"x" * 230)
    assert reader.usage() == UNKNOWN


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, None), (0.0, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")]
)
def test_retry_after_is_rounded_up(seconds: float | None, shown: str | None) -> None:
    assert answers.in_whole_seconds(seconds) == shown


def test_errors_have_openais_form() -> None:
    error = json.loads(answers.error_body(503, "busy"))["error"]
    assert error == {
        "message": "busy",
        "type": "service_unavailable",
        "param": None,
        "code": 503,
    }


RESPONSES_STREAM = (
    b'event: response.created\ndata: {"response":{"instructions":"event: x"}}\n\n'
    b'event: response.in_progress\ndata: {"sequence_number":1}\n\n'
    b'event: response.output_item.added\ndata: {"item":{}}\n\n'
)


def test_an_answer_begins_with_what_the_engine_generates() -> None:
    before = RESPONSES_STREAM.index(b"\n", RESPONSES_STREAM.index(b"output_item"))
    for size in range(1, len(RESPONSES_STREAM), 7):
        watch, seen = OutputWatch("/v1/responses?x=1", is_stream=True), 6
        assert not watch.sees(RESPONSES_STREAM[:6])
        while seen < len(RESPONSES_STREAM) and not watch.sees(RESPONSES_STREAM[seen : seen + size]):
            seen += size
        assert seen <= before < seen + size
    for path, is_stream, first in (
        ("/v1/messages", True, RESPONSES_STREAM),
        ("/v1/responses", False, b"{"),
        ("/v1/responses", True, b'data: {"choices":[]}\n\n'),
    ):
        assert OutputWatch(path, is_stream).sees(first)
