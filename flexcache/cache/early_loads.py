"""EarlyLoads: what is brought to DRAM before its request asks for it.

    begun --> moving --landed--> waiting --its get begins--> used: early; late, if it had to wait
                |                   +--too old, cancelled, cleared--> wasted
                +--its get begins--> used: late
                +--cancelled, failed--> wasted

Landed blocks are pinned until their request asks, so neither other early loads nor new blocks evict
them. They take at most a share of the tier: beyond it an early load gets what room is left, and the
request's own get loads the rest.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import Plan
from flexcache.cache.prefix_index import EMPTY_MATCH, PrefixMatch
from flexcache.cache.tail_index import Tail
from flexcache.cache.tier import Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TaskId, TierName

_DEFAULT_SHARE = 0.5
_MAX_OPEN = 64
"""Each get compares its prompt with all that are open."""


@dataclass(slots=True)
class EarlyLoadCounters:
    """Since startup, in blocks read from tiers below DRAM.

    Attributes:
        early: In DRAM when their request asked for them.
        late: On their way when their request asked.
        wasted: Read, and not asked for in time.
    """

    early: int = 0
    late: int = 0
    wasted: int = 0


@dataclass(slots=True, eq=False)
class EarlyLoad:
    """Blocks of one prompt, which a prefetch brings."""

    task_id: TaskId
    root: RootId
    key: BlockKey
    """Key of the last block that it brings: a prompt that has it has all of them."""
    stop: int
    """Blocks of the prompt up to there."""
    num_blocks: int
    until_s: float
    match: PrefixMatch = EMPTY_MATCH
    tail: Tail | None = None
    has_landed: bool = False
    ask_until_s: float | None = None
    """Its request has asked while it was on its way, and may wait until then."""
    is_used: bool = False


class EarlyLoads:
    """The early loads of one cache, until their requests ask.

    Args:
        host: The DRAM tier.
        share: Share of it that they may take; 0 for half, where only callers begin them.
        ttl_s: How long landed blocks wait for their request.
    """

    def __init__(self, host: Tier, share: float, ttl_s: float) -> None:
        self._host = host
        self._max_blocks = max(1, int((share or _DEFAULT_SHARE) * host.capacity))
        self._ttl_s = ttl_s
        self._moving: dict[Plan, EarlyLoad] = {}
        self._landed: list[EarlyLoad] = []
        """The oldest first."""
        self._num_blocks = 0
        self.counters = EarlyLoadCounters()

    @property
    def num_open(self) -> int:
        return len(self._moving) + len(self._landed)

    @property
    def num_blocks(self) -> int:
        """Blocks that are on their way or wait for their request."""
        return self._num_blocks

    @property
    def room(self) -> int:
        """How many blocks the next one may bring."""
        return max(0, self._max_blocks - self._num_blocks) if self.num_open < _MAX_OPEN else 0

    # -- loads -----------------------------------------------------------------------------------

    def begin(self, task_id: TaskId, plan: Plan, keys: BlockKeys, now: float) -> None:
        """Follow a prefetch that was planned for a prompt."""
        num_below = plan.num_blocks - plan.sources.get(TierName.CPU, 0)
        if not num_below:
            return
        load = EarlyLoad(
            task_id, keys.root, keys.key(plan.stop - 1), plan.stop, num_below, now + self._ttl_s
        )
        self._moving[plan] = load
        self._num_blocks += num_below

    def ended(self, plan: Plan, num_landed: int, num_read: int, now: float) -> None:
        """Keep what has landed of a prefetch, whose plan is finished, for its request.

        Args:
            num_landed: Blocks that can be found now.
            num_read: Blocks that were read.
        """
        load = self._moving.pop(plan, None)
        if load is None:
            return
        self._num_blocks -= load.num_blocks
        if not num_landed:
            if not load.is_used:  # else it has been counted as late
                self.counters.wasted += num_read
            return
        last = plan.load_keys[num_landed - 1]
        load.match = self._host.index.locate(plan.root, last)
        if load.is_used or load.match.run is None:
            return
        load.key, load.stop, load.num_blocks = last, plan.load_start + num_landed, num_landed
        load.has_landed, load.until_s = True, now + self._ttl_s
        self._host.pin(load.match)
        if plan.tail is not None:
            load.tail = self._host.tails.find(plan.root, plan.tail.key)
        if load.tail is not None:
            self._host.pin_tail(load.tail)
        self._landed.append(load)
        self._num_blocks += num_landed

    def cancel(self, task_id: TaskId) -> None:
        """Let go of what a prefetch has brought: its request has gone."""
        for load in self._landed:
            if load.task_id == task_id:
                self._landed.remove(load)
                self._waste(load)
                return

    # -- gets ------------------------------------------------------------------------------------

    def find(self, keys: BlockKeys) -> list[EarlyLoad]:
        """Return the loads for a prompt that its get makes use of, if it is launched."""
        return [load for load in self._open() if _is_of(load, keys)] if self.num_open else []

    def awaits(self, keys: BlockKeys, now: float, patience_s: float) -> bool:
        """Whether a get should wait for what is on its way for its prompt, no longer than
        ``patience_s`` from its first question on."""
        moving = [load for load in self._moving.values() if _is_of(load, keys)]
        for load in moving:
            if load.ask_until_s is None:
                load.ask_until_s = now + patience_s
        return any(now < load.ask_until_s for load in moving if load.ask_until_s is not None)

    def is_overdue(self, keys: BlockKeys, now: float) -> bool:
        """Whether a get has waited in vain: computing is faster than reading the blocks again."""
        return any(
            load.ask_until_s is not None and load.ask_until_s <= now and _is_of(load, keys)
            for load in self._moving.values()
        )

    def use(self, loads: list[EarlyLoad]) -> None:
        """Note that the get for which they were found begins; it has pins of its own."""
        for load in loads:
            if load.is_used or not (load.has_landed or load in self._moving.values()):
                continue
            load.is_used = True
            if load.has_landed and load.ask_until_s is None:
                self.counters.early += load.num_blocks
            else:
                self.counters.late += load.num_blocks
            if load.has_landed:
                self._landed.remove(load)
                self._let_go(load)

    def _open(self) -> Iterator[EarlyLoad]:
        yield from self._moving.values()
        yield from self._landed

    def _let_go(self, load: EarlyLoad) -> None:
        self._num_blocks -= load.num_blocks
        load.has_landed = False
        self._host.unpin(load.match)
        if load.tail is not None:
            self._host.unpin_tail(load.tail)

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        return self._landed[0].until_s if self._landed else None

    def expire(self, now: float) -> None:
        """Let go of blocks that no request has asked for in time."""
        while self._landed and self._landed[0].until_s <= now:
            self._waste(self._landed.pop(0))

    def forget(self) -> None:
        """Let go of all that has landed: the tier is to be cleared."""
        while self._landed:
            self._waste(self._landed.pop())

    def _waste(self, load: EarlyLoad) -> None:
        self.counters.wasted += load.num_blocks
        self._let_go(load)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self._num_blocks != sum(load.num_blocks for load in self._open()):
            raise InternalError("blocks of early loads are miscounted")
        if any(load.match.run is None or not load.has_landed for load in self._landed):
            raise InternalError("an early load has landed and is not pinned")


def _is_of(load: EarlyLoad, keys: BlockKeys) -> bool:
    """Whether a load is of a prefix of this prompt."""
    return (
        load.stop <= keys.num_blocks
        and load.root == keys.root
        and load.key == keys.key(load.stop - 1)
    )
