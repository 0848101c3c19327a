"""The promise of write-back: no block in DRAM is forgotten before its tier has had it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import BlockKey, RootId, TierName


class WriteBackModel:
    """Watches DRAM and one tier below it.

    A block may be missing there without being dirty only if the tier has had it and lost it since,
    had no place for it, or failed to write it, which is counted.
    """

    def __init__(self, cache: TieredCache, tier: Tier) -> None:
        self._cache = cache
        self._tier = tier
        self._excused: set[tuple[RootId, BlockKey]] = set()
        self.num_failed_writes = 0
        """Writes that the tier's worker has reported as failed."""
        cache.tiers.host.index.on_removed.append(self._gone_from_dram)
        tier.index.on_removed.append(self._gone_from_tier)
        self._unpublished, tier.on_unpublished = tier.on_unpublished, self._lease_ended
        self._plan_store: Callable[..., Plan] = cache.stores.plan_store
        cache.stores.plan_store = self._plan  # type: ignore[method-assign]

    def _gone_from_dram(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        self._excused.difference_update((root, key) for key in keys)

    def _gone_from_tier(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        self._excuse(root, keys)

    def _lease_ended(self, lease: Lease) -> None:
        assert self._unpublished is not None
        self._unpublished(lease)
        if lease.is_given_up:
            assert self.num_failed_writes, "nothing has failed"
            self._excuse(lease.root, lease.keys)

    def _plan(self, prompt: Prompt, *args: Any, **options: Any) -> Plan:
        plan = self._plan_store(prompt, *args, **options)
        if plan.dropped.get(f"{self._tier.name.value.lower()}_tier_full"):
            self._excuse(prompt.keys.root, prompt.keys.slice(0, prompt.stop))
        return plan

    def _excuse(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        on_host = self._cache.tiers.host.index
        self._excused.update((root, key) for key in keys if on_host.contains(root, key))

    def check(self) -> None:
        name: TierName = self._tier.name
        num_dirty = 0
        for root, directory in self._cache.tiers.host.index._directories.items():
            flight = self._tier._flights.get(root)
            for key in directory:
                is_dirty = self._cache.stores.is_dirty(name, root, key)
                num_dirty += is_dirty
                assert (
                    is_dirty
                    or self._tier.index.contains(root, key)
                    or (flight is not None and key in flight.owners)
                    or (root, key) in self._excused
                ), f"{key!r} is in DRAM, and {name.value} will never have it"
        assert self._cache.stores.num_dirty(name) == num_dirty, "dirty, and DRAM does not have it"
