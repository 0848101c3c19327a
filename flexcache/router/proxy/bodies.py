"""Reads the bodies of requests, within limits of size and time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from flexcache.errors import InternalError


class BodyRefused(Exception):
    """A body was not read.

    Args:
        status: What the client is answered.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Body:
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


class Bodies:
    """The bodies of all requests in flight.

    Args:
        max_bytes: Of one body.
        max_held_bytes: Of all of them.
        timeout_s: For one body.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def read(self, request: web.Request, body: Body) -> bytes:
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

    def release(self, body: Body) -> None:
        """Note that a body is no longer held."""
        self._held_bytes -= body.size

    def check(self, *, is_idle: bool) -> None:
        """Check invariants.

        Args:
            is_idle: There is no request in flight.

        Raises:
            InternalError: One does not hold.
        """
        if self._held_bytes < 0 or (is_idle and self._held_bytes):
            raise InternalError(f"{self._held_bytes} bytes held, is_idle={is_idle}")

    async def _collect(self, request: web.Request, body: Body) -> None:
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        try:
            await asyncio.wait_for(self._read_all(request, body), self._timeout_s)
        except asyncio.TimeoutError:
            raise BodyRefused(408, "the body did not arrive in time") from None
        except web.RequestPayloadError:
            raise BodyRefused(400, "the body is malformed") from None
        except ConnectionError:
            raise BodyRefused(400, "the client left") from None

    async def _read_all(self, request: web.Request, body: Body) -> None:
        while chunk := await request.content.readany():
            self._take(chunk, body)

    def _take(self, chunk: bytes, body: Body) -> None:
        body.add(chunk)
        self._held_bytes += len(chunk)
        if body.size > self._max_bytes:
            raise self._too_large()
        if self._held_bytes > self._max_held_bytes:
            raise BodyRefused(503, "too many large requests at once")

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, f"the body is larger than {self._max_bytes} bytes")
