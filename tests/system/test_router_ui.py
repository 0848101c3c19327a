"""The live page of a router in a headless browser, with statistics that a test hands in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from browser import CHROMIUM, Page, browser
from control_pages import ControlPages, serving
from router_stats import A, B, make_stats, make_worker

from flexcache.router.chooser import Decided, RequestEnded, Skipped

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.whole,
]

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = '<img src=x onerror="window.isHarmed=1"><script>window.isHarmed=1</script>\'"&lt;'
NUM_ROWS = "document.querySelectorAll('#decisions tbody tr').length"
NUM_ENGINES = "document.querySelectorAll('#engines .card').length"
LOGIN_IS_SHOWN = "document.getElementById('login')?.hidden === false"


def decided(**changes: Any) -> Decided:
    event = {
        "time": 1.7e9,
        "request_id": "a-request",
        "worker": A,
        "reason": "cost",
        "num_tokens": 1000,
        "matched": {"gpu": 600, "dram": 200, "disk": 0},
        "ttft_s": 0.25,
        "queued_s": 0.0,
        "attempt": 0,
    } | changes
    return Decided(**event)  # type: ignore[arg-type]


def ended(**changes: Any) -> RequestEnded:
    event = {
        "time": 1.7e9 + 2,
        "request_id": "a-request",
        "worker": A,
        "outcome": "done",
        "predicted_tokens": 800,
        "cached_tokens": 800,
        "prompt_tokens": 1000,
        "output_tokens": 50,
        "predicted_ttft_s": 0.25,
        "ttft_s": 0.2,
        "total_s": 2.0,
    } | changes
    return RequestEnded(**event)  # type: ignore[arg-type]


@asynccontextmanager
async def opened(pages: ControlPages, *, is_dark: bool = False, **size: int) -> AsyncIterator[Page]:
    with serving(pages):
        async with browser() as page:
            await page.open(f"{pages.url}/ui/", is_dark=is_dark, **(size or DESK))
            yield page


async def number(page: Page, selector: str) -> Any:
    return await page.evaluate(f"document.querySelectorAll({selector!r}).length")


def test_engines_figures_and_trouble_are_shown() -> None:
    async def look() -> None:
        async with opened(ControlPages(make_stats())) as page:
            await page.until(f"{NUM_ENGINES} == 2")
            assert await page.words("#link") == "live"
            first = await page.words("#engines .card")
            assert "10.0.0.1:8000" in first
            assert "5 running" in first
            assert "20,000 GPU, 90,000 DRAM, 30,000 disk" in first
            assert "71.4 %" in first
            assert "draining" in await page.words("#engines .card:nth-child(2)")
            assert "no events: blocks are guessed" in await page.words(
                "#engines .card:nth-child(2)"
            )
            figures = await page.words("#figures")
            assert "76.9 %of 78 answers" in figures
            assert "123,456" in figures
            assert "other routers1up, of 1; 42 requests" in figures
            assert "Only 60 of 78 predictions" in await page.words("#trouble")
            assert page.complaints == []

    asyncio.run(look())


def test_a_decision_is_followed_to_its_end() -> None:
    pages = ControlPages(make_stats())

    async def look() -> None:
        async with opened(pages) as page:
            pages.events.put(decided())
            await page.until(f"{NUM_ROWS} == 1")
            row = await page.words("#decisions tbody tr")
            assert "running" in row
            assert "1,000" in row
            pages.events.put(ended(cached_tokens=640))
            await page.until("document.querySelector('.outcome').textContent.startsWith('done')")
            assert await page.words(".cached") == "640, not 800"
            assert await page.words(".ttft") == "200 ms (250 ms)"
            assert (
                await page.evaluate("document.querySelectorAll('#tokens-chart .off').length") == 1
            )
            assert await page.evaluate("document.querySelectorAll('#ttft-chart .dot').length") == 1
            pages.events.put(decided(attempt=1, worker=B))
            pages.events.put(ended(worker=B, cached_tokens=None, outcome="broken"))
            pages.events.put(Skipped(time=1.7e9, count=12))
            await page.until(f"{NUM_ROWS} == 3")
            assert "12 events not shown" in await page.words("#decisions tbody tr")
            retried = await page.words("#decisions tbody tr:nth-child(2)")
            assert "cost, try 2" in retried
            assert "not reported" in retried
            assert page.complaints == []

    asyncio.run(look())


def test_a_paused_table_stays_and_a_long_one_is_cut() -> None:
    pages = ControlPages(make_stats())

    async def look() -> None:
        async with opened(pages) as page:
            for i in range(80):
                pages.events.put(decided(request_id=f"request-{i}"))
            await page.until("document.querySelector('#decisions .id')?.title == 'request-79'")
            assert await page.evaluate(NUM_ROWS) == 50
            await page.evaluate("document.getElementById('pause').click()")
            pages.events.put(decided(request_id="unseen"))
            pages.events.put(ended(request_id="unseen"))
            await page.until("document.querySelectorAll('#tokens-chart .dot').length == 1")
            assert await page.words("#decisions .id") == "request-79"

    asyncio.run(look())


def test_hostile_names_stay_text() -> None:
    worker = make_worker(url=HOSTILE, sources=[HOSTILE])
    pages = ControlPages(make_stats(workers={HOSTILE: worker, "__proto__": make_worker()}))
    for event in (
        decided(request_id=HOSTILE, worker=HOSTILE, reason=HOSTILE),
        ended(request_id=HOSTILE, worker=HOSTILE, outcome=HOSTILE),
        decided(request_id="constructor", matched={HOSTILE: 5, "gpu": 10**9}),
    ):
        pages.events.put(event)

    async def look() -> None:
        async with opened(pages) as page:
            await page.until(f"{NUM_ROWS} == 2 && {NUM_ENGINES} > 0")
            assert HOSTILE in await page.words("#decisions tbody tr:nth-child(2)")
            assert HOSTILE in await page.words("#engines .card")
            assert await number(page, "img, main script") == 0
            assert await page.evaluate("window.isHarmed") is None
            assert page.complaints == []

    asyncio.run(look())


def test_a_token_is_asked_for_and_sent() -> None:
    pages = ControlPages(make_stats(), token="secret")
    pages.events.put(decided())
    enter = (
        "document.getElementById('token').value = {!r};"
        "document.querySelector('#login button').click()"
    )

    async def look() -> None:
        async with opened(pages) as page:
            await page.until(LOGIN_IS_SHOWN)
            assert await page.evaluate("document.getElementById('main').hidden")
            await page.evaluate(enter.format("wrong"))
            await page.until(LOGIN_IS_SHOWN)
            await page.evaluate(enter.format("secret"))
            await page.until(f"{NUM_ENGINES} == 2 && {NUM_ROWS} == 1")
            assert not await page.evaluate(LOGIN_IS_SHOWN)
            assert not await page.evaluate("location.href.includes('secret')")

    asyncio.run(look())


def test_a_lost_router_is_named() -> None:
    pages = ControlPages(make_stats())

    async def look() -> None:
        async with browser() as page:
            with serving(pages):
                await page.open(f"{pages.url}/ui/", **DESK)
                await page.until(f"{NUM_ENGINES} == 2")
            await page.until("document.body?.dataset.link == 'lost'")

    asyncio.run(look())


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_shows_all_without_scrolling_sideways(is_dark: bool, tmp_path: Path) -> None:
    pages = ControlPages(make_stats())
    pages.events.put(decided())
    pages.events.put(ended())

    async def look() -> None:
        async with opened(pages, is_dark=is_dark, **PHONE) as page:
            await page.until(f"{NUM_ENGINES} == 2 && {NUM_ROWS} == 1")
            assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
            background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(22, 22, 21)" if is_dark else "rgb(246, 246, 244)")
            await page.picture(tmp_path / "phone.png")
            assert (tmp_path / "phone.png").stat().st_size > 10_000

    asyncio.run(look())
