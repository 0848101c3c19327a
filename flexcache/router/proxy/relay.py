"""Passes an answer on: piece by piece as it comes, or in one piece if it is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, ClientResponse, web

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
    response: web.StreamResponse,
    transport: asyncio.WriteTransport | None,
    size: int,
    stall_s: float,
) -> None:
    """Send a short answer, which is prepared, to its end.

    Args:
        size: Of its body.
        stall_s: How long the client may leave data unread.

    Raises:
        ClientStalled: See ``stall_s``.
        ConnectionError: The client is gone.
    """
    if transport is None:
        raise ConnectionResetError
    most_unread = transport.get_write_buffer_limits()[1] // 2  # the header needs room too
    if transport.get_write_buffer_size() + size < most_unread:
        await response.write_eof()  # does not wait
        return
    try:
        await asyncio.wait_for(response.write_eof(), stall_s)
    except asyncio.TimeoutError:
        raise ClientStalled from None


async def relay(
    answer: ClientResponse,
    response: web.StreamResponse,
    transport: asyncio.WriteTransport,
    *,
    feed: Callable[[bytes], None],
    first_byte: Callable[[], None],
    stall_s: float,
) -> None:
    """Pass the body of an answer on.

    Args:
        response: Prepared.
        transport: The client's.
        feed: Is given each piece before the client is.
        first_byte: Called when the first piece has come.
        stall_s: How long the client may leave data unread.

    Raises:
        EngineBroke: The body is incomplete.
        ClientStalled: See ``stall_s``.
        ConnectionError: The client is gone.
    """
    read, write = answer.content.readany, response.write
    most_unread = transport.get_write_buffer_limits()[1] - _FRAMING_BYTES
    is_first = True
    while True:
        try:
            chunk = await read()
        except (ClientError, asyncio.TimeoutError) as error:
            raise EngineBroke(type(error).__name__) from error
        if not chunk:
            return
        if is_first:
            first_byte()
            is_first = False
        feed(chunk)
        if transport.get_write_buffer_size() + len(chunk) < most_unread:
            await write(chunk)  # does not wait
            continue
        try:
            await asyncio.wait_for(write(chunk), stall_s)
        except asyncio.TimeoutError:
            raise ClientStalled from None
