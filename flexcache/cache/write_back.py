"""Write-back: what waits to be written to the tiers below DRAM, and how much may be."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexcache.cache.block_keys import PromptContent
from flexcache.cache.plan import Plan
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiers import Tiers
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TierName

BURST_S = 10.0
"""A tier that was left alone may receive what it could have received in this time, at once."""
_SHORTEST_WAIT_S = 1e-3


class WriteBudget:
    """A token bucket, spent in blocks.

    A budget grows at the rate that the operator sets, up to what `BURST_S` bring, and what is
    planned to be written is taken off. Writes beyond it are not planned. Reads never wait for it,
    nor do writes that have been planned.

    Args:
        bytes_per_s: The rate.
        block_bytes: Bytes that a block takes in the tier.
    """

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._blocks_per_s = bytes_per_s / block_bytes
        self._most = max(1.0, self._blocks_per_s * BURST_S)
        self._blocks = self._most
        self._now = -math.inf

    def room(self, now: float) -> int:
        """Return how many blocks may be written now."""
        if now > self._now:
            self._blocks = min(self._most, self._blocks + (now - self._now) * self._blocks_per_s)
            self._now = now
        return max(0, int(self._blocks))

    def allows(self, count: int, now: float) -> bool:
        """Whether ``count`` blocks that belong together may be written now.

        If they are more than it ever holds, they may be once it is full: later writes pay for them.
        """
        return self.room(now) >= min(count, int(self._most))

    def next_room(self, count: int, now: float) -> float:
        """Return when it will allow this many blocks, if no others are written. Not now."""
        # More than it ever holds is allowed once it is full: else it would wait for ever.
        missing = min(count, int(self._most)) - self._blocks
        return now + max(_SHORTEST_WAIT_S, missing / self._blocks_per_s)

    def spend(self, count: int) -> None:
        """Take off the blocks of a plan."""
        self._blocks -= count

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self._blocks > self._most:
            raise InternalError(f"{self._blocks} blocks in a budget of {self._most}")


_REMOTE_SHARE = 4  # a quarter: a store that hangs must not hold up the disk


class StoreBacklog:
    """Blocks and units of tails that wait to be written, by tier.

    The number of host blocks that wait, pinned, to be written is bounded; so is what is written per
    second, where the operator limits that (`WriteBudget`).

    Args:
        max_blocks: Upper bound, over all tiers.
        budgets: Those of the tiers whose writes per second are limited.
    """

    def __init__(
        self, tiers: Tiers, max_blocks: int, budgets: Mapping[TierName, WriteBudget]
    ) -> None:
        self._tiers = tiers
        self.max_blocks = max_blocks
        self._budgets = budgets
        self._by_tier = dict.fromkeys(tiers.by_name, 0)

    @property
    def total(self) -> int:
        """Blocks that wait, counted once per tier."""
        return sum(self._by_tier.values())

    def of(self, name: TierName) -> int:
        return self._by_tier[name]

    def room(self, name: TierName) -> int:
        """Return how many more blocks may wait to be written to a tier."""
        room = self.max_blocks - self.total
        if name is TierName.REMOTE:
            room = min(room, self.max_blocks // _REMOTE_SHARE - self._by_tier[name])
        return max(0, room)

    def room_for(
        self, plan: Plan, tier: Tier, count: int, limit: int | None, is_paid: bool = False
    ) -> tuple[int, str | None]:
        """Return how many of ``count`` blocks a plan may write to a tier, and why not all.

        Args:
            limit: At most this many blocks of the plan may wait to be written to the tier.
            is_paid: The tier's budget allows them (`affordable_at`).
        """
        name = tier.name.value.lower()
        if tier.name in self._tiers.unavailable:
            return 0, f"{name}_unavailable"
        room = self.room(tier.name)
        if limit is not None:
            room = max(0, min(room, limit - plan.num_reserved.get(tier.name, 0)))
        room, reason = (room, f"{name}_write_backlog") if room < count else (count, None)
        budget = self._budgets.get(tier.name)
        if budget is not None and not is_paid:
            affordable = budget.room(self._tiers.now)
            if affordable < room:
                return affordable, f"{name}_write_throttled"
        return room, reason

    def affordable_at(self, name: TierName, count: int) -> float | None:
        """Return when a tier's budget will allow this many blocks; None if it does now."""
        budget, now = self._budgets.get(name), self._tiers.now
        if budget is None or budget.allows(count, now):
            return None
        return budget.next_room(count, now)

    def reserve(self, plan: Plan, name: TierName, count: int) -> None:
        """Count blocks of a plan until `release`, and against the budget for good."""
        plan.num_reserved[name] = plan.num_reserved.get(name, 0) + count
        self._by_tier[name] += count
        if name in self._budgets:
            self._budgets[name].spend(count)

    def release(self, plan: Plan) -> None:
        """Count the blocks of a plan no more: it has ended."""
        for name, count in plan.num_reserved.items():
            self._by_tier[name] -= count


@dataclass(slots=True, eq=False)
class DirtyPrompt:
    """Blocks of a prompt, in order. DRAM has them and all blocks before them."""

    root: RootId
    keys: dict[BlockKey, None]
    content: PromptContent | None = None


