"""Eviction queue: which of an index's evictable tails goes next.

Tails are of *kinds*, and each kind has a queue by last use. What a tail is worth depends on its
kind and on its age, the time since its last use. With age the worth of a kind first rises, if at
all, and then falls. So the worst tail of a kind stands at one of the two ends of its queue, and at
the old one if it never rises:

    kind 0   oldest |------------------------| youngest
    kind 1   oldest |----------| youngest                   the worst of all these ends goes next
    ...

Under LRU, age alone counts, and the oldest tail goes. The ends themselves are in a heap by what
their tails are worth, so that the worst of them is at hand. A tail has one entry, at which both
ends arrive, and which goes with it: there are no stale ones to clean up.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, Protocol

from flexcache.errors import InternalError

Entry = tuple[float, int, int]
"""Time of last use, number and kind of a tail."""

MAX_LENGTH = 512
"""Entries of a list; the cost of an insertion is that of moving so many pointers."""


class SortedTails:
    """Entries in order. Each is there once.

    Both ends are at hand, and most tails come in at the young one:

        oldest |e e e e| |e e e e| |e e| youngest       sorted lists of bounded length, in order

    To add a tail elsewhere, or to take one out, is a bisection over the lists and one within a
    list. The list from which the oldest are being taken is kept the other way round, so that none
    moves for it; it is turned back when a tail comes in among its own, or one of them is taken out.

    Attributes:
        oldest: The oldest, if there are any.
    """

    __slots__ = ("_going", "_lists", "oldest")

    def __init__(self) -> None:
        self.oldest: Entry | None = None
        self._going: list[Entry] = []  # the oldest, in the order youngest to oldest
        self._lists: list[list[Entry]] = []  # the others; none is empty

    def __bool__(self) -> bool:
        return bool(self._going or self._lists)

    def __iter__(self) -> Iterator[Entry]:
        return chain(reversed(self._going), chain.from_iterable(self._lists))

    @property
    def youngest(self) -> Entry | None:
        if self._lists:
            return self._lists[-1][-1]
        return self._going[0] if self._going else None

    def add(self, entry: Entry) -> None:
        """O(1) for the youngest, mostly for the oldest; else O(log entries) and a bounded move."""
        lists, going = self._lists, self._going
        if self.oldest is None or entry < self.oldest:
            self.oldest = entry
            if going and len(going) < MAX_LENGTH:
                going.append(entry)
                return
        if not lists or lists[-1][-1] < entry:
            if lists and len(lists[-1]) < MAX_LENGTH:
                lists[-1].append(entry)
                return
            if lists or not going or going[0] < entry:
                lists.append([entry])
                return
        if going and entry < going[0]:
            self._turn_back()
        at = self._list_of(entry)
        entries = lists[at]
        insort(entries, entry)
        if len(entries) > MAX_LENGTH:
            lists.insert(at + 1, entries[MAX_LENGTH // 2 :])
            del entries[MAX_LENGTH // 2 :]

    def pop_oldest(self) -> Entry:
        """O(1), but for turning each list once, or as often as it has been turned back."""
        going = self._going
        if not going:
            going = self._going = self._lists[0]
            del self._lists[0]
            going.reverse()
        entry = going.pop()
        if going:
            self.oldest = going[-1]
        else:
            self._look_for_oldest()
        return entry

    def pop_youngest(self) -> Entry:
        if not self._lists:
            self._turn_back()
        entries = self._lists[-1]
        entry = entries.pop()
        if not entries:
            del self._lists[-1]
            self._look_for_oldest()
        return entry

    def _look_for_oldest(self) -> None:
        if self._going:
            self.oldest = self._going[-1]
        else:
            self.oldest = self._lists[0][0] if self._lists else None

    def _turn_back(self) -> None:
        """Have the oldest among the other lists again."""
        self._going.reverse()
        self._lists.insert(0, self._going)
        self._going = []

    def remove(self, entry: Entry) -> None:
        """Take out an entry. O(log entries) and a bounded move."""
        if self._going and entry <= self._going[0]:
            self._turn_back()
        at = self._list_of(entry) if self._lists else 0
        entries = self._lists[at] if self._lists else []
        position = bisect_left(entries, entry)
        if position == len(entries) or entries[position] != entry:
            raise InternalError(f"tail {entry[1]} is not in the eviction queue")
        del entries[position]
        if not entries:
            del self._lists[at]
        self._look_for_oldest()

    def _list_of(self, entry: Entry) -> int:
        """Return the number of the list that an entry belongs to."""
        return max(0, bisect_right(self._lists, entry, key=itemgetter(0)) - 1)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(entries)."""
        lengths = [len(entries) for entries in self._lists]
        if 0 in lengths or max((len(self._going), *lengths)) > MAX_LENGTH:
            raise InternalError("a list of sorted tails is empty or too long")
        if self.oldest != next(iter(self), None):
            raise InternalError("the oldest of sorted tails is another")
        if any(one >= other for one, other in pairwise(self)):
            raise InternalError("sorted tails are out of order, or one is there twice")


