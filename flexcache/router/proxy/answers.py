"""Answers: header fields that pass, errors of the proxy's own, what is read as they pass."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy, istr

from flexcache.router.chooser import SESSION_HEADERS, UNKNOWN, Usage
from flexcache.router.stored import IdReader

REQUEST_ID_HEADER = "x-request-id"
WORKER_HEADER = "x-flexcache-worker"
MATCHED_TOKENS_HEADER = "x-flexcache-matched-tokens"

ROUTING_HEADERS = ("content-type", *SESSION_HEADERS)
"""Passed to the chooser."""

# Fields that concern one connection only are not passed on (RFC 9110, 7.6.1): these, and those that
# ``Connection`` names.
_HOP_BY_HOP = tuple(
    istr(name)
    for name in (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_TO_ENGINES = (*_HOP_BY_HOP, hdrs.HOST, hdrs.CONTENT_LENGTH, hdrs.EXPECT)
"""`Host` and the body's length are the new request's own."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")

Headers = CIMultiDict[str] | CIMultiDictProxy[str]


def is_request_id(value: str) -> bool:
    """Return whether a client's request id may be passed on and logged."""
    return _REQUEST_ID.fullmatch(value) is not None


def headers_to_engine(headers: Headers, added: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the header fields of the request to an engine.

    Args:
        headers: The client's.
        added: Replace the client's fields of the same name. With ``Authorization`` among them the
            client's key is not passed on, however it was sent.
    """
    passed = _without(headers, _NOT_TO_ENGINES)
    for name, value in added.items():
        if name.lower() == "authorization":
            passed.popall("x-api-key", None)
        passed[name] = value
    return passed


def headers_to_client(headers: Headers) -> CIMultiDict[str]:
    """Return the header fields of the answer."""
    return _without(headers, _HOP_BY_HOP)


def _without(headers: Headers, dropped: tuple[istr, ...]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for line in headers.getall(hdrs.CONNECTION, ()):
        for name in line.split(","):
            kept.popall(name.strip(), None)
    for name in dropped:
        kept.popall(name, None)
    return kept


SERVER = "flexcache"
"""Value of ``Server``, where no engine has set one."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "request_timeout",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    502: "bad_gateway",
    503: "service_unavailable",
}


def error_body(status: int, message: str) -> bytes:
    """Return the JSON text of an error."""
    kind = _TYPES.get(status, "api_error")
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}
    ).encode()


def error_answer(status: int, message: str, retry_after: str | None = None) -> web.Response:
    """Return an error answer.

    Args:
        retry_after: Value of ``Retry-After``.
    """
    headers = {"Server": SERVER}
    if retry_after is not None:
        headers["Retry-After"] = retry_after
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=status,
        body=error_body(status, message),
        content_type="application/json",
        headers=headers,
    )


def in_whole_seconds(seconds: float | None) -> str | None:
    """Return the value of ``Retry-After`` for a time, rounded up; None if it is unknown."""
    return None if seconds is None else str(max(math.ceil(seconds), 1))


def broken_stream(message: str) -> bytes:
    """Return the last event of a stream that cannot be continued. The engine's last event may be
    incomplete, so an empty line ends it first."""
    return b"\n\ndata: " + error_body(502, message) + b"\n\n"


_KEY = b'"usage"'
_MAX_COUNT = 1 << 31
_KEPT_CHUNKS = 16  # pieces as they come from the engine; the last event spans one or two
_decode_first = json.JSONDecoder().raw_decode


class AnswerReader:
    """Reads the usage that an answer reports, and the ids that it names, as it passes.

    Usage is the end of a JSON answer, and in one of the last events of a stream: the last pieces
    are kept.

    Args:
        ids: Finds the ids; None: there are none.

    Attributes:
        feed: Takes the next bytes, before the client does; without ids in a fraction of a
            microsecond.
    """

    __slots__ = ("_chunks", "_ids", "feed")

    def __init__(self, ids: IdReader | None = None) -> None:
        self._chunks: deque[bytes] = deque(maxlen=_KEPT_CHUNKS)
        self._ids = ids
        self.feed: Callable[[bytes], None] = self._chunks.append if ids is None else self._feed

    def _feed(self, chunk: bytes) -> None:
        assert self._ids is not None
        self._ids.feed(chunk)
        self._chunks.append(chunk)

    def end(self) -> None:
        """Note that there is no more, before the client does."""
        if self._ids is not None:
            self._ids.end()

    def usage(self) -> Usage:
        """Return the last usage that the answer has reported."""
        tail = b"".join(self._chunks)
        end = len(tail)
        while (start := tail.rfind(_KEY, 0, end)) >= 0:
            usage = _read_at(tail, start + len(_KEY))
            if usage is not None:
                return usage
            end = start
        return UNKNOWN


_BEFORE_OUTPUT = frozenset(
    b"event: response." + name for name in (b"created", b"in_progress", b"queued")
)
_LINE_BYTES = 64  # of these; the lines with the data are far longer


class OutputWatch:
    """Tells when an answer has the first of what the engine has generated: with its first piece.

    But streams of ``/v1/responses`` begin with events that the request was taken, which come before
    the prompt is computed (OpenAI's API reference, "Streaming events").

    Args:
        path: The request's.
        is_stream: Whether the answer is one of events.
    """

    __slots__ = ("_is_late", "_line")

    def __init__(self, path: str, is_stream: bool) -> None:
        self._is_late = is_stream and path.partition("?")[0].endswith("/responses")
        self._line: bytes | None = None  # how the last one begins, which is not whole

    def sees(self, chunk: bytes) -> bool:
        """Take the next bytes; whether they have some of it."""
        if not self._is_late or (self._line is None and not chunk.startswith(b"event:")):
            return True
        *lines, last = ((self._line or b"") + chunk).split(b"\n")
        self._line = last[:_LINE_BYTES]
        return any(
            line.startswith(b"event:") and line.rstrip() not in _BEFORE_OUTPUT for line in lines
        )


def _read_at(tail: bytes, position: int) -> Usage | None:
    """Return the usage behind the key; None if there is none: ``null``, or text of the model."""
    text = tail[position:].decode(errors="replace").lstrip()
    if not text.startswith(":"):
        return None
    try:
        usage, _ = _decode_first(text[1:].lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    if cached is None and prompt is not None:  # Anthropic's counts what was not cached
        cached = _count(usage.get("cache_read_input_tokens"))
        prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    return Usage(cached, prompt, _count(usage.get("completion_tokens", usage.get("output_tokens"))))


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value <= _MAX_COUNT else None
