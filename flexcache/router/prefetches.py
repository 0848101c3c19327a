"""Prefetches: have caches begin to load what a request that was just placed will need.

From SSD or the remote store. Nothing waits for it, and it may fail: the request's own engine loads
what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from flexcache.breaker import CircuitBreaker
from flexcache.errors import InternalError
from flexcache.logs import log_event
from flexcache.router.stats import PrefetchStats

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_RUNNING = 16
"""Calls to one cache at a time; it answers within milliseconds."""
_ACCEPTED = 202
_MAX_ANSWER_BYTES = 200  # a reason for the log


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a session in which no cache takes the connections of another."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=MAX_RUNNING)
    return aiohttp.ClientSession(
        headers=headers,
        connector=connector,
        auto_decompress=False,  # a kilobyte may become a gigabyte
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class _Cache:
    """What is known of one cache."""

    def __init__(self) -> None:
        self.circuit = CircuitBreaker()
        self.counts = PrefetchStats()


class Prefetches:
    """Calls to caches, bounded in number. For one event loop.

    Args:
        session: For requests to caches (`open_session`); its headers carry their token.
        timeout_s: How long a cache may take to answer.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._clock = clock
        self._caches: dict[str, _Cache] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def follow(self, urls: Iterable[str]) -> None:
        """Replace the caches that may be asked; those that stay keep what is known of them."""
        self._caches = {url: self._caches.get(url) or _Cache() for url in urls}

    def begin(self, url: str, block_hash: int, num_tokens: int) -> None:
        """Ask a cache to load a prompt up to a block. Returns at once; never raises.

        Args:
            url: One that is followed; others are ignored.
            block_hash: As the cache published it.
            num_tokens: How many it will load, to be counted.
        """
        cache = self._caches.get(url)
        if cache is None:
            return
        obstacle = self._obstacle(cache)
        if obstacle is not None:
            cache.counts.results[obstacle] += 1
            return
        cache.counts.running += 1
        call = asyncio.create_task(self._call(url, cache, block_hash, num_tokens))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _obstacle(self, cache: _Cache) -> str | None:
        """Return why a cache must not be asked now."""
        if cache.circuit.is_closed:
            return "busy" if cache.counts.running >= MAX_RUNNING else None
        is_trial = not cache.counts.running and cache.circuit.wants_trial(self._clock())
        return None if is_trial else "circuit"

    async def _call(self, url: str, cache: _Cache, block_hash: int, num_tokens: int) -> None:
        try:
            failure = await self._post(url, block_hash)
        finally:
            cache.counts.running -= 1
        was_closed, now = cache.circuit.is_closed, self._clock()
        cache.counts.failure = failure
        if failure:
            cache.counts.results["failed"] += 1
            cache.circuit.failed(failure, now)
            if was_closed and not cache.circuit.is_closed:
                log_event(
                    logger, logging.WARNING, "early_loads_refused", cache=url, error=failure,
                    effect="blocks are loaded when their engine asks for them",
                )  # fmt: skip
            return
        cache.counts.results["accepted"] += 1
        cache.counts.tokens += num_tokens
        cache.circuit.succeeded(now)
        if not was_closed and cache.circuit.is_closed:
            log_event(logger, logging.INFO, "early_loads_accepted_again", cache=url)

    async def _post(self, url: str, block_hash: int) -> str:
        """Make one call; returns how it failed, empty if it did not."""
        try:
            async with self._session.post(
                f"{url}/cache/prefetch", json={"block_hash": block_hash},
                timeout=self._timeout, allow_redirects=False,
            ) as answer:  # fmt: skip
                text = await answer.content.read(_MAX_ANSWER_BYTES)
        except asyncio.TimeoutError:
            return f"no answer within {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or repr(error)
        if answer.status == _ACCEPTED:
            return ""
        return f"status {answer.status}: {text.decode(errors='replace')}"

    async def close(self) -> None:
        """Give up the calls in progress."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def stats(self) -> dict[str, PrefetchStats]:
        return {
            url: cache.counts.snapshot(circuit=cache.circuit.state)
            for url, cache in self._caches.items()
        }

    def check(self) -> None:
        """Raise `InternalError` if more calls are made than allowed."""
        for url, cache in self._caches.items():
            if not 0 <= cache.counts.running <= MAX_RUNNING:
                raise InternalError(f"{cache.counts.running} calls to {url}")
