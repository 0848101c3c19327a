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
from flexcache.cache.plan import STORE_OP, Plan, PlannedTail, block_names, chunks
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tail_index import TAIL_FIRST
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiers import RemoteTier, Tiers
from flexcache.cache.write_back import DirtyQueue, StoreBacklog, WriteBack, WriteBudget
from flexcache.config.model import UnitShape
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.scheduler import BlockIds


def begin_put(
    tiers: Tiers, tier: Tier, keys: BlockKeys, stop: int, retain_s: float
) -> tuple[Plan, PrefixMatch]:
    """Begin to plan a put of a prompt's first ``stop`` blocks; the prompt counts as used.

    Args:
        tier: Takes the blocks from the GPU.
        retain_s: The prompt counts as used this much later.

    Returns:
        An empty plan, behind the blocks that the tier has or awaits, and those that it has.
    """
    cached = tier.index.match(keys)
    first = cached.num_blocks
    first += tier.num_in_flight(keys, first, stop)
    plan = Plan(TaskKind.PUT, keys.root, first, first)
    tiers.num_holders += 1
    if first < stop:
        plan.outlook = tiers.store(keys, stop)
    else:
        tiers.store_nothing(keys, stop)
    tier.use(cached, plan.outlook, retain_s)
    return plan, cached


class TailStores:
    """Plans stores of tails. Arguments as for `StorePlanner`."""

    def __init__(
        self,
        host: Tier,
        op_ids: Iterator[OpId],
        chunk_blocks: int,
        backlog: StoreBacklog,
        shape: UnitShape,
    ) -> None:
        self._host = host
        self._backlog = backlog
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks
        self._shape = shape

    def find(self, plan: Plan, keys: BlockKeys, position: int, retain_s: float) -> bool:
        """Plan for a tail that the host tier has, without copying it; whether it has it."""
        tail = self._host.tails.find(keys.root, keys.key(position - 1))
        if tail is None:
            return False
        self._host.use_tail(tail, retain_s)
        self._host.pin_tail(tail)
        plan.tail = PlannedTail(position, tail.key, tail.units, pins=[(self._host, tail)])
        return True

    def copy(
        self, plan: Plan, keys: BlockKeys, position: int, retain_s: float
    ) -> dict[OpId, range]:
        """Copy a tail off the GPU unless the host tier has or awaits it.

        Returns:
            The copies, and which of its units each copies.
        """
        if self.find(plan, keys, position, retain_s):
            return {}
        key, count = keys.key(position - 1), self._shape.tail_units(position)
        if self._host.is_tail_in_flight(keys.root, key, count):
            return {}
        lease = self._host.reserve_tail(keys.root, key, count)
        if lease is None:
            plan.drop("host_tier_full", count)
            return {}
        lease.retain_s = retain_s
        units = lease.blocks.copy()
        plan.tail = PlannedTail(position, key, units, num_copied=count, staging=lease)
        copies = {}
        for chunk in chunks(0, count, self._chunk_blocks):
            landing = units[chunk.start : chunk.stop]
            first = TAIL_FIRST + chunk.start
            copies[plan.graph.add(next(self._op_ids), OpKind.D2H, first, None, landing)] = chunk
        return copies

    def are_throttled(
        self, plan: Plan, tier: Tier, num_blocks: int, has_tail: bool, retain_s: float
    ) -> bool:
        """Whether a tier's budget does not allow the blocks and the tail of a put, which it drops.

        Neither is of use without the other: they are written together or not at all.

        Args:
            has_tail: Whether the tail is to be written too, if the plan has one.
        """
        count, name = num_blocks, tier.name
        if has_tail and plan.tail is not None and not self._is_stored(plan, tier, retain_s):
            count += len(plan.tail.units)
        if not count or self._backlog.affordable_at(name, count) is None:
            return False
        plan.drop(f"{name.value.lower()}_write_throttled", count)
        return True

    def store(
        self, plan: Plan, tier: Tier, copies: dict[OpId, range], era: int,
        max_backlog: int | None, retain_s: float,
    ) -> None:  # fmt: skip
        """Write the plan's tail to a tier that lacks it, if there is room for all of it.

        Whether the tier's budget allows it was asked before (`are_throttled`).

        Args:
            copies: Ops that copy it off the GPU; empty if the host tier has it.
            era: See `StorePlanner`.
        """
        assert plan.tail is not None
        if self._is_stored(plan, tier, retain_s):
            return
        count = len(plan.tail.units)
        _, reason = self._backlog.room_for(plan, tier, count, max_backlog, is_paid=True)
        lease = None
        if reason is None:
            lease = tier.reserve_tail(plan.root, plan.tail.key, count)
        if lease is None:
            plan.drop(reason or f"{tier.name.value.lower()}_tier_full", count)
            return
        lease.retain_s = retain_s
        plan.tail.stores[tier.name] = lease
        self._backlog.reserve(plan, tier.name, count)
        if isinstance(tier, RemoteTier):
            plan.remote_root = tier.root_at_store(plan.root)
        for depends_on, chunk in self._pieces(tier, copies, count):
            names = plan.tail.names(tier, plan.root, chunk, era)
            source = plan.tail.units[chunk.start : chunk.stop]
            target = lease.blocks[chunk.start : chunk.stop]
            first = TAIL_FIRST + chunk.start
            plan.graph.add(
                next(self._op_ids), STORE_OP[tier.name], first, source, target, depends_on, names
            )

    def _pieces(
        self, tier: Tier, copies: dict[OpId, range], count: int
    ) -> Iterator[tuple[list[OpId], range]]:
        """Yield the units of each op that writes a tail, and what that op waits for.

        A remote store gets them in order, by one op: its last unit tells others that all are there.
        """
        if isinstance(tier, RemoteTier):
            yield list(copies), range(count)
        elif copies:
            yield from (([op], chunk) for op, chunk in copies.items())
        else:
            yield from (([], chunk) for chunk in chunks(0, count, self._chunk_blocks))

    def _is_stored(self, plan: Plan, tier: Tier, retain_s: float) -> bool:
        """Whether a tier has or awaits the plan's tail, which then counts as used."""
        assert plan.tail is not None
        tail = tier.tails.find(plan.root, plan.tail.key)
        if tail is not None:
            tier.use_tail(tail, retain_s)
            return True
        return tier.is_tail_in_flight(plan.root, plan.tail.key, len(plan.tail.units))


