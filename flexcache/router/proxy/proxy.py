"""Proxy: takes requests of clients, and passes engines' answers on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from aiohttp import ClientResponse, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from flexcache.errors import ConfigError, InternalError
from flexcache.router.chooser import UNKNOWN, Arrival, Choice, Chooser, NotRouted, Outcome, Usage
from flexcache.router.proxy.answers import (
    MATCHED_TOKENS_HEADER,
    REQUEST_ID_HEADER,
    ROUTING_HEADERS,
    SERVER,
    WORKER_HEADER,
    Headers,
    UsageReader,
    broken_stream,
    error_answer,
    headers_to_client,
    headers_to_engine,
    in_whole_seconds,
    is_request_id,
)
from flexcache.router.proxy.clients import ApiKeys, Bodies, BodyRefused, HeldBody, Seats, holding
from flexcache.router.proxy.engines import (
    SMALL_BYTES,
    ClientStalled,
    EngineBook,
    EngineBroke,
    Engines,
    NoAnswer,
    NotTaken,
    end_within,
    is_for_all,
    list_models,
    read_whole,
    relay,
    send_to_all,
)
from flexcache.router.settings import ProxyConfig
from flexcache.router.stored import IdReader, id_reader


class RequestLife:
    """A request's choices, of which one at most is open. Leaving the context ends an open one: the
    client left, or the choice was not used."""

    __slots__ = ("_chooser", "choice", "request_id")

    def __init__(self, chooser: Chooser, request_id: str) -> None:
        self._chooser = chooser
        self.request_id = request_id
        self.choice: Choice | None = None

    def begin(self, choice: Choice) -> None:
        assert self.choice is None
        self.choice = choice

    def first_byte(self, *, tells_time: bool) -> None:
        self._chooser.first_token(self.request_id, tells_time=tells_time)

    def end(self, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        self.choice = None
        self._chooser.ended(self.request_id, outcome, usage)

    def __enter__(self) -> RequestLife:
        return self

    def __exit__(self, *_: object) -> None:
        if self.choice is not None:
            self.end(Outcome.ABORTED)


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    Args:
        ratio: What a request adds; a retry takes 1.
        burst: What the bucket holds, and starts with.
    """

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = burst
        self._tokens = float(burst)

    def add_request(self) -> None:
        self._tokens = min(self._tokens + self._ratio, self._burst)

    def take_retry(self) -> bool:
        """Return whether a retry is allowed, and count it."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def check(self) -> None:
        """Check invariants.

        Raises:
            InternalError: One does not hold.
        """
        if not 0.0 <= self._tokens <= self._burst:
            raise InternalError(f"{self._tokens} tokens in a bucket of {self._burst}")


HEALTH = "/health"
_REJECTED = {
    400: "malformed", 401: "unauthorized", 408: "malformed", 413: "too_large", 431: "too_large",
}  # fmt: skip
"""Why a request was refused without an engine, by the status of its answer."""
_FIRST_ERROR = 400
_PAUSE_S = 0.1
_STREAM = "text/event-stream"
_BROKE = "the connection to the engine broke before the answer was complete"


class Proxy:
    """Handles requests. Every choice is ended exactly once, whatever happens.

    Args:
        is_ready: What ``GET /health`` reports.
        book: None: every request goes to one engine, whichever is chosen.

    Attributes:
        num_running: Requests in flight.
        num_retries: Requests sent to another engine.
        rejected: Requests that went to no engine, by reason.
    """

    def __init__(
        self,
        chooser: Chooser,
        config: ProxyConfig,
        is_ready: Callable[[], bool] = lambda: True,
        book: EngineBook | None = None,
    ) -> None:
        self._book = book
        self._chooser = chooser
        self._config = config
        self._is_ready = is_ready
        self._keys = ApiKeys(config.api_keys)
        self._bodies = Bodies(config.max_body_bytes, config.max_held_bytes, config.body_timeout_s)
        self._budget = RetryBudget(config.retry_ratio, config.retry_burst)
        self._engines = Engines(config)
        self._prefix = secrets.token_hex(8)
        self._numbers = count()
        self.num_running = 0
        self.num_retries = 0
        self.rejected: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def open(self) -> None:
        """Start: must run on the loop that handles requests."""
        await self._engines.open()

    async def close(self) -> None:
        """Close the connections to engines."""
        await self._engines.close()

    async def drain(self) -> None:
        """Wait until no request is in flight, for the configured time at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._config.stop_deadline_s)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of a client."""
        self.num_running += 1
        self._idle.clear()
        try:
            return await self._serve(request)
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def check(self) -> None:
        """Check invariants.

        Raises:
            InternalError: One does not hold.
        """
        self._budget.check()
        self._bodies.check(is_idle=not self.num_running)
        if self._idle.is_set() != (self.num_running == 0):
            raise InternalError(f"{self.num_running} running, idle={self._idle.is_set()}")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            self._count_rejected(refusal.status)
            return refusal
        unique_id = f"{self._prefix}-{next(self._numbers)}"
        shown_id = request.headers.get(REQUEST_ID_HEADER, unique_id)
        with holding(request), RequestLife(self._chooser, unique_id) as life:
            try:
                sent = await self._send(request, life, shown_id)
            except BodyRefused as refused:
                self._count_rejected(refused.status)
                sent = error_answer(refused.status, str(refused))
                sent.force_close()
            if isinstance(sent, web.Response):
                sent.headers[REQUEST_ID_HEADER] = shown_id
                return sent
            return await self._pass_on(request, life, sent, shown_id)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that goes to no engine."""
        target, fields = request.raw_path, request.headers
        if not target.startswith("/") or "#" in target:
            return error_answer(400, "the request's target must be a path")
        if "Upgrade" in fields and "websocket" in fields["Upgrade"].lower():
            return error_answer(400, "WebSockets are not supported")
        size = sum(len(name) + len(value) for name, value in request.raw_headers)
        if size > self._config.max_header_bytes:
            return error_answer(431, "the header is too large")
        request_id = fields.get(REQUEST_ID_HEADER)
        if request_id is not None and not is_request_id(request_id):
            return error_answer(400, f"{REQUEST_ID_HEADER}: not printable, or too long")
        if target.partition("?")[0] == HEALTH and request.method in ("GET", "HEAD"):
            status = 200 if self._is_ready() else 503
            return web.Response(status=status, headers={"Server": SERVER})
        if not self._keys.admit(fields):
            return error_answer(401, "a valid API key is required")
        if self._book is not None and request.method == "GET":
            return list_models(self._book, target)
        return None

    def _count_rejected(self, status: int) -> None:
        if status in _REJECTED:
            self.rejected[_REJECTED[status]] += 1

    async def _send(
        self, request: web.Request, life: RequestLife, shown_id: str
    ) -> ClientResponse | web.Response:
        """Read a request and send it to engines until one answers. Its body is held only meanwhile.

        Raises:
            BodyRefused: See `Bodies.read`.
        """
        fields, held = request.headers, HeldBody()
        try:
            body = await self._bodies.read(request, held)
            arrival = Arrival(
                request_id=life.request_id,
                method=request.method,
                path=request.raw_path,
                headers={n: fields[n] for n in ROUTING_HEADERS if n in fields},
                body=body,
            )
            if self._book is not None and is_for_all(arrival.method, arrival.path):
                passed = headers_to_engine(fields, {REQUEST_ID_HEADER: shown_id})
                answer = await send_to_all(self._engines, self._book, arrival, passed)
                if answer is not None:
                    return answer
            return await self._place(arrival, fields, life, shown_id, request.body_exists)
        finally:
            self._bodies.release(held)

    async def _place(
        self,
        arrival: Arrival,
        fields: Headers,
        life: RequestLife,
        shown_id: str,
        has_body: bool,
    ) -> ClientResponse | web.Response:
        """Send a request to the engines that the chooser names, until one answers.

        While those that are left have no room for a connection it waits: an engine that is asked
        directly would let it wait, too.
        """
        self._budget.add_request()
        body = arrival.body if has_body else None
        failure: NotTaken | None = None
        num_failures = 0
        give_up_s = time.monotonic() + self._config.queue_timeout_s
        while True:
            try:
                choice = await self._chooser.choose(arrival)
            except NotRouted as refused:
                return _not_routed(refused) if failure is None else _not_taken(failure)
            life.begin(choice)
            if failure is not None:
                is_again = failure.may_be_stale or failure.is_full
                if choice.worker in arrival.tried and not is_again:
                    return _not_taken(failure)  # no other engine is left
                self.num_retries += 1
            passed = headers_to_engine(fields, {**choice.headers, REQUEST_ID_HEADER: shown_id})
            try:
                return await self._engines.send(choice, arrival.method, arrival.path, passed, body)
            except NoAnswer as error:
                life.end(Outcome.BROKEN)
                return error_answer(502, str(error))
            except NotTaken as error:
                life.end(Outcome.REFUSED)
                if error.retry_after is None and failure is not None:
                    error.retry_after = failure.retry_after
                failure = error
            tried = tuple(dict.fromkeys((*arrival.tried, choice.worker)))
            arrival = replace(arrival, tried=tried)
            if failure.is_full:
                if time.monotonic() > give_up_s:
                    return _not_taken(failure)
                await asyncio.sleep(_PAUSE_S)
                continue
            num_failures += 1
            if num_failures > self._config.max_retries or not self._budget.take_retry():
                return _not_taken(failure)

    async def _pass_on(
        self, request: web.Request, life: RequestLife, answer: ClientResponse, shown_id: str
    ) -> web.StreamResponse:
        """Pass the answer of an engine on."""
        assert life.choice is not None
        fields = headers_to_client(answer.headers)
        fields.setdefault("Server", SERVER)
        fields.update(_of_choice(life.choice), **{REQUEST_ID_HEADER: shown_id})
        ids = None
        if answer.status < _FIRST_ERROR:
            found = partial(self._chooser.stored, life.choice.url)
            size = answer.content_length
            ids = id_reader(found, request.raw_path, answer.content_type, size)
            if self._book is not None and is_for_all(request.method, request.raw_path):
                self._book.models_changed()
        try:
            if request.method != "HEAD" and 0 < (answer.content_length or 0) <= SMALL_BYTES:
                return await self._pass_on_whole(request, life, answer, fields, ids)
            return await self._pass_on_stream(request, life, answer, fields, ids)
        finally:
            answer.close()

    async def _pass_on_whole(
        self,
        request: web.Request,
        life: RequestLife,
        answer: ClientResponse,
        fields: CIMultiDict[str],
        ids: IdReader | None,
    ) -> web.StreamResponse:
        usage = UsageReader()
        try:
            body = await read_whole(answer)
        except EngineBroke:
            life.end(Outcome.BROKEN)
            broken = error_answer(502, _BROKE)
            broken.headers[REQUEST_ID_HEADER] = fields[REQUEST_ID_HEADER]
            return broken
        if answer.status < _FIRST_ERROR:
            life.first_byte(tells_time=False)
        usage.feed(body)
        if ids is not None:
            ids.feed(body)
        response = web.Response(
            status=answer.status, reason=answer.reason, headers=fields, body=body
        )
        try:
            await response.prepare(request)
            await end_within(response, request.transport, len(body), self._config.client_idle_s)
            life.end(Outcome.DONE, usage.read())
        except ClientStalled:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client left
        return response

    async def _pass_on_stream(
        self,
        request: web.Request,
        life: RequestLife,
        answer: ClientResponse,
        fields: CIMultiDict[str],
        ids: IdReader | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=fields)
        usage = UsageReader()
        transport = request.transport
        if transport is None:  # the client left
            return response
        is_stream = answer.content_type == _STREAM
        first_byte = partial(life.first_byte, tells_time=is_stream)
        try:
            await response.prepare(request)
            await relay(
                answer,
                response,
                transport,
                feed=usage.feed if ids is None else ids.before(usage.feed),
                first_byte=_ignore if answer.status >= _FIRST_ERROR else first_byte,
                stall_s=self._config.client_idle_s,
            )
            if ids is not None:
                ids.end()
            await response.write_eof()
            life.end(Outcome.DONE, usage.read())
        except EngineBroke:
            life.end(Outcome.BROKEN)
            if is_stream:
                with contextlib.suppress(ConnectionError):
                    await response.write(broken_stream(_BROKE))
            transport.close()  # without the end of the body, so that the client notices
        except ClientStalled:
            transport.abort()
        except ConnectionError:
            pass  # the client left
        return response


