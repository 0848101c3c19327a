"""The ext_proc service: one gRPC stream for each request that Envoy has."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

from flexcache.errors import MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.chooser import Choice, Chooser, NotRouted
from flexcache.router.gateway.destinations import Destinations
from flexcache.router.gateway.exchange import BadStream, Exchange, Stage
from flexcache.router.gateway.room import Room

try:
    import grpc
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
    from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorServicer
except ImportError as error:
    raise MissingDependencyError(
        f"the endpoint picker needs the package {error.name}: pip install '.[gateway]'"
    ) from None

logger = logging.getLogger(__name__)

MAX_FALLBACKS = 2


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
