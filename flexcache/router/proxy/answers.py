"""Answers that the proxy gives itself: errors, as JSON in OpenAI's form."""

from __future__ import annotations

import json
import math

from aiohttp import web

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


def error(status: int, message: str, retry_after: str | None = None) -> web.Response:
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