RETIRED = -1e300
"""Time of use of tails that go before all that are not retired."""
_REFRESH_S = 1.0
"""Worths change with age: those that are compared are at most this old."""
_TURNS = 16
"""Parts of the ends that are seen to in turn, so that seldom an eviction weighs them all."""
_SPARE_ENTRIES = 64
_GROWTH = 3
"""Times the number of ends, at which their order is sorted again without what is outdated."""
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
        edges: Ages at which the worth of a kind may change; they rise.
        worths: What blocks are worth, by kind and by the number of edges that their age has passed.
    """

    num_kinds: int
    is_lru: bool
    version: int
    edges: Sequence[float]
    worths: Sequence[Sequence[float]]

    def bar(self, outlook: Outlook) -> float:
        """Return the worth from which on a block is not evicted for those of a new prompt."""


class LruRanking:
    """Ranks by age alone."""

    num_kinds = 1
    is_lru = True
    version = 0
    edges: Sequence[float] = ()
    worths: Sequence[Sequence[float]] = ((0.0,),)

    def bar(self, outlook: Outlook) -> float:
        return math.inf


class EvictionQueue:
    """Tails by kind and time of last use.

    A time in the future means that the tail is to be retained until then, if possible.

    Args:
        is_evictable: Whether a queued tail, given by its number, may go. One that may not leaves
            the queue when it hides what is behind it; it is then no longer queued.
    """

    def __init__(self, ranking: Ranking, is_evictable: Callable[[int], bool]) -> None:
        self.now = 0.0
        self._ranking = ranking
        self._is_evictable = is_evictable
        self._num_kinds = ranking.num_kinds
        self._has_kinds = ranking.num_kinds > 1
        self._tails = [SortedTails() for _ in range(self._num_kinds)]
        num_ends = self._num_kinds * (2 if self._has_kinds else 1)
        self._worths = [math.inf] * num_ends
        """Worth of the oldest tail of each kind, then of the youngest of each."""
        self._changes_at = [math.inf] * num_ends
        """When each of them changes at the earliest, if the tail stays."""
        self._alike_until = [-math.inf] * self._num_kinds
        """Last use up to which the tails of a kind are worth as much as its oldest."""
        self._rises = [False] * self._num_kinds
        """Whether the worth of a kind rises with age: else its youngest is never the worst."""
        self._order: list[tuple[float, int]] = []
        """A heap of worths and ends; outdated unless it is the end's present worth."""
        self._version = -1
        self._turn = 0
        self._refresh_at = math.inf if ranking.is_lru else 0.0

    def add(self, entry: Entry) -> None:
        """Add a tail that is not in the queue. O(log n)."""
        kind = entry[2]
        tails = self._tails[kind]
        tails.add(entry)
        if tails.oldest is entry:
            self._weigh(kind)
        if self._rises[kind] and tails.youngest is entry:
            self._weigh(self._num_kinds + kind)

    def remove(self, entry: Entry) -> None:
        """Take out a tail that was added with this entry. O(log n)."""
        self._tails[entry[2]].remove(entry)
        self._weigh_both(entry[2])

    def pop(self, below: float = math.inf) -> Entry | None:
        """Take out the tail that is worth least.

        None if all are worth ``below`` or more. Amortised O(log ends). Most evictions call it, and
        calls are most of what it costs, so it is one function.
        """
        order, worths = self._order, self._worths
        if self.now >= self._refresh_at or self._version != self._ranking.version:
            self._refresh()
        while order:
            worth, end = order[0]
            if worth == worths[end]:
                break
            heapq.heappop(order)
        else:
            return None
        if worth >= below:
            return None
        kind = end % self._num_kinds
        tails = self._tails[kind]
        entry = tails.pop_oldest() if end == kind else tails.pop_youngest()
        following = tails.oldest
        if following is None:
            self._weigh_both(kind)
        elif end != kind or following[0] > self._alike_until[kind]:
            self._weigh(end)
        return entry

    def _refresh(self) -> None:
        """Weigh the ends whose turn it is and whose worth changes; all, if the ranking has."""
        begin, self._turn = self._turn, int(self.now / _REFRESH_S * _TURNS)
        due = self.now
        if self._version != self._ranking.version:
            due, ranking = math.inf, self._ranking
            for kind, worths in enumerate(ranking.worths):
                rises = any(one < other for one, other in pairwise(worths))
                self._rises[kind] = rises and self._has_kinds and not ranking.is_lru
        if due == math.inf or begin < self._turn - _TURNS:
            begin = self._turn - _TURNS
        changes_at = self._changes_at
        for turn in range(begin, self._turn):
            for end in range(turn % _TURNS, len(changes_at), _TURNS):
                if changes_at[end] > due:
                    continue
                tails = self._tails[end % self._num_kinds]
                while entry := tails.oldest if end < self._num_kinds else tails.youngest:
                    if self._is_evictable(entry[1]):
                        break
                    tails.remove(entry)
                self._weigh(end)
                if not tails:
                    self._weigh_both(end % self._num_kinds)
        self._version = self._ranking.version
        self._refresh_at = (
            math.inf if self._ranking.is_lru else (self._turn + 1) * _REFRESH_S / _TURNS
        )

    def _weigh_both(self, kind: int) -> None:
        """Weigh both ends of a kind."""
        self._weigh(kind)
        if self._rises[kind]:
            self._weigh(self._num_kinds + kind)

    def _weigh(self, end: int) -> None:
        """Note what the tail at an end is worth; infinity if there is none, or at a young end that
        cannot be the worst."""
        ranking, kind = self._ranking, end % self._num_kinds
        if end == kind:
            entry = self._tails[kind].oldest
        else:
            entry = self._tails[kind].youngest if self._rises[kind] else None
        worth = changes_at = math.inf
        alike_until = -math.inf
        if entry is not None:
            time = entry[0]
            if ranking.is_lru or time <= RETIRED:
                worth = time
            elif time > self.now:
                worth, changes_at = _RETAINED + time, time
            else:
                edges = ranking.edges
                passed = bisect_right(edges, self.now - time)
                worth = ranking.worths[kind][passed]
                alike_until = self.now - (edges[passed - 1] if passed else 0.0)
                if passed < len(edges):
                    changes_at = time + edges[passed]
        self._changes_at[end] = changes_at
        if end == kind:
            self._alike_until[kind] = alike_until
        outdated = self._worths[end]
        if worth == outdated:
            return
        order = self._order
        self._worths[end] = worth
        if order and order[0] == (outdated, end):  # as after each eviction
            heapq.heapreplace(order, (worth, end))
            return
        heapq.heappush(order, (worth, end))
        if len(order) > _GROWTH * len(self._worths) + _SPARE_ENTRIES:
            order[:] = sorted(zip(self._worths, range(len(self._worths)), strict=True))

    def check(self, queued: set[Entry]) -> None:
        """Raise `InternalError` if the queue has others than these entries, or an end that has one
        would not be found. O(entries).
        """
        order = set(self._order)
        for end, worth in enumerate(self._worths):
            if worth < math.inf and (worth, end) not in order:
                raise InternalError(f"end {end} of the eviction queue is not in order")
        for kind, tails in enumerate(self._tails):
            tails.check()
            if any(of_kind != kind for _, _, of_kind in tails):
                raise InternalError(f"a tail of another kind is among those of kind {kind}")
            if bool(tails) == (self._worths[kind] == math.inf):
                raise InternalError(f"end {kind} of the eviction queue has no worth, or no tail")
            if not tails and self._worths[-self._num_kinds + kind] < math.inf:
                raise InternalError(f"the other end of kind {kind} has a worth and no tail")
        if wrong := queued.symmetric_difference(chain(*self._tails)):
            numbers = sorted({number for _, number, _ in wrong})
            raise InternalError(f"runs {numbers} and their entries in the eviction queue differ")
