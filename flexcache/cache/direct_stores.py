"""DirectStores: plans puts of a cache without a DRAM tier, from the GPU straight to SSD.

    put, blocks of the prompt:   0            first             end
                                 |--------------|----------------|
                                   SSD has or     D2DISK, COMMIT
                                   awaits them    in chunks

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexcache.cache.admission import Admission
from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import Plan, block_names, chunks
from flexcache.cache.put_plan import begin_put
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_budget import WriteBudget
from flexcache.ids import OpId, OpKind, TierName


class DirectStores:
    """Plans puts on the SSD tier. Arguments as for `StorePlanner`; ``budget`` is that of the tier.

    Attributes:
        tier: The SSD tier.
    """

    def __init__(
        self,
        tiers: Tiers,
        op_ids: Iterator[OpId],
        chunk_blocks: int,
        admission: Admission | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        self._tiers = tiers
        self.tier = tiers.by_name[TierName.SSD]
        self._admission = admission
        self._budget = budget
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks

    def plan_put(
        self, keys: BlockKeys, start: int, stop: int, retain_s: float = 0.0, era: int = 0
    ) -> Plan:
        """Plan to store the blocks ``[start, stop)`` that the SSD tier neither has nor awaits.

        Args:
            retain_s: The prompt counts as used this much later.
            era: See `StorePlanner`.
        """
        plan, _ = begin_put(self._tiers, self.tier, keys, stop, retain_s)
        first = plan.start
        if first >= stop:
            plan.start = plan.stop = stop
        elif start > first:
            plan.drop("prefix_not_cached", stop - start)
        elif self.tier.name in self._tiers.unavailable:
            plan.drop("ssd_unavailable", stop - first)
        else:
            end = stop if self._admission is None else self._admission.admit(keys, stop, start)
            self._add_blocks(plan, keys, first, end, retain_s, era)
        return plan

    def _add_blocks(
        self, plan: Plan, keys: BlockKeys, first: int, end: int, retain_s: float, era: int
    ) -> None:
        room = end - first if self._budget is None else self._budget.room(self._tiers.now)
        if room < end - first:
            plan.drop("ssd_write_throttled", end - first - room)
            end = first + room
        if first >= end:
            return
        lease = self.tier.reserve(keys, first, end, plan.outlook, retain_s)
        plan.stores[self.tier.name] = lease
        plan.store_starts[self.tier.name] = first
        plan.stop = first + len(lease)
        if self._budget is not None:
            self._budget.spend(len(lease))
        if plan.stop < end:
            plan.drop(lease.why_short("ssd"), end - plan.stop)
        for chunk in chunks(first, plan.stop, self._chunk_blocks):
            slots = lease.blocks[chunk.start - first : chunk.stop - first]
            names = block_names(self.tier, keys, chunk.start, chunk.stop, era=era)
            write = plan.graph.add(next(self._op_ids), OpKind.D2DISK, chunk.start, None, slots)
            commit = next(self._op_ids)
            plan.graph.add(commit, OpKind.COMMIT, chunk.start, slots, slots, [write], names)
