"""Eviction queue: which of an index's evictable tails goes next.

Tails are of *kinds*, and each kind has a queue by last use. What a tail is worth depends on its
kind and on its age, the time since its last use. With age the worth of a kind first rises, if at
all, and then falls. So the worst tail of a kind stands at one of the two ends of its queue:

    kind 0   oldest |------------------------| youngest
    kind 1   oldest |----------| youngest                   the worst of all these ends goes next
    ...

Under LRU, age alone counts, and the oldest tail goes. The ends themselves are in a heap by what
their tails are worth, so that the worst of them is at hand.

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
_TURNS = 16
"""Parts of the ends that are weighed in turn, so that seldom an eviction weighs them all."""
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
        self._order: list[tuple[float, int]] = []
        """A heap of worths and ends; stale unless it is the end's present worth."""
        self._limits = [_SPARE_ENTRIES] * num_ends
        self._version = ranking.version
        self._turn = 0
        self._refresh_at = math.inf if ranking.is_lru else 0.0

    def add(self, number: int, time: float, kind: int) -> None:
        """Add a tail in its present state; an earlier entry for it is stale. Amortised O(log n)."""
        self._push(kind, (time, number), time)
        if self._num_kinds > 1:
            self._push(self._num_kinds + kind, (-time, -number), time)

    def pop(self, below: float = math.inf) -> tuple[int, float, int] | None:
        """Take out the tail that is worth least: its number, time and kind; or a stale entry.

        None if all are worth ``below`` or more. Amortised O(log n).
        """
        order, worths = self._order, self._worths
        if self.now >= self._refresh_at or self._version != self._ranking.version:
            self._refresh()
        while order and worths[order[0][1]] != order[0][0]:
            heapq.heappop(order)
        if not order or order[0][0] >= below:
            return None
        end = order[0][1]
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

    def _refresh(self) -> None:
        """Weigh the ends whose turn it is, or all if the ranking has changed."""
        begin, self._turn = self._turn, int(self.now / _REFRESH_S * _TURNS)
        if self._version != self._ranking.version or begin < self._turn - _TURNS:
            begin = self._turn - _TURNS
        for turn in range(begin, self._turn):
            for end in range(turn % _TURNS, len(self._heaps), _TURNS):
                heap = self._heaps[end]
                while heap and not self._is_queued(*self._tail(end, heap[0])):
                    heapq.heappop(heap)  # it hides what is behind it
                self._weigh(end)
        self._version = self._ranking.version
        self._refresh_at = (
            math.inf if self._ranking.is_lru else (self._turn + 1) * _REFRESH_S / _TURNS
        )

    def _weigh(self, end: int) -> None:
        heap, worth = self._heaps[end], math.inf
        if heap and end < self._num_kinds:
            worth = self.worth(heap[0][0], end)
        elif heap and not self._ranking.is_lru:
            worth = self.worth(-heap[0][0], end - self._num_kinds)
        if worth == self._worths[end]:
            return
        self._worths[end] = worth
        heapq.heappush(self._order, (worth, end))
        if len(self._order) > _GROWTH * len(self._worths) + _SPARE_ENTRIES:
            self._order[:] = sorted(zip(self._worths, range(len(self._worths)), strict=True))

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
        """Raise `InternalError` if one of these tails, number -> (time, kind), is not in the queue,
        or an end that has one would not be found. O(entries).
        """
        order = set(self._order)
        for end, worth in enumerate(self._worths):
            if worth < math.inf and (worth, end) not in order:
                raise InternalError(f"end {end} of the eviction queue is not in order")
        entries = [set(map(partial(self._tail, end), heap)) for end, heap in enumerate(self._heaps)]
        for number, (time, kind) in queued.items():
            ends = range(kind, len(entries), self._num_kinds)
            if any((number, time, kind) not in entries[end] for end in ends):
                raise InternalError(f"run {number} could be evicted and is not queued")
