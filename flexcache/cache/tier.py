"""Tier: a pool of block ids, the index of cached ones, and the leases on the others.

Every id of a tier is free, indexed, or in exactly one lease. A lease is reserved before bytes move
and made findable (`publish`) only after they have arrived; it ends once, with `release`:

    reserve ---> [bytes move] ---> publish(n) ---> release      n blocks indexed, the rest freed
        \\-----------------------------------------> release     nothing indexed, all freed

Keys of a lease that may still be published are *in flight*: no other task reserves them, no match
sees them. A lease can build on another lease's blocks in flight. If those have not arrived when it
is published, it waits for them, beyond its release if necessary, and shares their fate.

The lease on a tail (`tail_index`) builds on no block, and is published whole or not at all. Blocks
and tails share the pool and one order of eviction.

Not thread-safe, no I/O.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import BlockKeys, PromptContent
from flexcache.cache.block_pool import NO_ROOT, BlockIdPool, DoomedBlocks, Quotas
from flexcache.cache.eviction_policy import RETIRED, LruQueue, MakeQueue, Outlook
from flexcache.cache.pins import PinnedBlocks
from flexcache.cache.prefix_index import (
    EMPTY_MATCH,
    NO_BLOCKS,
    PrefixIndex,
    PrefixMatch,
    RestoredRun,
)
from flexcache.cache.retention import Retention, Seconds
from flexcache.cache.tail_index import Tail, TailIndex, tail_keys
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.stats import TierStats

BlockIds = npt.NDArray[np.int64]
OnStored = Callable[
    [RootId, BlockKey | None, Sequence[BlockKey], PromptContent | None, int], object
]
"""Root, key of the block before, keys, content, position of the first key in its prompt."""
_TICK_S = 1e-6  # well above the resolution of a double that counts seconds since boot


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks of one tier that one task has reserved. Made by `Tier.reserve`."""

    root: RootId
    parent_key: BlockKey | None
    keys: Sequence[BlockKey]
    """Keys of the blocks; empty for a private lease, which is never published."""
    blocks: BlockIds
    """Those that are still its own: not the published ones."""
    first: int = 0
    """Position of the first block in its prompt, if ``content`` is known."""
    content: PromptContent | None = None
    parent_pin: PrefixMatch = EMPTY_MATCH
    retain_s: float = 0.0
    """Once published, the blocks count as used this much later than their last use."""
    outlook: Outlook | None = None
    """Kinds of the prompt's blocks, if known."""
    used_s: Seconds | None = None
    """When each of its blocks, or its tail, was last used; None for once they are published."""
    is_refused: bool = False
    """Whether it is shorter than asked for since what the tier holds is worth more."""
    to_publish: int = 0
    published: PrefixMatch = EMPTY_MATCH
    num_published: int = 0
    is_given_up: bool = False
    """Whether blocks that were not published must not be written again on their own."""
    tail: Tail | None = None
    """The tail that the blocks make up, if they do."""
    era: int = 0
    """The tier's, when it was made: what is older than the last `Tier.forget_held` is void."""
    waiting: bool = False
    in_flight: bool = False
    released: bool = False
    limit: int = sys.maxsize
    """How many of its first blocks may be published: a user has deleted the next one."""

    def __len__(self) -> int:
        return len(self.blocks)

    def why_short(self, tier: str) -> str:
        """Why a tier had fewer blocks for it than it asked for."""
        return f"{tier}_worth_less" if self.is_refused else f"{tier}_tier_full"


@dataclass(slots=True)
class _Flight:
    """Keys of one root that are in flight, and the leases that wait for them."""

    num_leases: int = 0
    owners: dict[BlockKey, Lease] = field(default_factory=dict)
    waiting: dict[BlockKey, list[Lease]] = field(default_factory=dict)


def _limit(lease: Lease, keys: set[BlockKey] | None) -> int:
    """Return how many blocks of a lease may be published once these are deleted, with what
    continues them and their tails; None: all."""
    if keys is None:
        return 0
    if lease.tail is not None:
        return 0 if lease.tail.key in keys else lease.limit
    if lease.parent_key in keys:
        return 0
    left = lease.keys[: lease.limit]
    if keys.isdisjoint(left):
        return lease.limit
    return next(number for number, key in enumerate(left) if key in keys)


