"""A shadow of a tier: which lineages it would hold under a policy. No blocks, no bytes."""

from __future__ import annotations

import heapq

from flexcache.cache.eviction_policy import Lineage
from flexcache.errors import InternalError


class Shadow:
    """Lineages of ``capacity`` blocks in all; the earliest due are evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_blocks = 0
        self._held: dict[Lineage, tuple[float, int, int]] = {}  # (due, count, its blocks)
        self._queue: list[tuple[float, int, Lineage]] = []
        """One (due, count, lineage) per held lineage, which may be due later by now."""
        self._count = 0

    def see(self, lineage: Lineage, due: float) -> bool:
        """Return whether a lineage was there. It and its ancestors now are, until ``due``.

        Amortised O(log lineages) for each of them.
        """
        was_there = lineage in self._held
        hold: Lineage | None = lineage
        while hold is not None:
            self._hold(hold, due)
            hold = hold.parent
        while self._num_blocks > self._capacity:
            entry = self._queue[0]
            due, count, num_blocks = self._held[entry[2]]
            if count != entry[1]:
                heapq.heapreplace(self._queue, (due, count, entry[2]))
                continue
            heapq.heappop(self._queue)
            del self._held[entry[2]]
            self._num_blocks -= num_blocks
        return was_there

    def _hold(self, lineage: Lineage, due: float) -> None:
        self._count += 1
        before = self._held.get(lineage)
        if before is None:
            heapq.heappush(self._queue, (due, self._count, lineage))
            before = due, self._count, 0
        self._num_blocks += lineage.num_blocks - before[2]
        self._held[lineage] = max(due, before[0]), self._count, lineage.num_blocks

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(lineages)."""
        num_blocks = sum(num_blocks for *_, num_blocks in self._held.values())
        if num_blocks != self._num_blocks or num_blocks > self._capacity:
            raise InternalError(
                f"a shadow of {self._capacity} blocks has {num_blocks}, {self._num_blocks} counted"
            )
        queued = {lineage: (due, count) for due, count, lineage in self._queue}
        if len(queued) < len(self._queue) or queued.keys() != self._held.keys():
            raise InternalError("a shadow's queue and what it holds differ")
        if any(queued[lineage] > held[:2] for lineage, held in self._held.items()):
            raise InternalError("a shadow holds a lineage that it cannot evict in time")
