"""The control API: workers, decisions, statistics.

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

`selection` has the rest. `access` says who may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

import msgspec
from aiohttp import web

from flexcache.config.router import RouterConfig
from flexcache.config.values import split_tcp
from flexcache.errors import ConfigError
from flexcache.metrics.collector import CatalogExposition
from flexcache.router import ui
from flexcache.router.control.access import make_gate
from flexcache.router.control.bodies import BODIES, Draining, as_json, read
from flexcache.router.control.selection import SelectionApi
from flexcache.router.decider.service import DeciderService
from flexcache.router.decisions import to_server_sent
from flexcache.router.discovery.listing import (
    WorkerEntry,
    WorkerUrl,
    bracketed,
    parse_cache_url,
    parse_source,
)
from flexcache.router.metrics.catalog import CATALOG
from flexcache.router.proxy.bodies import Bodies
from flexcache.router.proxy.server import LINGER_S, bind, listen
from flexcache.router.report import to_json
from flexcache.router.stats import RouterStats

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
        self._exposition: CatalogExposition[RouterStats] = CatalogExposition(CATALOG, service.stats)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        config = self._config
        app = web.Application(middlewares=[make_gate(config.control_host, config.control_token)])
        app[BODIES] = Bodies(_MAX_BODY_BYTES, _MAX_HELD_BYTES, config.idle_timeout_s)
        app.add_routes(self._routes() + SelectionApi(self._service.decider).routes())
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, handler_cancellation=True,
            keepalive_timeout=config.idle_timeout_s, lingering_time=LINGER_S,
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
            content, content_type = ui.read(name)
        except KeyError:
            raise web.HTTPNotFound from None
        return web.Response(body=content, headers={**ui.HEADERS, "Content-Type": content_type})

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
