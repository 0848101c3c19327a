"""A shadow of a tier: which lineages it would hold if it kept to a policy. No blocks, no bytes."""

from __future__ import annotations

import heapq

from flexcache.cache.eviction_policy import Lineage
from flexcache.errors import InternalError


class Shadow:
    """Lineages of ``capacity`` blocks in all; those that are due first go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_blocks = 0
        self._held: dict[Lineage, tuple[float, int]] = {}  # when it is due, and its blocks
        self._queue: list[tuple[float, int, Lineage]] = []  # (due, count, lineage), lazily kept
        self._count = 0

    def see(self, lineage: Lineage, due: float) -> bool:
        """Whether a lineage was there. Now it is, until ``due``, and all that it hangs off.

        O(log lineages) for each of these, amortised.
        """
        was_there = lineage in self._held
        hold: Lineage | None = lineage
        while hold is not None:
            self._hold(hold, due)
            hold = hold.parent
        while self._num_blocks > self._capacity:
            entry = heapq.heappop(self._queue)
            if self._is_current(entry):
                self._num_blocks -= self._held.pop(entry[2])[1]
        if len(self._queue) > 4 * len(self._held) + 64:
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapq.heapify(self._queue)
        return was_there

    def _hold(self, lineage: Lineage, due: float) -> None:
        before, num_blocks = self._held.get(lineage, (due, 0))
        due = max(due, before)
        self._num_blocks += lineage.num_blocks - num_blocks
        self._held[lineage] = due, lineage.num_blocks
        self._count += 1
        heapq.heappush(self._queue, (due, self._count, lineage))

    def _is_current(self, entry: tuple[float, int, Lineage]) -> bool:
        due, _, lineage = entry
        return lineage in self._held and self._held[lineage][0] == due

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(lineages)."""
        num_blocks = sum(num_blocks for _, num_blocks in self._held.values())
        if num_blocks != self._num_blocks or num_blocks > self._capacity:
            raise InternalError(
                f"a shadow of {self._capacity} blocks has {num_blocks}, {self._num_blocks} counted"
            )
        if sum(map(self._is_current, self._queue)) < len(self._held):
            raise InternalError("a shadow holds what it cannot let go")
