"""Who may use the control API.

On loopback only requests that name a loopback host are answered, so a web page whose own name
resolves to this host gets nothing; and none that a browser sends for a page of another origin, so
no page can change anything. With a token every request needs it, except for health and the files
of the live page.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from flexcache.config.values import is_loopback
from flexcache.router.proxy.access import holding
from flexcache.router.proxy.bodies import BodyRefused

_OPEN_PATHS = ("/healthz", "/readyz")
_OPEN_FILES = "/ui/"
"""Show nothing of the router."""
_READING = ("GET", "HEAD")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_gate(host: str, token: str | None) -> Middleware:
    """Return the middleware that admits requests.

    Args:
        host: Address that the API is bound to.
        token: The bearer token; None, on loopback only: none is needed.
    """
    secret = None if token is None else token.encode()
    is_local = is_loopback(host)

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_local and not _is_loopback_host(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="the Host header must name localhost")
        if not _is_same_origin(request):
            raise web.HTTPForbidden(text="requests for pages of other sites are refused")
        is_open = request.path in _OPEN_PATHS or request.path.startswith(_OPEN_FILES)
        if secret is not None and not is_open:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(errors="replace"), secret)
            if scheme.lower() != "bearer" or not is_right:
                raise web.HTTPUnauthorized(
                    text="a bearer token is required", headers={"WWW-Authenticate": "Bearer"}
                )
        has_body = request.method not in _READING and request.body_exists
        if has_body and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="the body must be application/json")
        keeps = contextlib.nullcontext() if is_open else holding(request)
        try:
            with keeps:
                return await handler(request)
        except BodyRefused as refused:
            answer = web.Response(status=refused.status, text=str(refused))
            answer.force_close()
            return answer

    return gate


def _is_loopback_host(header: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def _is_same_origin(request: web.Request) -> bool:
    """Whether a browser, if it is one, sends this for a page of this API."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("Host")
    except ValueError:
        return False
