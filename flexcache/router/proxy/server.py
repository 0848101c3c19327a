"""Serves a proxy: the application, and the listening socket with its limits."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flexcache.errors import ConfigError
from flexcache.router.chooser import Chooser
from flexcache.router.proxy.access import Seats
from flexcache.router.proxy.config import ProxyConfig
from flexcache.router.proxy.engines import EngineBook
from flexcache.router.proxy.proxy import Proxy

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
