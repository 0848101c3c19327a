"""The beginning of a put's plan, which is the same whichever tier takes the blocks first."""

from __future__ import annotations

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import Plan
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import Tiers
from flexcache.ids import TaskKind


def begin_put(
    tiers: Tiers, tier: Tier, keys: BlockKeys, stop: int, retain_s: float
) -> tuple[Plan, PrefixMatch]:
    """Begin to plan a put of a prompt's first ``stop`` blocks; the prompt counts as used.

    Args:
        tier: Takes the blocks from the GPU.
        retain_s: The prompt counts as used this much later.

    Returns:
        An empty plan, behind the blocks that the tier has or awaits, and those that it has.
    """
    cached = tier.index.match(keys)
    first = cached.num_blocks
    first += tier.num_in_flight(keys, first, stop)
    plan = Plan(TaskKind.PUT, keys.root, first, first)
    tiers.num_holders += 1
    if first < stop:
        plan.outlook = tiers.store(keys, stop)
    else:
        tiers.store_nothing(keys, stop)
    tier.use(cached, plan.outlook, retain_s)
    return plan, cached
