"""Tails of one tier: what window and state groups need to resume a prompt at one position.

    full-attention groups   |b0|b1|b2|b3|b4|b5|b6|b7|       PrefixIndex: closed under prefixes
    tails, at some of them              T4          T8      {a window's blocks, a state, ...} as one

A *tail* is some units of the tier's pool under the key of the block that ends its prefix. It is
found, pinned and evicted as a whole, so there is never a part of one. A prompt resumes at the end
of a cached prefix that has a tail. Nothing ties the two together: a tail whose prefix is gone is
not asked for, and is evicted when it is due.

Not thread-safe, no I/O. ``now`` and due times mean what they mean in `prefix_index`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xxhash

from flexcache.cache.prefix_index import NO_BLOCKS, BlockIds
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

TAIL_FIRST = 1 << 31
"""Positions of a tail's units in ops and names start here, far beyond those of blocks."""
_SPARE_ENTRIES = 64


def tail_keys(key: BlockKey, count: int) -> list[BlockKey]:
    """Name the units of a tail of ``count`` units behind the block ``key``. 16 bytes each.

    The count is part of every name, so the first units of a longer tail are not taken for a tail.
    """
    return [_tail_key(key, count, j) for j in range(count)]


def last_tail_key(key: BlockKey, count: int) -> BlockKey:
    """Name the last of these units."""
    return _tail_key(key, count, count - 1)


def _tail_key(key: BlockKey, count: int, number: int) -> BlockKey:
    names = key + b"tail" + count.to_bytes(4, "little") + number.to_bytes(4, "little")
    return BlockKey(xxhash.xxh3_128_digest(names))


# One unit, not an entry per group and block: an index of such entries allows holes, its look-up is
# a fixed point over groups and tiers, and eviction leaves halves that are of no use. Windows that
# overlap are stored twice; to share their blocks by reference counts is not worth its code.
#
# Tails have the root of their prompt's blocks. Their units' keys are digests with a domain of their
# own, so a second root gains nothing, and a restart learns from the record which block one is
# behind.


@dataclass(slots=True, eq=False)
class Tail:
    """The units of one tail. Internal to a tier; `is_indexed` says whether it can be found."""

    root: RootId
    key: BlockKey
    units: BlockIds
    due: float = 0.0
    num_pins: int = 0
    is_indexed: bool = False
    is_queued: bool = False
    used: float = 0.0
    """When it was last used, whenever it is due."""


