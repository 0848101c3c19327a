"""Server of the endpoint picker, an ext_proc service for Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.chooser import Choice, Chooser, NotRouted
from flexcache.router.gateway.exchange import BadStream, Destinations, Exchange, Stage
from flexcache.router.proxy.clients import Room
from flexcache.router.settings import ProxyConfig
from flexcache.router.waiting import Turns

try:
    import grpc
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
    from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
        ExternalProcessorServicer,
        add_ExternalProcessorServicer_to_server,
    )
    from grpc_health.v1 import health
    from grpc_health.v1.health_pb2 import HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
except ImportError as error:
    raise MissingDependencyError(
        f"the endpoint picker needs the package {error.name}: pip install '.[gateway]'"
    ) from None

logger = logging.getLogger(__name__)

MAX_FALLBACKS = 2
LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
"""Health services that are served once the router is ready."""
_READY_INTERVAL_S = 0.5
_MAX_MESSAGE_BYTES = 16 << 20  # Envoy sends at most what its buffers hold


class Picker(ExternalProcessorServicer):  # type: ignore[misc]
    """Answers Envoy with the engine that a chooser names."""

    def __init__(self, chooser: Chooser, room: Room) -> None:
        self._chooser = chooser
        self._room = room
        self._faults: set[str] = set()
        self._destinations = Destinations()
        self._numbers = itertools.count()
        self._prefix = f"picker-{os.urandom(6).hex()}"
        self.num_streams = 0

    async def Process(self, requests: Any, context: Any) -> None:  # noqa: N802
        """Follow one request and its answer."""
        request_id = f"{self._prefix}-{next(self._numbers)}"
        exchange = Exchange(self._chooser, request_id, self._room)
        self.num_streams += 1
        try:
            await self._follow(exchange, context)
        except BadStream as error:
            if str(error) not in self._faults:
                self._faults.add(str(error))
                log_event(logger, logging.ERROR, "gateway_stream_refused", error=str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            exchange.close()
            self.num_streams -= 1

    async def _follow(self, exchange: Exchange, context: Any) -> None:
        reading: asyncio.Future[Any] | None = None
        try:
            while (message := await (reading or context.read())) is not grpc.aio.EOF:
                reading = None
                replies = exchange.take(message)
                if exchange.stage is Stage.WHOLE:
                    reading = asyncio.ensure_future(context.read())
                    replies = await self._place(exchange, reading)
                for reply in replies:
                    await context.write(reply)
                if exchange.stage is Stage.OVER:
                    return
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _place(
        self, exchange: Exchange, reading: asyncio.Future[Any]
    ) -> Sequence[ProcessingResponse]:
        """Choose while the stream lasts.

        Args:
            reading: The next message. Nothing but the stream's end comes before an answer.
        """
        choosing = asyncio.ensure_future(self._choose(exchange))
        try:
            await asyncio.wait({choosing, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not choosing.done() and reading.result() is grpc.aio.EOF:
                return ()
            return await choosing
        except NotRouted as error:
            return exchange.refused(error)
        finally:
            choosing.cancel()
            await asyncio.wait({choosing})

    async def _choose(self, exchange: Exchange) -> Sequence[ProcessingResponse]:
        """
        Raises:
            NotRouted: There is no engine.
        """
        arrival = exchange.arrival()
        choice = await self._chooser.choose(arrival)
        exchange.reserved(choice)
        return exchange.placed(await self._addresses(choice, arrival.only))

    async def _addresses(self, choice: Choice, only: tuple[str, ...] | None) -> list[str]:
        """Return the addresses of the chosen engine and of those to fall back to."""
        try:
            found = [await self._destinations.of(choice.url)]
        except OSError as error:
            raise NotRouted(503, f"{choice.url}: {error.strerror or error}") from None
        if only is not None and found[0] not in only:
            raise NotRouted(503, "no engine of the subset takes requests")
        for url in choice.others:
            if len(found) > MAX_FALLBACKS:
                break
            with contextlib.suppress(OSError):
                address = await self._destinations.of(url)
                if address not in found and (only is None or address in only):
                    found.append(address)
        return found


class Gateway:
    """A running picker.

    Args:
        config: Of it count the certificate, the limits of bodies, and the time to stop.
        port: 0: any.
        is_ready: Whether the router can choose; reported by the health services.

    Attributes:
        port: Where it listens, once it was started.
        room: For the bodies of requests that wait.
    """

    def __init__(
        self,
        chooser: Chooser,
        config: ProxyConfig,
        host: str,
        port: int,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.port = port
        self._host = host
        self._config = config
        self._is_ready = is_ready
        self.room = Room(config.max_body_bytes, config.max_held_bytes)
        self._picker = Picker(chooser, self.room)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        """Requests that Envoy has at the picker."""
        return self._picker.num_streams

    async def start(self) -> None:
        """
        Raises:
            ConfigError: The port is taken, or the certificate cannot be used.
        """
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ]
        )
        add_ExternalProcessorServicer_to_server(self._picker, server)
        add_HealthServicer_to_server(self._health, server)
        address = f"{self._host}:{self.port}"
        try:
            if config.tls_cert is None or config.tls_key is None:
                self.port = server.add_insecure_port(address)
            else:
                pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
                credentials = grpc.ssl_server_credentials([pair])
                self.port = server.add_secure_port(address, credentials)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"gateway {address}: {error}") from None
        await self._report()
        await server.start()
        self._server = server
        self._reporting = asyncio.create_task(self._report_always())
        log_event(logger, logging.INFO, "gateway_started", host=self._host, port=self.port)

    async def stop(self) -> None:
        """Refuse new requests, let running ones end, then stop."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(self._config.stop_deadline_s)

    async def _report_always(self) -> None:
        turns = Turns("gateway health")
        while True:
            await asyncio.sleep(_READY_INTERVAL_S)
            with turns.turn():
                await self._report()

    async def _report(self) -> None:
        """Tell the health services how the router is."""
        statuses = HealthCheckResponse
        status = statuses.SERVING if self._is_ready() else statuses.NOT_SERVING
        await self._health.set(LIVENESS, statuses.SERVING)
        for service in READINESS:
            await self._health.set(service, status)
