"""Takes requests of clients, sends each to the engine that the chooser names, and passes the answer
back."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from aiohttp import ClientResponse, web
from multidict import CIMultiDict

from flexcache.errors import InternalError
from flexcache.router.chooser import Arrival, Choice, Chooser, NotRouted, Outcome
from flexcache.router.proxy import answers, headers
from flexcache.router.proxy.access import ApiKeys, holding
from flexcache.router.proxy.bodies import Bodies, Body, BodyRefused
from flexcache.router.proxy.config import ProxyConfig
from flexcache.router.proxy.engines import EngineBook, Engines, NoAnswer, NotTaken
from flexcache.router.proxy.fleet import is_for_all, list_models, send_to_all
from flexcache.router.proxy.life import RequestLife
from flexcache.router.proxy.relay import (
    SMALL_BYTES,
    ClientStalled,
    EngineBroke,
    end_within,
    read_whole,
    relay,
)
from flexcache.router.proxy.retries import RetryBudget
from flexcache.router.proxy.usage import UsageReader
from flexcache.router.stored import IdReader, id_reader

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
        shown_id = request.headers.get(headers.REQUEST_ID, unique_id)
        with holding(request), RequestLife(self._chooser, unique_id) as life:
            try:
                sent = await self._send(request, life, shown_id)
            except BodyRefused as refused:
                self._count_rejected(refused.status)
                sent = answers.error(refused.status, str(refused))
                sent.force_close()
            if isinstance(sent, web.Response):
                sent.headers[headers.REQUEST_ID] = shown_id
                return sent
            return await self._pass_on(request, life, sent, shown_id)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that goes to no engine."""
        target, fields = request.raw_path, request.headers
        if not target.startswith("/") or "#" in target:
            return answers.error(400, "the request's target must be a path")
        if "Upgrade" in fields and "websocket" in fields["Upgrade"].lower():
            return answers.error(400, "WebSockets are not supported")
        size = sum(len(name) + len(value) for name, value in request.raw_headers)
        if size > self._config.max_header_bytes:
            return answers.error(431, "the header is too large")
        request_id = fields.get(headers.REQUEST_ID)
        if request_id is not None and not headers.is_request_id(request_id):
            return answers.error(400, f"{headers.REQUEST_ID}: not printable, or too long")
        if target.partition("?")[0] == HEALTH and request.method in ("GET", "HEAD"):
            status = 200 if self._is_ready() else 503
            return web.Response(status=status, headers={"Server": answers.SERVER})
        if not self._keys.admit(fields):
            return answers.error(401, "a valid API key is required")
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
        fields, held = request.headers, Body()
        try:
            body = await self._bodies.read(request, held)
            arrival = Arrival(
                request_id=life.request_id,
                method=request.method,
                path=request.raw_path,
                headers={n: fields[n] for n in headers.ROUTING_HEADERS if n in fields},
                body=body,
            )
            if self._book is not None and is_for_all(arrival.method, arrival.path):
                passed = headers.to_engine(fields, {headers.REQUEST_ID: shown_id})
                answer = await send_to_all(self._engines, self._book, arrival, passed)
                if answer is not None:
                    return answer
            return await self._place(arrival, fields, life, shown_id, request.body_exists)
        finally:
            self._bodies.release(held)

    async def _place(
        self,
        arrival: Arrival,
        fields: headers.Headers,
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
            passed = headers.to_engine(fields, {**choice.headers, headers.REQUEST_ID: shown_id})
            try:
                return await self._engines.send(choice, arrival.method, arrival.path, passed, body)
            except NoAnswer as error:
                life.end(Outcome.BROKEN)
                return answers.error(502, str(error))
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
        fields = headers.to_client(answer.headers)
        fields.setdefault("Server", answers.SERVER)
        fields.update(_of_choice(life.choice), **{headers.REQUEST_ID: shown_id})
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
            broken = answers.error(502, _BROKE)
            broken.headers[headers.REQUEST_ID] = fields[headers.REQUEST_ID]
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
                    await response.write(answers.broken_stream(_BROKE))
            transport.close()  # without the end of the body, so that the client notices
        except ClientStalled:
            transport.abort()
        except ConnectionError:
            pass  # the client left
        return response


def _ignore() -> None:
    """An error is no answer to the prompt: the time that it took says nothing."""


def _of_choice(choice: Choice) -> dict[str, str]:
    shown = {headers.WORKER: choice.worker}
    if choice.matched_tokens is not None:
        shown[headers.MATCHED_TOKENS] = str(choice.matched_tokens)
    return shown


def _not_routed(refused: NotRouted) -> web.Response:
    retry_after = answers.in_whole_seconds(refused.retry_after_s)
    return answers.error(refused.status, str(refused), retry_after)


def _not_taken(failure: NotTaken) -> web.Response:
    """Return 503 if engines are busy, and 502 if they are out of order."""
    status = 503 if failure.status in (429, 503) else 502
    return answers.error(status, f"no engine took the request: {failure}", failure.retry_after)
