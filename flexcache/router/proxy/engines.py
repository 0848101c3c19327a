"""Engines as the proxy sees them: connections, relayed answers, requests that concern all."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import ClientError, ClientHandlerType, ClientRequest, ClientResponse, web
from multidict import CIMultiDict
from yarl import URL

from flexcache.logs import log_event
from flexcache.router.chooser import Arrival, Chooser, WorkerAddress
from flexcache.router.proxy.answers import SERVER, WORKER_HEADER, error_answer, headers_to_engine
from flexcache.router.settings import ProxyConfig
from flexcache.router.tokens.body import named_model
from flexcache.router.tokens.engines import read_answer
from flexcache.router.waiting import OnceAMinute

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace


SMALL_BYTES = 64 << 10
"""An answer of this length at most goes to the client with its header in one packet."""

_FRAMING_BYTES = 64  # of a chunk


class EngineBroke(Exception):
    """The connection to the engine broke, or it was silent for too long."""


class ClientStalled(Exception):
    """The client has not read its answer for too long."""


async def read_whole(answer: ClientResponse) -> bytes:
    """Return the body of a short answer.

    Raises:
        EngineBroke: It is incomplete.
    """
    try:
        return await answer.read()
    except (ClientError, asyncio.TimeoutError) as error:
        raise EngineBroke(type(error).__name__) from error


async def end_within(
    response: web.StreamResponse, transport: asyncio.WriteTransport, size: int, stall_s: float
) -> None:
    """Send a short answer, which is prepared, to its end.

    Args:
        size: Of its body.
        stall_s: How long the client may leave data unread.

    Raises:
        ClientStalled: See ``stall_s``.
        ConnectionError: The client is gone.
    """
    most_unread = transport.get_write_buffer_limits()[1] // 2  # the header needs room too
    if transport.get_write_buffer_size() + size < most_unread:
        await response.write_eof()  # does not wait
        return
    try:
        await asyncio.wait_for(response.write_eof(), stall_s)
    except asyncio.TimeoutError:
        raise ClientStalled from None


async def relay(
    read: Callable[[], Awaitable[bytes]],
    response: web.StreamResponse,
    transport: asyncio.WriteTransport,
    *,
    feed: Callable[[bytes], None],
    begins: Callable[[bytes], bool],
    stall_s: float,
) -> None:
    """Pass the body of an answer on.

    Args:
        read: Returns the next piece of it; none at its end.
        response: Prepared.
        transport: The client's.
        feed: Is given each piece before the client is.
        begins: Is given each piece before that, until it returns True.
        stall_s: How long the client may leave data unread.

    Raises:
        EngineBroke: The body is incomplete.
        ClientStalled: See ``stall_s``.
        ConnectionError: The client is gone.
    """
    write = response.write
    most_unread = transport.get_write_buffer_limits()[1] - _FRAMING_BYTES
    has_begun = False
    while True:
        try:
            chunk = await read()
        except (ClientError, asyncio.TimeoutError) as error:
            raise EngineBroke(type(error).__name__) from error
        if not chunk:
            return
        has_begun = has_begun or begins(chunk)
        feed(chunk)
        if transport.get_write_buffer_size() + len(chunk) < most_unread:
            await write(chunk)  # does not wait
            continue
        try:
            await asyncio.wait_for(write(chunk), stall_s)
        except asyncio.TimeoutError:
            raise ClientStalled from None


logger = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({429, 502, 503})
_POOL_IDLE_S = 4.0  # vLLM closes connections that are idle for 5 s; a request must not meet that
_LARGE_BODY_BYTES = 1 << 20  # aiohttp sends larger ones from a file, piece by piece
_ALIVE_S = 30.0  # an engine that took a connection this long ago is busy, not gone
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_NO_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class NotTaken(Exception):
    """An engine did not take a request: no byte of an answer has come, or one of the statuses 429,
    502 and 503. Another engine may be tried.

    Args:
        reason: For people.
        status: The engine's; None if it sent nothing.
        retry_after: The engine's ``Retry-After``.
        may_be_stale: The connection was closed, perhaps only because it was idle: the same engine
            may be tried again.
        is_full: There is no room for a connection now, and will be: nothing was sent.
    """

    def __init__(
        self,
        reason: str,
        status: int | None = None,
        retry_after: str | None = None,
        may_be_stale: bool = False,
        is_full: bool = False,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after
        self.may_be_stale = may_be_stale
        self.is_full = is_full


class NoAnswer(Exception):
    """An engine began to answer, or was silent for too long, and there is no valid answer."""


class _Closed(aiohttp.ClientError):
    """A connection was closed before the answer was complete up to its header."""


async def _report_closed(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Keep aiohttp from sending idempotent requests again by itself: retries have a budget."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
        raise
    except (aiohttp.ClientConnectionError, ConnectionError) as error:
        raise _Closed from error


class _Connector(aiohttp.TCPConnector):
    """Remembers when each engine last took a connection."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_POOL_IDLE_S)
        self._taken_s: dict[URL, float] = {}

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        now, engine = time.monotonic(), req.url.origin()
        if engine not in self._taken_s:  # engines come and go
            self._taken_s = {k: at for k, at in self._taken_s.items() if now - at < _ALIVE_S}
        self._taken_s[engine] = now
        return connection

    def is_alive(self, engine: URL) -> bool:
        return time.monotonic() - self._taken_s.get(engine.origin(), -_ALIVE_S) < _ALIVE_S


