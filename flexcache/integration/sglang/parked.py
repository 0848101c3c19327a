"""ParkedRequests: requests that wait while their pages come from SSD or a remote store to DRAM.

arrived --nothing below DRAM--> ready
   |
   +--the store is asked--> asked --answered, or too late--> ready, or:
   +--found below DRAM--> fetching --the prefetch has ended--> ready
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexcache.cache.prompt_content import PromptContent
from flexcache.ids import TierName
from flexcache.integration.safe_calls import safely
from flexcache.integration.sglang.rank_cache import RankCache


@dataclass(slots=True)
class _Parked:
    """A request that waits; ``task_id`` is that of its prefetch, None while the store is asked."""

    keys: Sequence[bytes]
    parent_key: bytes | None
    content: PromptContent | None
    give_up_s: float
    task_id: int | None = None


class ParkedRequests:
    """The waiting requests of one rank.

    Args:
        lookup_timeout_s: How long a request waits for the remote store's answer.
        fetch_timeout_s: How long it waits for its pages.
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

    def arrived(
        self,
        rid: str,
        keys: Sequence[str],
        parent_key: str | None,
        content: PromptContent | None = None,
    ) -> None:
        """Begin to bring pages to DRAM that a new request needs."""
        parent = None if parent_key is None else bytes.fromhex(parent_key)
        give_up_s = time.monotonic() + self._lookup_timeout_s
        parked = _Parked([bytes.fromhex(key) for key in keys], parent, content, give_up_s)
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
        return True

    def ended(self, rid: str) -> None:
        """Forget a request; what it fetches stays in DRAM for others."""
        self._parked.pop(rid, None)

    def is_busy(self) -> bool:
        """Return whether any request waits."""
        return bool(self._parked)

    def reset(self) -> None:
        for parked in self._parked.values():
            if parked.task_id is not None:
                safely(self._cache.manager.cancel, [parked.task_id])
        self._parked.clear()

    def _advance(self, parked: _Parked) -> bool:
        """Take the next step of a request, if it is due; return whether it still waits."""
        now = time.monotonic()
        if parked.task_id is not None:
            ended = safely(self._cache.manager.try_wait, [parked.task_id])
            return ended == {} and now < parked.give_up_s
        prompt = self._cache.prompt(parked.keys, parked.parent_key)
        found = safely(
            self._cache.manager.get_match_by_tier, look_up=now < parked.give_up_s, **prompt
        )
        if found is None:
            return now < parked.give_up_s  # not answered yet, or failed
        task_id, mask, sources = found
        safely(self._cache.manager.cancel, [task_id])
        if sources.keys() <= {TierName.CPU}:
            return False
        keys = parked.keys[: self._cache.num_pages(mask)]
        prompt = self._cache.prompt(keys, parked.parent_key, content=parked.content)
        parked.task_id = safely(self._cache.manager.prefetch_async, **prompt)
        parked.give_up_s = now + self._fetch_timeout_s
        return parked.task_id is not None
