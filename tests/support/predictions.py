"""A router that follows the KV events of real engines and is asked what it expects them to find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flexcache.router import KVRouter
from flexcache.router.chooser import RouteRequest
from flexcache.router.feed import Feed
from flexcache.router.fleet import EventSource, Tier, WorkerSpec

PATIENCE_S = 120.0


class Predictions:
    """A router that follows engines and is asked what it expects."""

    def __init__(self, workers: dict[str, tuple[EventSource, ...]]) -> None:
        self.router = KVRouter(approximate="never")
        self.router.set_workers(
            [WorkerSpec(name=name, url=name, sources=sources) for name, sources in workers.items()]
        )

    def of(self, worker: str, prompt: list[int], **more: Any) -> dict[Tier, int]:
        """Return the tokens that the worker is expected to find, by tier."""
        request = RouteRequest(request_id="asked", num_tokens=len(prompt), token_ids=prompt, **more)
        (score,) = [score for score in self.router.scores(request, 0.0) if score.worker == worker]
        return score.matched

    def total(self, worker: str, prompt: list[int], **more: Any) -> int:
        return sum(self.of(worker, prompt, **more).values())

    async def come_to(self, expected: int, worker: str, prompt: list[int], **more: Any) -> None:
        """Wait until so much is expected: events come after the answer."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while self.total(worker, prompt, **more) != expected:
            assert asyncio.get_running_loop().time() < deadline, self.of(worker, prompt, **more)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def predicting(**workers: tuple[EventSource, ...]) -> AsyncIterator[Predictions]:
    predictions = Predictions(workers)
    feed = Feed(predictions.router, asyncio.get_running_loop())
    try:
        feed.set_sources([source for sources in workers.values() for source in sources])
        yield predictions
        assert all(stats.bad_batches == 0 for stats in feed.stats().values())
        predictions.router.check()
    finally:
        feed.close()
