"""Sorted tails: the evictable tails of one kind, in the order of their last use.

Both ends are at hand, and most tails come in at the young one:

    oldest |e e e e| |e e e e| |e e| youngest       sorted lists of bounded length, in order

To add a tail elsewhere, or to take one out, is a bisection over the lists and one within a list.

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
    """Entries in order. Each is there once."""

    __slots__ = ("_lists",)

    def __init__(self) -> None:
        self._lists: list[list[Entry]] = []  # none is empty

    def __bool__(self) -> bool:
        return bool(self._lists)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._lists)

    @property
    def oldest(self) -> Entry | None:
        lists = self._lists
        return lists[0][0] if lists else None

    @property
    def youngest(self) -> Entry | None:
        lists = self._lists
        return lists[-1][-1] if lists else None

    def add(self, entry: Entry) -> None:
        """O(1) for the youngest, O(log entries) and a bounded move otherwise."""
        lists = self._lists
        if not lists or lists[-1][-1] < entry:
            if lists and len(lists[-1]) < MAX_LENGTH:
                lists[-1].append(entry)
            else:
                lists.append([entry])
            return
        at = self._list_of(entry)
        entries = lists[at]
        insort(entries, entry)
        if len(entries) > MAX_LENGTH:
            lists.insert(at + 1, entries[MAX_LENGTH // 2 :])
            del entries[MAX_LENGTH // 2 :]

    def pop_oldest(self) -> Entry:
        entries = self._lists[0]
        entry = entries.pop(0)
        if not entries:
            del self._lists[0]
        return entry

    def pop_youngest(self) -> Entry:
        entries = self._lists[-1]
        entry = entries.pop()
        if not entries:
            del self._lists[-1]
        return entry

    def remove(self, entry: Entry) -> None:
        """Take out an entry. O(log entries) and a bounded move."""
        at = self._list_of(entry) if self._lists else 0
        entries = self._lists[at] if self._lists else []
        position = bisect_left(entries, entry)
        if position == len(entries) or entries[position] != entry:
            raise InternalError(f"tail {entry[1]} is not in the eviction queue")
        del entries[position]
        if not entries:
            del self._lists[at]

    def _list_of(self, entry: Entry) -> int:
        """Return the number of the list that an entry belongs to."""
        return max(0, bisect_right(self._lists, entry, key=itemgetter(0)) - 1)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(entries)."""
        if any(not 0 < len(entries) <= MAX_LENGTH for entries in self._lists):
            raise InternalError("a list of sorted tails is empty or too long")
        if any(one >= other for one, other in pairwise(self)):
            raise InternalError("sorted tails are out of order, or one is there twice")