class Tier:
    """Blocks of one tier; see the module for the life of a lease."""

    def __init__(
        self, name: TierName, capacity: int, make_queue: MakeQueue = LruQueue,
        bypasses: bool = False, quotas: Quotas | None = None, retention_s: float | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            make_queue: Makes the order of eviction of each tenant.
            bypasses: Whether blocks are not stored if all that would be evicted is worth more.
            quotas: Which of its blocks tenants are sure of; None if all share everything.
            retention_s: What was not used for this long is dropped; None to keep it.
        """
        self.name = name
        self.capacity = capacity
        self.pool = BlockIdPool(capacity)
        self.quotas = quotas
        parts = (1, lambda root: 0) if quotas is None else (quotas.num_tenants, quotas.tenant)
        self.index = PrefixIndex(make_queue, *parts)
        self._bypasses = bypasses
        self.tails = TailIndex(*parts)
        self.pinned = PinnedBlocks(parts[1])
        self._retention: Retention | None = None
        if retention_s is not None:
            self._retention = Retention(self.index, self.tails, retention_s, self.pinned)
        self.counters = TierStats()
        self._flights: dict[RootId, _Flight] = {}
        self.num_leased = 0
        self._era = 0
        self._expected = NO_BLOCKS
        self._expected_s = 0.0
        self._now = 0.0
        self.on_stored: list[OnStored] = []
        """Called with blocks that were indexed; `PrefixIndex.on_removed` with removed ones."""
        self.on_unpublished: Callable[[Lease], None] | None = None
        """Called for a lease that has ended with blocks that were not published."""
        self.doomed = DoomedBlocks(capacity if name is TierName.SSD else 0)
        self.on_void: Callable[[Lease], None] | None = None
        """Called for a lease that has ended whose blocks a user has deleted meanwhile."""

    @property
    def num_indexed(self) -> int:
        """Blocks and units of tails that can be found, or were discarded while pinned."""
        return self.index.num_blocks + self.tails.num_units

    @property
    def num_expected(self) -> int:
        """Blocks whose bytes are in place, and that are to be indexed (`expect`)."""
        return len(self._expected)

    def advance(self, now: float) -> None:
        """Set the time: recency is counted in seconds."""
        # `_tick` may be ahead of the clock. Recency must not fall: the index counts on it.
        self._now = max(self._now, now)

    def match(
        self, keys: BlockKeys, outlook: Outlook | None = None, retain_s: float = 0.0,
        is_use: bool = True,
    ) -> PrefixMatch:  # fmt: skip
        """Return the longest cached prefix of a prompt, and `use` it.

        Args:
            is_use: Else it becomes more recent only, and expires as if nothing had happened.
        """
        match = self.index.match(keys)
        if is_use:
            self.use(match, outlook, retain_s)
        else:
            self.keep(match, retain_s)
        return match

    def use(self, match: PrefixMatch, outlook: Outlook | None, retain_s: float = 0.0) -> None:
        """Count matched blocks as used now, or ``retain_s`` later.

        Args:
            outlook: Their kinds from now on; None to give all the kind of the last.
        """
        if match.run is not None:
            # Retention shifts recency and creates no class: a strict priority class can fill a tier
            # for good. Recency in the future needs no timer and no second queue, and wears off.
            self.index.touch(match, self._tick(), retain_s, outlook)
            if self._retention is not None:
                self._retention.used(match, self._now)

    def sort(self, keys: BlockKeys, outlook: Outlook) -> None:
        """Note the kinds of a prompt's cached blocks; this does not make them more recent."""
        self.index.sort(self.index.match(keys), outlook)

    def num_in_flight(self, keys: BlockKeys, start: int, stop: int) -> int:
        """Return how many contiguous blocks from ``start`` on are in flight."""
        flight = self._flights.get(keys.root)
        if flight is None:
            return 0
        position = start
        while position < stop and keys.key(position) in flight.owners:
            position += 1
        return position - start

    def is_in_flight(self, root: RootId, key: BlockKey) -> bool:
        """Whether a block is on its way."""
        flight = self._flights.get(root)
        return flight is not None and key in flight.owners

    def chain_to(self, root: RootId, key: BlockKey) -> list[BlockKey]:
        """Return the keys of all blocks up to ``key``, which is indexed or in flight.

        Empty if it is neither. O(blocks), at C speed.
        """
        flight = self._flights.get(root)
        pieces: list[Sequence[BlockKey]] = []
        while (found := self.index.locate(root, key)).run is None:
            lease = None if flight is None else flight.owners.get(key)
            if flight is None or lease is None or lease.tail is not None:
                return []
            if len(pieces) == flight.num_leases:
                return []  # leases in a circle: the engine does not chain its keys
            pieces.append(lease.keys[: lease.keys.index(key) + 1])
            if lease.parent_key is None:
                break
            key = lease.parent_key
        else:
            pieces.append(self.index.path_keys(found))
        return list(chain.from_iterable(reversed(pieces)))

    def reserve(
        self, keys: BlockKeys, start: int, stop: int, outlook: Outlook | None = None,
        retain_s: float = 0.0, hold_s: float | None = None,
    ) -> Lease:  # fmt: skip
        """Reserve blocks for ``[start, stop)`` of a prompt, as many from the front as possible.

        The block before ``start`` must be indexed or in flight. Evicts unheld blocks.

        Args:
            outlook: Kinds of the prompt's blocks, if known.
            retain_s: Once published, they count as used this much later; or earlier, if negative.
            hold_s: Of blocks that are loaded early: how long they are held for each use. None is
                evicted for them that is likely to be used sooner.
        """
        parent_key = keys.key(start - 1) if start else None
        below = math.inf
        if hold_s is not None:
            below = self.index.queues[0].worth_of_hold(hold_s, self._now)
        # What its caller asks to keep is stored whatever it is worth.
        elif self._bypasses and retain_s <= 0.0 and outlook is not None:
            below = self.index.queues[0].bar(outlook)
        lease = self._reserve(
            keys.root, parent_key, stop - start, lambda n: keys.slice(start, start + n), below
        )
        lease.outlook, lease.retain_s = outlook, retain_s
        lease.is_refused = len(lease) < stop - start and below < math.inf
        lease.first, lease.content = start, keys.content
        return lease

    def reserve_keys(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        first: int = 0,
        content: PromptContent | None = None,
    ) -> Lease:
        """Reserve consecutive blocks after the block ``parent``, likewise from the front."""
        lease = self._reserve(root, parent, len(keys), lambda n: keys[:n])
        lease.first, lease.content = first, content
        return lease

    def _reserve(
        self, root: RootId, parent_key: BlockKey | None, count: int,
        first_keys: Callable[[int], Sequence[BlockKey]], below: float = math.inf,
    ) -> Lease:  # fmt: skip
        pin = self.index.locate(root, parent_key) if parent_key is not None else EMPTY_MATCH
        self.index.pin(pin)  # before anything is evicted to make room
        blocks = self._allocate(root, count, below)
        lease = Lease(root, parent_key, first_keys(len(blocks)), blocks, parent_pin=pin)
        lease.era = self._era
        if len(blocks):
            flight = self._flights.setdefault(root, _Flight())
            flight.num_leases += 1
            lease.in_flight = True
            ours = dict.fromkeys(lease.keys, lease)
            # Keys that another lease has in flight stay with it.
            flight.owners |= ours if flight.owners.keys().isdisjoint(ours) else ours | flight.owners
        return lease

    def reserve_private(self, root: RootId, count: int) -> Lease:
        """Reserve up to ``count`` blocks as staging that will not be published."""
        return Lease(root, None, (), self._allocate(root, count))

    def reserve_exactly(self, blocks: BlockIds) -> Lease:
        """Reserve these blocks, which must be free, likewise."""
        self.pool.take_exactly(blocks)
        self._charge(NO_ROOT, blocks)
        self.doomed.leave(blocks)
        self.num_leased += len(blocks)
        return Lease(NO_ROOT, None, (), blocks)

    def is_tail_in_flight(self, root: RootId, key: BlockKey, count: int) -> bool:
        """Whether the tail of ``count`` units behind the block ``key`` is in flight."""
        flight = self._flights.get(root)
        return flight is not None and tail_keys(key, count)[0] in flight.owners

    def reserve_tail(
        self, root: RootId, key: BlockKey, count: int, retain_s: float = 0.0
    ) -> Lease | None:
        """Reserve ``count`` units for the tail behind the block ``key``; None if there is no room
        for all of it. ``retain_s``: as in `reserve`."""
        names = tail_keys(key, count)
        lease = self._reserve(root, None, count, lambda n: names[:n])
        if len(lease) < count:
            self.release(lease)
            return None
        lease.tail, lease.retain_s = Tail(root, key, lease.blocks), retain_s
        return lease

    def publish(self, lease: Lease, count: int) -> None:
        """Make the first ``count`` blocks findable; their bytes are in place. A tail needs all.

        They stay pinned until the lease is released. Waits if the block before them is in flight.
        """
        if lease.released or lease.to_publish or lease.published.run is not None:
            raise InternalError("a lease is published once, before its release")
        lease.to_publish = min(count, len(lease.keys), lease.limit)
        if lease.to_publish and lease.era == self._era:
            self._try_publish([lease])

    def release(self, lease: Lease) -> None:
        """End the lease: published blocks stay indexed, the rest are freed."""
        if lease.released:
            raise InternalError("a lease ends once")
        lease.released = True
        self.unpin(lease.parent_pin)
        if not lease.waiting:
            self._settle(lease)

    def unpin(self, match: PrefixMatch) -> None:
        """Release blocks that were pinned in the index; those discarded meanwhile are freed."""
        self.index.unpin(match)
        if self.index.has_discarded:
            self._drop(self.index.sweep())

    def keep(self, match: PrefixMatch, for_s: float) -> None:
        """Make the matched blocks due no sooner than if they were used ``for_s`` from now."""
        self.index.touch(match, self._tick(), for_s)

    def retire(self, match: PrefixMatch, start: int) -> int:
        """Evict the blocks of the match's run from depth ``start`` on before all others, and the
        tails behind them. Return how many blocks were not due first already."""
        if match.run is not None and self.tails.num_tails:
            keys = match.run.keys[start - match.run.depth :]
            self.tails.retire(match.run.root, keys, RETIRED)
        return self.index.retire(match, start)

    def retire_root(self, root: RootId, drop: bool = False) -> None:
        """Evict all that is kept under a root before all else; or ``drop`` it at once."""
        if drop:
            for key in self.index.starts_of(root):
                self._drop(self.index.discard(root, key))
            for tail in self.tails.tails_of(root):
                self._drop(self.tails.discard(root, tail.key))
            return
        self.index.retire_root(root)
        self.tails.retire(root, [tail.key for tail in self.tails.tails_of(root)], RETIRED)

    def use_tail(self, tail: Tail, retain_s: float = 0.0, is_use: bool = True) -> None:
        """Make a tail as recent as the prefix that it stands on, or as now without one."""
        self.tails.touch(tail, self._tail_due(tail, retain_s))
        tail.used = self._now if is_use else tail.used

    def unpin_tail(self, tail: Tail) -> None:
        """Release a tail that was pinned in `tails`; it is freed if it was discarded meanwhile."""
        self._drop(self.tails.unpin(tail))

    def discard_tail(self, root: RootId, key: BlockKey) -> None:
        """Drop the tail behind the block ``key``: some of its bytes are bad."""
        self._drop(self.tails.discard(root, key))

    def discard(self, root: RootId, key: BlockKey) -> int:
        """Drop a block with bad bytes and all that build on it; return how many are freed now."""
        freed = self.index.discard(root, key)
        self._drop(freed)
        return len(freed)

    # -- deletes: gone for good, also after a restart --------------------------------------------

    def delete(self, root: RootId, key: BlockKey) -> list[BlockKey]:
        """Make a block and all that builds on it unfindable for good; return their keys."""
        found, keys = self.index.locate(root, key), list[BlockKey]()
        if found.run is None:
            return keys
        for run, offset in self.index.behind(found.run, found.length - 1):
            stop = run.num_findable
            keys += run.keys[offset:stop]
            self.doomed.doom(run.blocks[offset:stop])
        self._give_back(self.index.discard(root, key))
        return keys

    def roots(self) -> set[RootId]:
        """Return the roots under which blocks or tails are cached, or on their way."""
        of_blocks = {root for root, _ in self.index.starts()}
        return of_blocks | {*self.tails.roots(), *self._flights}

    def delete_tail(self, root: RootId, key: BlockKey) -> int:
        """Make the tail behind the block ``key`` unfindable for good, unless a pin holds it; return
        how many units it had."""
        tail = self.tails.find(root, key)
        if tail is None or tail in self.pinned.tails:
            return 0
        self.doomed.doom(tail.units)
        self._give_back(self.tails.discard(root, key))
        return len(tail.units)

    def void(self, root: RootId, keys: set[BlockKey] | None) -> list[Lease]:
        """Have no lease publish one of these blocks, what continues them or their tails; that is
        added to them. None: nothing of the root. Return the leases that publish less now."""
        flight = self._flights.get(root)
        if flight is None:
            return []
        waiting = chain.from_iterable(flight.waiting.values())
        leases = dict.fromkeys([*flight.owners.values(), *waiting])
        due: dict[Lease, None] = {}
        while found := [lease for lease in leases if _limit(lease, keys) < lease.limit]:
            for lease in found:
                lease.limit = _limit(lease, keys)
                # Not what is before: another prompt may share that, and continue it.
                if keys is not None and lease.tail is None:
                    keys.update(lease.keys[lease.limit :])
            due |= dict.fromkeys(found)
        for lease in due:
            lease.to_publish = min(lease.to_publish, lease.limit)
            self.doomed.doom(lease.blocks[lease.limit :])
        for lease in due:  # from here on another put may bring the blocks
            self._try_publish(self._land(lease, lease.limit))
        return list(due)

    def in_flight_behind(self, root: RootId, positions: Mapping[BlockKey, int]) -> int:
        """Return how many of a prompt's first blocks another one is to continue from that is on its
        way here; 0 for none.

        Args:
            positions: Of the prompt's blocks, by key.
        """
        flight = self._flights.get(root)
        shared = 0
        for lease in dict.fromkeys(() if flight is None else flight.owners.values()):
            before = () if lease.parent_key is None else (lease.parent_key,)
            path = () if lease.tail is not None else (*before, *lease.keys[: lease.limit])
            for key, following in pairwise(path):
                at = positions.get(key, -1)
                if 0 <= at < len(positions) - 1 and positions.get(following) != at + 1:
                    shared = max(shared, at + 1)
        return shared

    def withhold_deleted(self) -> Lease:
        """Reserve what was set aside, and free blocks that are doomed."""
        free = self.doomed.among(self.pool.free_ids())
        if len(free):
            self.pool.take_exactly(free)
            self._charge(NO_ROOT, free)
            self.num_leased += len(free)
        return Lease(NO_ROOT, None, (), np.concatenate((self.doomed.take(), free)))

    def clear(self) -> BlockIds:
        """Drop every unheld block, and those that are expected; return their ids."""
        # Each tenant has an order of eviction of its own.
        tenants = range(1 if self.quotas is None else self.quotas.num_tenants)
        freed = np.concatenate(
            [self._evict_with_tails(self.capacity, math.inf, tenant) for tenant in tenants]
        )
        self._give_back(freed)
        return np.concatenate((freed, self._give_up(self.num_expected)))

    def forget_held(self) -> None:
        """Make all blocks unfindable, and have no lease published that there is.

        What is held is freed when it is let go.
        """
        # A write, a load or a lease may hold blocks now, and who clears knows nothing of them: so
        # leases of earlier eras are never published.
        self._era += 1
        for root, key in self.index.starts():
            self._give_back(self.index.discard(root, key))
        for tail in self.tails.all_tails():
            self._give_back(self.tails.discard(tail.root, tail.key))
        flights, self._flights = self._flights, {}
        for lease in chain.from_iterable(chain(*f.waiting.values()) for f in flights.values()):
            lease.waiting = False
            if lease.released:
                self._settle(lease)

    @property
    def retention_s(self) -> float | None:
        """How long what is not used is kept; None if it has no such limit."""
        return None if self._retention is None else self._retention.retention_s

    def last_used(self, match: PrefixMatch, start: int) -> Seconds | None:
        """Return when the matched blocks from position ``start`` on were last used; None if that
        does not matter."""
        return None if self._retention is None else self._retention.last_used(match, start)

    @property
    def next_expiry(self) -> float | None:
        """When `expire` has something to do."""
        return None if self._retention is None else self._retention.next_turn

    def expire(self, now: float) -> None:
        """Drop some of what was not used for too long, if it is time to look for that."""
        if self._retention is not None and now >= self._retention.next_turn:
            self._expire(self._retention.turn(now))

    def expire_all(self, now: float) -> None:
        """Drop all that was not used for too long, at once."""
        if self._retention is not None:
            self._expire(self._retention.sweep(now))

    def _expire(self, freed: BlockIds) -> None:
        self._give_back(freed)
        self.counters.expired_blocks += len(freed)

    def stats(self, **others: Any) -> TierStats:
        """Return what was counted and what is there now.

        Args:
            others: Figures that those have who use the tier.
        """
        return self.counters.snapshot(
            capacity=self.capacity,
            free=self.pool.num_free,
            indexed=self.num_indexed,
            leased=self.num_leased,
            restoring=self.num_expected,
            tails=self.tails.num_tails,
            pinned=self.pinned.num_blocks,
            quotas=None if self.quotas is None else self.quotas.stats(),
            **others,
        )

    def _drop(self, blocks: BlockIds) -> None:
        self._give_back(blocks)
        self.counters.dropped_blocks += len(blocks)

    def _tick(self) -> float:
        """Return the time, never the same twice."""
        self._now += _TICK_S
        return self._now

    def _give_back(self, blocks: BlockIds) -> None:
        if len(blocks) and self.doomed:
            aside, blocks = self.doomed.set_aside(blocks)
            self.num_leased += len(aside)
        if not len(blocks):
            return
        self.pool.give_back(blocks)
        if self.quotas is not None:
            self.quotas.give_back(blocks)

    def _allocate(self, root: RootId, count: int, below: float = math.inf) -> BlockIds:
        """Take free blocks, and evict as many as are missing, of those that are worth less than
        ``below``. Before that, blocks that are only expected go: they are the oldest."""
        # Evicted blocks are handed over directly: by the free stack they would cost twice as much.
        num_free, blocks = self.pool.num_free, NO_BLOCKS
        if count > num_free and len(self._expected):
            num_free += len(self._give_up(count - num_free))
        num_free = min(count, num_free)
        if num_free:
            blocks = self.pool.take(num_free)
            self._charge(root, blocks)
        if count > num_free:
            missing = count - num_free
            if self.quotas is None:
                evicted = self._take_from(0, missing, missing, below)
            else:
                evicted = self._take_by_quota(self.quotas, root, missing, below)
            blocks = np.concatenate((blocks, evicted)) if num_free else evicted
        self.doomed.leave(blocks)
        self.num_leased += len(blocks)
        return blocks

    def _take_by_quota(self, quotas: Quotas, root: RootId, missing: int, below: float) -> BlockIds:
        """Evict ``missing`` blocks for a root's tenant if possible, first of who is over its quota.

        ``below`` decides between blocks of one tenant only: others get back what they are sure of.
        """
        tenant, spared, pieces = quotas.tenant(root), set[int](), [NO_BLOCKS]
        while missing > 0 and (found := quotas.victim(tenant, missing, spared)) is not None:
            victim, most = found
            is_own = victim == tenant
            evicted = self._take_from(victim, most, missing, below if is_own else math.inf)
            quotas.pass_on(victim, tenant, evicted)
            missing -= len(evicted)
            pieces.append(evicted)
            # It has nothing more that may go: asked again it would be named again, for ever.
            if len(evicted) < most:
                spared.add(victim)
                if is_own and below < math.inf:  # not worth the room of others either
                    missing = min(missing, quotas.room(tenant))
        return np.concatenate(pieces)

    def make_room(self, root: RootId, count: int, age_s: float) -> None:
        """Have ``count`` blocks free, if a root's tenant has so many that are worth less than what
        was last used this long ago."""
        tenant = 0 if self.quotas is None else self.quotas.tenant(root)
        if (missing := count - self.pool.num_free) > 0:
            below = self.index.queues[tenant].worth_at(age_s, self._now)
            self._take_from(tenant, missing, 0, below)

    def _take_from(self, tenant: int, count: int, wanted: int, below: float) -> BlockIds:
        """Evict ``count`` blocks of a tenant if possible; return ``wanted`` at most.

        There may be more than ``count`` if the last are a tail's; what is not wanted is freed.
        """
        if self.tails.num_tails:
            evicted = self._evict_with_tails(count, below, tenant)
        else:
            evicted = self.index.evict(count, math.inf, below, tenant)
        self.counters.evicted_blocks += len(evicted)
        if self.quotas is not None:
            self.quotas.count_evicted(tenant, len(evicted))
        if len(evicted) > wanted:
            self._give_back(evicted[wanted:])
            evicted = evicted[:wanted]
        return evicted

    def _evict_with_tails(self, count: int, below: float, tenant: int) -> BlockIds:
        """Remove ``count`` unheld blocks of a tenant if possible, and a few more if the last are a
        tail's. A tail goes before blocks used no earlier: without them it would be useless."""
        pieces, worth_at = [NO_BLOCKS], self.index.queues[tenant].worth_at
        while count > 0:
            due = self.tails.next_due(tenant)
            pieces.append(self.index.evict(count, due, below, tenant))
            count -= len(pieces[-1])
            # Without a tail that may go, the index has given all that it can.
            if due == math.inf or worth_at(self._now - due, self._now) >= below:
                break
            if count > 0:
                pieces.append(self.tails.evict(tenant))
                count -= len(pieces[-1])
        return np.concatenate(pieces)

    def _tail_due(self, tail: Tail, retain_s: float) -> float:
        prefix = self.index.locate(tail.root, tail.key)
        return self._tick() + retain_s if prefix.run is None else self.index.due(prefix)

    def _try_publish(self, leases: list[Lease]) -> None:
        """Publish each lease whose parent is indexed; those that waited for it follow."""
        # A loop, no recursion: leases may wait for each other in a chain deeper than the stack.
        while leases:
            lease = leases.pop()
            parent = EMPTY_MATCH
            if lease.parent_key is not None:
                parent = self.index.locate(lease.root, lease.parent_key)
                if parent.run is None and self._wait_for_parent(lease):
                    continue
            if lease.tail is not None:
                self._insert_tail(lease, lease.tail)
            elif lease.parent_key is None or parent.run is not None:
                self._insert(lease, parent)
            leases.extend(self._land(lease))
            if lease.released:
                self._settle(lease)

    def _wait_for_parent(self, lease: Lease) -> bool:
        flight = self._flights.get(lease.root)
        assert lease.parent_key is not None
        if flight is None or lease.parent_key not in flight.owners:
            return False  # it was dropped: blocks that build on it cannot be found
        ahead: Lease | None = flight.owners[lease.parent_key]
        while ahead is not None and ahead is not lease and ahead.waiting and ahead.parent_key:
            ahead = flight.owners.get(ahead.parent_key)
        if ahead is lease:
            return False  # it would wait for itself: the engine does not chain its keys
        flight.waiting.setdefault(lease.parent_key, []).append(lease)
        lease.waiting = True
        return True

    def _insert(self, lease: Lease, parent: PrefixMatch) -> None:
        """Index the lease's blocks, except those that another lease published first."""
        count, start, parent_key = lease.to_publish, 0, lease.parent_key
        while start < count:
            there = self.index.locate(lease.root, lease.keys[start])
            if there.run is None:
                break
            parent, parent_key, start = there, lease.keys[start], start + 1
        if start == count:
            return
        # All of them, unless they are the engine's own keys and do not chain.
        stop = start + self.index.num_insertable(lease.root, lease.keys[start:count])
        # The blocks leave the lease before the index gets them: what fails in between loses them,
        # and gives none back that the index leads to.
        blocks, rest = lease.blocks[start:stop], lease.blocks[stop:]
        self.doomed.spare(blocks)
        lease.blocks = np.concatenate((lease.blocks[:start], rest)) if start else rest
        self.num_leased -= len(blocks)
        lease.published = self.index.insert(
            parent, lease.root, lease.keys[start:stop], blocks, self._tick(), lease.retain_s,
            lease.outlook,
        )  # fmt: skip
        if self._retention is not None and lease.used_s is None:
            self._retention.used(lease.published, self._now)
        elif self._retention is not None and lease.used_s is not None:
            self._retention.used_before(lease.published, lease.used_s[start:stop])
        self.index.pin(lease.published)
        lease.num_published = stop - start
        self.counters.stored_blocks += lease.num_published
        keys = lease.keys[start:stop]
        for tell in self.on_stored:
            tell(lease.root, parent_key, keys, lease.content, lease.first + start)

    def _insert_tail(self, lease: Lease, tail: Tail) -> None:
        """Index the lease's tail if all of it is there, and no other lease published it first."""
        is_whole = lease.to_publish == len(lease)
        if not is_whole or self.tails.find(tail.root, tail.key) is not None:
            return
        self.doomed.spare(lease.blocks)
        lease.num_published, lease.blocks = len(lease), NO_BLOCKS  # before the index gets them
        self.num_leased -= lease.num_published
        # As recent as its prefix: without that it is useless, and must not outlast it.
        self.tails.insert(tail, self._tail_due(tail, lease.retain_s))
        tail.used = self._now if lease.used_s is None else float(lease.used_s[-1])
        self.tails.pin(tail)
        self.counters.stored_blocks += lease.num_published

    def _land(self, lease: Lease, first: int = 0) -> list[Lease]:
        """End the flight of the lease's keys from the ``first`` on; return the leases that waited
        for them."""
        is_void = not lease.in_flight or lease.era < self._era
        lease.in_flight = first > 0 and not is_void
        if is_void:
            return []
        flight = self._flights[lease.root]
        flight.num_leases -= first == 0
        if flight.num_leases == 0 and not flight.waiting:
            del self._flights[lease.root]
            return []
        # Another lease may have the same key in flight: who waits for that one waits on.
        ours = [key for key in lease.keys[first:] if flight.owners.get(key) is lease]
        followers: list[Lease] = []
        if flight.waiting:
            followers = [follower for key in ours for follower in flight.waiting.pop(key, ())]
        if flight.num_leases == 0:
            del self._flights[lease.root]
        else:
            for key in ours:
                flight.owners.pop(key, None)  # a key may occur in a lease twice
        for follower in followers:
            follower.waiting = False
        return followers

    def _settle(self, lease: Lease) -> None:
        """Free the blocks that a released lease did not publish."""
        self.unpin(lease.published)
        if lease.tail is not None and lease.num_published:
            self.unpin_tail(lease.tail)
        followers = self._land(lease)
        unpublished, lease.blocks = lease.blocks, NO_BLOCKS  # before they are anyone else's
        self.num_leased -= len(unpublished)
        self._give_back(unpublished)
        if lease.limit < len(lease.keys) and self.on_void is not None:
            self.on_void(lease)
        is_short = lease.num_published < len(lease.keys[: lease.limit]) and lease.tail is None
        if is_short and lease.era == self._era and self.on_unpublished is not None:
            self.on_unpublished(lease)
        self._try_publish(followers)

    def expect(self, blocks: BlockIds) -> None:
        """Take blocks whose bytes are in place, until `restore` indexes them, or they are freed
        since there is no other room, or by `clear`.

        They count as used before now.

        Args:
            blocks: Those used last come first.
        """
        self.pool.take_exactly(blocks)
        self._charge(NO_ROOT, blocks)
        self._expected = blocks
        # Indexed later, they must count as older than what has been used since.
        self._expected_s = self._tick()

    def _give_up(self, count: int) -> BlockIds:
        """Free up to ``count`` expected blocks, those used first; return them."""
        kept = max(0, self.num_expected - count)
        self._expected, given_up = self._expected[:kept], self._expected[kept:]
        self._give_back(given_up)
        return given_up

    def restore(self, runs: Iterable[RestoredRun]) -> None:
        """Index blocks that are expected, in that order: each run after the one it builds on.

        No block may have been used later than one before it. What has been stored since comes
        first: the rest is freed. O(1) Python steps per run.
        """
        now, added = self._expected_s, []
        for run in runs:
            run = self._restorable(run)
            if not run.keys:
                continue
            ends = run.ends or [len(run.keys)]
            segments = [
                (end, now - age * _TICK_S, 0) for end, age in zip(ends, run.ages, strict=True)
            ]
            self.doomed.spare(run.blocks)
            added.append(self.index.restore(run.root, run.parent, run.keys, run.blocks, segments))
            if self._retention is not None:
                self._retention.restored(added[-1], zip(ends, run.written_s or [now], strict=True))
            if (quotas := self.quotas) is not None:
                quotas.pass_on(quotas.tenant(NO_ROOT), quotas.tenant(run.root), run.blocks)
            for tell in self.on_stored:
                tell(run.root, run.parent, run.keys, None, 0)
        self.index.queue_restored(added)

    def _restorable(self, run: RestoredRun) -> RestoredRun:
        """Take a run from what is expected; return it without what is given up, what has been
        stored since, and what has lost its parent. The latter two are freed."""
        index, root, keys = self.index, run.root, run.keys[: self.num_expected]
        blocks, self._expected = self._expected[: len(keys)], self._expected[len(keys) :]
        start = 0
        while start < len(keys) and index.contains(root, keys[start]):
            start += 1
        parent, stop = keys[start - 1] if start else run.parent, start
        if parent is None or index.contains(root, parent):
            stop += index.num_insertable(root, keys[start:])
        if stop - start == len(run.keys):
            return run
        self._give_back(np.concatenate((blocks[:start], blocks[stop:])))
        first, last = bisect_right(run.ends, start), bisect_left(run.ends, stop) + 1
        return RestoredRun(
            root, parent, keys[start:stop], blocks[start:stop],
            [min(end, stop) - start for end in run.ends[first:last]], run.ages[first:last],
            run.written_s[first:last],
        )  # fmt: skip

    def restore_tails(self, tails: Sequence[Tail]) -> None:
        """Index whole tails whose bytes are already in place, after `restore`.

        Each is as recent as the prefix that it stands on. Those without one are due before all
        others; of them, later ones count as more recent.
        """
        taken = [NO_BLOCKS]
        for number, tail in enumerate(tails, -len(tails)):
            prefix = self.index.locate(tail.root, tail.key)
            due = float(number) if prefix.run is None else self.index.due(prefix)
            self.tails.insert(tail, due)
            taken.append(tail.units)
            self.doomed.spare(tail.units)
            self._charge(tail.root, tail.units)
        self.pool.take_exactly(np.concatenate(taken))

    def _charge(self, root: RootId, blocks: BlockIds) -> None:
        if self.quotas is not None:
            self.quotas.take(self.quotas.tenant(root), blocks)

    def check(self) -> None:
        """Raise `InternalError` if ids were lost or a structure is broken. O(capacity)."""
        self.pool.check()
        self.index.check()
        self.tails.check()
        self.pinned.check(self.index.run)
        if self._retention is not None:
            self._retention.check()
        self.check_counts()
        if self.quotas is not None:
            found = chain(self.index.blocks_by_root(), self.tails.units_by_root())
            self.quotas.check(found, self.pool.free_ids())

    def check_counts(self) -> None:
        """Raise `InternalError` if the counts say that ids were lost. O(1)."""
        total = self.pool.num_free + self.num_indexed + self.num_leased + self.num_expected
        if total != self.capacity:
            raise InternalError(
                f"{self.name.value}: {self.pool.num_free} free + {self.num_indexed} indexed "
                f"+ {self.num_leased} leased + {self.num_expected} expected != {self.capacity}"
            )