class TailIndex:
    """Tails by the block behind which they resume.

    Args:
        num_tenants: Parts of the tails that are evicted each on their own.
        tenant_of: Returns the number of a root's part.
    """

    def __init__(
        self, num_tenants: int = 1, tenant_of: Callable[[RootId], int] = lambda root: 0
    ) -> None:
        self._tails: dict[RootId, dict[BlockKey, Tail]] = {}
        self._tenant_of = tenant_of
        self._queues: list[list[tuple[float, int, Tail]]] = [[] for _ in range(num_tenants)]
        """Heaps of (due, count, tail); entries of removed, pinned or touched tails are stale."""
        self._count = 0
        self._pinned_away: dict[Tail, None] = {}
        """Tails that were discarded and wait for their last unpin."""
        self.num_units = 0
        self.num_tails = 0

    def find(self, root: RootId, key: BlockKey) -> Tail | None:
        """Return the tail behind the block ``key``. O(1)."""
        tails = self._tails.get(root)
        return None if tails is None else tails.get(key)

    def has_any(self, root: RootId) -> bool:
        return root in self._tails

    def roots(self) -> list[RootId]:
        """Return the roots that have tails."""
        return list(self._tails)

    def all_tails(self) -> list[Tail]:
        """Return all tails that can be found."""
        return [tail for tails in self._tails.values() for tail in tails.values()]

    def tails_of(self, root: RootId) -> list[Tail]:
        """Return a root's tails that can be found."""
        return list(self._tails.get(root, {}).values())

    def insert(self, tail: Tail, due: float) -> None:
        """Make a tail findable; there must be none behind its block."""
        tails = self._tails.setdefault(tail.root, {})
        if tail.key in tails or tail.is_indexed:
            raise InternalError("a tail was inserted twice")
        tails[tail.key] = tail
        tail.is_indexed = True
        tail.due = due
        self.num_tails += 1
        self.num_units += len(tail.units)
        self._queue_if_evictable(tail)

    def touch(self, tail: Tail, due: float) -> None:
        """Evict the tail no earlier than ``due``."""
        tail.due = max(tail.due, due)

    def retire(self, root: RootId, keys: Iterable[BlockKey], due: float) -> None:
        """Make the tails behind these blocks due as early as ``due``. O(keys + tails)."""
        tails = self._tails.get(root, {})
        retired = {tail for key in keys if (tail := tails.get(key)) is not None}
        for tail in retired:
            tail.due = due
        if retired:
            queue = self._queues[self._tenant_of(root)]
            queue[:] = [
                (tail.due if tail in retired else time, count, tail) for time, count, tail in queue
            ]
            heapq.heapify(queue)

    def pin(self, tail: Tail) -> None:
        """Keep the tail in place until `unpin`."""
        tail.num_pins += 1

    def unpin(self, tail: Tail) -> BlockIds:
        """Release a tail; return its units if it was discarded in the meantime."""
        tail.num_pins -= 1
        if tail.num_pins:
            return NO_BLOCKS
        if tail in self._pinned_away:
            del self._pinned_away[tail]
            self.num_units -= len(tail.units)
            return tail.units
        self._queue_if_evictable(tail)
        return NO_BLOCKS

    def units_by_root(self) -> Iterator[tuple[RootId, BlockIds]]:
        """Yield the units of each tail with its root."""
        found = chain.from_iterable(tails.values() for tails in self._tails.values())
        return ((tail.root, tail.units) for tail in chain(found, self._pinned_away))

    def next_due(self, tenant: int = 0) -> float:
        """Return when a tenant's first tail is due that may be evicted; infinity if none may."""
        queue = self._queues[tenant]
        while queue:
            due, _, tail = queue[0]
            # Corrected here, not at each use: most are used often and evicted once.
            if tail.is_indexed and not tail.num_pins and tail.due == due:
                return due
            heapq.heappop(queue)
            tail.is_queued = False
            self._queue_if_evictable(tail)
        return math.inf

    def evict(self, tenant: int = 0) -> BlockIds:
        """Remove a tenant's tail that is due first; return its units. Amortised O(log tails)."""
        if self.next_due(tenant) == math.inf:
            return NO_BLOCKS
        tail = heapq.heappop(self._queues[tenant])[2]
        tail.is_queued = False
        self._remove(tail)
        self.num_units -= len(tail.units)
        return tail.units

    def discard(self, root: RootId, key: BlockKey) -> BlockIds:
        """Make a tail with bad bytes unfindable; return its units unless it is pinned."""
        tail = self.find(root, key)
        if tail is None:
            return NO_BLOCKS
        self._remove(tail)
        self._bound(self._queues[self._tenant_of(root)])
        if tail.num_pins:
            self._pinned_away[tail] = None
            return NO_BLOCKS
        self.num_units -= len(tail.units)
        return tail.units

    def _remove(self, tail: Tail) -> None:
        tails = self._tails[tail.root]
        del tails[tail.key]
        if not tails:
            del self._tails[tail.root]
        tail.is_indexed = False
        self.num_tails -= 1

    def _bound(self, queue: list[tuple[float, int, Tail]]) -> None:
        """Drop the entries of discarded tails from a queue once they are most of it.

        A tier that never fills evicts nothing, so nothing else would. Amortised O(1).
        """
        if len(queue) > 2 * self.num_tails + _SPARE_ENTRIES:
            for _, _, tail in queue:
                tail.is_queued = tail.is_indexed
            queue[:] = [entry for entry in queue if entry[2].is_indexed]
            heapq.heapify(queue)

    def _queue_if_evictable(self, tail: Tail) -> None:
        if tail.is_indexed and not tail.is_queued and not tail.num_pins:
            tail.is_queued = True
            self._count += 1
            queue = self._queues[self._tenant_of(tail.root)]
            heapq.heappush(queue, (tail.due, self._count, tail))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(tails)."""
        found = [tail for tails in self._tails.values() for tail in tails.values()]
        held = [*found, *self._pinned_away]
        units = np.concatenate([NO_BLOCKS, *(tail.units for tail in held)])
        if len(found) != self.num_tails or len(units) != self.num_units:
            raise InternalError(f"{len(found)} tails of {len(units)} units are miscounted")
        if len(np.unique(units)) != len(units):
            raise InternalError("two tails share a unit")
        entries = [tail for _, _, tail in chain(*self._queues)]
        queued = {id(tail) for tail in entries}
        if len(queued) != len(entries):
            raise InternalError("a tail is queued twice")
        for tenant, queue in enumerate(self._queues):
            if any(self._tenant_of(tail.root) != tenant for _, _, tail in queue):
                raise InternalError("a tail is in the queue of another tenant")
        for tail in held:
            if tail.is_queued != (id(tail) in queued):
                raise InternalError("a tail and the queue disagree")
            if tail.is_indexed == (tail in self._pinned_away) or not len(tail.units):
                raise InternalError("a tail can be found and was discarded, or has no units")
            if tail.is_indexed and not (tail.num_pins or tail.is_queued):
                raise InternalError("a tail could be evicted and is not queued")
        if any(not tail.num_pins for tail in self._pinned_away):
            raise InternalError("a discarded tail waits for no unpin")