def _ignore() -> None:
    """An error is no answer to the prompt: the time that it took says nothing."""


def _of_choice(choice: Choice) -> dict[str, str]:
    shown = {WORKER_HEADER: choice.worker}
    if choice.matched_tokens is not None:
        shown[MATCHED_TOKENS_HEADER] = str(choice.matched_tokens)
    return shown


def _not_routed(refused: NotRouted) -> web.Response:
    retry_after = in_whole_seconds(refused.retry_after_s)
    return error_answer(refused.status, str(refused), retry_after)


def _not_taken(failure: NotTaken) -> web.Response:
    """Return 503 if engines are busy, and 502 if they are out of order."""
    status = 503 if failure.status in (429, 503) else 502
    return error_answer(status, f"no engine took the request: {failure}", failure.retry_after)


PROXY: web.AppKey[Proxy] = web.AppKey("proxy", Proxy)
CONFIG: web.AppKey[ProxyConfig] = web.AppKey("config", ProxyConfig)

_BACKLOG = 1024
_TLS_HANDSHAKE_S = 10.0
_CANCEL_S = 1.0  # for what still runs after the deadline
LINGER_S = 2.0
"""Time for the rest of a body that was refused."""
_KEEP_ALIVE_PROBES = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)


def make_app(
    chooser: Chooser,
    config: ProxyConfig,
    is_ready: Callable[[], bool] = lambda: True,
    book: EngineBook | None = None,
) -> web.Application:
    """Return the application, to be passed to `serve`.

    Args:
        is_ready: What ``GET /health`` reports: 200 or 503.
        book: None: every request goes to one engine, whichever is chosen.
    """
    app = web.Application()
    proxy = Proxy(chooser, config, is_ready, book)
    app[PROXY], app[CONFIG] = proxy, config
    app.router.add_route("*", "/{path:.*}", proxy.handle)

    async def drain(_: web.Application) -> None:
        await proxy.drain()

    async def close(_: web.Application) -> None:
        await proxy.close()

    async def open_(_: web.Application) -> None:
        await proxy.open()

    app.on_startup.append(open_)
    app.on_shutdown.append(drain)
    app.on_cleanup.append(close)
    return app


