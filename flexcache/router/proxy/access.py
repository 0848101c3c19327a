"""Access of clients: their keys, and which connections are kept when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from aiohttp import web

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
