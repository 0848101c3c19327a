"""Hints in a request's ``kv_transfer_params``. They come from its sender: invalid ones are ignored,
and logged.

flexcache_namespace                                   whose quota it counts against
flexcache_priority, flexcache_ttl_s                   how long to keep what it stores
flexcache_session_id                                  whose prompt it is
flexcache_session_over, flexcache_returns_in_s        how the session goes on after its end
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from flexcache.cache.prompt import check_hint, check_name, check_session_id
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_HIGHEST_PRIORITY = 100  # highest priority that a request may set
_LONGEST_TTL_S = 7 * 86400.0
_LONGEST_NAMESPACE = 256

_warned: set[str] = set()

T = TypeVar("T")


class SessionEnd(NamedTuple):
    """How a session goes on, or not, after a request; see `KVManager.session_hint`."""

    session_id: str
    over: bool
    returns_in_s: float | None


def read_retention(request: Any) -> dict[str, Any]:
    """Return the hints as arguments of `KVManager.put_match`."""
    if not getattr(request, "kv_transfer_params", None):
        return {}
    hints = {
        "priority": _read(
            request, "priority", _between(int, -_HIGHEST_PRIORITY, _HIGHEST_PRIORITY)
        ),
        "ttl_s": _read(request, "ttl_s", _between(float, 0.0, _LONGEST_TTL_S)),
    }
    return {name: hint for name, hint in hints.items() if hint is not None}


def read_namespace(request: Any) -> str | None:
    """Return the namespace in which the request's blocks are kept, if it names one."""
    return _read(request, "namespace", _namespace)


def read_session_id(request: Any) -> str | None:
    """Return the session that the request belongs to, if it says so."""
    return _read(request, "session_id", _session_id)


def read_session_end(request: Any) -> SessionEnd | None:
    """Return what is to be passed on when the request has ended, if anything."""
    session_id = read_session_id(request)
    if session_id is None:
        return None
    over = _read(request, "session_over", _bool) or False
    returns_in_s = _read(request, "returns_in_s", _returns_in_s)
    if over == (returns_in_s is not None):
        if over:
            _ignored(request, "session_over", "flexcache_returns_in_s says that it goes on")
        return None
    return SessionEnd(session_id, over, returns_in_s)


def _read(request: Any, name: str, convert: Callable[[Any], T]) -> T | None:
    params = getattr(request, "kv_transfer_params", None)
    if not params or (hint := params.get(f"flexcache_{name}")) is None:
        return None
    try:
        return convert(hint)
    except (TypeError, ValueError, OverflowError) as error:
        _ignored(request, name, error)
        return None


def _ignored(request: Any, name: str, reason: object) -> None:
    """Log a hint that makes no sense; the first of each name as a warning."""
    level = logging.DEBUG if name in _warned else logging.WARNING
    _warned.add(name)
    log_event(
        logger, level, "hint_ignored", request=request.request_id, hint=f"flexcache_{name}",
        reason=reason,
    )  # fmt: skip


def _between(kind: type[T], lowest: Any, highest: Any) -> Callable[[Any], T]:
    def convert(hint: Any) -> T:
        value: Any = kind(hint)  # type: ignore[call-arg]
        if not lowest <= value <= highest:
            raise ValueError(f"must be {lowest} to {highest}")
        return value  # type: ignore[no-any-return]

    return convert


def _bool(hint: Any) -> bool:
    if not isinstance(hint, bool):
        raise TypeError("must be true or false")
    return hint


def _namespace(hint: Any) -> str:
    check_name("namespace", hint, _LONGEST_NAMESPACE)
    return str(hint)


def _session_id(hint: Any) -> str:
    check_session_id(hint)
    return str(hint)


def _returns_in_s(hint: Any) -> float:
    seconds = float(hint)
    check_hint("any", over=False, returns_in_s=seconds)
    return seconds
