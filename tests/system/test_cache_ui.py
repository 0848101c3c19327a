"""The live page of a cache server in a headless browser, beside a real cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from browser import CHROMIUM, Page, browser
from cluster import WAIT_S, Cluster, running_cluster, until
from ports import free_port

from flexcache.logs import log_event

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.whole,
]

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = '<img src=x onerror="window.isHarmed=1"><script>window.isHarmed=1</script>\'"&lt;'
LINK_IS = "document.body?.dataset.link == '{}'"
LOGIN_IS_SHOWN = "document.getElementById('login')?.hidden === false"


@contextmanager
def served(port: int, *ssd_dirs: Path, **settings: Any) -> Iterator[Cluster]:
    with running_cluster(ssd_dirs, http_endpoint=str(port), **settings) as cluster:
        yield cluster


@asynccontextmanager
async def opened(port: int, *, is_dark: bool = False, **size: int) -> AsyncIterator[Page]:
    async with browser() as page:
        await page.open(f"http://127.0.0.1:{port}/ui", is_dark=is_dark, **(size or DESK))
        yield page


def ask(cluster: Cluster, prompt: int, num_blocks: int = 8, **names: Any) -> None:
    """Get a prompt and store it, as a request does."""
    tokens, blocks = np.arange(num_blocks * 16) + 10_000 * prompt, range(num_blocks)
    found, _ = cluster.manager.get_async(tokens, cluster.slots(blocks), **names)
    stored, _ = cluster.manager.put_async(tokens, cluster.slots(blocks), **names)
    cluster.manager.wait([found, stored], WAIT_S, completely=True)


def includes(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r})?.textContent.includes({text!r})"


def test_what_a_cache_has_done_is_shown(tmp_path: Path) -> None:
    port = free_port()

    async def look(cluster: Cluster) -> None:
        async with opened(port) as page:
            await page.until(includes("#sessions", "chat-1"))
            await page.until(LINK_IS.format("live"))
            assert "Healthy" in await page.words("#health")
            assert (await page.evaluate("document.title")).startswith("✓")
            assert "hit rate, 10 min50.0 %" in await page.words("#figures")
            assert "DRAM" in await page.words("#tiers .card")
            assert "SSD" in await page.words("#tiers .card:nth-child(2)")
            assert "teamDRAM" in await page.words("#tenants")
            assert "chat-1128DRAM1returns in" in await page.words("#sessions")
            assert "disk worker" in await page.words("#queues")
            assert "dp0" in await page.words("#engines tbody")
            assert await page.evaluate("document.querySelectorAll('rect.dram').length > 0")
            # What is wrong is said first, and that it is right again.
            cluster.server.state.observers.absent.append("KV events")
            log_event(logging.getLogger("flexcache.x"), logging.ERROR, "it_happened", n=7)
            await page.until(includes("#trouble", "KV events"))
            assert "Degraded" in await page.words("#health")
            await page.until(includes("#events", "it_happened n=7"))
            cluster.server.state.observers.absent.clear()
            await page.until(includes("#health", "Healthy"))
            assert await page.words("#trouble") == ""
            assert page.complaints == []

    with served(port, tmp_path, quotas="team=50%") as cluster:
        for turn in range(2):
            ask(cluster, 1, session_id="chat-1")
            ask(cluster, 2, session_id=f"chat-{2 + turn}", namespace="team")
        cluster.manager.session_hint("chat-1", returns_in_s=3600)
        asyncio.run(look(cluster))


def test_hostile_names_stay_text() -> None:
    port = free_port()

    async def look() -> None:
        async with opened(port) as page:
            await page.until(includes("#sessions", "onerror"))
            assert HOSTILE in await page.words("#sessions")
            assert "onerror" in await page.words("#events")
            assert await page.evaluate("document.querySelectorAll('img, main script').length") == 0
            assert await page.evaluate("window.isHarmed") is None
            assert page.complaints == []

    with served(port) as cluster:
        ask(cluster, 1, session_id=HOSTILE)
        log_event(logging.getLogger("flexcache.x"), logging.WARNING, "came", peer=HOSTILE)
        asyncio.run(look())


def test_a_token_is_asked_for_and_a_wrong_one_is_named() -> None:
    port = free_port()
    enter = (
        "document.getElementById('token').value = {!r};"
        "document.querySelector('#login button').click()"
    )

    async def look() -> None:
        async with opened(port) as page:
            await page.until(LOGIN_IS_SHOWN)
            assert await page.evaluate("document.getElementById('main').hidden")
            assert await page.evaluate("document.activeElement.id") == "token"
            await page.evaluate(enter.format("wrong"))
            await page.until(includes("#link", "refused"))
            await page.evaluate(enter.format("a-secret"))
            await page.until(includes("#health", "Healthy"))
            assert not await page.evaluate("location.href.includes('secret')")

    with served(port, http_token="a-secret"):
        asyncio.run(look())


def test_a_server_that_went_is_named_and_found_again() -> None:
    port = free_port()

    async def look() -> None:
        async with browser() as page:
            with served(port) as cluster:
                ask(cluster, 1)
                await page.open(f"http://127.0.0.1:{port}/ui/", **DESK)
                await page.until(includes("#tiers", "DRAM"))
            await page.until(LINK_IS.format("lost"))
            assert "no answer since" in await page.words("#link")
            with served(port):
                await page.until(LINK_IS.format("live"))
                await page.until(includes("#share-chart", "no engine has asked"))

    asyncio.run(look())


def test_a_page_in_the_background_reads_nothing() -> None:
    port = free_port()
    hide = (
        "window.isHidden = true; window.looks = window.reads = 0;"
        "Object.defineProperty(document, 'hidden', {get() { looks++; return isHidden; }});"
        "const read = fetch; window.fetch = (...given) => { reads++; return read(...given); };"
    )
    turn = "document.dispatchEvent(new Event('visibilitychange'))"

    async def look() -> None:
        async with opened(port) as page:
            await page.until(LINK_IS.format("live"))
            await page.evaluate(hide)
            await page.until("looks == 1")
            await page.evaluate(turn)
            await page.until("looks == 2")
            assert await page.evaluate("reads") == 0
            await page.evaluate(f"isHidden = false; {turn}")
            await page.until("reads >= 2")

    with served(port):
        asyncio.run(look())


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_shows_all_and_nothing_jumps(is_dark: bool, tmp_path: Path) -> None:
    port = free_port()
    watch = (
        "window.shift = 0; new PerformanceObserver((seen) => {"
        "for (const each of seen.getEntries()) window.shift += each.value;"
        "}).observe({type: 'layout-shift'})"
    )

    async def look(cluster: Cluster) -> None:
        async with opened(port, is_dark=is_dark, **PHONE) as page:
            await page.until(includes("#sessions", "chat"))
            await page.evaluate(watch)
            for _ in range(3):
                ask(cluster, 1, session_id="chat")
            await page.until(includes("#figures", "80.0 %"))
            assert await page.evaluate("shift") < 0.01
            assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
            background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(22, 22, 21)" if is_dark else "rgb(246, 246, 244)")
            for unnamed in ("svg:not([aria-label])", ".bar:not([aria-label])",
                            ".scroll:not([tabindex='0'])", "section:not([aria-label])"
                            ":not([aria-labelledby])"):  # fmt: skip
                assert await page.evaluate(f'document.querySelectorAll("{unnamed}").length') == 0

    with served(port, tmp_path) as cluster:
        for _ in range(2):
            ask(cluster, 1, session_id="chat")
        until(lambda: cluster.manager.stats()["hit_rate"]["1m"]["rate"] == 0.5)
        asyncio.run(look(cluster))
