"""Reads statistics over HTTP, from a cache (`http_endpoint`) or a router (control port)."""

from __future__ import annotations

from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from flexcache.errors import FlexCacheError, ServerLostError

_MAX_BYTES = 64 << 20
_OPENER = build_opener(ProxyHandler({}))  # the token is for the server only


class TokenRequiredError(FlexCacheError):
    """A page needs a bearer token, or another one."""


def read_page(url: str, path: str, token: str | None, timeout_s: float) -> bytes | None:
    """Return the body of a page; None if the server has no such page.

    Args:
        url: ``http://HOST:PORT``.
        token: The server's bearer token, if it needs one.

    Raises:
        ServerLostError: There is no answer.
        TokenRequiredError: The token is missing or wrong.
        FlexCacheError: The answer is another refusal.
    """
    request = Request(f"{url.rstrip('/')}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read(_MAX_BYTES + 1)
            if len(body) > _MAX_BYTES:
                raise FlexCacheError(f"{url} answers more than {_MAX_BYTES >> 20} MiB")
            return body
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        if error.code == 401:
            reason = (
                "set FLEXCACHE_HTTP_TOKEN to a cache's http_token, "
                "FLEXCACHE_ROUTER_CONTROL_TOKEN to a router's control_token"
            )
            raise TokenRequiredError(f"{url} requires a token: {reason}") from None
        raise FlexCacheError(f"{url} answers {error.code}") from None
    except (URLError, OSError, ValueError) as error:
        raise ServerLostError(f"{url} does not answer: {error}") from None
