"""Eviction queue: which of an index's evictable tails goes next.

Tails are of *kinds*, and each kind has a queue by last use. What a tail is worth depends on its
kind and on its age, the time since its last use. With age the worth of a kind first rises, if at
all, and then falls. So the worst tail of a kind stands at one of the two ends of its queue:

    kind 0   oldest |------------------------| youngest
    kind 1   oldest |----------| youngest                   the worst of all these ends goes next
    ...

Under LRU, age alone counts, and the oldest tail goes.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from flexcache.errors import InternalError

Entry = tuple[float, int]
"""Time and number of a tail; both negated where the youngest comes first."""

RETIRED = -1e300
"""Time of use of tails that go before all that are not retired."""
_REFRESH_S = 1.0
"""Ages change all the time: the worths that are compared are at most this old."""
_SPARE_ENTRIES = 64
_GROWTH = 3
"""Times its size after the last removal of stale entries, at which a heap is searched for them."""
_RETAINED = 1e12
"""Worth above that of any tail that is not to be retained."""


class Outlook(NamedTuple):
    """Kinds of a prompt's blocks.

    Attributes:
        front: Kind of the first ``num_seen`` blocks, which earlier prompts had too.
        rear: Kind of those behind them.
    """

    front: int
    rear: int
    num_seen: int


class Ranking(Protocol):
    """Defines what blocks are worth keeping.

    Attributes:
        num_kinds: Number of kinds; one if they do not matter.
        is_lru: Whether age alone counts.
        version: Rises whenever anything else changes.
    """

    num_kinds: int
    is_lru: bool
    version: int

    def worth(self, kind: int, age: float) -> float:
        """Return what a block of this kind and age is worth. O(1)."""

    def bar(self, outlook: Outlook) -> float:
        """Return the worth from which on a block is not evicted for those of a new prompt."""


class LruRanking:
    """Ranks by age alone."""

    num_kinds = 1
    is_lru = True
    version = 0

    def worth(self, kind: int, age: float) -> float:
        return -age

    def bar(self, outlook: Outlook) -> float:
        return math.inf


class EvictionQueue:
    """Tails by kind and time of last use.

    A time in the future means that the tail is to be retained until then, if possible.

    Args:
        is_queued: Whether a tail (number, time, kind) is in the queue in its present state.
            Entries of others are stale, and dropped when they reach an end.
    """

    def __init__(self, ranking: Ranking, is_queued: Callable[[int, float, int], bool]) -> None:
        self.now = 0.0
        self._ranking = ranking
        self._is_queued = is_queued
        self._num_kinds = ranking.num_kinds
        num_ends = ranking.num_kinds * (2 if ranking.num_kinds > 1 else 1)
        self._heaps: list[list[Entry]] = [[] for _ in range(num_ends)]
        """The oldest of each kind first, then the youngest of each first."""
        self._worths = [math.inf] * num_ends
        self._limits = [_SPARE_ENTRIES] * num_ends
        self._version = ranking.version
        self._weighed_at = 0.0

    def add(self, number: int, time: float, kind: int) -> None:
        """Add a tail in its present state; an earlier entry for it is stale. Amortised O(log n)."""
        self._push(kind, (time, number), time)
        if self._num_kinds > 1:
            self._push(self._num_kinds + kind, (-time, -number), time)

    def pop(self, below: float = math.inf) -> tuple[int, float, int] | None:
        """Take out the tail that is worth least: its number, time and kind; or a stale entry.

        None if all are worth ``below`` or more. O(kinds) at C speed, amortised O(log n).
        """
        if self._version != self._ranking.version or self.now - self._weighed_at >= _REFRESH_S:
            self._weigh_all()
        worth = min(self._worths)
        if worth >= below:
            return None
        end = self._worths.index(worth)
        time, number = heapq.heappop(self._heaps[end])
        self._weigh(end)
        if end < self._num_kinds:
            return number, time, end
        return -number, -time, end - self._num_kinds

    def worth(self, time: float, kind: int) -> float:
        """Return what a tail is worth now; under LRU the time itself."""
        if self._ranking.is_lru or time <= RETIRED:
            return time
        if time > self.now:
            return _RETAINED + time
        return self._ranking.worth(kind, self.now - time)

    def _push(self, end: int, entry: Entry, time: float) -> None:
        heap = self._heaps[end]
        heapq.heappush(heap, entry)
        if heap[0] is entry:
            self._weigh(end)
        if len(heap) > self._limits[end]:
            self._drop_stale(end)

    def _weigh_all(self) -> None:
        self._version, self._weighed_at = self._ranking.version, self.now
        for end, heap in enumerate(self._heaps):
            while heap and not self._is_queued(*self._tail(end, heap[0])):
                heapq.heappop(heap)
            self._weigh(end)

    def _weigh(self, end: int) -> None:
        heap = self._heaps[end]
        if not heap or (end >= self._num_kinds and self._ranking.is_lru):
            self._worths[end] = math.inf
            return
        _, time, kind = self._tail(end, heap[0])
        self._worths[end] = self.worth(time, kind)

    def _tail(self, end: int, entry: Entry) -> tuple[int, float, int]:
        if end < self._num_kinds:
            return entry[1], entry[0], end
        return -entry[1], -entry[0], end - self._num_kinds

    def _drop_stale(self, end: int) -> None:
        heap = {entry for entry in self._heaps[end] if self._is_queued(*self._tail(end, entry))}
        self._heaps[end] = sorted(heap)
        self._limits[end] = max(_SPARE_ENTRIES, _GROWTH * len(heap))
        self._weigh(end)

    def check(self, queued: dict[int, tuple[float, int]]) -> None:
        """Raise `InternalError` if one of these tails, number -> (time, kind), is not in the queue.

        O(entries).
        """
        entries = [set(map(partial(self._tail, end), heap)) for end, heap in enumerate(self._heaps)]
        for number, (time, kind) in queued.items():
            ends = range(kind, len(entries), self._num_kinds)
            if any((number, time, kind) not in entries[end] for end in ends):
                raise InternalError(f"run {number} could be evicted and is not queued")
