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
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from aiohttp import ClientError, ClientResponse, web
from aiohttp.http_exceptions import HttpProcessingError

from flexcache.errors import ConfigError, InternalError
from flexcache.router.chooser import UNKNOWN, Arrival, Choice, Chooser, NotRouted, Outcome, Usage
from flexcache.router.proxy.answers import (
    MATCHED_TOKENS_HEADER,
    REQUEST_ID_HEADER,
    ROUTING_HEADERS,
    SERVER,
    WORKER_HEADER,
    AnswerReader,
    OutputWatch,
    broken_stream,
    error_answer,
    headers_to_client,
    headers_to_engine,
    in_whole_seconds,
    is_request_id,
)
from flexcache.router.proxy.clients import (
    ApiKeys,
    Bodies,
    BodyRefused,
    HeldBody,
    Room,
    Seats,
    holding,
)
from flexcache.router.proxy.engines import (
    SMALL_BYTES,
    ClientStalled,
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
from flexcache.router.proxy.transfers import (
    decode_body,
    prefill_body,
    with_kv_source,
)
from flexcache.router.settings import ProxyConfig
from flexcache.router.stored import id_reader
from flexcache.router.tokens.body import MARKER, with_pin


class RequestLife:
    """A request's choices, of which one at most is open. Leaving the context ends an open one: the
    client left, or the choice was not used.

    Attributes:
        request_id: Names it to the chooser.
        shown_id: Names it to its client and to engines.
        workers: Those that were chosen so far.
        prefill_usage: What the engine that computes the prompt for another reports.
        first_chunk: What was read of the answer before it is passed on.
    """

    __slots__ = (
        "_chooser", "_prefill", "_unbegun", "choice", "first_chunk", "prefill_usage",
        "request_id", "shown_id", "workers",
    )  # fmt: skip

    def __init__(self, chooser: Chooser, request_id: str, shown_id: str) -> None:
        self._chooser = chooser
        self.request_id = request_id
        self.shown_id = shown_id
        self.choice: Choice | None = None
        self.workers: dict[str, None] = {}
        self.prefill_usage = UNKNOWN
        self._prefill: asyncio.Task[bytes] | None = None
        self._unbegun = ""
        """The choice of who computes the prompt, until it is asked."""
        self.first_chunk = b""

    def begin(self, choice: Choice) -> None:
        assert self.choice is None
        self.choice = choice
        self._unbegun = "" if choice.prefill is None else choice.prefill.request_id
        self.workers[choice.worker] = None

    def begins(self, output: OutputWatch, tells_time: bool, chunk: bytes) -> bool:
        """Take the next bytes of the answer; whether they have some of its output."""
        has_begun = output.sees(chunk)
        if has_begun:
            self._chooser.first_token(self.request_id, tells_time=tells_time)
        return has_begun

    def end(self, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        self.choice = None
        if self._unbegun:
            self._chooser.ended(self._unbegun, Outcome.ABORTED)
            self._unbegun = ""
        self._chooser.ended(self.request_id, outcome, usage)

    def __enter__(self) -> RequestLife:
        return self

    def begin_prefill(
        self, request_id: str, compute: Coroutine[Any, Any, bytes]
    ) -> asyncio.Task[bytes]:
        """Have another engine compute the prompt. Its choice is ended, too."""
        self._unbegun = ""
        task = self._prefill = asyncio.create_task(compute)
        # Not by the coroutine: one that is cancelled before its first step does nothing.
        task.add_done_callback(partial(self._prefill_ended, request_id))
        return task

    def _prefill_ended(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        error = None if task.cancelled() else task.exception()
        outcome = Outcome.ABORTED if task.cancelled() else Outcome.DONE
        if isinstance(error, NotTaken):  # the fault of a request is not its engine's
            outcome = Outcome.DONE if _is_clients(error.status) else Outcome.REFUSED
        elif error is not None:
            outcome = Outcome.BROKEN
        self._chooser.ended(request_id, outcome, self.prefill_usage)

    def reader(self, answer: ClientResponse) -> Callable[[], Awaitable[bytes]]:
        """Return what reads an answer piece by piece."""

        async def read() -> bytes:
            chunk, self.first_chunk = self.first_chunk or await answer.content.readany(), b""
            return chunk

        return read if self.first_chunk else answer.content.readany

    def after_prefill(self, call: Callable[[], object]) -> None:
        """Call this once no other engine reads the request any more."""
        if self._prefill is None or self._prefill.done():
            call()
        else:
            self._prefill.add_done_callback(lambda _: call())

    def refused(self) -> None:
        """End what was begun: another engine may be tried."""
        self.stop_prefill()
        if self.choice is not None:
            self.end(Outcome.REFUSED)

    def stop_prefill(self) -> None:
        """End what another engine computes: it is not waited for."""
        if self._prefill is not None:
            self._prefill.cancel()

    def __exit__(self, *_: object) -> None:
        self.stop_prefill()
        if self.choice is not None:
            self.end(Outcome.ABORTED)


class _Undone(NotTaken):
    """An engine did not compute a prompt for another."""


def _is_clients(status: int | None) -> bool:
    """Whether an error is the fault of a request."""
    return status is not None and _FIRST_ERROR <= status < _SERVER_ERROR and status != 429


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
_FIRST_ERROR, _SERVER_ERROR = 400, 500
_PAUSE_S = 0.1  # until the backlog of a full engine is tried again
_STREAM = "text/event-stream"
_BROKE = "the connection to the engine broke before the answer was complete"


class Proxy:
    """Handles requests. Every choice is ended exactly once, whatever happens.

    Args:
        is_ready: What ``GET /health`` reports.

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
    ) -> None:
        self._chooser = chooser
        self._config = config
        self._is_ready = is_ready
        self._keys = ApiKeys(config.api_keys)
        self._room = Room(config.max_body_bytes, config.max_held_bytes)
        self._bodies = Bodies(self._room, config.body_timeout_s)
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
        self._room.check(is_idle=not self.num_running)
        if self._idle.is_set() != (self.num_running == 0):
            raise InternalError(f"{self.num_running} running, idle={self._idle.is_set()}")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            self._count_rejected(refusal.status)
            return refusal
        # Not the client's id: two requests may have the same, and the chooser counts by it.
        unique_id = f"{self._prefix}-{next(self._numbers)}"
        shown_id = request.headers.get(REQUEST_ID_HEADER, unique_id)
        with holding(request), RequestLife(self._chooser, unique_id, shown_id) as life:
            try:
                sent = await self._send(request, life)
            except BodyRefused as refused:
                self._count_rejected(refused.status)
                sent = error_answer(refused.status, str(refused))
                sent.force_close()
            if isinstance(sent, web.Response):
                sent.headers[REQUEST_ID_HEADER] = shown_id
                return sent
            try:
                return await self._pass_on(request, life, sent)
            finally:
                sent.close()

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that goes to no engine."""
        malformed = self._malformed(request)
        if malformed is not None:
            return malformed
        target = request.raw_path
        if target.partition("?")[0] == HEALTH and request.method in ("GET", "HEAD"):
            status = 200 if self._is_ready() else 503
            return web.Response(status=status, headers={"Server": SERVER})
        if not self._keys.admit(request.headers):
            return error_answer(401, "a valid API key is required")
        return list_models(self._chooser, target) if request.method == "GET" else None

    def _malformed(self, request: web.Request) -> web.Response | None:
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
        return None

    def _count_rejected(self, status: int) -> None:
        if status in _REJECTED:
            self.rejected[_REJECTED[status]] += 1

    async def _send(self, request: web.Request, life: RequestLife) -> ClientResponse | web.Response:
        """Read a request and send it to engines until one answers. Its body is held only meanwhile.

        Raises:
            BodyRefused: See `Bodies.read`.
        """
        fields, held = request.headers, HeldBody()
        try:
            body = await self._bodies.read(request, held)
            if MARKER in body:
                body = with_pin(request.raw_path, body)
            arrival = Arrival(
                request_id=life.request_id,
                method=request.method,
                path=request.raw_path,
                headers={n: fields[n] for n in ROUTING_HEADERS if n in fields},
                body=body,
                may_divide=True,
            )
            if is_for_all(arrival.method, arrival.path):
                passed = headers_to_engine(fields, {REQUEST_ID_HEADER: life.shown_id})
                answer = await send_to_all(self._engines, self._chooser, arrival, passed)
                if answer is not None:
                    return answer
            return await self._place(request, arrival, life)
        finally:
            life.after_prefill(partial(self._bodies.release, held))

    async def _place(
        self, request: web.Request, arrival: Arrival, life: RequestLife
    ) -> ClientResponse | web.Response:
        """Send a request to the engines that the chooser names, until one answers.

        While those that are left have no room for a connection it waits: an engine that is asked
        directly would let it wait, too.
        """
        self._budget.add_request()
        failure: NotTaken | None = None
        num_retries = num_undone = 0
        give_up_s = time.monotonic() + self._config.queue_timeout_s
        while True:
            try:
                return await self._try(request, arrival, life, failure)
            except NotTaken as error:
                if error.retry_after is None and failure is not None:
                    error.retry_after = failure.retry_after
                failure = error
            arrival = replace(arrival, tried=tuple(life.workers))
            if isinstance(failure, _Undone):  # the engine that answers has not had its turn
                num_undone += 1
                # What is wrong with a request, that one is to say.
                is_once_more = num_undone == 1 and not _is_clients(failure.status)
                arrival = replace(arrival, may_divide=is_once_more)
                continue
            if failure.is_full:
                if time.monotonic() > give_up_s:
                    return _not_taken(failure)
                await asyncio.sleep(_PAUSE_S)
                continue
            if num_retries == self._config.max_retries or not self._budget.take_retry():
                return _not_taken(failure)
            num_retries += 1

    async def _try(
        self, request: web.Request, arrival: Arrival, life: RequestLife, failure: NotTaken | None
    ) -> ClientResponse | web.Response:
        """Send a request to the engine that the chooser names.

        Args:
            failure: Of the engine before; None: this is the first.

        Raises:
            NotTaken: Another engine may be tried.
        """
        try:
            choice = await self._chooser.choose(arrival)
        except NotRouted as refused:
            return _not_routed(refused) if failure is None else _not_taken(failure)
        life.begin(choice)
        if failure is not None and not self._may_follow(choice, arrival, failure):
            return _not_taken(failure)  # no other engine is left
        added = {**choice.headers, REQUEST_ID_HEADER: life.shown_id}
        fields = headers_to_engine(request.headers, added)
        send = partial(self._engines.send, choice.url, arrival.method, arrival.path, fields)
        try:
            if choice.prefill is not None:
                return await self._divide(request, arrival, life, send)
            body = arrival.body if request.body_exists else None
            if body and choice.fetch_from is not None:
                body = with_kv_source(arrival.path, body, choice.fetch_from, life.request_id)
            return await send(body)
        except NoAnswer as error:
            life.end(Outcome.BROKEN)
            return error_answer(502, str(error))
        except NotTaken:
            life.refused()
            raise

    def _may_follow(self, choice: Choice, arrival: Arrival, failure: NotTaken) -> bool:
        """Return whether a choice is of use after a failure, and count it if it is a retry."""
        if isinstance(failure, _Undone):
            return True
        is_other = choice.worker not in arrival.tried
        self.num_retries += is_other  # one that is full is asked ten times a second
        return is_other or failure.may_be_stale or failure.is_full

    async def _divide(
        self, request: web.Request, arrival: Arrival, life: RequestLife,
        send: Callable[[bytes], Coroutine[Any, Any, ClientResponse]],
    ) -> ClientResponse:  # fmt: skip
        """Have one engine compute the prompt, and another the answer, which is returned.

        Args:
            send: Sends a body to the latter.

        Raises:
            NotTaken, NoAnswer: As of `Engines.send`, also if the first has failed before the second
                has answered.
        """
        choice = life.choice
        assert choice is not None and choice.prefill is not None and choice.fetch_from is not None
        first, source = choice.prefill, choice.fetch_from
        prefill = life.begin_prefill(
            first.request_id, self._prefill(request, arrival, life, choice)
        )
        sent: asyncio.Task[ClientResponse] | None = None
        try:
            answer = await prefill if source.transfer == "nixl" else None
            body = decode_body(arrival.body, source, first.request_id, choice.wait_s, answer)
            sent = asyncio.create_task(self._begin_answer(send(body), life))
            await asyncio.wait((prefill, sent), return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                prefill.result()
            return await sent
        except (NotTaken, NoAnswer) as error:
            if sent is not None and sent.done():
                raise
            life.end(Outcome.ABORTED)  # it is to be divided otherwise
            if choice.worker not in arrival.tried:
                del life.workers[choice.worker]
            life.workers[first.worker] = None
            status = error.status if isinstance(error, NotTaken) else None
            raise _Undone(f"{first.worker}: {error}", status) from error
        finally:
            if sent is not None:
                sent.cancel()

    async def _begin_answer(
        self, sent: Coroutine[Any, Any, ClientResponse], life: RequestLife
    ) -> ClientResponse:
        """Wait for an answer, of a stream also for its first piece: engines send the header at
        once, and then wait for the prompt's KV."""
        answer = await sent
        if answer.content_type != _STREAM:
            return answer
        try:
            life.first_chunk = await answer.content.readany()
        except (ClientError, asyncio.TimeoutError) as error:
            answer.close()
            raise NoAnswer(_BROKE) from error
        except asyncio.CancelledError:
            answer.close()
            raise
        return answer

    async def _prefill(
        self, request: web.Request, arrival: Arrival, life: RequestLife, choice: Choice
    ) -> bytes:
        """Have an engine compute a prompt; return its answer.

        Raises:
            NotTaken, NoAnswer: It did not.
        """
        first, source = choice.prefill, choice.fetch_from
        assert first is not None and source is not None
        body = prefill_body(arrival.body, source, first.request_id)
        if first.fetch_from is not None:
            body = with_kv_source(arrival.path, body, first.fetch_from, first.request_id)
        # An id of its own: engines refuse one that runs.
        added = {**first.headers, REQUEST_ID_HEADER: f"{life.shown_id}-prefill"}
        fields = headers_to_engine(request.headers, added)
        answer = await self._engines.send(first.url, arrival.method, arrival.path, fields, body)
        try:
            data = await read_whole(answer)
        except EngineBroke as error:
            raise NoAnswer(str(error)) from error
        if answer.status >= _FIRST_ERROR:
            raise NotTaken(f"status {answer.status}", answer.status)
        self._chooser.first_token(first.request_id)
        reader = AnswerReader()
        reader.feed(data)
        reader.end()
        life.prefill_usage = reader.usage()
        return data

    async def _pass_on(
        self, request: web.Request, life: RequestLife, answer: ClientResponse
    ) -> web.StreamResponse:
        """Pass the answer of an engine on.

        A short one is read to its end before: all of it goes in one packet, and if the engine
        breaks, the client gets a 502 instead of a part.
        """
        head = self._head(life, answer)
        response = web.StreamResponse(**head)
        transport, stall_s = request.transport, self._config.client_idle_s
        if transport is None:  # the client left
            return response
        is_short = request.method != "HEAD" and 0 < (answer.content_length or 0) <= SMALL_BYTES
        is_stream = answer.content_type == _STREAM
        reader, begins = AnswerReader(), _ignore
        if answer.status < _FIRST_ERROR:
            reader = self._reader(request, life, answer)
            output = OutputWatch(request.raw_path, is_stream)
            begins = partial(life.begins, output, is_stream and not is_short)
        try:
            if is_short:
                body = await read_whole(answer)
                begins(body)
                reader.feed(body)
                response = web.Response(**head, body=body)
                await response.prepare(request)
                await end_within(response, transport, len(body), stall_s)
            else:
                await response.prepare(request)
                await relay(
                    life.reader(answer), response, transport, feed=reader.feed, begins=begins,
                    stall_s=stall_s,
                )  # fmt: skip
                reader.end()
                await response.write_eof()
            life.end(Outcome.DONE, reader.usage())
        except EngineBroke:
            life.end(Outcome.BROKEN)
            if not response.prepared:
                response = error_answer(502, _BROKE)
                response.headers[REQUEST_ID_HEADER] = life.shown_id
                return response
            if is_stream:
                with contextlib.suppress(ConnectionError):
                    await response.write(broken_stream(_BROKE))
            transport.close()  # without the end of the body, so that the client notices
        except ClientStalled:
            transport.abort()
        except ConnectionError:
            pass  # the client left
        return response

    def _head(self, life: RequestLife, answer: ClientResponse) -> dict[str, Any]:
        choice = life.choice
        assert choice is not None
        fields = headers_to_client(answer.headers)
        fields.setdefault("Server", SERVER)
        both = () if choice.prefill is None else (choice.prefill.worker,)
        fields[WORKER_HEADER] = ", ".join((*both, choice.worker))
        if choice.matched_tokens is not None:
            fields[MATCHED_TOKENS_HEADER] = str(choice.matched_tokens)
        fields[REQUEST_ID_HEADER] = life.shown_id
        return {"status": answer.status, "reason": answer.reason, "headers": fields}

    def _reader(
        self, request: web.Request, life: RequestLife, answer: ClientResponse
    ) -> AnswerReader:
        assert life.choice is not None
        if is_for_all(request.method, request.raw_path):
            self._chooser.models_changed()
        found = partial(self._chooser.stored, life.choice.url)
        size = answer.content_length
        return AnswerReader(id_reader(found, request.raw_path, answer.content_type, size))


def _ignore(chunk: bytes) -> bool:
    """An error is no answer to the prompt: the time that it took says nothing."""
    return True


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
) -> web.Application:
    """Return the application, to be passed to `serve`.

    Args:
        is_ready: What ``GET /health`` reports: 200 or 503.
    """
    app = web.Application()
    proxy = Proxy(chooser, config, is_ready)
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
        auto_decompress=False,  # bodies pass as they came
        handler_cancellation=True,  # a client that leaves ends its request at the engine
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
