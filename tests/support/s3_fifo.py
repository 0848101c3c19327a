"""S3-FIFO (Yang et al., SOSP 2023), as an eviction policy that FlexCache does not come with.

New tails go to a small queue; those that were used there, or went lately, go to the main one, which
gives each use another round.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import chain

from flexcache.cache.eviction_policy import (
    Entry,
    EvictionPolicy,
    EvictionQueue,
    Leaves,
    MakeQueue,
)
from flexcache.config.cache import EVICTION_POLICIES
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

S3_FIFO = "s3_fifo:S3FifoPolicy"
POLICIES = [*EVICTION_POLICIES, S3_FIFO]

_MOST_USES = 3
_SMALL_SHARE = 0.1


class S3FifoQueue(EvictionQueue):
    sees_uses = True

    def __init__(self, capacity: int, leaves: Leaves) -> None:
        super().__init__(leaves)
        self._most_gone = capacity
        self._small: OrderedDict[int, Entry] = OrderedDict()
        self._main: OrderedDict[int, Entry] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._gone: OrderedDict[tuple[RootId, BlockKey], None] = OrderedDict()

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._small.values(), self._main.values())

    def add(self, entry: Entry) -> None:
        was_here = self._gone.pop(self.leaves.last_key(entry[1]), False) is None
        (self._main if was_here else self._small)[entry[1]] = entry
        self._uses[entry[1]] = 0

    def used(self, number: int) -> None:
        if number in self._uses:
            self._uses[number] = min(self._uses[number] + 1, _MOST_USES)

    def remove(self, entry: Entry) -> None:
        queue = self._small if entry[1] in self._small else self._main
        if queue.get(entry[1]) != entry:
            raise InternalError(f"tail {entry[1]} is not in the eviction queue")
        del queue[entry[1]], self._uses[entry[1]]

    def pop(self, below: float = math.inf) -> Entry | None:
        for _ in range(len(self._uses) + sum(self._uses.values()) + len(self._small)):
            num_small = len(self._small)
            is_small = num_small > _SMALL_SHARE * len(self._uses) or not self._main
            number, entry = next(iter((self._small if is_small else self._main).items()))
            if not self._uses[number] and entry[0] <= self.now:
                return self._take(entry)
            if is_small:
                self._main[number] = self._small.pop(number)
            else:
                self._main.move_to_end(number)
                self._uses[number] = max(0, self._uses[number] - 1)
        left = min(self, default=None)  # all are to be retained
        return None if left is None else self._take(left)

    def _take(self, entry: Entry) -> Entry:
        self.remove(entry)
        self._gone[self.leaves.last_key(entry[1])] = None
        if len(self._gone) > self._most_gone:
            self._gone.popitem(last=False)
        return entry

    def check(self, queued: set[Entry]) -> None:
        super().check(queued)
        if self._uses.keys() != {number for _, number, _ in self}:
            raise InternalError("uses are counted of tails that are not in the queue")


class S3FifoPolicy(EvictionPolicy):
    def for_tier(self, capacity: int) -> MakeQueue:
        return partial(S3FifoQueue, capacity)
