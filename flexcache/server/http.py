"""HTTP API of a server, for Prometheus, orchestrators and people.

    GET  /metrics          Prometheus' text format, or OpenMetrics if requested
    GET  /healthz          200, or 503 and what is missing; needs no token
    GET  /status           `KVManager.stats` as JSON
    GET  /lately           `Lately` as JSON: the last hour's hits, sessions, peers, warnings
    GET  /ui/, /           live page; it shows nothing without the two above
    POST /cache/clear      {"tier": "SSD"}, or null for all
    POST /cache/prefetch   {"token_ids": [..]} or {"block_keys": [hex, ..]}, and a "namespace": [..]
                           or {"block_hash": 123}, the prompt's last block in KV events
    POST /cache/lookup     {"token_ids": [..]} or {"block_keys": [hex, ..]}, and a "namespace": [..]
    POST /cache/pin        as lookup, or {"session_id": ".."}, and "ttl_s": 300
    POST /cache/unpin      {"pin_id": ".."}
    POST /cache/delete     as lookup, or {"session_id": ".."}, or a "namespace" alone
    POST /cache/session    {"session_id": ".."} with "over": true or "returns_in_s": 20
    POST /cache/weights    {"version": "step-17"} or null, and a "client" where several are attached
    POST /cache/drain      {"to": "tcp://HOST:PORT", "seconds": 60, "bytes": 8e9}; null to stop it
    GET  /cache/drain      how that goes

The API has its own event loop, on a daemon thread; it calls the server on further threads, so that
neither waits for the other. On loopback it answers only requests that name a loopback host (so a
web page whose own name resolves to this host is refused), and accepts only JSON, which pages of
other sites cannot send. If a token is set, every request must carry it, except for health and the
page's files. Without one, which is possible on loopback only, a request must come from our own user
or from root. Opening a connection needs no token, so connections are limited: their number, and how
long each may idle.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from flexcache.config.values import check_http_endpoint, is_loopback
from flexcache.counters import plain
from flexcache.errors import (
    AmbiguousEngineError,
    ConfigError,
    FlexCacheError,
    MissingDependencyError,
)
from flexcache.logs import log_event
from flexcache.metrics import Exposition
from flexcache.processes import raise_limit
from flexcache.protocol.trust import find_peer, user_name
from flexcache.stats import Stats, to_plain
from flexcache.ui import read_page

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol

except ImportError as error:
    raise MissingDependencyError(
        f"HTTP needs the package {error.name}: pip install '.[http]'"
    ) from None

if TYPE_CHECKING:
    from flexcache.server.operator import Operator

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 << 20  # a prompt of two million tokens
_PATIENCE_S = (
    10  # limit for a client to send a request's head, to send its body, to read the answer
)
MAX_CONNECTIONS = 64
_ACCEPT_PAUSE_S = 1.0  # after an error, such as no free file descriptor
_CLOSE_PATIENCE_S = 1  # limit for open requests when the service closes

T = TypeVar("T", bound=msgspec.Struct)


TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ClearRequest(msgspec.Struct, forbid_unknown_fields=True):
    tier: str | None


class LookupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request with one of the first two; ``block_keys`` in hexadecimal."""

    token_ids: list[TokenId] | None = None
    block_keys: list[str] | None = None
    namespace: str | list[str] | None = None

    @property
    def prompt(self) -> tuple[list[int] | None, list[bytes] | None, str | list[str] | None]:
        return self.token_ids, _parse_keys(self.block_keys), self.namespace


class DeleteRequest(LookupRequest, kw_only=True, forbid_unknown_fields=True):
    """Request about a prompt, or instead about a session, or about a namespace alone."""

    session_id: str | None = None


class PinRequest(DeleteRequest, kw_only=True, forbid_unknown_fields=True):
    ttl_s: float


class UnpinRequest(msgspec.Struct, forbid_unknown_fields=True):
    pin_id: str


class PrefetchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request with one of the first three.

    Attributes:
        block_keys: In hexadecimal.
        block_hash: Of the last wanted block, as KV events have it; its low 64 bits suffice.
    """

    token_ids: list[TokenId] | None = None
    block_keys: list[str] | None = None
    block_hash: int | None = None
    namespace: str | list[str] | None = None


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    over: bool = False
    returns_in_s: float | None = None


class WeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request for a name of weights.

    Attributes:
        version: None for one that no one else has.
        client: Name of the engine, as in `/status`; None if only one is attached.
    """

    version: str | None
    client: str | None = None


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request for a drain to a peer; None to stop the one that is under way."""

    to: str | None
    seconds: float = 60.0
    bytes: int | None = None


class HttpService:
    """Serves one server's HTTP API.

    Args:
        endpoint: ``HOST:PORT``, or a port on loopback; port 0 selects a free one.
        token: The bearer token that requests must carry; None, on loopback only, requires none.
        patience_s: How long a client may take to send the head of a request, to send its body, and
            to read the answer; also the longest pause between requests.

    Raises:
        ConfigError: The address is malformed, or open to other hosts without a token.
    """

    def __init__(
        self,
        server: Operator,
        endpoint: str,
        token: str | None = None,
        patience_s: int = _PATIENCE_S,
    ) -> None:
        self._endpoint = endpoint
        self._host, self._port = check_http_endpoint(endpoint, has_token=token is not None)
        self._patience_s = patience_s
        self._app = _make_app(server, _Gate(is_loopback(self._host), token), patience_s)
        self._socket: socket.socket | None = None
        self._loop: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The ``http://`` address of the service, once started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def start(self) -> None:
        """Bind and serve on a thread; returns at once.

        Raises:
            ConfigError: The address cannot be bound.
        """
        raise_limit()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(f"http_endpoint = {self._endpoint!r}: {error.strerror}") from None
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            self._app, http=HttpConnection, ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=self._patience_s, timeout_graceful_shutdown=_CLOSE_PATIENCE_S,
        )  # fmt: skip
        self._loop = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="flexcache-http", daemon=True)
        self._thread.start()
        log_event(logger, logging.INFO, "http_began", address=self.address)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # the cache runs without it
            log_event(logger, logging.ERROR, "http_failed", address=self.address, exc_info=True)

    async def _serve(self) -> None:
        assert self._loop is not None
        assert self._socket is not None
        accepting = asyncio.create_task(accept_connections(self._socket, self._loop))
        try:
            await self._loop.serve(sockets=[])  # `accept_connections` passes it connections
        finally:
            accepting.cancel()

    def close(self) -> None:
        """Finish open requests within a second or two, and stop. Idempotent."""
        if self._thread is None or self._loop is None or self._socket is None:
            return
        self._loop.should_exit = True
        self._thread.join()
        self._socket.close()
        self._thread = None


# -- access -------------------------------------------------------------------------------------


class _Gate:
    """Decides whether a request is admitted."""

    def __init__(self, is_loopback: bool, token: str | None) -> None:
        self._is_loopback = is_loopback
        self._token = None if token is None else token.encode()

    async def __call__(
        self, request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if self._is_loopback and not _names_loopback(request.headers.get("host", "")):
            return _problem(403, "on loopback the Host header must name localhost")
        # Not `request.url`, which contains the Host header, so anything that the caller sends.
        path = request.scope["path"]
        # A browser has no token to open a page with; the page asks its user for it.
        is_page = self._token is not None and (path == "/" or f"{path}/".startswith("/ui/"))
        if is_page or path == "/healthz":
            return await answer(request)
        if self._token is None:
            refusal = await run_in_threadpool(_refuse_stranger, request)
            if refusal is not None:
                return _problem(403, refusal)
        else:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self._token)
            if scheme.lower() != "bearer" or not is_right:
                return _problem(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})
        return await answer(request)


def _refuse_stranger(request: Request) -> str | None:
    """Why the client may not use an API without a token, if so. Root may do anything as it is."""
    found: dict[str, int | None] = request.scope["state"]["found"]  # of this connection
    if found.get("uid") is None:
        ours, theirs = request.scope["server"], request.scope["client"]
        found["uid"] = find_peer(tuple(ours), tuple(theirs))
    uid = found["uid"]
    if uid in (0, os.geteuid()):
        return None
    whose = "an unknown user" if uid is None else user_name(uid)
    return (
        f"the request comes from {whose}, the server belongs to {user_name(os.geteuid())}: "
        "set http_token, and send it as a bearer token"
    )


def _names_loopback(host_header: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host_header}").hostname or "")
    except ValueError:
        return False


# -- the answers ---------------------------------------------------------------------------------


def _make_app(server: Operator, gate: _Gate, patience_s: float) -> Starlette:
    # Read when it is scraped: the counters exist for `stats` anyway.
    exposition = Exposition(Stats, server.stats)

    def metrics(request: Request) -> Response:
        text, content_type = exposition.render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    def healthz(_: Request) -> Response:
        health = server.health()
        is_whole = health["serving"] and not health["missing"]
        return _json(health, 200 if is_whole else 503)

    def status(_: Request) -> Response:
        return _json(to_plain(server.stats()))

    async def clear(request: Request) -> Response:
        wanted = await _read(request, ClearRequest, patience_s)
        dropped = await run_in_threadpool(server.clear, wanted.tier)
        return _json({"dropped_blocks": dropped})

    async def prefetch(request: Request) -> Response:
        wanted = await _read(request, PrefetchRequest, patience_s)
        num_blocks = await run_in_threadpool(
            server.prefetch, wanted.token_ids, _parse_keys(wanted.block_keys), wanted.namespace,
            wanted.block_hash,
        )  # fmt: skip
        return _json({"blocks": num_blocks}, 202)

    async def session(request: Request) -> Response:
        hint = await _read(request, SessionRequest, patience_s)
        is_known = await run_in_threadpool(
            server.session_hint, hint.session_id, hint.over, hint.returns_in_s
        )
        return _json({"known": is_known})

    async def weights(request: Request) -> Response:
        wanted = await _read(request, WeightsRequest, patience_s)
        version = await run_in_threadpool(server.new_weights, wanted.version, wanted.client)
        return _json({"version": version})

    async def drain(request: Request) -> Response:
        stop = False
        if request.method == "POST":
            wanted = await _read(request, DrainRequest, patience_s)
            stop = wanted.to is None
            if wanted.to is not None:
                await run_in_threadpool(server.drain, wanted.to, wanted.seconds, wanted.bytes)
        return _json(await run_in_threadpool(server.drain_progress, stop))

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/status", status),
            *_page_routes(server),
            Route("/cache/clear", clear, methods=["POST"]),
            Route("/cache/prefetch", prefetch, methods=["POST"]),
            *_control_routes(server, patience_s),
            Route("/cache/session", session, methods=["POST"]),
            Route("/cache/weights", weights, methods=["POST"]),
            Route("/cache/drain", drain, methods=["GET", "POST"]),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=gate)],
        exception_handlers={
            HTTPException: lambda _, error: _problem(error.status_code, error.detail),
            msgspec.MsgspecError: partial(_refused, status=400),
            ValueError: partial(_refused, status=400),
            AmbiguousEngineError: partial(_refused, status=409),
            FlexCacheError: partial(_refused, status=503),
        },
    )


def _page_routes(server: Operator) -> list[Route]:
    """Return the live page, and what it reads besides the status."""

    def lately(_: Request) -> Response:
        return _json(plain(server.lately()))

    def page(request: Request) -> Response:
        if (name := request.path_params.get("name")) is None:
            return Response(status_code=307, headers={"Location": "ui/"})
        try:
            content, headers = read_page("cache", name)
        except KeyError:
            raise HTTPException(404) from None
        return Response(content, headers=headers)

    pages = [Route(path, page) for path in ("/", "/ui", "/ui/{name:path}")]
    return [Route("/lately", lately), *pages]


def _control_routes(server: Operator, patience_s: float) -> list[Route]:
    """Return the calls about what is cached."""

    async def lookup(request: Request) -> Response:
        wanted = await _read(request, LookupRequest, patience_s)
        found = await run_in_threadpool(server.lookup, *wanted.prompt)
        return _json({"tokens": found})

    async def pin(request: Request) -> Response:
        wanted = await _read(request, PinRequest, patience_s)
        pinned = await run_in_threadpool(
            server.pin, *wanted.prompt, wanted.session_id, ttl_s=wanted.ttl_s
        )
        return _json({"pin": None if pinned is None else pinned._asdict()})

    async def delete(request: Request) -> Response:
        wanted = await _read(request, DeleteRequest, patience_s)
        deleted = await run_in_threadpool(server.delete, *wanted.prompt, wanted.session_id)
        return _json({"deleted_blocks": deleted})

    async def unpin(request: Request) -> Response:
        wanted = await _read(request, UnpinRequest, patience_s)
        return _json({"unpinned": await run_in_threadpool(server.unpin, wanted.pin_id)})

    calls = (lookup, pin, unpin, delete)
    return [Route(f"/cache/{call.__name__}", call, methods=["POST"]) for call in calls]


def _parse_keys(texts: Sequence[str] | None) -> list[bytes] | None:
    try:
        return None if texts is None else [bytes.fromhex(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"block_keys: {error}") from None


async def _read(request: Request, kind: type[T], patience_s: float) -> T:
    """Read and decode the body of a request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "the body must be sent as application/json")
    try:
        body = await asyncio.wait_for(_read_body(request), patience_s)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body was incomplete after {patience_s:g} s") from None
    except ClientDisconnect:  # nothing reads the answer, but a lost client is not a server error
        raise HTTPException(400, "the client disconnected before the end of the body") from None
    return msgspec.json.decode(body, type=kind)


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    _check_size(int(request.headers.get("content-length", "0")))
    async for part in request.stream():
        body += part
        _check_size(len(body))
    return bytes(body)


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MAX_BODY_BYTES:
        raise HTTPException(413, f"the body has more than {_MAX_BODY_BYTES} bytes")


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _problem(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    response = _json({"error": text}, status)
    response.headers.update(headers or {})
    return response


def _refused(_: Request, error: Exception, status: int) -> Response:
    return _problem(status, str(error))


# -- connections ---------------------------------------------------------------------------------

# uvicorn alone accepts any number of connections, waits forever for the head of a request, and
# reads the body of an answered request to its end.


class HttpConnection(H11Protocol):
    """A connection that is closed unless its client sends complete requests and reads the answers.

    The head of a request must arrive within ``timeout_keep_alive`` seconds of the connection or the
    last answer, and that answer must have been read by then. Time spent handling a request does
    not count; the handler limits how long it waits for a body.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # the handler did not read the rest of the body
            self.transport.close()
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._expire)

    def _expire(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:  # the handler is running
            self._set_deadline()
        else:
            self.transport.abort()  # closing would wait until the client has read the answer


# Accepted here and handed to uvicorn's protocol, as asyncio's accept has no limit and logs a
# traceback for each failed attempt. New ones are closed beyond the limit, so that a flood cuts off
# no request.
async def accept_connections(listener: socket.socket, server: uvicorn.Server) -> None:
    """Accept clients of ``server`` until cancelled; close those beyond `MAX_CONNECTIONS` unread.

    Args:
        listener: A listening socket that does not block.
    """
    loop = asyncio.get_running_loop()
    state = server.server_state

    def make_connection() -> HttpConnection:
        app_state: dict[str, Any] = {"found": {}}  # what is known of it, for all its requests
        return HttpConnection(server.config, state, app_state, loop)

    is_failing = False
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:
            if not is_failing:
                log_event(logger, logging.ERROR, "http_accept_failed", error=error.strerror,
                          effect="new connections wait")  # fmt: skip
            is_failing = True
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        is_failing = False
        if server.should_exit or len(state.connections) >= MAX_CONNECTIONS:
            client.close()
            await asyncio.sleep(0)  # accepting does not yield if clients are already waiting
        else:
            await loop.connect_accepted_socket(make_connection, client)
