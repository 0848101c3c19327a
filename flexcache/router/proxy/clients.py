"""Clients of the proxy: keys, connections, and bodies within limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from aiohttp import web

from flexcache.errors import InternalError
from flexcache.logs import log_event
from flexcache.router.waiting import OnceAMinute

logger = logging.getLogger(__name__)

_SCHEME = "bearer"


class ApiKeys:
    """The keys of clients. Comparing takes the same time for all that is presented.

    Args:
        keys: Empty: anyone is let in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has a valid key.

        Args:
            headers: Case-insensitive.
        """
        if not self._digests:
            return True
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == _SCHEME else headers.get("x-api-key", "")
        digest = _digest(presented)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


@contextlib.contextmanager
def holding(request: web.Request) -> Iterator[None]:
    """Keep the connection of a request that its sender may send, while it is served."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    seat = protocol if isinstance(protocol, _Seat) else None
    if seat is not None:
        seat.serve(True)
    try:
        yield
    finally:
        if seat is not None:
            seat.serve(False)


class Seats:
    """The connections of a listening socket, up to a limit.

    Beyond it the one goes that has waited longest for a request, or has sent none that it may:
    a client that opens as many as there can be, and sends nothing, must not keep everyone else out.
    Only if all are being served the new one goes.
    """

    def __init__(self, server: web.Server, address: object, limit: int) -> None:
        self.server = server
        self._address = address
        self._limit = limit
        self._waiting: dict[_Seat, None] = {}  # the longest first
        self._serving: set[_Seat] = set()
        self._says_full = OnceAMinute()

    def offer(self) -> asyncio.Protocol:
        """Return the protocol of a connection that is being accepted."""
        return _Seat(self)

    def admit(self, seat: _Seat) -> bool:
        if len(self._waiting) + len(self._serving) >= self._limit:
            oldest = next(iter(self._waiting), None)
            which = "idle" if oldest is not None else "new"
            if self._says_full.is_due(which):
                log_event(
                    logger, logging.WARNING, "connections_turned_away", address=self._address,
                    limit=self._limit, which=which,
                )  # fmt: skip
            if oldest is None:
                return False
            del self._waiting[oldest]
            oldest.turn_away()
        self._waiting[seat] = None
        return True

    def serve(self, seat: _Seat, is_served: bool) -> None:
        if is_served and seat in self._waiting:
            del self._waiting[seat]
            self._serving.add(seat)
        elif not is_served and seat in self._serving:
            self._serving.remove(seat)
            self._waiting[seat] = None

    def leave(self, seat: _Seat) -> None:
        self._waiting.pop(seat, None)
        self._serving.discard(seat)


class _Seat(asyncio.Protocol):
    """A connection, which aiohttp handles if it is admitted."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._handler: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None

    def serve(self, is_served: bool) -> None:
        self._seats.serve(self, is_served)

    def turn_away(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._seats.admit(self):
            self.turn_away()
            return
        self._handler = self._seats.server()
        self._handler.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._seats.leave(self)
        if self._handler is not None:
            self._handler.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()


class BodyRefused(Exception):
    """A body was not read.

    Args:
        status: What the client is answered.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HeldBody:
    """The part of a body that has arrived."""

    __slots__ = ("_chunks", "size")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk)

    def joined(self) -> bytes:
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)


class Room:
    """Memory for the bodies of all requests in flight.

    Args:
        max_body_bytes: Of one body.
        max_held_bytes: Of all of them.

    Attributes:
        held_bytes: In use.
    """

    def __init__(self, max_body_bytes: int, max_held_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._max_held_bytes = max_held_bytes

    def take(self, num_bytes: int, body_bytes: int) -> None:
        """Count bytes that have arrived; they are to be given back, also after an error.

        Args:
            body_bytes: Of their body so far, these included.

        Raises:
            BodyRefused: There is no room for them.
        """
        self.held_bytes += num_bytes
        self.check_size(body_bytes)
        if self.held_bytes > self._max_held_bytes:
            raise BodyRefused(503, "too many large requests at once")

    def check_size(self, body_bytes: int) -> None:
        """
        Raises:
            BodyRefused: A body is too large.
        """
        if body_bytes > self.max_body_bytes:
            raise BodyRefused(413, f"the body is larger than {self.max_body_bytes} bytes")

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def check(self, *, is_idle: bool) -> None:
        """Check invariants.

        Args:
            is_idle: There is no request in flight.

        Raises:
            InternalError: Bytes are held by no request.
        """
        if self.held_bytes < 0 or (is_idle and self.held_bytes):
            raise InternalError(f"{self.held_bytes} bytes held, is_idle={is_idle}")


class Bodies:
    """Reads the bodies of requests.

    Args:
        room: For all of them.
        timeout_s: For one body.
    """

    def __init__(self, room: Room, timeout_s: float) -> None:
        self.room = room
        self._timeout_s = timeout_s

    async def read(self, request: web.Request, body: HeldBody) -> bytes:
        """Read the body of a request.

        Args:
            body: Empty. To be released, also after an error.

        Raises:
            BodyRefused: It is too large, too slow, malformed or cut, or there is no room for it.
        """
        if not request.content.is_eof():
            await self._collect(request, body)
        elif request.body_exists:
            self._take(request.content.read_nowait(), body)
        return body.joined()

    def release(self, body: HeldBody) -> None:
        """Note that a body is no longer held."""
        self.room.give_back(body.size)

    async def _collect(self, request: web.Request, body: HeldBody) -> None:
        self.room.check_size(request.content_length or 0)
        try:
            await asyncio.wait_for(self._read_all(request, body), self._timeout_s)
        except asyncio.TimeoutError:
            raise BodyRefused(408, "the body did not arrive in time") from None
        except web.RequestPayloadError:
            raise BodyRefused(400, "the body is malformed") from None
        except ConnectionError:
            raise BodyRefused(400, "the client left") from None

    async def _read_all(self, request: web.Request, body: HeldBody) -> None:
        while chunk := await request.content.readany():
            self._take(chunk, body)

    def _take(self, chunk: bytes, body: HeldBody) -> None:
        body.add(chunk)
        self.room.take(len(chunk), body.size)
