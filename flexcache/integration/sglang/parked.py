"""ParkedRequests: requests that wait while their pages come from SSD or a remote store to DRAM.

arrived --nothing below DRAM--> ready
   |
   +--the store is asked--> asked --answered, or too late--> ready, or:
   +--found below DRAM, faster than computing--> fetching --ended, or too late--> ready

What has come is kept until the request is computed, or gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexcache.cache.block_keys import PromptContent
from flexcache.ids import TierName
from flexcache.integration.adapter import safely
from flexcache.integration.sglang.rank_cache import RankCache
from flexcache.tasks.model import load_patience_s


@dataclass(slots=True)
class _Parked:
    """A request that waits; ``task_id`` is that of its prefetch, None while the store is asked."""

    keys: Sequence[bytes]
    parent_key: bytes | None
    content: PromptContent | None
    session_id: str | None
    give_up_s: float
    task_id: int | None = None


class ParkedRequests:
    """The waiting requests of one rank.

    A request waits for its pages no longer than computing them would take, and not at all if their
    tier has been slower than that lately (`LoadCost`).

    Args:
        lookup_timeout_s: How long a request waits for the remote store's answer.
        fetch_timeout_s: How long it waits for its pages at most.
    """

    def __init__(
        self,
        cache: RankCache,
        lookup_timeout_s: float,
        fetch_timeout_s: float,
    ) -> None:
        self._cache = cache
        self._lookup_timeout_s = lookup_timeout_s
        self._fetch_timeout_s = fetch_timeout_s
        self._parked: dict[str, _Parked] = {}
        self._ready: dict[str, int] = {}
        """Prefetches of requests that wait no longer."""
        self.prefill_pages_per_s = 0.0

    def report_prefill(self, tokens_per_s: float) -> None:
        """Report how fast the engine computes prompts."""
        self.prefill_pages_per_s = tokens_per_s / self._cache.page_size
        safely(self._cache.manager.report_prefill, tokens_per_s)

    def __contains__(self, rid: str) -> bool:
        return rid in self._parked

    def arrived(
        self,
        rid: str,
        keys: Sequence[str],
        parent_key: str | None,
        content: PromptContent | None = None,
        session_id: str | None = None,
    ) -> None:
        """Begin to bring pages to DRAM that a new request needs."""
        parent = None if parent_key is None else bytes.fromhex(parent_key)
        give_up_s = time.monotonic() + self._lookup_timeout_s
        parked = _Parked(
            [bytes.fromhex(key) for key in keys], parent, content, session_id, give_up_s
        )
        if self._advance(parked):
            self._parked[rid] = parked

    def is_ready(self, rid: str) -> bool:
        """Return whether a request has nothing to wait for."""
        parked = self._parked.get(rid)
        if parked is None:
            return True
        if self._advance(parked):
            return False
        del self._parked[rid]
        if parked.task_id is not None:  # what comes too late tells how slow the tier is
            self._ready[rid] = parked.task_id
        return True

    def ended(self, rid: str) -> None:
        """Forget a request; bring nothing more for it, and pin nothing."""
        parked = self._parked.pop(rid, None)
        task_id = self._ready.pop(rid, None) if parked is None else parked.task_id
        if task_id is not None:
            safely(self._cache.manager.cancel, [task_id])

    def is_busy(self) -> bool:
        """Return whether any request waits."""
        return bool(self._parked)

    def reset(self) -> None:
        for rid in [*self._parked, *self._ready]:
            self.ended(rid)

    def _advance(self, parked: _Parked) -> bool:
        """Take the next step of a request, if it is due; return whether it still waits."""
        now = time.monotonic()
        if parked.task_id is not None:
            ended = safely(self._cache.manager.try_wait, [parked.task_id])
            return ended == {} and now < parked.give_up_s
        prompt = self._cache.prompt(parked.keys, parked.parent_key)
        found = safely(
            self._cache.manager.get_match_by_tier, look_up=now < parked.give_up_s,
            session_id=parked.session_id, **prompt,
        )  # fmt: skip
        if found is None:
            return now < parked.give_up_s  # not answered yet, or failed
        task_id, mask, sources = found
        safely(self._cache.manager.cancel, [task_id])
        num_pages = self._cache.num_pages(mask)
        if sources.keys() <= {TierName.CPU}:
            return False
        num_below = num_pages - sources.get(TierName.CPU, 0) // self._cache.page_size
        keys = parked.keys[:num_pages]
        prompt = self._cache.prompt(keys, parked.parent_key, content=parked.content)
        parked.task_id = safely(
            self._cache.manager.prefetch_async, session_id=parked.session_id, **prompt
        )
        parked.give_up_s = now + load_patience_s(
            max(1, num_below), self.prefill_pages_per_s, self._fetch_timeout_s
        )
        return parked.task_id is not None
