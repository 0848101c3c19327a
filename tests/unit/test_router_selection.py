"""The control API's selection of workers for others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from flexcache.router.chooser import Arrival, RouteRequest
from flexcache.router.control import BODIES, SelectionApi
from flexcache.router.decider import Decider, WaitingLine
from flexcache.router.fleet import WorkerSpec
from flexcache.router.proxy.clients import Bodies, Room
from flexcache.router.roster import Probe, Roster
from flexcache.router.router import KVRouter

URL = "http://a:1"
TOKENS = list(range(64))
Ask = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]


async def never(arrival: Arrival) -> RouteRequest:
    raise AssertionError("the requests here have tokens")


def with_api(max_requests: int | None, test: Callable[[Ask], Coroutine[Any, Any, None]]) -> Decider:
    """Run a test before one idle worker; returns the decider."""
    routing = KVRouter(max_requests=max_requests)
    roster = Roster(routing)
    roster.set_listed([WorkerSpec(name=URL, url=URL)])
    roster.probed(URL, Probe.GOOD, 0.0)
    decider = Decider(routing, roster, never, WaitingLine(1, 0.01))

    async def run() -> None:
        app = web.Application()
        app[BODIES] = Bodies(Room(1 << 20, 1 << 20), 60.0)
        app.add_routes(SelectionApi(decider).routes())
        async with TestClient(TestServer(app)) as client:

            async def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                async with client.post(path, json=body) as answer:
                    return answer.status, (await answer.json() if answer.status < 400 else None)

            await test(ask)

    asyncio.run(run())
    decider.check()
    return decider


def test_the_last_place_of_a_worker_can_be_reserved() -> None:
    async def test(ask: Ask) -> None:
        status, answer = await ask("/reservations", {"selection_id": "1", "token_ids": TOKENS})
        assert (status, answer["worker_id"], answer["endpoint"]) == (201, URL, URL)
        status, _ = await ask("/reservations", {"selection_id": "2", "token_ids": TOKENS})
        assert status == 429

    assert set(with_api(1, test).running) == {"1"}


def test_a_reservation_does_not_find_itself() -> None:
    async def test(ask: Ask) -> None:
        _, answer = await ask("/reservations", {"selection_id": "1", "token_ids": TOKENS})
        assert answer["overlap"]["longest_matched"] == 0
        assert answer["effective_prefill_tokens"] == 64
        await ask("/reservations/1/prefill_complete", {})
        _, answer = await ask("/reservations", {"selection_id": "2", "token_ids": TOKENS})
        assert answer["overlap"]["longest_matched"] == 48
        assert answer["effective_prefill_tokens"] == 16

    with_api(None, test)
