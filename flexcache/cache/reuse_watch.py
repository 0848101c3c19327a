"""ReuseWatch: notices that nothing which is stored is asked for again, and ends the storing.

    stores ----- nothing found while every tier was replaced as a whole -----> notes prompts only
      ^                                                                             |
      +------------- a prompt is found, or one that was noted comes back -----------+

An engine whose prompts never repeat pays for a cache and gains nothing. Once every tier has evicted
as much as it holds since a prompt was last found, whatever comes back comes later than it is kept.
What is stored by then stays; of new prompts only the keys are kept, far longer than a tier would
keep their blocks (`GhostTier`). Traffic that begins to repeat loses one hit by this.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcache.cache.admission import SIGHTINGS_PER_BLOCK, GhostTier, Sample, stride_for
from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import Plan
from flexcache.cache.tier import Tier

MIN_MISSED_BLOCKS = 8192
"""Fewer blocks than these, asked for in vain, say nothing about those who ask."""
_MAX_CAPACITY = 1 << 20


class ReuseWatch:
    """Whether prompts come back before their blocks are evicted.

    Args:
        tiers: All that keep blocks. Others must not read them, as they do those of a remote store.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._stride = stride_for(capacity := sum(tier.capacity for tier in tiers))
        self._num_noted = SIGHTINGS_PER_BLOCK * min(capacity, _MAX_CAPACITY) // self._stride
        self._noted: GhostTier | None = None
        """What was not stored, since it ended the storing."""
        self._num_missed = 0
        self._evicted_before = self._num_evicted()

    def looked_up(self, keys: BlockKeys, plan: Plan, stop: int) -> None:
        """Record how an engine's request for a prompt's first ``stop`` blocks was planned.

        What the engine has already, or is skipped, was also there before.
        """
        if not stop:
            return
        if plan.stop or self._is_known(keys, stop):
            self._num_missed = 0
            self._noted = None
        else:
            if not self._num_missed:
                self._evicted_before = self._num_evicted()
            self._num_missed += stop

    def is_worth_storing(self, keys: BlockKeys, stop: int) -> bool:
        """Whether to store a prompt's first ``stop`` blocks; if not, note their keys."""
        if self._noted is None:
            if self._num_missed < MIN_MISSED_BLOCKS or not self._were_replaced():
                return True
            self._noted = GhostTier(self._num_noted)
        sample = Sample(keys, stop, self._stride)
        if not sample.num_blocks:
            return True  # too short to be noted
        self._noted.see(sample, sample.num_blocks)
        return False

    def _is_known(self, keys: BlockKeys, stop: int) -> bool:
        """Whether the beginning of a prompt is cached, or was noted."""
        if any(tier.index.contains(keys.root, keys.key(0)) for tier in self._tiers):
            return True
        return self._noted is not None and self._noted.has(Sample(keys, stop, self._stride))

    def _were_replaced(self) -> bool:
        """Whether each tier evicted all that it holds since the first block was missed."""
        pairs = zip(self._tiers, self._num_evicted(), self._evicted_before, strict=True)
        return all(now - before >= tier.capacity for tier, now, before in pairs)

    def _num_evicted(self) -> list[int]:
        return [tier.counters.evicted_blocks for tier in self._tiers]
