"""Reuse: evicts the blocks least likely to be reused, estimated from returns of similar prompts.

New prompts look alike, but a conversation that continued three times is likely to continue once
more, and soon if it did so soon before. Lineages are therefore sorted into *kinds*: by how often
they came back and how long that took last time; those that never did by their length. The returns
of each kind are counted (`eviction_returns`), also after eviction: an evicted lineage leaves a
*ghost*, its first key, which is the first to be inserted again if it returns.

Past returns may mislead, and if all kinds return alike nothing beats LRU. Two shadows of the
tier (`eviction_shadow`) see every use, one in LRU order and one in the order planned here. The plan
is followed only while it is clearly ahead.
"""

from __future__ import annotations

from collections import OrderedDict

from flexcache.cache.eviction_policy import Lineage
from flexcache.cache.eviction_returns import BINS_PER_OCTAVE, ReturnTimes, bin_of
from flexcache.cache.eviction_shadow import Shadow
from flexcache.ids import BlockKey, RootId

_UNBORN = -1  # the kind of a lineage without blocks
_MAX_RETURNS = 4
"""Lineages that came back at least this often are of one kind."""
_SPELLS_PER_PLAN = 512
_SPELLS_REMEMBERED = 16_384
_BLOCKS_PER_GHOST = 8
_MIN_GHOSTS = 8_192
_HALF_LIFE = 4.0
"""Multiple of the tier's size, in blocks seen, after which a hit counts half in the comparison."""
_CLEAR_LEAD = 0.005
"""Share of all blocks seen that the plan must hit more before it replaces LRU."""
_MAX_LEAD = 0.01
"""Cap on the lead: the larger it is, the later a change of traffic is noticed."""


class Reuse:
    """Evicts the blocks least likely to be reused, or by LRU; see the module.

    Args:
        capacity: Blocks of the tier.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kinds: dict[tuple[int, int], int] = {}
        self._times = ReturnTimes()
        self._patience: list[float] = []
        self._spells_to_plan = _SPELLS_PER_PLAN
        self._ghosts: OrderedDict[tuple[RootId, BlockKey], Lineage] = OrderedDict()
        self._max_ghosts = max(_MIN_GHOSTS, capacity // _BLOCKS_PER_GHOST)
        self._lru_shadow = Shadow(capacity)
        self._planned_shadow = Shadow(capacity)
        self._lead = 0.0  # blocks that the planned shadow found above the other's, decayed
        self._compared = 0.0  # blocks that both saw, decayed
        self._is_lru = True

    def begin(
        self, parent: Lineage | None, root: RootId, key: BlockKey, start: int, now: float
    ) -> Lineage:
        lineage = self._ghosts.pop((root, key), None)
        if lineage is None or lineage.start != start:  # keys need not chain
            lineage = Lineage(parent, start)
            lineage.kind = _UNBORN
            lineage.used_at = now
        elif lineage.used_at < now:
            self.use(lineage, now)
        return lineage

    def extend(self, lineage: Lineage, end: int) -> None:
        added = end - lineage.start - lineage.num_blocks
        if added <= 0:
            return
        lineage.num_blocks += added
        if lineage.kind == _UNBORN:
            lineage.kind = self._kind(0, end.bit_length())
            self._begin_spell(lineage)
        else:
            self._times.grow(lineage.kind, added)
            self._see(lineage, 0)

    def part(self, lineage: Lineage, depth: int) -> None:
        lineage.is_shared = True
        lineage.num_blocks = min(lineage.num_blocks, depth - lineage.start)

    def use(self, lineage: Lineage, now: float) -> None:
        gap_bin = bin_of(now - lineage.used_at)
        self._times.end(lineage.kind, gap_bin)
        lineage.used_at = now
        lineage.num_returns = min(lineage.num_returns + 1, _MAX_RETURNS)
        lineage.kind = self._kind(lineage.num_returns, gap_bin // BINS_PER_OCTAVE)
        self._begin_spell(lineage)

    def patience(self, lineage: Lineage) -> float:
        return 0.0 if self._is_lru else self._patience[lineage.kind]

    def forget(self, root: RootId, key: BlockKey, lineage: Lineage) -> None:
        self._ghosts[root, key] = lineage
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def check(self) -> None:
        self._lru_shadow.check()
        self._planned_shadow.check()

    def _kind(self, num_returns: int, octave: int) -> int:
        features = num_returns, octave
        kind = self._kinds.get(features)
        if kind is None:
            kind = self._kinds[features] = self._times.add_kind()
            self._patience.append(max(self._patience, default=0.0))
        return kind

    def _begin_spell(self, lineage: Lineage) -> None:
        now = lineage.used_at
        self._times.begin(lineage.kind, lineage.num_blocks, now)
        self._see(lineage, lineage.num_blocks)
        self._spells_to_plan -= 1
        if self._spells_to_plan == 0:
            self._spells_to_plan = _SPELLS_PER_PLAN
            if self._times.num_spells > _SPELLS_REMEMBERED:
                self._times.halve(now)
            self._patience = self._times.best_patience(self._capacity, now)

    def _see(self, lineage: Lineage, num_compared: int) -> None:
        """Show both shadows a use, and compare what they had of it."""
        now = lineage.used_at
        lru = self._lru_shadow.see(lineage, now)
        planned = self._planned_shadow.see(lineage, now + self._patience[lineage.kind])
        remaining = 0.5 ** (num_compared / (_HALF_LIFE * self._capacity))
        self._compared = self._compared * remaining + num_compared
        lead = self._lead * remaining + (planned - lru) * num_compared
        self._lead = min(lead, _MAX_LEAD * self._compared)
        self._is_lru = self._lead <= (_CLEAR_LEAD * self._compared if self._is_lru else 0.0)
