"""Header fields: which ones are passed on, in both directions.

Fields that concern one connection only are not (RFC 9110, 7.6.1): the listed ones, and those that
``Connection`` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy, istr

REQUEST_ID = "x-request-id"
WORKER = "x-flexcache-worker"
MATCHED_TOKENS = "x-flexcache-matched-tokens"

ROUTING_HEADERS = ("content-type", "x-session-id")
"""Passed to the chooser."""

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


def to_engine(headers: Headers, added: Mapping[str, str]) -> CIMultiDict[str]:
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


def to_client(headers: Headers) -> CIMultiDict[str]:
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
