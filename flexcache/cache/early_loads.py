"""Prefetches to DRAM (`EarlyLoads`): loads that begin before their request asks for them.

    begun --> moving --landed--> waiting --its get begins--> used: early; late, if it had to wait
                |                   +--too old, cancelled, cleared--> wasted
                +--its get begins--> used: late
                +--cancelled, failed--> wasted
                +--too old: what was not begun is not read

Blocks have landed when they and all before them are in DRAM: those that continue a load of another
prompt wait for it. Landed blocks are pinned until their request asks, so neither other early loads
nor new blocks evict them. What DRAM had of the prompt before is kept, without a pin, for as long as
requests usually take to ask.

What peers are to read from SSD is loaded early, too: *staged*. It has a share of its own, teaches
nothing, is kept for seconds, and is the first to be evicted after that.

Early loads take at most a share of the tier: beyond it an early load gets what room is left, and
the request's own get loads the rest. They evict only what is worth less than they are lately, in
uses per time held.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import EarlyTerms, Plan
from flexcache.cache.prefix_index import EMPTY_MATCH, PrefixMatch
from flexcache.cache.tail_index import Tail
from flexcache.cache.tier import Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TaskId, TierName
from flexcache.stats import EarlyLoadStats

_DEFAULT_SHARE = 0.5
_MAX_OPEN = 64
"""Each get compares its prompt with all that are open."""
_KEEP = 0.9  # weight of the past, per load
_FIRST_HOLD_S = 1.0  # assumed until the first loads have ended
_LEAST_USED = 0.01
_HALF_LIFE_S = 60.0  # of the past, without loads

STAGED_SHARE = 1 / 8
"""Share of DRAM that may hold what peers are to read from SSD."""
STAGED_S = 3.0
"""How long it is on its way at most, and then kept for the peer."""
_STAGED_AGE_S = 1e9  # older than anything else


@dataclass(slots=True, eq=False)
class EarlyLoad:
    """Blocks of one prompt, which a prefetch brings."""

    task_id: TaskId
    plan: Plan
    root: RootId
    key: BlockKey
    """Key of the last block that it brings: a prompt that has it has all of them."""
    stop: int
    """Blocks of the prompt up to there."""
    num_blocks: int
    begun_s: float
    until_s: float
    """Until then it may be on its way; from its landing on, until then it is kept."""
    ttl_s: float
    is_staged: bool = False
    """Whether it is for a peer."""
    match: PrefixMatch = EMPTY_MATCH
    tail: Tail | None = None
    has_landed: bool = False
    asked_s: float | None = None
    """When its request first asked, if it was on its way then."""
    ask_until_s: float = 0.0
    """How long that request may wait for it."""
    is_used: bool = False


class _Experience:
    """How long requests have lately waited before they asked, and DRAM has held what was loaded.

    The latter is forgotten with time: once nothing may be evicted for loads, none would teach that
    they are used again.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._held_s = _FIRST_HOLD_S
        self._used = 1.0
        self._learned_s = 0.0

    def hold_s(self, now: float) -> float:
        """Return the seconds for which a load is held, per load that is used."""
        held_s, used = self._remembered(now)
        return held_s / used

    def asked(self, wait_s: float) -> None:
        self.wait_s = _KEEP * self.wait_s + (1 - _KEEP) * wait_s

    def used(self, since_s: float, now: float) -> None:
        self._add(now - since_s, 1.0, now)

    def wasted(self, since_s: float, now: float) -> None:
        self._add(now - since_s, 0.0, now)

    def _add(self, held_s: float, used: float, now: float) -> None:
        past_held_s, past_used = self._remembered(now)
        self._held_s = _KEEP * past_held_s + (1 - _KEEP) * held_s
        # Never zero: `hold_s` divides by it.
        self._used = max(_KEEP * past_used + (1 - _KEEP) * used, _LEAST_USED)
        self._learned_s = now

    def _remembered(self, now: float) -> tuple[float, float]:
        """Return the seconds and the share of loads that were used, on the way back to the first
        assumption."""
        share = 0.5 ** ((now - self._learned_s) / _HALF_LIFE_S)
        held_s = share * self._held_s + (1 - share) * _FIRST_HOLD_S
        return held_s, share * self._used + (1 - share)


