"""Control API: what shows or changes a router's state, on a port of its own.

GET    /healthz, /readyz       200, or 503; need no token
    GET    /metrics                Prometheus' text format
    GET    /stats                  `RouterStats` as JSON
    GET    /decisions              events as they happen (server-sent events)
    GET    /dump                   the index: one `IndexPart` per line, as JSON
    GET    /workers                what is known of each
    POST   /workers                {"url": ..., "data_parallel_size": 1, "events": [...],
                                    "cache_url": ...}
    DELETE /workers?worker=NAME    the name, or the URL for all ranks
    POST   /workers/drain          {"worker": NAME, "draining": true}
    GET    /ui/                    live page

Choosing workers for others, such as gateways, with or without reserving:

POST /select                                 the worker that would be chosen
    POST /select_and_reserve, /reservations      the same, and the request counts as its load
    POST /reservations/{id}/prefill_complete     its first token came
    DELETE /reservations/{id}                    it ended
    POST /score                                  what the request would find at each worker
    POST /query                                  how much of the prompt each worker holds

Bodies and answers have the fields of Dynamo's selection service; a worker's id is its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Meta

from flexcache.config.router import RouterConfig
from flexcache.config.values import is_loopback, split_tcp
from flexcache.errors import ConfigError
from flexcache.metrics import Exposition
from flexcache.router.chooser import (
    Arrival,
    Decision,
    NotRouted,
    Outcome,
    RouteRequest,
    to_server_sent,
)
from flexcache.router.decider import Decider, Terms
from flexcache.router.fleet import Tier
from flexcache.router.listing import (
    WorkerEntry,
    WorkerUrl,
    bracketed,
    parse_cache_url,
    parse_source,
)
from flexcache.router.proxy.clients import Bodies, BodyRefused, HeldBody, Room, holding
from flexcache.router.proxy.proxy import LINGER_S, bind, listen
from flexcache.router.router import WorkerScore
from flexcache.router.service import DeciderService
from flexcache.router.settings import IDLE_TIMEOUT_S
from flexcache.router.stats import RouterStats, to_json
from flexcache.ui import read_page

_OPEN_PATHS = ("/", "/ui", "/healthz", "/readyz")
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
        is_open = request.path in _OPEN_PATHS or request.path.startswith(_OPEN_FILES)
        # A page whose name resolves to 127.0.0.1 (DNS rebinding) sends its own name.
        if is_local and not _is_loopback_host(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="the Host header must name localhost")
        if not _is_same_origin(request):
            raise web.HTTPForbidden(text="requests for pages of other sites are refused")
        if not (is_open or secret is None or _has_token(request, secret)):
            raise web.HTTPUnauthorized(
                text="a bearer token is required", headers={"WWW-Authenticate": "Bearer"}
            )
        if not _is_readable(request):
            raise web.HTTPUnsupportedMediaType(text="the body must be application/json")
        try:
            with contextlib.nullcontext() if is_open else holding(request):
                return await handler(request)
        except BodyRefused as refused:
            answer = web.Response(status=refused.status, text=str(refused))
            answer.force_close()
            return answer

    return gate


def _has_token(request: web.Request, secret: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(errors="replace"), secret)
    return scheme.lower() == "bearer" and is_right


def _is_readable(request: web.Request) -> bool:
    has_body = request.method not in _READING and request.body_exists
    return not has_body or request.content_type == "application/json"


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


T = TypeVar("T")
BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)

_LEASE_S = 600.0
_NOTHING = msgspec.Raw()
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Id = Annotated[str, Meta(min_length=1, max_length=200)]


class Selection(msgspec.Struct, kw_only=True):
    """A request to be placed. Unknown fields are ignored, as other selection services' callers
    send some.

    Attributes:
        selection_id: Names the reservation; made up if there is none.
        token_ids: The prompt.
        isl_tokens: Its length, if the tokens are unknown.
        model_name: Served model.
        request: Instead of tokens: the body of a request to the engines' API. Empty: none.
        path: Path that it is for.
        worker_id: For ``/reservations``: the worker that was selected.
        lease_s: A reservation is given up after this long.
    """

    selection_id: Id | None = None
    token_ids: list[TokenId] | None = None
    isl_tokens: Annotated[int, Meta(ge=0)] | None = None
    model_name: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request: msgspec.Raw = _NOTHING
    path: str = "/v1/chat/completions"
    worker_id: str | None = None
    lease_s: Annotated[float, Meta(gt=0)] = _LEASE_S


class Draining(msgspec.Struct, forbid_unknown_fields=True):
    """
    Attributes:
        worker: Name, or the URL of an engine with all its ranks.
    """

    worker: str
    draining: bool = True


async def read(request: web.Request, kind: type[T]) -> T:
    """Read a JSON body.

    Raises:
        web.HTTPBadRequest: It is not what is expected; says why.
        BodyRefused: See `Bodies.read`.
    """
    bodies, held = request.app[BODIES], HeldBody()
    try:
        return msgspec.json.decode(await bodies.read(request, held), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    finally:
        bodies.release(held)


def as_json(content: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )


_OWNER = "control API"


class SelectionApi:
    """Handlers of the requests above."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/select", self.select),
            web.post("/select_and_reserve", self.reserve),
            web.post("/reservations", self.reserve),
            web.post("/reservations/{id}/prefill_complete", self.prefill_complete),
            web.delete("/reservations/{id}", self.free),
            web.post("/score", self.score),
            web.post("/query", self.query),
        ]

    async def select(self, request: web.Request) -> web.Response:
        selection = await read(request, Selection)
        wanted = await self._read(selection)
        return as_json(self._selected(selection, wanted, self._scores(wanted)[0]))

    async def reserve(self, request: web.Request) -> web.Response:
        selection = await read(request, Selection)
        if selection.selection_id is None:
            selection.selection_id = uuid.uuid4().hex
        wanted = await self._read(selection)
        decision = await self._place(wanted, selection)
        # Scores from now on would count the reservation itself.
        found = WorkerScore(decision.worker, None, dict(decision.matched), decision.ttft_s)
        return as_json(self._selected(selection, wanted, found), 201)

    async def prefill_complete(self, request: web.Request) -> web.Response:
        self._require(request)
        self._decider.first_token(request.match_info["id"])
        return as_json({"status": "ok"})

    async def free(self, request: web.Request) -> web.Response:
        self._require(request)
        self._decider.ended(request.match_info["id"], Outcome.DONE)
        return as_json({"status": "ok"})

    async def score(self, request: web.Request) -> web.Response:
        wanted = await self._read(await read(request, Selection))
        return as_json({"scores": [_score(score) for score in self._scores(wanted)]})

    async def query(self, request: web.Request) -> web.Response:
        wanted = await self._read(await read(request, Selection))
        held = {score.worker: _overlap(score) for score in self._scores(wanted)}
        return as_json({"num_tokens": wanted.num_tokens, "workers": held})

    # -- parts -------------------------------------------------------------------------------------

    def _require(self, request: web.Request) -> None:
        running = self._decider.running.get(request.match_info["id"])
        if running is None or running.owner != _OWNER:
            raise web.HTTPNotFound(text="no such reservation")

    async def _read(self, selection: Selection) -> RouteRequest:
        name = selection.selection_id or uuid.uuid4().hex
        if bytes(selection.request):
            arrival = Arrival(
                request_id=name, method="POST", path=selection.path, body=bytes(selection.request)
            )
            return await self._decider.read(arrival)
        tokens = selection.token_ids
        if tokens is None and selection.isl_tokens is None:
            raise web.HTTPBadRequest(text="give token_ids, isl_tokens or request")
        return RouteRequest(
            request_id=name,
            num_tokens=len(tokens) if tokens is not None else selection.isl_tokens or 0,
            token_ids=None if tokens is None else np.array(tokens, np.uint32),
            model=selection.model_name,
            adapter=selection.lora_name,
            cache_salt=selection.cache_salt,
            session_id=selection.session_id,
        )

    async def _place(self, wanted: RouteRequest, selection: Selection) -> Decision:
        decider, worker = self._decider, selection.worker_id
        if worker is not None and worker not in decider.roster:
            raise web.HTTPNotFound(text=f"no worker {worker!r}")
        others = [] if worker is None else [each.name for each in decider.roster.specs]
        tried = tuple(name for name in others if name != worker)
        try:
            terms = Terms(tried=tried, owner=_OWNER, lease_s=selection.lease_s)
            decision = await decider.decide(wanted, terms)
        except NotRouted as refusal:
            headers = {}
            if refusal.retry_after_s is not None:
                headers["Retry-After"] = str(int(-(-refusal.retry_after_s // 1)))
            kind = web.HTTPTooManyRequests if refusal.status == 429 else web.HTTPServiceUnavailable
            raise kind(text=str(refusal), headers=headers) from None
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from None
        if worker not in (None, decision.worker):
            decider.ended(wanted.request_id, Outcome.ABORTED)
            raise web.HTTPConflict(text=f"worker {worker!r} takes no requests now")
        return decision

    def _scores(self, wanted: RouteRequest) -> list[WorkerScore]:
        scores = self._decider.routing.scores(wanted, self._decider.clock())
        if not scores:
            raise web.HTTPServiceUnavailable(text="no worker takes requests")
        return scores

    def _selected(
        self, selection: Selection, wanted: RouteRequest, score: WorkerScore
    ) -> dict[str, Any]:
        spec = self._decider.roster.spec(score.worker)
        return {
            "selection_id": selection.selection_id,
            "model_name": selection.model_name,
            "worker_id": score.worker,
            "dp_rank": spec.data_parallel_rank,
            "endpoint": spec.url,
            "overlap": _overlap(score),
            "ttft_s": score.ttft_s,
            "effective_prefill_tokens": wanted.num_tokens - sum(score.matched.values()),
        }


def _overlap(score: WorkerScore) -> dict[str, int]:
    """Return the tokens that a worker has in a tier or a faster one."""
    gpu, dram, disk = (score.matched.get(tier, 0) for tier in Tier)
    held = {"gpu": gpu, "cpu": gpu + dram, "disk": gpu + dram + disk}
    return {"longest_matched": gpu + dram + disk, **held}


def _score(score: WorkerScore) -> dict[str, Any]:
    matched = {tier.value: tokens for tier, tokens in score.matched.items()}
    return {
        "worker_id": score.worker, "cost": score.cost, "ttft_s": score.ttft_s, "matched": matched,
    }  # fmt: skip


_MAX_CONNECTIONS = 64  # strangers who take them all take none from clients
_MAX_BODY_BYTES = 64 << 20
_MAX_HELD_BYTES = 256 << 20
_CLOSE_S = 1.0
_COMMENT = b": \n\n"
"""Sent while no event happens, so that a stream whose reader left ends."""
_MAX_WATCHERS = 16


class ControlApi:
    """Serves one decider's API.

    Raises:
        ConfigError: On `start`: the address cannot be used.
    """

    def __init__(self, service: DeciderService) -> None:
        self._service = service
        self._config: RouterConfig = service.config
        self._exposition = Exposition(RouterStats, service.stats)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        config = self._config
        app = web.Application(middlewares=[make_gate(config.control_host, config.control_token)])
        app[BODIES] = Bodies(Room(_MAX_BODY_BYTES, _MAX_HELD_BYTES), IDLE_TIMEOUT_S)
        app.add_routes(self._routes() + SelectionApi(self._service.decider).routes())
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, handler_cancellation=True,
            keepalive_timeout=IDLE_TIMEOUT_S, lingering_time=LINGER_S,
            shutdown_timeout=_CLOSE_S,
        )  # fmt: skip
        await self._runner.setup()
        try:
            sock = bind(config.control_host, config.control_port)
            self._server = await listen(self._runner, sock, _MAX_CONNECTIONS)
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"control_port = {config.control_port}: {error.strerror or error}"
            ) from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
            web.get("/stats", self._stats),
            web.get("/decisions", self._decisions),
            web.get("/dump", self._dump),
            web.get("/workers", self._workers),
            web.post("/workers", self._add_worker),
            web.delete("/workers", self._remove_worker),
            web.post("/workers/drain", self._drain_worker),
            web.get("/", self._page),
            web.get("/ui", self._page),
            web.get("/ui/{name:[a-z.]*}", self._page),
        ]

    # -- state -------------------------------------------------------------------------------------

    async def _healthz(self, _: web.Request) -> web.Response:
        return as_json({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        is_ready = self._service.is_ready
        return as_json({"ready": is_ready}, 200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text, content_type = self._exposition.render(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _stats(self, _: web.Request) -> web.Response:
        return web.Response(body=to_json(self._service.stats()), content_type="application/json")

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        watchers = self._service.decider.watchers
        if len(watchers) >= _MAX_WATCHERS:
            raise web.HTTPServiceUnavailable(text="too many watch already")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        events = watchers.watch()
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(events):
                async for event in events:
                    await response.write(_COMMENT if event is None else to_server_sent(event))
        return response

    async def _dump(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        index = self._service.routing.holdings.index
        for part in index.snapshot({holder.source for holder in index.holders}):
            await response.write(msgspec.json.encode(part) + b"\n")
        return response

    async def _page(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        if name is None:
            raise web.HTTPFound("/ui/")
        try:
            content, headers = read_page("router", name)
        except KeyError:
            raise web.HTTPNotFound from None
        return web.Response(body=content, headers=headers)

    # -- workers -----------------------------------------------------------------------------------

    async def _workers(self, _: web.Request) -> web.Response:
        stats = self._service.stats().workers
        return as_json({"workers": {name: msgspec.to_builtins(w) for name, w in stats.items()}})

    async def _add_worker(self, request: web.Request) -> web.Response:
        entry = await read(request, WorkerEntry)
        try:
            url = WorkerUrl.parse(entry.url)
            if url.group:
                raise web.HTTPBadRequest(text="groups are listed in options or the file")
            if not self._is_allowed(str(url)):
                raise web.HTTPForbidden(text=f"{url} is not in allowed_workers")
            if not _are_of(url.host, entry):
                raise web.HTTPForbidden(text="events and cache_url must be on the worker's host")
            specs = self._service.discovery.listing.specs_of(entry, url)
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        self._service.roster.add(specs)
        return as_json({"workers": [spec.name for spec in specs]}, 201)

    def _is_allowed(self, url: str) -> bool:
        """Whether a worker may have this URL: no caller can have the router send requests, with the
        engines' key, to an address of its own choice."""
        listed = {str(WorkerUrl.parse(e.url)) for e in self._service.discovery.listing.workers}
        return url in listed or any(re.fullmatch(p, url) for p in self._config.allowed_workers)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        names = self._named(request.query.get("worker", ""))
        self._service.roster.remove(names)
        return as_json({"workers": names})

    async def _drain_worker(self, request: web.Request) -> web.Response:
        draining = await read(request, Draining)
        names = self._named(draining.worker)
        self._service.roster.drain(names, draining.draining)
        return as_json({"workers": names})

    def _named(self, text: str) -> list[str]:
        names = self._service.roster.named(text)
        if not names:
            raise web.HTTPNotFound(text=f"no worker {text!r}")
        return names


def _are_of(host: str, entry: WorkerEntry) -> bool:
    """Whether all publishers of a worker, and its cache, are on its host: no caller can have the
    router connect to an address of its own choice."""
    texts = (*entry.events, *entry.shared_events)
    sources = [parse_source(text, bracketed(host)) for text in texts]
    endpoints = [each for source in sources for each in (source.endpoint, source.replay) if each]
    if any(each.startswith("ipc://") for each in endpoints):
        return False
    hosts = [split_tcp(each)[0] for each in endpoints]
    if entry.cache_url is not None:
        hosts.append(WorkerUrl.parse(parse_cache_url(entry.cache_url, bracketed(host))).host)
    return all(each == host for each in hosts)
