"""StorePlanner: plans what puts copy off the GPU, and what the tiers below DRAM receive and when.

Blocks that a put copies to the host tier go on to each lower tier by its write policy: at once
(write-through), as far as an `Admission` allows, or when a `DirtyQueue` is full (write-back).

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexcache.cache.admission import Admission
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.plan import STORE_OP, Plan, block_names, chunks
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.put_plan import begin_put
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.store_backlog import StoreBacklog
from flexcache.cache.tail_stores import TailStores
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_back import DirtyQueue, WriteBack
from flexcache.cache.write_budget import WriteBudget
from flexcache.config.model import UnitShape
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.graph import BlockIds


@dataclass(frozen=True, slots=True)
class _Copy:
    """An op that copies the blocks of a chunk from the GPU to ``landing``."""

    op: OpId
    chunk: range
    landing: BlockIds


class StorePlanner:
    """Plans puts, and writes to lower tiers, over a cache's tiers.

    Args:
        op_ids: Shared with the cache's other planner.
        chunk_blocks: Blocks per op if one tier feeds another, so that both work at once.
        max_backlog: Host blocks that may wait to be written below; blocks of a put beyond it stay
            on the host tier only.
        budgets: Those of the tiers whose writes per second are limited.
        admissions: Policies of the tiers that do not take every block.
        write_back: Queues of the tiers with write-back.
        shape: How the blocks of several groups fill the cache's units; None for a single group.
    """

    def __init__(
        self,
        tiers: Tiers,
        op_ids: Iterator[OpId],
        chunk_blocks: int,
        max_backlog: int,
        budgets: Mapping[TierName, WriteBudget],
        admissions: Mapping[TierName, Admission],
        write_back: Mapping[TierName, DirtyQueue],
        shape: UnitShape | None = None,
    ) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks
        self.max_backlog = max_backlog
        self._backlog = StoreBacklog(tiers, max_backlog, budgets)
        self.era = 0
        """How often the SSD tier was reset: what was planned before is not recorded for good."""
        self._admissions = dict(admissions)
        self._write_back = {
            name: WriteBack(self._host, tiers.by_name[name], dirty, tiers.lose)
            for name, dirty in write_back.items()
        }
        self._shape = shape
        self._tails: TailStores | None = None
        if shape is not None and shape.sparse:
            self._tails = TailStores(tiers.host, op_ids, chunk_blocks, self._backlog, shape)

    @property
    def backlog(self) -> int:
        """Host blocks that wait to be written below, counted once per tier."""
        return self._backlog.total

    def keep_content(self, tokens_per_block: int) -> None:
        """Keep, for a journal, the content of blocks that wait to be written back."""
        for late in self._write_back.values():
            late.tokens_per_block = tokens_per_block

    def plan_put(
        self, keys: BlockKeys, start: int, stop: int, max_backlog: int | None = None,
        retain_s: float = 0.0, tail_at: int = 0,
    ) -> Plan:  # fmt: skip
        """Plan to store the blocks ``[start, stop)`` that the host tier neither has nor awaits.

        Blocks whose prefix is not cached are not stored: no lookup could find them.

        Args:
            max_backlog: At most this many are written below.
            retain_s: In every tier the prompt counts as used this much later.
            tail_at: Store the tail behind this many blocks too, unless it is 0.
        """
        plan, cached = begin_put(self._tiers, self._host, keys, stop, retain_s)
        first = plan.start
        if self._shape is not None:
            plan.take_shape(self._shape)
        copies: list[_Copy] = []
        if first >= stop or not plan.has_dense:
            plan.start = plan.stop = stop
            if not tail_at:
                return plan
        elif start > first:
            plan.dropped["prefix_not_cached"] = stop - start
            return plan
        else:
            plan.staging = self._host.reserve(keys, first, stop, plan.outlook, retain_s)
            plan.stop = first + len(plan.staging)
            if plan.stop < stop:
                plan.dropped[plan.staging.why_short("host")] = stop - plan.stop
            copies = self._add_copies(plan)
        tail_copies: dict[OpId, range] = {}
        if self._tails is not None and 0 < tail_at <= plan.stop:
            plan.pin(self._host, cached)
            tail_copies = self._tails.copy(plan, keys, tail_at, retain_s)
        if copies or tail_copies:
            self._add_stores(
                plan, keys, cached, copies, tail_copies, None, max_backlog, retain_s, start
            )
        return plan

    def plan_store(
        self, keys: BlockKeys, stop: int, max_backlog: int | None = None, retain_s: float = 0.0,
        tiers: Iterable[Tier] | None = None, tail_at: int = 0, start: int = 0,
    ) -> Plan:  # fmt: skip
        """Plan to write what the host has of a prompt's first blocks to the tiers that lack it.

        Does not touch the GPU. The graph is empty if no tier lacks anything.

        Args:
            tiers: Write back to these only, whatever their write policy: no use of the blocks.
            tail_at: Write the tail behind this many blocks too, unless it is 0.
            start: The blocks before it were offered by an earlier put of the same request.
        """
        cached = self._host.index.match(keys)
        if self._shape is None or self._shape.dense_blocks:
            stop = min(stop, cached.num_blocks)
        plan = Plan(TaskKind.STORE, keys.root, stop, stop, is_write_back=tiers is not None)
        self._tiers.num_holders += 1
        if self._tails is not None and 0 < tail_at <= plan.stop:
            self._tails.find(plan, keys, tail_at, retain_s)
        self._add_stores(plan, keys, cached, [], {}, tiers, max_backlog, retain_s, start)
        return plan

    def plan_write_back(self) -> Plan | None:
        """Plan to write dirty blocks to a tier with write-back; None if no blocks are due.

        The plan has no op if all of them are dropped.
        """
        for name, late in self._write_back.items():
            if name in self._tiers.unavailable or self._tiers.is_withheld(name):
                continue
            tier = self._tiers.by_name[name]
            while (prompt := late.dirty.peek()) is not None:
                room = self._backlog.room(name)
                if not room or (self._backlog.of(name) and room < len(prompt.keys)):
                    break  # until the blocks in flight have been written
                if self.throttled_until(name) is not None:
                    break
                prompt = late.dirty.pop()
                root, content, last = prompt.root, prompt.content, next(reversed(prompt.keys))
                path = self._host.index.path_keys(self._host.index.locate(root, last))
                keys = EngineBlockKeys(root, path, len(path), content)
                plan = self.plan_store(keys, len(path), tiers=[tier])
                num_beyond = sum(plan.dropped.pop(why, 0) for why in _why_later(name))
                if num_beyond:
                    late.dirty.add(root, path[-num_beyond:], content, is_old=True)
                if plan.graph.ops or plan.dropped:
                    return plan
                self._tiers.num_holders -= 1  # a plan without an op holds nothing
        return None

    def throttled_until(self, name: TierName) -> float | None:
        """Return until when dirty blocks that are due wait for their tier's budget, if they do."""
        late = self._write_back.get(name)
        prompt = None if late is None else late.dirty.peek()
        return None if prompt is None else self._backlog.affordable_at(name, len(prompt.keys))

    def put_off(self, plan: Plan, name: TierName, has_failed: bool) -> bool:
        """Whether blocks that a plan failed to write to a tier become dirty again, not lost.

        They do if the plan writes back and the tier is unavailable, or has failed as a whole.
        """
        plan.has_failed = True
        plan.is_put_off |= plan.is_write_back and (has_failed or name in self._tiers.unavailable)
        return plan.is_put_off

    def begin_closing(self) -> None:
        """Make `plan_write_back` return everything that is still to be written."""
        for late in self._write_back.values():
            late.dirty.drain()

    def num_dirty(self, name: TierName) -> int:
        """Blocks that wait to be written back to a tier."""
        late = self._write_back.get(name)
        return 0 if late is None else late.dirty.num_blocks

    def is_dirty(self, name: TierName, root: RootId, key: BlockKey) -> bool:
        late = self._write_back.get(name)
        return late is not None and late.dirty.contains(root, key)

    def release(self, plan: Plan) -> None:
        """End a plan's writes: blocks that were not published are freed."""
        self._backlog.release(plan)
        for name, lease in plan.stores.items():
            self._tiers.by_name[name].release(lease)
        plan.stores = {}
        if plan.tail is not None:
            for name, lease in plan.tail.stores.items():
                self._tiers.by_name[name].release(lease)
            plan.tail.stores = {}

    def stats_of(self, name: TierName) -> dict[str, int]:
        """Counters of a tier's write policy."""
        stats = self._admissions[name].stats() if name in self._admissions else {}
        return stats | {"dirty_blocks": self.num_dirty(name)} if name in self._write_back else stats

    def _add_copies(self, plan: Plan) -> list[_Copy]:
        """Copy the staged blocks off the GPU, in chunks."""
        assert plan.staging is not None
        staged = plan.staging.blocks.copy()
        copies = []
        for chunk in chunks(plan.start, plan.stop, self._chunk_blocks):
            landing = staged[chunk.start - plan.start : chunk.stop - plan.start]
            op = plan.graph.add(next(self._op_ids), OpKind.D2H, chunk.start, None, landing)
            copies.append(_Copy(op, chunk, landing))
        return copies

    def _add_stores(
        self, plan: Plan, keys: BlockKeys, cached: PrefixMatch, copies: Sequence[_Copy],
        tail_copies: dict[OpId, range], tiers: Iterable[Tier] | None, max_backlog: int | None,
        retain_s: float, start: int,
    ) -> None:  # fmt: skip
        """Write to the tiers below what they lack of the host's blocks and of those being copied.

        Args:
            copies: Ops that copy blocks ``[plan.start, plan.stop)`` to the host.
            tail_copies: Ops that copy the units of ``plan.tail`` to the host.
            tiers: None for all, each by its own policy.
            start: The blocks before it were offered by an earlier put of the request.
        """
        tail_end = 0 if plan.tail is None else plan.tail.position
        for tier in self._tiers.lower if tiers is None else tiers:
            begin = tier.match(keys, plan.outlook, retain_s, not plan.is_write_back).num_blocks
            begin += tier.num_in_flight(keys, begin, plan.stop)
            late = self._write_back.get(tier.name) if tiers is None else None
            end = plan.stop if late is None else 0
            if tiers is None and (admission := self._admissions.get(tier.name)) is not None:
                end = _admit(admission, plan, keys, begin, start, retain_s)
            is_admitted = late is not None or tail_end <= end
            if tiers is None and self._tails is not None:
                num_blocks = max(0, end - begin)
                if self._tails.are_throttled(plan, tier, num_blocks, is_admitted, retain_s):
                    end, is_admitted = 0, False
            if begin < end:
                self._add_blocks(
                    plan, tier, keys, cached, copies, begin, end, max_backlog, retain_s
                )
            elif late is not None and begin < plan.start <= cached.num_blocks:
                # the host has them, the tier lacks them: a write failed, for example
                late.mark(keys.root, keys.slice(begin, plan.start), keys.content, begin)
            if self._tails is not None and plan.tail is not None and is_admitted:
                self._tails.store(plan, tier, tail_copies, self.era, max_backlog, retain_s)

    def _add_blocks(
        self, plan: Plan, tier: Tier, keys: BlockKeys, cached: PrefixMatch, copies: Sequence[_Copy],
        begin: int, end: int, max_backlog: int | None, retain_s: float,
    ) -> None:  # fmt: skip
        """Write blocks ``[begin, end)`` to a tier, as far as there is room."""
        if begin < plan.start and cached.num_blocks < plan.start:
            return  # earlier blocks are still being copied to the host: their put writes them
        is_paid = self._tails is not None and tier.name not in self._write_back
        room, reason = self._backlog.room_for(plan, tier, end - begin, max_backlog, is_paid)
        if reason is not None:
            plan.dropped[reason] = end - begin - room
        if not room:
            return
        end = begin + room
        outlook = self._tiers.recall(keys) if plan.outlook is None else plan.outlook
        lease = tier.reserve(keys, begin, end, outlook, retain_s)
        lease.used_s = self._host.last_used(cached, begin) if plan.is_write_back else None
        plan.stores[tier.name] = lease
        plan.store_starts[tier.name] = begin
        self._backlog.reserve(plan, tier.name, len(lease))
        if isinstance(tier, RemoteTier):
            plan.remote_root = tier.root_at_store(plan.root)
        if begin + len(lease) < end:
            plan.dropped[lease.why_short(tier.name.value.lower())] = end - begin - len(lease)
        end = begin + len(lease)
        self._add_back_fill(plan, tier, keys, lease, cached, begin, min(end, plan.start))
        for copy in copies:
            low, high = max(copy.chunk.start, begin), min(copy.chunk.stop, end)
            if low < high:
                source = copy.landing[low - copy.chunk.start : high - copy.chunk.start]
                target = lease.blocks[low - begin : high - begin]
                self._add_store(plan, tier, keys, low, source, target, [copy.op])

    def _add_back_fill(
        self, plan: Plan, tier: Tier, keys: BlockKeys, lease: Lease, cached: PrefixMatch,
        begin: int, end: int,
    ) -> None:  # fmt: skip
        """Write blocks that the host tier has and a lower one lacks."""
        if begin >= end:
            return
        plan.pin(self._host, cached)
        source = self._host.index.blocks(cached, begin)
        for chunk in chunks(begin, end, self._chunk_blocks):
            low, high = chunk.start - begin, chunk.stop - begin
            used_s = None if lease.used_s is None else float(lease.used_s[high - 1])
            target = lease.blocks[low:high]
            self._add_store(plan, tier, keys, chunk.start, source[low:high], target, [], used_s)

    def _add_store(
        self, plan: Plan, tier: Tier, keys: BlockKeys, first: int, source: BlockIds,
        target: BlockIds, depends_on: Sequence[OpId], used_s: float | None = None,
    ) -> None:  # fmt: skip
        names = block_names(tier, keys, first, first + len(target), used_s, self.era)
        plan.graph.add(
            next(self._op_ids), STORE_OP[tier.name], first, source, target, depends_on, names
        )


def _admit(
    admission: Admission, plan: Plan, keys: BlockKeys, begin: int, start: int, retain_s: float
) -> int:
    """Return how many of a prompt's first blocks a tier's policy writes now.

    Args:
        begin: The blocks before it are in the tier.
        start: The blocks before it were offered by an earlier put of the request.
    """
    end = admission.admit(keys, plan.stop, start, retain_s)
    num_refused = plan.stop - max(begin, start, end)
    if admission.why_refused is not None and num_refused > 0:
        plan.drop(admission.why_refused, num_refused)
    return end


def _why_later(name: TierName) -> tuple[str, str]:
    """Why a plan leaves out blocks that can be written later."""
    tier = name.value.lower()
    return f"{tier}_write_backlog", f"{tier}_write_throttled"
