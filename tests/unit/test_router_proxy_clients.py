"""A proxy before an engine, in one process: clients that do not read, answers that are errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from aiohttp import web
from aiohttp.test_utils import TestServer

from flexcache.router.chooser import UNKNOWN, Arrival, Choice, Outcome, Usage, WorkerAddress
from flexcache.router.proxy.proxy import PROXY, make_app, serve
from flexcache.router.settings import ProxyConfig

ANSWER = b"x" * (60 << 10)
NUM_REQUESTS = 400
PATIENCE_S = 60


class OneEngine:
    """Names one engine, and follows its requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.open: set[str] = set()
        self.first_tokens = 0
        self.ends: list[Outcome] = []

    async def choose(self, arrival: Arrival) -> Choice:
        self.open.add(arrival.request_id)
        return Choice(worker="e", url=self.url, headers={}, matched_tokens=None)

    def stored(self, url: str, ids: Iterable[str]) -> None:
        pass

    def addresses(self) -> list[WorkerAddress]:
        return []

    def cards(self) -> dict[str, bytes]:
        return {}

    def models_changed(self) -> None:
        pass

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        self.first_tokens += 1

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        self.open.remove(request_id)
        self.ends.append(outcome)


async def answer(request: web.Request) -> web.Response:
    return web.Response(body=ANSWER, status=int(request.query.get("status", 200)))


def before_an_engine(
    test: Callable[[OneEngine, int], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as engine:
            chooser = OneEngine(str(engine.make_url("")).rstrip("/"))
            config = ProxyConfig(**{"client_idle_s": 0.3, "stop_deadline_s": 1.0, **settings})
            app = make_app(chooser, config)
            serving = await serve(app)
            try:
                await test(chooser, serving.port)
            finally:
                await serving.stop()
            app[PROXY].check()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_client_that_reads_no_short_answers_holds_no_engine() -> None:
    async def test(chooser: OneEngine, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: r\r\n\r\n" * NUM_REQUESTS)
        while Outcome.ABORTED not in chooser.ends:
            assert len(chooser.ends) < NUM_REQUESTS, "all were taken: send more"
            await asyncio.sleep(0.02)
        assert not chooser.open
        writer.transport.abort()

    before_an_engine(test)


@pytest.mark.parametrize(("status", "first_tokens"), [(200, 1), (400, 0), (500, 0)])
def test_an_error_has_no_first_token(status: int, first_tokens: int) -> None:
    async def test(chooser: OneEngine, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /?status=%d HTTP/1.1\r\nHost: r\r\n\r\n" % status)
        assert await reader.readexactly(12) == b"HTTP/1.1 %d" % status
        while not chooser.ends:
            await asyncio.sleep(0.01)
        assert (chooser.ends, chooser.first_tokens) == ([Outcome.DONE], first_tokens)
        writer.transport.abort()

    before_an_engine(test)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, data: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


STATUS_LINE = len(b"HTTP/1.1 200")


def test_strangers_do_not_keep_those_with_a_key_out() -> None:
    right = b"GET / HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer key\r\n\r\n"

    async def test(chooser: OneEngine, port: int) -> None:
        opened: list[Connection] = []
        for _ in range(2):
            opened.append(await connect(port, b"GET / HTTP/1.1\r\nHost"))  # no whole request
            opened.append(await connect(port, b"GET / HTTP/1.1\r\nHost: r\r\n\r\n"))  # no key
            assert await opened[-1][0].readexactly(STATUS_LINE) == b"HTTP/1.1 401"
        clients = [await connect(port, right) for _ in range(4)]
        for reader, _ in clients:
            assert await reader.readexactly(STATUS_LINE) == b"HTTP/1.1 200"
        for _, writer in [*opened, *clients]:
            writer.transport.abort()

    before_an_engine(test, max_connections=4, api_keys=("key",), client_idle_s=PATIENCE_S)


def test_the_connection_that_is_idle_longest_makes_room() -> None:
    request = b"GET / HTTP/1.1\r\nHost: r\r\n\r\n"

    async def ask(connection: Connection) -> None:
        connection[1].write(request)
        head = await connection[0].readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await connection[0].readexactly(len(ANSWER))

    async def test(chooser: OneEngine, port: int) -> None:
        first, second = await connect(port), await connect(port)
        await ask(second)
        await ask(first)  # idle since then
        third = await connect(port)
        await ask(third)
        await ask(first)
        assert await second[0].read() == b""
        for _, writer in (first, second, third):
            writer.transport.abort()

    before_an_engine(test, max_connections=2, client_idle_s=PATIENCE_S)
