"""Hints in ``kv_transfer_params``: read if they make sense, ignored if not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flexcache.integration.vllm import calls as request_hints
from flexcache.integration.vllm.calls import (
    SessionEnd,
    read_namespace,
    read_retention,
    read_session_end,
    read_session_id,
)


def request_with(**hints: Any) -> SimpleNamespace:
    params = {f"flexcache_{name}": hint for name, hint in hints.items()}
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


def test_a_request_without_hints_says_nothing() -> None:
    for request in (SimpleNamespace(request_id="r"), request_with()):
        assert read_session_id(request) is None
        assert read_namespace(request) is None
        assert read_session_end(request) is None
        assert read_retention(request) == {}


@pytest.mark.parametrize(
    ("hints", "retention"),
    [({"priority": 2, "ttl_s": 1}, {"priority": 2, "ttl_s": 1.0}),
     ({"priority": "3"}, {"priority": 3}),
     ({"priority": 1000}, {}), ({"priority": "high", "ttl_s": 5}, {"ttl_s": 5.0}),
     ({"ttl_s": float("nan")}, {}), ({"priority": [1]}, {})],
)  # fmt: skip
def test_retention(hints: dict[str, Any], retention: dict[str, Any]) -> None:
    assert read_retention(request_with(**hints)) == retention


@pytest.mark.parametrize(
    ("hints", "end"),
    [({"session_id": "a"}, None), ({"session_over": True}, None),
     ({"session_id": "a", "session_over": False}, None),
     ({"session_id": "a", "session_over": True}, SessionEnd("a", True, None)),
     ({"session_id": "a", "session_over": "false"}, None),
     ({"session_id": "a", "returns_in_s": 3}, SessionEnd("a", False, 3.0)),
     ({"session_id": "a", "returns_in_s": -3}, None),
     ({"session_id": "a", "returns_in_s": "soon"}, None),
     ({"session_id": "x" * 300, "session_over": True}, None),
     ({"session_id": "a", "returns_in_s": 86_401}, None),
     ({"session_id": "a", "session_over": True, "returns_in_s": 3}, None),
     ({"session_id": "\ud800", "session_over": True}, None),
     ({"session_id": 7, "session_over": True}, None)],
)  # fmt: skip
def test_the_end_of_a_session(hints: dict[str, Any], end: SessionEnd | None) -> None:
    assert read_session_end(request_with(**hints)) == end


@pytest.mark.parametrize(
    ("hint", "namespace"),
    [
        ("team-a", "team-a"),
        ("", None),
        ("x" * 257, None),
        (7, None),
        (["a"], None),
        ("\ud800", None),
    ],
)
def test_a_namespace(hint: object, namespace: str | None) -> None:
    assert read_namespace(request_with(namespace=hint)) == namespace


def test_what_is_ignored_is_logged_once_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    request_hints._warned.clear()
    for seconds in (-3, "soon"):
        read_session_end(request_with(session_id="a", returns_in_s=seconds))
    read_session_end(request_with(session_id="a", session_over=True, returns_in_s=3))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "hint=flexcache_returns_in_s" in warnings[0]
    assert "0 to 86,400 s" in warnings[0]
    assert "hint=flexcache_session_over" in warnings[1]