class Engines:
    """Connections to engines, kept alive and shared by all requests."""

    def __init__(self, config: ProxyConfig) -> None:
        self._says_full = OnceAMinute()
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.engine_idle_s
        )
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._connector = _Connector()
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            skip_auto_headers=_NO_AUTOMATIC_HEADERS,
            auto_decompress=False,
            trust_env=False,
            middlewares=(_report_closed,),
        )

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self,
        engine: str,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> ClientResponse:
        """Send a request; returns once the header of the answer has come.

        Args:
            engine: Its base URL.
            target: Path and query as received; begins with a slash.

        Raises:
            NotTaken: Another engine may be tried.
            NoAnswer: The request may not be sent again.
        """
        assert self._session is not None and target.startswith("/")
        data = io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body
        # Encoded: a target that was quoted again would be another one.
        url = URL(engine + target, encoded=True)
        try:
            answer = await self._session.request(
                method, url, headers=headers, data=data, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._no_connection(engine, error) from error
        except _Closed as closed:
            if _has_begun(closed.__cause__):
                raise NoAnswer("the connection was closed within the answer's header") from closed
            raise NotTaken("the connection was closed", may_be_stale=True) from closed
        except asyncio.TimeoutError as error:
            raise NoAnswer("the engine was silent for too long") from error
        except aiohttp.ClientError as error:
            raise NoAnswer(f"not a valid answer: {type(error).__name__}") from error
        if answer.status in RETRIED_STATUSES:
            retry_after = answer.headers.get("Retry-After")
            answer.release()
            raise NotTaken(f"status {answer.status}", answer.status, retry_after)
        return answer

    def _no_connection(self, engine: str, error: Exception) -> NotTaken:
        """Return why there is no connection. An engine with a full backlog does not answer, as one
        that is gone; but it took connections a moment ago."""
        if isinstance(error, aiohttp.ClientConnectorError):
            is_full = error.os_error.errno in _OWN_FAULTS
        else:
            is_full = self._connector.is_alive(URL(engine))
        if not is_full:
            return NotTaken(f"no connection: {error}")
        if self._says_full.is_due(engine):
            log_event(
                logger, logging.WARNING, "engine_backlog_full", engine=engine,
                error=str(error), effect="requests wait for a connection",
            )  # fmt: skip
        return NotTaken(f"no connection: {error}", 503, "1", is_full=True)


def _has_begun(error: BaseException | None) -> bool:
    """Return whether a part of the answer came before the connection was closed."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


_MODELS = "/v1/models"
_OF_VLLM = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory",
    "/pause", "/resume", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
    "/start_weight_update", "/start_draft_weight_update", "/update_weights",
    "/finish_weight_update", "/update_weight_version", "/weight_checker", "/collective_rpc",
)  # fmt: skip
_OF_SGLANG = (
    "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter",
    "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    "/pause_generation", "/continue_generation", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/begin_weight_update", "/end_weight_update", "/init_weights_update_group",
    "/destroy_weights_update_group", "/update_weight_version", "/weights_checker",
)  # fmt: skip
_TO_ALL = frozenset(_OF_VLLM + _OF_SGLANG)
"""Paths of changes: with one of several engines changed, answers would depend on the choice."""
_METHODS = ("POST", "GET")
"""SGLang makes some of these changes by GET."""
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class _Said:
    """What an engine answered.

    Attributes:
        status: None: nothing.
    """

    url: str
    status: int | None
    body: bytes
    content_type: str = "text/plain"

    @property
    def is_done(self) -> bool:
        return self.status is not None and self.status < 300


def is_for_all(method: str, target: str) -> bool:
    """Return whether a request must reach every engine."""
    return method in _METHODS and target.partition("?")[0] in _TO_ALL


def list_models(chooser: Chooser, target: str) -> web.Response | None:
    """Return the models of all engines, or the one that is asked for; None: an engine may know."""
    path = target.partition("?")[0]
    if path != _MODELS and not path.startswith(f"{_MODELS}/"):
        return None
    cards, name = chooser.cards(), unquote(path[len(_MODELS) + 1 :])
    if not cards or (name and name not in cards):
        return None
    listed = [msgspec.Raw(card) for card in cards.values()]
    content = msgspec.Raw(cards[name]) if name else {"object": "list", "data": listed}
    return web.Response(
        body=msgspec.json.encode(content),
        content_type="application/json",
        headers={"Server": SERVER},
    )


async def send_to_all(
    engines: Engines, chooser: Chooser, arrival: Arrival, passed: CIMultiDict[str]
) -> web.Response | None:
    """Send a request to every engine; None: there is one at most.

    With a ``model`` in its body it goes to the engines that serve this model.

    Args:
        passed: The header fields of the request.
    """
    workers = {worker.url: worker for worker in chooser.addresses()}  # its ranks are one engine
    if len(workers) <= 1:
        return None
    model = named_model(arrival)
    able = [worker for worker in workers.values() if model in worker.models]
    chosen = able or list(workers.values())
    said = await asyncio.gather(*(_send(engines, each, arrival, passed) for each in chosen))
    chooser.models_changed()
    return _summary(said)


def _summary(said: list[_Said]) -> web.Response:
    failed = [each for each in said if not each.is_done]
    if not failed:
        first = said[0]
        urls = ", ".join(each.url for each in said)
        fields = {"Content-Type": first.content_type, WORKER_HEADER: urls}
        return web.Response(status=first.status or 200, body=first.body, headers=fields)
    shown = "; ".join(f"{each.url}: {_shown(each)}" for each in failed)
    message = f"{len(failed)} of {len(said)} engines did not do it, the others did: {shown}"
    return error_answer(failed[0].status or 502, message)


async def _send(
    engines: Engines, worker: WorkerAddress, arrival: Arrival, passed: CIMultiDict[str]
) -> _Said:
    fields = headers_to_engine(passed, {**worker.headers, "Accept-Encoding": "identity"})
    try:
        answer = await engines.send(
            worker.url, arrival.method, arrival.path, fields, arrival.body or None
        )
    except NotTaken as error:
        return _Said(worker.url, error.status, str(error).encode())
    except NoAnswer as error:
        return _Said(worker.url, None, str(error).encode())
    try:
        body = await read_answer(answer)
        return _Said(worker.url, answer.status, body, answer.headers.get("Content-Type", ""))
    except Exception as error:  # it broke, or is too long
        return _Said(worker.url, None, repr(error).encode())
    finally:
        answer.close()


def _shown(said: _Said) -> str:
    text = said.body.decode(errors="replace")[:_SHOWN]
    return text if said.status is None else f"status {said.status}: {text}"
