"""StoreBacklog: bounds what is planned to be written to lower tiers.

The number of host blocks that wait, pinned, to be written is bounded; so is what is written per
second, where the operator limits that (`WriteBudget`).

Pure: counts only.
"""

from __future__ import annotations

from collections.abc import Mapping

from flexcache.cache.plan import Plan
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_budget import WriteBudget
from flexcache.ids import TierName

_REMOTE_SHARE = 4  # a quarter: a store that hangs must not hold up the disk


class StoreBacklog:
    """Blocks and units of tails that wait to be written, by tier.

    Args:
        max_blocks: Upper bound, over all tiers.
        budgets: Those of the tiers whose writes per second are limited.
    """

    def __init__(
        self, tiers: Tiers, max_blocks: int, budgets: Mapping[TierName, WriteBudget]
    ) -> None:
        self._tiers = tiers
        self.max_blocks = max_blocks
        self._budgets = budgets
        self._by_tier = dict.fromkeys(tiers.by_name, 0)

    @property
    def total(self) -> int:
        """Blocks that wait, counted once per tier."""
        return sum(self._by_tier.values())

    def of(self, name: TierName) -> int:
        return self._by_tier[name]

    def room(self, name: TierName) -> int:
        """Return how many more blocks may wait to be written to a tier."""
        room = self.max_blocks - self.total
        if name is TierName.REMOTE:
            room = min(room, self.max_blocks // _REMOTE_SHARE - self._by_tier[name])
        return max(0, room)

    def room_for(
        self, plan: Plan, tier: Tier, count: int, limit: int | None, is_paid: bool = False
    ) -> tuple[int, str | None]:
        """Return how many of ``count`` blocks a plan may write to a tier, and why not all.

        Args:
            limit: At most this many blocks of the plan may wait to be written to the tier.
            is_paid: The tier's budget allows them (`affordable_at`).
        """
        name = tier.name.value.lower()
        if tier.name in self._tiers.unavailable:
            return 0, f"{name}_unavailable"
        room = self.room(tier.name)
        if limit is not None:
            room = max(0, min(room, limit - plan.num_reserved.get(tier.name, 0)))
        room, reason = (room, f"{name}_write_backlog") if room < count else (count, None)
        budget = self._budgets.get(tier.name)
        if budget is not None and not is_paid:
            affordable = budget.room(self._tiers.now)
            if affordable < room:
                return affordable, f"{name}_write_throttled"
        return room, reason

    def affordable_at(self, name: TierName, count: int) -> float | None:
        """Return when a tier's budget will allow this many blocks; None if it does now."""
        budget, now = self._budgets.get(name), self._tiers.now
        if budget is None or budget.allows(count, now):
            return None
        return budget.next_room(count, now)

    def reserve(self, plan: Plan, name: TierName, count: int) -> None:
        """Count blocks of a plan until `release`, and against the budget for good."""
        plan.num_reserved[name] = plan.num_reserved.get(name, 0) + count
        self._by_tier[name] += count
        if name in self._budgets:
            self._budgets[name].spend(count)

    def release(self, plan: Plan) -> None:
        """Count the blocks of a plan no more: it has ended."""
        for name, count in plan.num_reserved.items():
            self._by_tier[name] -= count
