"""The prober tells apart an engine that serves nothing known from one that did not say."""

from __future__ import annotations

import asyncio

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

from flexcache.router import prober as module  # noqa: E402
from flexcache.router.fleet import ModelCard  # noqa: E402
from flexcache.router.prober import Prober, parse_models  # noqa: E402
from flexcache.router.roster import Probe  # noqa: E402
from flexcache.router.tokens.engines import BadAnswer  # noqa: E402

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROBE_INTERVAL_S", "DETAILS_INTERVAL_S"):
        monkeypatch.setattr(module, name, 0.0)


def test_lists_of_models_are_read_or_refused() -> None:
    card = b'{"id": "lora", "root": "/lora", "parent": "m", "created": 1}'
    assert parse_models(b'{"data": [%s, {"id": "m"}]}' % card) == [
        ModelCard("lora", "/lora", "m", card), ModelCard("m", raw=b'{"id": "m"}'),
    ]  # fmt: skip
    for strange in (b"", b"[]", b'{"data": 1}', b'{"data": [{}]}', b"[" * 100_000, b"\xff"):
        with pytest.raises(BadAnswer, match="no list of models"):
            parse_models(strange)


def test_a_list_of_models_that_is_not_answered_is_not_an_empty_one() -> None:
    answers = iter([(200, ["small"]), (503, []), (200, [])])
    told: list[list[str] | None] = []
    probed: list[int] = []

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        status, names = next(answers)
        return web.json_response({"data": [{"id": name} for name in names]}, status=status)

    async def test() -> None:
        is_over = asyncio.Event()

        def on_details(url: str, cards: list[ModelCard] | None, _: object) -> None:
            told.append(None if cards is None else [card.id for card in cards])
            if len(told) == 3:
                is_over.set()

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            prober = Prober(
                session, on_probe=lambda *_: probed.append(len(told)), on_details=on_details
            )
            prober.follow((str(server.make_url("")).rstrip("/"),))
            await is_over.wait()
            await prober.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
    assert told == [["small"], None, []]
    assert probed[0] == 1, "it takes requests once its models are known"


def test_a_fault_where_details_are_used_does_not_end_the_probes() -> None:
    answers = iter([200, 200, 503])
    probed: list[Probe] = []

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=next(answers, 503))

    async def test() -> None:
        is_over = asyncio.Event()

        def on_probe(_: str, probe: Probe) -> None:
            probed.append(probe)
            if probe is Probe.BAD:
                is_over.set()

        def on_details(*_: object) -> None:
            raise RuntimeError("a bug")

        app = web.Application()
        app.router.add_get("/health", health)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            prober = Prober(session, on_probe=on_probe, on_details=on_details)
            prober.follow((str(server.make_url("")).rstrip("/"),))
            await is_over.wait()
            await prober.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
    assert probed == [Probe.GOOD, Probe.GOOD, Probe.BAD]
