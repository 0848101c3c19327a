"""TailStores: plans copying tails off the GPU and writing them to the tiers below DRAM.

Part of `StorePlanner`, for models with tails. A tail is written as a whole, at once: tiers with
write-back get it with the put too. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import STORE_OP, Plan, PlannedTail, chunks
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.store_backlog import StoreBacklog
from flexcache.cache.tail_index import TAIL_FIRST
from flexcache.cache.tier import Tier
from flexcache.config.model import UnitShape
from flexcache.ids import OpId, OpKind


class TailStores:
    """Plans stores of tails. Arguments as for `StorePlanner`."""

    def __init__(
        self,
        host: Tier,
        op_ids: Iterator[OpId],
        chunk_blocks: int,
        backlog: StoreBacklog,
        shape: UnitShape,
    ) -> None:
        self._host = host
        self._backlog = backlog
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks
        self._shape = shape

    def find(self, plan: Plan, keys: BlockKeys, position: int, retain_s: float) -> bool:
        """Plan for a tail that the host tier has, without copying it; whether it has it."""
        tail = self._host.tails.find(keys.root, keys.key(position - 1))
        if tail is None:
            return False
        self._host.use_tail(tail, retain_s)
        self._host.pin_tail(tail)
        plan.tail = PlannedTail(position, tail.key, tail.units, pins=[(self._host, tail)])
        return True

    def copy(
        self, plan: Plan, keys: BlockKeys, position: int, retain_s: float
    ) -> dict[OpId, range]:
        """Copy a tail off the GPU unless the host tier has or awaits it.

        Returns:
            The copies, and which of its units each copies.
        """
        if self.find(plan, keys, position, retain_s):
            return {}
        key, count = keys.key(position - 1), self._shape.tail_units(position)
        if self._host.is_tail_in_flight(keys.root, key, count):
            return {}
        lease = self._host.reserve_tail(keys.root, key, count)
        if lease is None:
            plan.drop("host_tier_full", count)
            return {}
        lease.retain_s = retain_s
        units = lease.blocks.copy()
        plan.tail = PlannedTail(position, key, units, num_copied=count, staging=lease)
        copies = {}
        for chunk in chunks(0, count, self._chunk_blocks):
            landing = units[chunk.start : chunk.stop]
            first = TAIL_FIRST + chunk.start
            copies[plan.graph.add(next(self._op_ids), OpKind.D2H, first, None, landing)] = chunk
        return copies

    def are_throttled(
        self, plan: Plan, tier: Tier, num_blocks: int, has_tail: bool, retain_s: float
    ) -> bool:
        """Whether a tier's budget does not allow the blocks and the tail of a put, which it drops.

        Neither is of use without the other: they are written together or not at all.

        Args:
            has_tail: Whether the tail is to be written too, if the plan has one.
        """
        count, name = num_blocks, tier.name
        if has_tail and plan.tail is not None and not self._is_stored(plan, tier, retain_s):
            count += len(plan.tail.units)
        if not count or self._backlog.affordable_at(name, count) is None:
            return False
        plan.drop(f"{name.value.lower()}_write_throttled", count)
        return True

    def store(
        self, plan: Plan, tier: Tier, copies: dict[OpId, range], era: int,
        max_backlog: int | None, retain_s: float,
    ) -> None:  # fmt: skip
        """Write the plan's tail to a tier that lacks it, if there is room for all of it.

        Whether the tier's budget allows it was asked before (`are_throttled`).

        Args:
            copies: Ops that copy it off the GPU; empty if the host tier has it.
            era: See `StorePlanner`.
        """
        assert plan.tail is not None
        if self._is_stored(plan, tier, retain_s):
            return
        count = len(plan.tail.units)
        _, reason = self._backlog.room_for(plan, tier, count, max_backlog, is_paid=True)
        lease = None
        if reason is None:
            lease = tier.reserve_tail(plan.root, plan.tail.key, count)
        if lease is None:
            plan.drop(reason or f"{tier.name.value.lower()}_tier_full", count)
            return
        lease.retain_s = retain_s
        plan.tail.stores[tier.name] = lease
        self._backlog.reserve(plan, tier.name, count)
        if isinstance(tier, RemoteTier):
            plan.remote_root = tier.root_at_store(plan.root)
        for depends_on, chunk in self._pieces(tier, copies, count):
            names = plan.tail.names(tier, plan.root, chunk, era)
            source = plan.tail.units[chunk.start : chunk.stop]
            target = lease.blocks[chunk.start : chunk.stop]
            first = TAIL_FIRST + chunk.start
            plan.graph.add(
                next(self._op_ids), STORE_OP[tier.name], first, source, target, depends_on, names
            )

    def _pieces(
        self, tier: Tier, copies: dict[OpId, range], count: int
    ) -> Iterator[tuple[list[OpId], range]]:
        """Yield the units of each op that writes a tail, and what that op waits for.

        A remote store gets them in order, by one op: its last unit tells others that all are there.
        """
        if isinstance(tier, RemoteTier):
            yield list(copies), range(count)
        elif copies:
            yield from (([op], chunk) for op, chunk in copies.items())
        else:
            yield from (([], chunk) for chunk in chunks(0, count, self._chunk_blocks))

    def _is_stored(self, plan: Plan, tier: Tier, retain_s: float) -> bool:
        """Whether a tier has or awaits the plan's tail, which then counts as used."""
        assert plan.tail is not None
        tail = tier.tails.find(plan.root, plan.tail.key)
        if tail is not None:
            tier.use_tail(tail, retain_s)
            return True
        return tier.is_tail_in_flight(plan.root, plan.tail.key, len(plan.tail.units))
