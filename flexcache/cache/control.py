"""Control of a cache by its users: look-ups of what it has of a prompt.

    lookup   how much of a prompt each tier could supply

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from flexcache.cache.load_plan import TailLoads
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import Tiers
from flexcache.ids import TierName
from flexcache.stats import ControlStats

CallName = Literal["lookup"]


class CacheCall(msgspec.Struct, frozen=True, kw_only=True):
    """A user's call about what is cached.

    Attributes:
        prompts: What it is about: one prompt, under each name of weights that engines have.
    """

    name: CallName
    prompts: Sequence[Prompt] = ()


class CacheControl:
    """Carries calls out over a cache's tiers.

    Args:
        tails: Finds tails, in a model with tails.
    """

    def __init__(self, tiers: Tiers, tails: TailLoads | None) -> None:
        self._tiers = tiers
        self._tails = tails
        self.counters = ControlStats()

    def look_up(self, prompts: Sequence[Prompt]) -> Mapping[TierName, int]:
        """Return how many blocks from its start each tier could supply of a prompt.

        It is no use of them: recency, counters and deadlines stay. Of the remote store, what is
        known here counts. A tier that is unavailable supplies nothing.

        Args:
            prompts: The prompt by its names; the one that a tier has most of counts.
        """
        self.counters.calls["lookup"] += 1
        return {
            tier.name: max((self._num_supplied(tier, prompt) for prompt in prompts), default=0)
            for tier in self._tiers
        }

    def _num_supplied(self, tier: Tier, prompt: Prompt) -> int:
        if tier.name in self._tiers.unavailable:
            return 0
        if self._tails is None:
            return min(prompt.stop, tier.index.match(prompt.keys).num_blocks)
        # A tier's blocks are of use up to a place where the other groups can resume from it, too.
        found = self._tails.last(prompt.keys, 0, prompt.stop, [tier])
        return 0 if found is None else found.position
