"""Calls to caches: few at a time, none to a cache that does not answer, and nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

pytest.importorskip("aiohttp", reason="calls need the extra `router`")

from aiohttp import web

from flexcache.router.prefetches import MAX_RUNNING, Prefetches, open_session

PATIENCE_S = 60.0
LONG_S = 3600.0


class Cache:
    """A cache's HTTP API with answers that a test sets."""

    def __init__(self) -> None:
        self.status = 202
        self.asked: list[object] = []
        self.tokens: list[str | None] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        await self.may_answer.wait()
        return web.json_response({"blocks": 1}, status=self.status)


@contextlib.asynccontextmanager
async def serving(cache: Cache) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/cache/prefetch", cache.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        cache.may_answer.set()
        await runner.cleanup()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def calling(
    *urls: str, timeout_s: float = LONG_S, clock: Clock | None = None, token: str | None = None
) -> AsyncIterator[Prefetches]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with open_session(headers) as session:
        prefetches = Prefetches(session, timeout_s=timeout_s, clock=clock or Clock())
        prefetches.follow(urls)
        try:
            yield prefetches
        finally:
            prefetches.check()
            await prefetches.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S) if hasattr(asyncio, "timeout") else _no_limit():
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def _no_limit() -> AsyncIterator[None]:  # Python 3.10: the test's own limit holds
    yield


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_a_cache_is_asked_once_for_each_call_with_its_token() -> None:
    async def test() -> None:
        cache = Cache()
        async with serving(cache) as url, calling(url, token="secret") as prefetches:
            prefetches.begin(url, (1 << 64) - 1, 512)
            await until(lambda: prefetches.stats()[url].results == {"accepted": 1})
            assert cache.asked == [{"block_hash": (1 << 64) - 1}]
            assert cache.tokens == ["Bearer secret"]
            assert prefetches.stats()[url].tokens == 512
            prefetches.begin("http://127.0.0.1:1", 7, 512)  # of no worker
            assert prefetches.stats().keys() == {url}

    run(test)


def test_a_cache_that_is_slow_gets_a_bounded_number_of_calls() -> None:
    async def test() -> None:
        cache = Cache()
        cache.may_answer.clear()
        async with serving(cache) as url, calling(url) as prefetches:
            for number in range(MAX_RUNNING + 5):
                prefetches.begin(url, number, 1)
            assert prefetches.stats()[url].running == MAX_RUNNING
            assert prefetches.stats()[url].results == {"busy": 5}
            cache.may_answer.set()
            await until(lambda: not prefetches.stats()[url].running)
            assert len(cache.asked) == MAX_RUNNING
            assert prefetches.stats()[url].results == {"accepted": MAX_RUNNING, "busy": 5}

    run(test)


def test_caches_that_do_not_answer_take_no_connections_of_others() -> None:
    async def test() -> None:
        silent, quick = Cache(), Cache()
        silent.may_answer.clear()
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(silent)) for _ in range(8)]
            urls.append(await stack.enter_async_context(serving(quick)))
            prefetches = await stack.enter_async_context(calling(*urls))
            for url in urls[:-1]:
                for number in range(MAX_RUNNING):
                    prefetches.begin(url, number, 1)
            prefetches.begin(urls[-1], 7, 1)
            await until(lambda: quick.asked == [{"block_hash": 7}])
            silent.may_answer.set()

    run(test)


def test_a_cache_that_fails_is_left_alone_and_tried_again_later() -> None:
    async def test() -> None:
        cache, clock = Cache(), Clock()
        cache.status = 503
        async with serving(cache) as url, calling(url, clock=clock) as prefetches:

            async def ask() -> None:
                before = len(cache.asked)
                prefetches.begin(url, 1, 100)
                await until(lambda: not prefetches.stats()[url].running)
                assert len(cache.asked) <= before + 1

            for _ in range(100):
                if prefetches.stats()[url].circuit == "closed":
                    await ask()
            assert prefetches.stats()[url].circuit == "open"
            num_failed = len(cache.asked)
            assert "status 503" in prefetches.stats()[url].failure
            for _ in range(10):
                await ask()
            assert len(cache.asked) == num_failed
            assert prefetches.stats()[url].results == {"failed": num_failed, "circuit": 10}

            cache.status, clock.now = 202, LONG_S
            cache.may_answer.clear()
            prefetches.begin(url, 1, 100)
            prefetches.begin(url, 2, 100)  # one trial at a time
            assert prefetches.stats()[url].running == 1
            cache.may_answer.set()
            await until(lambda: not prefetches.stats()[url].running)
            for _ in range(100):
                if prefetches.stats()[url].circuit != "closed":
                    await ask()
            assert prefetches.stats()[url].circuit == "closed"
            assert prefetches.stats()[url].failure == ""
            assert prefetches.stats()[url].results["circuit"] == 11

    run(test)


@pytest.mark.parametrize("timeout_s", [0.05])
def test_calls_without_an_answer_end(timeout_s: float) -> None:
    async def test() -> None:
        cache = Cache()
        cache.may_answer.clear()
        async with serving(cache) as url, calling(url, timeout_s=timeout_s) as prefetches:
            for number in range(4):
                prefetches.begin(url, number, 1)
            await until(lambda: prefetches.stats()[url].results == {"failed": 4})
            assert prefetches.stats()[url].circuit == "open"
            assert "no answer" in prefetches.stats()[url].failure

    run(test)


def test_a_cache_that_is_not_there_fails() -> None:
    async def test() -> None:
        async with serving(Cache()) as url:
            pass
        async with calling(url) as prefetches:
            prefetches.begin(url, 1, 1)
            await until(lambda: prefetches.stats()[url].results == {"failed": 1})
            assert prefetches.stats()[url].failure

    run(test)


def test_caches_that_stay_are_known_and_those_that_go_are_forgotten() -> None:
    async def test() -> None:
        cache = Cache()
        async with serving(cache) as url, calling(url) as prefetches:
            prefetches.begin(url, 1, 1)
            await until(lambda: prefetches.stats()[url].results == {"accepted": 1})
            prefetches.follow([url, "http://other:1"])
            assert prefetches.stats()[url].results == {"accepted": 1}
            cache.may_answer.clear()
            prefetches.begin(url, 2, 1)
            prefetches.follow([])
            assert prefetches.stats() == {}

    run(test)  # a call to a cache that has gone ends with the rest
