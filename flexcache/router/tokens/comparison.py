"""Compares the tokens made here with the engine's: for probes at first, then for real requests."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from flexcache.logs import log_event
from flexcache.router.tokens.asked import AskedTokens
from flexcache.router.tokens.body import (
    ChatBody,
    CompletionBody,
    Kind,
    UnknownPrompt,
    read_body,
)
from flexcache.router.tokens.engines import NotRendered
from flexcache.router.tokens.limits import TokenLimits
from flexcache.router.tokens.local import LocalTokens
from flexcache.router.tokens.probes import probes
from flexcache.router.tokens.served import ServedModel
from flexcache.router.waiting import Turns

logger = logging.getLogger(__name__)

_MAX_BODY = 1 << 20  # of a request that is compared: an engine takes a second for it


class Comparison:
    """Runs comparisons beside the requests, one for each kind and period."""

    def __init__(self, local: LocalTokens, asked: AskedTokens, limits: TokenLimits) -> None:
        self._local = local
        self._asked = asked
        self._every_s = limits.check_every_s
        self._next: dict[tuple[str, Kind], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._samples = Turns("comparisons")

    def sample(
        self, model: ServedModel, path: str, raw: bytes, body: ChatBody | CompletionBody, now: float
    ) -> None:
        """Compare a request in the background if it is time to.

        Args:
            now: Seconds, of any clock.
        """
        key = (model.name, body.kind)
        due = self._next.setdefault(key, now + self._every_s)
        if now < due or len(raw) > _MAX_BODY or not model.engines:
            return
        self._next[key] = now + self._every_s
        task = asyncio.create_task(self._compare_sample(model, path, raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare_sample(self, model: ServedModel, path: str, raw: bytes) -> None:
        with self._samples.turn():
            await self._compare(model, path, raw, None)

    async def probe(self, model: ServedModel, url: str) -> None:
        """Compare probes of every kind that is made here with one engine's tokens."""
        for kind in Kind:
            if not model.ways.has_local(kind):
                continue
            path, bodies = probes(kind, model.name)
            for raw in bodies:
                if await self._compare(model, path, raw, url):
                    break

    async def _compare(self, model: ServedModel, path: str, raw: bytes, url: str | None) -> bool:
        """Compare one request.

        Returns:
            Whether it could be compared.
        """
        if model.files is None:
            return False
        try:
            body = read_body(path, raw)
            if not isinstance(body, (ChatBody, CompletionBody)):
                return False
            made = await self._local.tokens(model.files, body, len(raw))
            if made.num_tokens > len(made.ids):
                return False  # not all is known: media
            theirs = await self._asked.render(model, path, raw, body, url)
        except (UnknownPrompt, NotRendered):
            return False
        ours = made.ids
        equal = len(ours) == len(theirs) and bool((ours == theirs).all())
        before = model.ways.way(body.kind)
        model.ways.compared(body.kind, equal)
        if model.ways.way(body.kind) is not before:
            log_event(
                logger,
                logging.WARNING if not equal else logging.INFO,
                "router_tokens_differ" if not equal else "router_tokens_agree_again",
                model=model.name,
                prompts=body.kind.value,
                from_token=None if equal else _first_difference(ours, theirs),
                now=model.ways.way(body.kind).value,
            )
        return True

    async def close(self) -> None:
        """Give up what is being compared."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _first_difference(ours: np.ndarray, theirs: np.ndarray) -> int:
    shared = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shared] != theirs[:shared])
    return int(differing[0]) if len(differing) else shared
