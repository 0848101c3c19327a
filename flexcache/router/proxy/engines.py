"""The proxy's side towards engines: connections, and what counts as an answer."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import time
from typing import TYPE_CHECKING, Protocol

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from multidict import CIMultiDict
from yarl import URL

from flexcache.logs import log_event
from flexcache.router.chooser import Choice
from flexcache.router.link.messages import WorkerAddress
from flexcache.router.proxy.config import ProxyConfig
from flexcache.router.waiting import OnceAMinute

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

logger = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({429, 502, 503})
_POOL_IDLE_S = 4.0  # vLLM closes connections that are idle for 5 s; a request must not meet that
_LARGE_BODY_BYTES = 1 << 20  # aiohttp sends larger ones from a file, piece by piece
_ALIVE_S = 30.0  # an engine that took a connection this long ago is busy, not gone
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_NO_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class EngineBook(Protocol):
    """What a proxy needs of the engines beside a choice among them."""

    def addresses(self) -> list[WorkerAddress]:
        """Return the workers that take requests."""
        ...

    def cards(self) -> dict[str, bytes]:
        """Return what they say of each model that they serve, as JSON."""
        ...

    def models_changed(self) -> None:
        """Have the engines' lists of models read again."""
        ...


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
        choice: Choice,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> ClientResponse:
        """Send a request; returns once the header of the answer has come.

        Args:
            target: Path and query as received; begins with a slash.

        Raises:
            NotTaken: Another engine may be tried.
            NoAnswer: The request may not be sent again.
        """
        assert self._session is not None and target.startswith("/")
        data = io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body
        url = URL(choice.url + target, encoded=True)
        try:
            answer = await self._session.request(
                method,
                url,
                headers=headers,
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._no_connection(choice, url, error) from error
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

    def _no_connection(self, choice: Choice, url: URL, error: Exception) -> NotTaken:
        """Return why there is no connection. An engine with a full backlog does not answer, as one
        that is gone; but it took connections a moment ago."""
        if isinstance(error, aiohttp.ClientConnectorError):
            is_full = error.os_error.errno in _OWN_FAULTS
        else:
            is_full = self._connector.is_alive(url)
        if not is_full:
            return NotTaken(f"no connection: {error}")
        if self._says_full.is_due(choice.url):
            log_event(
                logger, logging.WARNING, "engine_backlog_full", engine=choice.url,
                error=str(error), effect="requests wait for a connection",
            )  # fmt: skip
        return NotTaken(f"no connection: {error}", 503, "1", is_full=True)


def _has_begun(error: BaseException | None) -> bool:
    """Return whether a part of the answer came before the connection was closed."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