class DirectStores:
    """Plans puts on the SSD tier. Arguments as for `StorePlanner`; ``budget`` is that of the tier.

        put, blocks of the prompt:   0            first             end
                                     |--------------|----------------|
                                       SSD has or     D2DISK, COMMIT
                                       awaits them    in chunks

    Attributes:
        tier: The SSD tier.
    """

    def __init__(
        self,
        tiers: Tiers,
        op_ids: Iterator[OpId],
        chunk_blocks: int,
        admission: Admission | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        self._tiers = tiers
        self.tier = tiers.by_name[TierName.SSD]
        self._admission = admission
        self._budget = budget
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks

    def plan_put(
        self, keys: BlockKeys, start: int, stop: int, retain_s: float = 0.0, era: int = 0
    ) -> Plan:
        """Plan to store the blocks ``[start, stop)`` that the SSD tier neither has nor awaits.

        Args:
            retain_s: The prompt counts as used this much later.
            era: See `StorePlanner`.
        """
        plan, _ = begin_put(self._tiers, self.tier, keys, stop, retain_s)
        first = plan.start
        if first >= stop:
            plan.start = plan.stop = stop
        elif start > first:
            plan.drop("prefix_not_cached", stop - start)
        elif self.tier.name in self._tiers.unavailable:
            plan.drop("ssd_unavailable", stop - first)
        else:
            end = stop if self._admission is None else self._admission.admit(keys, stop, start)
            self._add_blocks(plan, keys, first, end, retain_s, era)
        return plan

    def _add_blocks(
        self, plan: Plan, keys: BlockKeys, first: int, end: int, retain_s: float, era: int
    ) -> None:
        room = end - first if self._budget is None else self._budget.room(self._tiers.now)
        if room < end - first:
            plan.drop("ssd_write_throttled", end - first - room)
            end = first + room
        if first >= end:
            return
        lease = self.tier.reserve(keys, first, end, plan.outlook, retain_s)
        plan.stores[self.tier.name] = lease
        plan.store_starts[self.tier.name] = first
        plan.stop = first + len(lease)
        if self._budget is not None:
            self._budget.spend(len(lease))
        if plan.stop < end:
            plan.drop(lease.why_short("ssd"), end - plan.stop)
        for chunk in chunks(first, plan.stop, self._chunk_blocks):
            slots = lease.blocks[chunk.start - first : chunk.stop - first]
            names = block_names(self.tier, keys, chunk.start, chunk.stop, era=era)
            write = plan.graph.add(next(self._op_ids), OpKind.D2DISK, chunk.start, None, slots)
            commit = next(self._op_ids)
            plan.graph.add(commit, OpKind.COMMIT, chunk.start, slots, slots, [write], names)


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