class Serving:
    """A proxy that accepts connections. Made by `serve`."""

    def __init__(self, runner: web.AppRunner, server: asyncio.Server) -> None:
        self._runner = runner
        self._server = server

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop accepting, let running answers end until the deadline, and close."""
        self._server.close()
        await self._runner.cleanup()


async def serve(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    sock: socket.socket | None = None,
) -> Serving:
    """Accept connections.

    Args:
        app: Of `make_app`.
        sock: A bound socket, instead of host and port.

    Raises:
        ConfigError: Certificate or key cannot be used.
        OSError: The address cannot be bound.
    """
    config = app[CONFIG]
    context = _tls_context(config)
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=config.client_idle_s,
        lingering_time=LINGER_S,
        logger=_logger_without_bad_requests(),
        max_field_size=config.max_header_bytes,
        max_headers=config.max_headers,
        shutdown_timeout=_CANCEL_S,
    )
    await runner.setup()
    try:
        listening = sock or bind(host, port, config.reuse_port)
        server = await listen(runner, listening, config.max_connections, context)
    except BaseException:
        await runner.cleanup()
        raise
    return Serving(runner, server)


async def listen(
    runner: web.AppRunner,
    sock: socket.socket,
    max_connections: int,
    context: ssl.SSLContext | None = None,
) -> asyncio.Server:
    """Accept connections at a bound socket, up to a limit: see `Seats`."""
    if sock.family != socket.AF_UNIX:
        for option, value in _KEEP_ALIVE_PROBES:  # accepted sockets inherit them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    assert runner.server is not None
    seats = Seats(runner.server, sock.getsockname(), max_connections)
    return await asyncio.get_running_loop().create_server(
        seats.offer,
        sock=sock,
        ssl=context,
        backlog=_BACKLOG,
        ssl_handshake_timeout=_TLS_HANDSHAKE_S if context else None,
    )


def bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=reuse_port)


def _tls_context(config: ProxyConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert = {str(config.tls_cert)!r}: {error}") from None
    return context


def _logger_without_bad_requests() -> logging.Logger:
    """Return aiohttp's logger for the server, without a traceback for each malformed request."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_not_of_a_client)
    return logger


def _is_not_of_a_client(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