class DirtyQueue:
    """Queue of dirty blocks, first in, first out; each block once.

        indexed in DRAM --> dirty --> in a lease of the tier --> indexed there
                            ^    |                 |    |
                            |    +--> evicted      |    +--> a write failed: given up
                            +----------------------+ the lease ends without them

    A block leaves the dirty set only by one of these arrows, so none is forgotten while DRAM holds
    it. The set is bounded: beyond ``high`` the oldest prompts are written until at most three
    quarters of that remain. DRAM mostly evicts the oldest blocks, so with a bound well below DRAM's
    size blocks are written before they are evicted.

    Args:
        high: Number of dirty blocks beyond which some are written.
    """

    def __init__(self, high: int) -> None:
        self._high = max(1, high)
        # With one bound each new block would have one written: small writes, always.
        self._low = self._high * 3 // 4
        self._prompts: OrderedDict[DirtyPrompt, None] = OrderedDict()
        self._by_key: dict[RootId, dict[BlockKey, DirtyPrompt]] = {}
        self._is_draining = False
        self.num_blocks = 0

    def contains(self, root: RootId, key: BlockKey) -> bool:
        return key in self._by_key.get(root, ())

    def add(
        self,
        root: RootId,
        keys: Iterable[BlockKey],
        content: PromptContent | None = None,
        is_old: bool = False,
    ) -> None:
        """Add the blocks that are not dirty yet; ``is_old`` ones are written first."""
        known = self._by_key.get(root, {})
        prompt = DirtyPrompt(root, {key: None for key in keys if key not in known}, content)
        if not prompt.keys:
            return
        self._by_key.setdefault(root, known).update(dict.fromkeys(prompt.keys, prompt))
        self._prompts[prompt] = None
        # DRAM evicts old blocks first: at the young end they would be gone before their turn.
        if is_old:
            self._prompts.move_to_end(prompt, last=False)
        self.num_blocks += len(prompt.keys)
        self._is_draining |= self.num_blocks > self._high

    def discard(self, root: RootId, keys: Sequence[BlockKey]) -> int:
        """Remove keys; return how many of them were dirty."""
        known, count = self._by_key.get(root), 0
        if known is None:
            return 0
        for key in keys:
            prompt = known.pop(key, None)
            if prompt is None:
                continue
            count += 1
            del prompt.keys[key]
            if not prompt.keys:
                del self._prompts[prompt]
        if not known:
            del self._by_key[root]
        self.num_blocks -= count
        self._is_draining &= self.num_blocks > self._low
        return count

    def peek(self) -> DirtyPrompt | None:
        """Return the prompt to write now, if there is one."""
        return next(iter(self._prompts)) if self._is_draining else None

    def pop(self) -> DirtyPrompt:
        """Remove and return the oldest prompt."""
        prompt = next(iter(self._prompts))
        # A copy, as `discard` empties the prompt's own table.
        popped = DirtyPrompt(prompt.root, prompt.keys.copy(), prompt.content)
        self.discard(prompt.root, list(popped.keys))
        return popped

    def drain(self) -> None:
        """Make everything due: the cache is about to close."""
        self._high = self._low = 0
        self._is_draining = bool(self._prompts)


class WriteBack:
    """Observes DRAM and a tier below it, to track which blocks are dirty.

    Args:
        lose: Called for blocks that left DRAM before the tier received them.
    """

    def __init__(
        self, host: Tier, tier: Tier, dirty: DirtyQueue, lose: Callable[[Tier, int], None]
    ) -> None:
        self._host = host
        self._tier = tier
        self._lose = lose
        self.dirty = dirty
        self.tokens_per_block = 0
        """Block size if a journal records the content of blocks; else 0."""
        host.on_stored.append(
            lambda root, _, keys, content, first: self.mark(root, keys, content, first)
        )
        host.index.on_removed.append(self._evicted)
        tier.on_stored.append(lambda root, _, keys, *__: dirty.discard(root, keys))
        tier.on_unpublished = self._unwritten

    def mark(
        self,
        root: RootId,
        keys: Sequence[BlockKey],
        content: PromptContent | None,
        first: int,
        is_old: bool = False,
    ) -> None:
        """Mark the blocks that the tier lacks; the first key is at ``first`` of its prompt."""
        lacking = [key for key in keys if not self._tier.index.contains(root, key)]
        if content is not None:  # only of these blocks: they may stay dirty for long
            stop, size = first + len(keys), self.tokens_per_block
            content = content.part(first, stop, size) if size else None
        self.dirty.add(root, lacking, content, is_old)

    def _evicted(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        if count := self.dirty.discard(root, keys):
            self._lose(self._tier, count)

    def _unwritten(self, lease: Lease) -> None:
        """Handle a lease on the tier that ended without some of its blocks."""
        if lease.is_given_up:
            return  # the disk rejected it and lives on: it would be rejected again
        root, at_tier, on_host = lease.root, self._tier.index, self._host.index
        kept = lease.keys[: lease.limit]  # the others were deleted
        lacking = [key for key in kept if not at_tier.contains(root, key)]
        held = [key for key in lacking if on_host.contains(root, key)]
        if len(held) < len(lacking):
            self._lose(self._tier, len(lacking) - len(held))
        self.dirty.add(root, held, lease.content, is_old=True)