class EarlyLoads:
    """The early loads of one cache, until their requests ask.

    Args:
        host: The DRAM tier.
        share: Share of it that they may take; 0 for half, where only callers begin them.
        ttl_s: How long landed blocks wait for their request, and a load for its turn.
    """

    def __init__(self, host: Tier, share: float, ttl_s: float) -> None:
        self._host = host
        self._max_blocks = max(1, int((share or _DEFAULT_SHARE) * host.capacity))
        self._ttl_s = ttl_s
        self._moving: dict[Plan, EarlyLoad] = {}
        self._behind: list[EarlyLoad] = []
        """Those that have been read, behind blocks that are still on their way."""
        self._landed: list[EarlyLoad] = []
        """The oldest first."""
        self.num_blocks = 0
        """Blocks that are on their way or wait for their request."""
        self._experience = _Experience()
        self.counters = EarlyLoadStats()

    @property
    def num_open(self) -> int:
        return len(self._moving) + len(self._behind) + len(self._landed)

    def terms(self, now: float) -> EarlyTerms:
        """Return what the next one may take."""
        taken = self.num_blocks - self._num_staged
        room = max(0, self._max_blocks - taken) if self.num_open < _MAX_OPEN else 0
        return EarlyTerms(room, self._experience.wait_s, self._experience.hold_s(now))

    def staging_terms(self) -> EarlyTerms:
        """Return what may be staged for a peer."""
        most = int(STAGED_SHARE * self._host.capacity)
        room = max(0, most - self._num_staged) if self.num_open < _MAX_OPEN else 0
        return EarlyTerms(room, 0.0, 0.0, _STAGED_AGE_S)

    @property
    def _num_staged(self) -> int:
        loads = (*self._under_way(), *self._landed)
        return sum(load.num_blocks for load in loads if load.is_staged)

    # -- loads -----------------------------------------------------------------------------------

    def begin(
        self, task_id: TaskId, plan: Plan, keys: BlockKeys, now: float, is_staged: bool = False
    ) -> None:
        """Follow a prefetch that was planned for a prompt, or what is staged for a peer."""
        num_there = plan.sources.get(TierName.CPU, 0)
        if num_there and not is_staged:
            there = self._host.index.locate(keys.root, keys.key(plan.start + num_there - 1))
            self._host.keep(there, min(self._experience.hold_s(now), self._ttl_s))
        num_below = plan.num_blocks - num_there
        if not num_below:
            return
        own_s = self._ttl_s if plan.terms is None else min(self._ttl_s, plan.terms.ttl_s)
        ttl_s = STAGED_S if is_staged else own_s
        self._moving[plan] = EarlyLoad(
            task_id, plan, keys.root, keys.key(plan.stop - 1), plan.stop, num_below, now,
            now + ttl_s, ttl_s, is_staged,
        )  # fmt: skip
        self.num_blocks += num_below

    def ended(self, plan: Plan, num_landed: int, num_read: int, now: float) -> None:
        """Keep what a prefetch, whose plan is finished, has brought for its request.

        Args:
            num_landed: Blocks that can be found, once all before them have landed.
            num_read: Blocks that were read.
        """
        load = self._moving.pop(plan, None)
        if load is None:
            return
        self.num_blocks -= load.num_blocks
        if load.is_used:
            return  # it has been counted as late
        if not num_landed:
            self.counters.wasted += 0 if load.is_staged else num_read
            return
        load.key, load.stop = plan.load_keys[num_landed - 1], plan.load_start + num_landed
        load.num_blocks = num_landed
        self.num_blocks += num_landed
        self._behind.append(load)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Keep the loads that were behind others which have landed now. A task has ended."""
        for load in self._behind.copy():
            load.match = self._host.index.locate(load.root, load.key)
            if load.match.run is None and self._host.is_in_flight(load.root, load.key):
                continue
            self._behind.remove(load)
            if load.match.run is None:  # what it builds on has not come
                self.num_blocks -= load.num_blocks
                self.counters.wasted += 0 if load.is_staged else load.num_blocks
                continue
            load.has_landed, load.until_s = True, now + load.ttl_s
            # Else other early loads, or new blocks, would evict what was just read.
            self._host.index.pin(load.match)
            if load.plan.tail is not None:
                load.tail = self._host.tails.find(load.root, load.plan.tail.key)
            if load.tail is not None:
                self._host.tails.pin(load.tail)
            self._landed.append(load)

    def cancel(self, task_id: TaskId, now: float) -> None:
        """Let go of what a prefetch has brought: its request has gone."""
        for load in [*self._behind, *self._landed]:
            if load.task_id == task_id:
                self._waste(load, now)
                return

    # -- gets ------------------------------------------------------------------------------------

    def find(self, keys: BlockKeys) -> list[EarlyLoad]:
        """Return the loads for a prompt that its get makes use of, if it is launched."""
        # Each get asks, and mostly there is none.
        if not self.num_open:
            return []
        found = (*self._under_way(), *self._landed)
        return [load for load in found if not load.is_staged and _is_of(load, keys)]

    def keep_longest(self, keys: BlockKeys) -> None:
        """Keep of the landed loads of a prompt only the one that has all of the others' blocks."""
        landed = [load for load in self.find(keys) if load.has_landed]
        for load in sorted(landed, key=lambda load: load.stop)[:-1]:
            self.counters.early += load.num_blocks
            load.is_used = True
            self._let_go(load)

    def awaited(self, keys: BlockKeys, now: float, patience_s: float) -> list[EarlyLoad]:
        """Return the loads on their way that a get for a prompt should wait for, no longer than
        ``patience_s`` from its first question on."""
        awaited = []
        for load in self._under_way():
            if not _is_of(load, keys):
                continue
            if load.asked_s is None:
                load.asked_s, load.ask_until_s = now, now + patience_s
                if not load.is_staged:
                    self._experience.asked(now - load.begun_s)
            if now < load.ask_until_s:
                awaited.append(load)
        return awaited

    def is_overdue(self, keys: BlockKeys, now: float) -> bool:
        """Whether a get has waited in vain: computing is faster than reading the blocks again."""
        return self.num_open > 0 and any(
            load.asked_s is not None and load.ask_until_s <= now and _is_of(load, keys)
            for load in self._under_way()
        )

    def use(self, loads: list[EarlyLoad], now: float) -> None:
        """Note that the get for which they were found begins; it has pins of its own."""
        for load in loads:
            is_open = load.has_landed or load in self._behind or load.plan in self._moving
            if load.is_used or not is_open:
                continue
            load.is_used = True
            self._experience.used(load.begun_s, now)
            if load.asked_s is None:
                self._experience.asked(now - load.begun_s)
            # One whose request had to wait did not come early, however soon it came then.
            if load.has_landed and load.asked_s is None:
                self.counters.early += load.num_blocks
            else:
                self.counters.late += load.num_blocks
            self._let_go(load)

    def _under_way(self) -> Iterator[EarlyLoad]:
        yield from self._moving.values()
        yield from self._behind

    def _let_go(self, load: EarlyLoad) -> None:
        """Keep its blocks no longer, if they have been read."""
        if load in self._behind:
            self._behind.remove(load)
        elif load.has_landed:
            self._landed.remove(load)
            self._host.unpin(load.match)
            if load.tail is not None:
                self._host.unpin_tail(load.tail)
        else:
            return
        load.has_landed = False
        self.num_blocks -= load.num_blocks

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `take_overdue` or `expire` has something to do at the earliest."""
        times = [load.until_s for load in (*self._moving.values(), *self._landed)]
        return min((time for time in times if time < math.inf), default=None)

    def take_overdue(self, now: float) -> EarlyLoad | None:
        """Return a load that has been on its way for too long, each once; None if there is none."""
        for load in self._moving.values():
            if load.until_s <= now:
                # Told once: what is being read by then ends by itself.
                load.until_s = math.inf
                return load
        return None

    def expire(self, now: float) -> None:
        """Let go of blocks that no request has asked for in time."""
        for load in [load for load in self._landed if load.until_s <= now]:
            self._waste(load, now)

    def let_go_expired(self, now: float) -> None:
        """Let go of blocks that were not used for so long that the tier has dropped them."""
        for load in self._landed.copy():
            if not self._host.index.contains(load.root, load.key):
                self._waste(load, now)

    def forget(self) -> None:
        """Let go of all that has landed: the tier is to be cleared."""
        while self._landed:
            self._waste(self._landed[-1])

    def _waste(self, load: EarlyLoad, now: float | None = None) -> None:
        if not load.is_staged:
            self.counters.wasted += load.num_blocks
            if now is not None:
                self._experience.wasted(load.begun_s, now)
        self._let_go(load)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self.num_blocks != sum(load.num_blocks for load in (*self._under_way(), *self._landed)):
            raise InternalError("blocks of early loads are miscounted")
        if any(load.match.run is None or not load.has_landed for load in self._landed):
            raise InternalError("an early load has landed and is not pinned")
        if any(not self._host.is_in_flight(load.root, load.key) for load in self._behind):
            raise InternalError("an early load waits for nothing")


def _is_of(load: EarlyLoad, keys: BlockKeys) -> bool:
    """Whether a load is of a prefix of this prompt."""
    return (
        load.stop <= keys.num_blocks
        and load.root == keys.root
        and load.key == keys.key(load.stop - 1)
    )
