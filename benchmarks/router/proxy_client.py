"""Load for proxies: streams, short requests, large ones, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop

_QUICK_ACK = getattr(socket, "TCP_QUICKACK", 12)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Measured:
    """What a load saw.

    Attributes:
        ttft_ms: Time to the first byte of an answer's body, per request.
        total_ms: Time to its last.
    """

    ttft_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0


class Load:
    """Sends requests to a port.

    Args:
        quick_acks: Acknowledge each packet at once. Otherwise the kernel may delay it by 40 ms,
            which a sender with Nagle's algorithm waits for.
    """

    def __init__(self, port: int, quick_acks: bool) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._quick_acks = quick_acks

    def run(self, body: dict[str, Any], num_requests: int, concurrency: int) -> Measured:
        """Send requests, so many at a time, on connections that are kept."""
        return uvloop.run(self._run(json.dumps(body).encode(), num_requests, concurrency))

    async def _run(self, body: bytes, num_requests: int, concurrency: int) -> Measured:
        measured = Measured()
        left = iter(range(num_requests))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def client() -> None:
                for _ in left:
                    await self._ask(session, body, measured)

            await asyncio.gather(*(client() for _ in range(concurrency)))
        return measured

    async def _ask(self, session: aiohttp.ClientSession, body: bytes, measured: Measured) -> None:
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        first = None
        async with session.post(self._url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise AssertionError(f"status {answer.status}: {await answer.text()}")
            acknowledge = self._acknowledger(answer)
            acknowledge()  # the header, which the first piece may be waiting for
            async for chunk in answer.content.iter_any():
                acknowledge()
                first = first or time.perf_counter()
                measured.num_tokens += chunk.count(b'"choices"')
                measured.num_bytes += len(chunk)
        assert first is not None
        measured.ttft_ms.append((first - started) * 1e3)
        measured.total_ms.append((time.perf_counter() - started) * 1e3)

    def _acknowledger(self, answer: aiohttp.ClientResponse) -> Callable[[], None]:
        connection = answer.connection
        if not self._quick_acks or connection is None or connection.transport is None:
            return lambda: None
        sock = connection.transport.get_extra_info("socket")
        return lambda: sock.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)


def leave(port: int, num_clients: int, concurrency: int, seed: int) -> float:
    """Send requests and leave at a random moment; returns the seconds it took."""
    started = time.perf_counter()
    uvloop.run(_leave(port, num_clients, concurrency, seed))
    return time.perf_counter() - started


async def _leave(port: int, num_clients: int, concurrency: int, seed: int) -> None:
    content = json.dumps({"prompt": [1] * 20, "max_tokens": 64, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    message = head.encode() + content
    rng = random.Random(seed)
    left = iter(range(num_clients))

    async def client() -> None:
        for _ in left:
            await _send_and_leave(port, message, rng)

    await _all([client for _ in range(concurrency)])


async def _all(clients: list[Callable[[], Awaitable[None]]]) -> None:
    await asyncio.gather(*(client() for client in clients))


async def _send_and_leave(port: int, message: bytes, rng: random.Random) -> None:
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # A reset, so that the port is free again at once.
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        stage = rng.randrange(10)
        writer.write(message[: rng.randrange(len(message))] if stage == 0 else message)
        if stage < 4:
            await asyncio.sleep(rng.random() * 0.005)
        else:
            await reader.read(4096)  # the header, and perhaps the first token
        if stage > 7:
            await reader.read(4096)
        writer.transport.abort()
