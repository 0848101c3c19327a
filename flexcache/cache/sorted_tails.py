"""Sorted tails: the evictable tails of one kind, in the order of their last use.

Both ends are at hand, and most tails come in at the young one:

    oldest |e e e e| |e e e e| |e e| youngest       sorted lists of bounded length, in order

To add a tail elsewhere, or to take one out, is a bisection over the lists and one within a list.
The list from which the oldest are being taken is kept the other way round, so that none moves for
it; it is turned back when a tail comes in among its own, or one of them is taken out.

Pure. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain, pairwise
from operator import itemgetter

from flexcache.errors import InternalError

Entry = tuple[float, int, int]
"""Time of last use, number and kind of a tail."""

MAX_LENGTH = 512
"""Entries of a list; the cost of an insertion is that of moving so many pointers."""


class SortedTails:
    """Entries in order. Each is there once.

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
