"""Hints in ``kv_transfer_params``: read if they make sense, ignored if not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flexcache.integration.vllm import calls
from flexcache.integration.vllm.calls import Hints, read_hints

OVER = {"over": True, "returns_in_s": None}


def request_with(**hints: Any) -> SimpleNamespace:
    params = {f"flexcache_{name}": hint for name, hint in hints.items()}
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


def test_a_request_without_hints_says_nothing() -> None:
    for request in (SimpleNamespace(request_id="r"), request_with()):
        assert read_hints(request) == Hints()


@pytest.mark.parametrize(
    ("hints", "retention"),
    [({"priority": 2, "ttl_s": 1}, {"priority": 2, "ttl_s": 1.0}),
     ({"priority": "3"}, {"priority": 3}),
     ({"priority": 1000}, {}), ({"priority": "high", "ttl_s": 5}, {"ttl_s": 5.0}),
     ({"ttl_s": float("nan")}, {}), ({"priority": [1]}, {})],
)  # fmt: skip
def test_retention(hints: dict[str, Any], retention: dict[str, Any]) -> None:
    assert read_hints(request_with(**hints)).retention == retention


@pytest.mark.parametrize(
    ("hints", "end"),
    [({"session_id": "a"}, {}), ({"session_over": True}, {}),
     ({"session_id": "a", "session_over": False}, {}),
     ({"session_id": "a", "session_over": True}, OVER),
     ({"session_id": "a", "session_over": "false"}, {}),
     ({"session_id": "a", "returns_in_s": 3}, {"over": False, "returns_in_s": 3.0}),
     ({"session_id": "a", "returns_in_s": -3}, {}),
     ({"session_id": "a", "returns_in_s": "soon"}, {}),
     ({"session_id": "x" * 300, "session_over": True}, {}),
     ({"session_id": "a", "returns_in_s": 86_401}, {}),
     ({"session_id": "a", "session_over": True, "returns_in_s": 3}, {}),
     ({"session_id": "\ud800", "session_over": True}, {}),
     ({"session_id": 7, "session_over": True}, {})],
)  # fmt: skip
def test_the_end_of_a_session(hints: dict[str, Any], end: dict[str, Any]) -> None:
    read = read_hints(request_with(**hints))
    assert read.session_end == end
    assert read.session_id == "a" or not end


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
    assert read_hints(request_with(namespace=hint)).namespace == namespace


def test_what_is_ignored_is_logged_once_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls._warned.clear()
    for seconds in (-3, "soon"):
        read_hints(request_with(session_id="a", returns_in_s=seconds))
    read_hints(request_with(session_id="a", session_over=True, returns_in_s=3))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "hint=flexcache_returns_in_s" in warnings[0]
    assert "0 to 86,400 s" in warnings[0]
    assert "hint=flexcache_session_over" in warnings[1]
