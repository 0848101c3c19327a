"""StorePlanner: plans what puts copy off the GPU, and what the tiers below DRAM receive and when.

Blocks that a put copies to the host tier go on to each lower tier by its write policy: at once
(write-through), as far as an `Admission` allows, or when a `DirtyQueue` is full (write-back).

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.plan import STORE_OP, Plan, PlannedTail, PlannerSettings, block_names, chunks
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.prompt import Prompt
from flexcache.cache.tail_index import TAIL_FIRST
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiers import RemoteTier, Tiers
from flexcache.cache.write_back import StoreBacklog, WriteBack
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.scheduler import TransferOp


def begin_put(tiers: Tiers, tier: Tier, prompt: Prompt) -> tuple[Plan, PrefixMatch]:
    """Begin to plan a put of a prompt; the prompt counts as used.

    Args:
        tier: Takes the blocks from the GPU.

    Returns:
        An empty plan, behind the blocks that the tier has or awaits, and those that it has.
    """
    keys, stop = prompt.keys, prompt.stop
    cached = tier.index.match(keys)
    first = cached.num_blocks
    first += tier.num_in_flight(keys, first, stop)
    # What is in flight is not copied again: its put makes it findable, or neither put does.
    plan = Plan(TaskKind.PUT, keys.root, first, first)
    tiers.num_holders += 1
    if first < stop:
        plan.outlook = tiers.store(keys, stop)
    else:
        tiers.store_nothing(keys, stop)
    tier.use(cached, plan.outlook, prompt.retain_s)
    return plan, cached


class DirectStores:
    """Plans puts on the SSD tier.

        put, blocks of the prompt:   0            first             end
                                     |--------------|----------------|
                                       SSD has or     D2DISK, COMMIT
                                       awaits them    in chunks

    Attributes:
        tier: The SSD tier.
    """

    def __init__(self, tiers: Tiers, settings: PlannerSettings) -> None:
        self._tiers = tiers
        self.tier = tiers.by_name[TierName.SSD]
        self._admission = settings.admissions.get(TierName.SSD)
        self._budget = settings.write_budgets.get(TierName.SSD)
        self._op_ids = settings.op_ids
        self._chunk_blocks = settings.chunk_blocks

    def plan_put(self, prompt: Prompt, era: int = 0) -> Plan:
        """Plan to store the blocks of a prompt that the SSD tier neither has nor awaits.

        Args:
            era: See `StorePlanner`.
        """
        plan, _ = begin_put(self._tiers, self.tier, prompt)
        keys, start, stop, first = prompt.keys, prompt.start, prompt.stop, plan.start
        if first >= stop:
            plan.start = plan.stop = stop
        elif start > first:
            plan.drop("prefix_not_cached", stop - start)
        elif self.tier.name in self._tiers.unavailable:
            plan.drop("ssd_unavailable", stop - first)
        else:
            end = stop if self._admission is None else self._admission.admit(keys, stop, start)
            self._add_blocks(plan, prompt, end, era)
        return plan

    def _add_blocks(self, plan: Plan, prompt: Prompt, end: int, era: int) -> None:
        keys, first = prompt.keys, plan.start
        room = end - first if self._budget is None else self._budget.room(self._tiers.now)
        if room < end - first:
            plan.drop("ssd_write_throttled", end - first - room)
            end = first + room
        if first >= end:
            return
        lease = self.tier.reserve(keys, first, end, plan.outlook, prompt.retain_s)
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
            # A slot is recorded by an op of its own, once all ranks have written their parts of it.
            write, commit = next(self._op_ids), next(self._op_ids)
            plan.graph.ops += [
                TransferOp(write, OpKind.D2DISK, chunk.start, None, slots),
                TransferOp(commit, OpKind.COMMIT, chunk.start, slots, slots, (write,), names),
            ]


@dataclass(slots=True)
class _Supply:
    """What a plan has for the tiers below the host.

    Attributes:
        prompt: An earlier put of the request has offered the blocks before its ``start``.
        cached: The blocks of the prompt that the host tier has.
        copies: Ops that copy blocks ``[plan.start, plan.stop)`` to the host.
        tail_copies: Ops that copy the plan's tail to the host, and which of its units each copies.
        max_backlog: At most this many blocks are written to a tier.
    """

    plan: Plan
    prompt: Prompt
    cached: PrefixMatch
    max_backlog: int | None
    copies: list[TransferOp] = field(default_factory=list)
    tail_copies: dict[OpId, range] = field(default_factory=dict)


class StorePlanner:
    """Plans puts, and writes to lower tiers, over a cache's tiers.

    In models with tails a tail is written as a whole, at once: tiers with write-back get it with
    the put too.
    """

    def __init__(self, tiers: Tiers, settings: PlannerSettings) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._op_ids = settings.op_ids
        self._chunk_blocks = settings.chunk_blocks
        self.max_backlog = settings.max_store_backlog
        self._backlog = StoreBacklog(tiers, self.max_backlog, settings.write_budgets)
        self.era = 0
        """How often the SSD tier was reset: what was planned before is not recorded for good."""
        self._admissions = settings.admissions
        self._write_back = {
            name: WriteBack(self._host, tiers.by_name[name], dirty, tiers.lose)
            for name, dirty in settings.write_back.items()
        }
        self._shape = shape = settings.shape
        self._tail_shape = shape if shape is not None and shape.sparse else None

    @property
    def backlog(self) -> int:
        """Host blocks that wait to be written below, counted once per tier."""
        return self._backlog.total

    def keep_content(self, tokens_per_block: int) -> None:
        """Keep, for a journal, the content of blocks that wait to be written back."""
        for late in self._write_back.values():
            late.tokens_per_block = tokens_per_block

    def plan_put(self, prompt: Prompt, max_backlog: int | None = None) -> Plan:
        """Plan to store the blocks of a prompt that the host tier neither has nor awaits, and its
        tail.

        Blocks whose prefix is not cached are not stored: no lookup could find them.

        Args:
            max_backlog: At most this many are written below.
        """
        plan, cached = begin_put(self._tiers, self._host, prompt)
        start, stop, tail_at, first = prompt.start, prompt.stop, prompt.tail_at, plan.start
        if self._shape is not None:
            plan.take_shape(self._shape)
        supply = _Supply(plan, prompt, cached, max_backlog)
        if first >= stop or not plan.has_dense:
            plan.start = plan.stop = stop
            if not tail_at:
                return plan
        elif start > first:
            plan.dropped["prefix_not_cached"] = stop - start
            return plan
        else:
            # Also what the SSD has: copying off the GPU is cheap, and the host stays closed under
            # prefixes.
            plan.staging = self._host.reserve(
                prompt.keys, first, stop, plan.outlook, prompt.retain_s
            )
            plan.stop = first + len(plan.staging)
            if plan.stop < stop:
                plan.dropped[plan.staging.why_short("host")] = stop - plan.stop
            supply.copies = self._add_copies(plan)
        if self._tail_shape is not None and 0 < tail_at <= plan.stop:
            plan.pin(self._host, cached)
            self._copy_tail(supply, tail_at, self._tail_shape.tail_units(tail_at))
        if supply.copies or supply.tail_copies:
            self._add_stores(supply)
        return plan

    def plan_store(
        self, prompt: Prompt, max_backlog: int | None = None, tiers: Iterable[Tier] | None = None
    ) -> Plan:
        """Plan to write what the host has of a prompt up to its ``stop``, and of its tail, to the
        tiers that lack it.

        Does not touch the GPU. The graph is empty if no tier lacks anything.

        Args:
            max_backlog: As in `plan_put`.
            tiers: Write back to these only, whatever their write policy: no use of the blocks.
        """
        keys, stop, tail_at = prompt.keys, prompt.stop, prompt.tail_at
        cached = self._host.index.match(keys)
        if self._shape is None or self._shape.dense_blocks:
            stop = min(stop, cached.num_blocks)
        plan = Plan(TaskKind.STORE, keys.root, stop, stop, is_write_back=tiers is not None)
        self._tiers.num_holders += 1
        supply = _Supply(plan, prompt, cached, max_backlog)
        if self._tail_shape is not None and 0 < tail_at <= plan.stop:
            self._find_tail(supply, tail_at)
        self._add_stores(supply, tiers)
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
                due = Prompt(TaskKind.STORE, keys, 0, len(path), 0)
                plan = self.plan_store(due, tiers=[tier])
                beyond = [f"{name.value.lower()}_write_{why}" for why in ("backlog", "throttled")]
                num_beyond = sum(plan.dropped.pop(why, 0) for why in beyond)
                if num_beyond:
                    # Old: what could not be written in its turn must not queue up behind all
                    # others.
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

    def _add_copies(self, plan: Plan) -> list[TransferOp]:
        """Copy the staged blocks off the GPU, in chunks."""
        assert plan.staging is not None
        staged = plan.staging.blocks.copy()
        copies = []
        for chunk in chunks(plan.start, plan.stop, self._chunk_blocks):
            landing = staged[chunk.start - plan.start : chunk.stop - plan.start]
            op = TransferOp(next(self._op_ids), OpKind.D2H, chunk.start, None, landing)
            copies.append(op)
        plan.graph.ops += copies
        return copies

    def _add_stores(self, supply: _Supply, tiers: Iterable[Tier] | None = None) -> None:
        """Write to the tiers below what they lack of the host's blocks and of those being copied.

        Args:
            tiers: None for all, each by its own policy.
        """
        plan, keys, cached = supply.plan, supply.prompt.keys, supply.cached
        start, retain_s = supply.prompt.start, supply.prompt.retain_s
        tail_end = 0 if plan.tail is None else plan.tail.position
        for tier in self._tiers.written if tiers is None else tiers:
            begin = tier.match(keys, plan.outlook, retain_s, not plan.is_write_back).num_blocks
            begin += tier.num_in_flight(keys, begin, plan.stop)
            late = self._write_back.get(tier.name) if tiers is None else None
            end = plan.stop if late is None else 0
            if tiers is None and (admission := self._admissions.get(tier.name)) is not None:
                end = admission.admit(keys, plan.stop, start, retain_s)
                num_refused = plan.stop - max(begin, start, end)
                if admission.why_refused is not None and num_refused > 0:
                    plan.drop(admission.why_refused, num_refused)
            is_admitted = late is not None or tail_end <= end
            has_tails = tiers is None and self._tail_shape is not None
            if has_tails and self._are_throttled(supply, tier, max(0, end - begin), is_admitted):
                end, is_admitted = 0, False
            if begin < end:
                self._add_blocks(supply, tier, begin, end)
            elif late is not None and begin < plan.start <= cached.num_blocks:
                # the host has them, the tier lacks them: a write failed, for example
                late.mark(keys.root, keys.slice(begin, plan.start), keys.content, begin)
            if plan.tail is not None and is_admitted:
                # At once even where blocks are written back: a tail is lost as a whole when the
                # host evicts it, and there are few of them.
                self._store_tail(supply, tier, plan.tail)

    def _add_blocks(self, supply: _Supply, tier: Tier, begin: int, end: int) -> None:
        """Write blocks ``[begin, end)`` to a tier, as far as there is room."""
        plan, keys, cached = supply.plan, supply.prompt.keys, supply.cached
        if begin < plan.start and cached.num_blocks < plan.start:
            return  # earlier blocks are still being copied to the host: their put writes them
        is_paid = self._tail_shape is not None and tier.name not in self._write_back
        room, reason = self._backlog.room_for(plan, tier, end - begin, supply.max_backlog, is_paid)
        if reason is not None:
            plan.dropped[reason] = end - begin - room
        if not room:
            return
        end = begin + room
        outlook = self._tiers.recall(keys) if plan.outlook is None else plan.outlook
        lease = tier.reserve(keys, begin, end, outlook, supply.prompt.retain_s)
        lease.used_s = self._host.last_used(cached, begin) if plan.is_write_back else None
        plan.stores[tier.name] = lease
        plan.store_starts[tier.name] = begin
        self._backlog.reserve(plan, tier.name, len(lease))
        # Noted now: what a clear renames meanwhile was written under the former name.
        if isinstance(tier, RemoteTier):
            plan.remote_root = tier.root_at_store(plan.root)
        if begin + len(lease) < end:
            plan.dropped[lease.why_short(tier.name.value.lower())] = end - begin - len(lease)
        end = begin + len(lease)
        self._add_ops(supply, tier, lease, begin, end)

    def _add_ops(self, supply: _Supply, tier: Tier, lease: Lease, begin: int, end: int) -> None:
        """Write blocks ``[begin, end)`` into a lease on a tier."""
        plan, keys, cached = supply.plan, supply.prompt.keys, supply.cached
        filled = min(end, plan.start)
        if begin < filled:  # blocks that the host tier has and this one lacks
            plan.pin(self._host, cached)
            blocks = self._host.index.blocks(cached, begin)
            for chunk in chunks(begin, filled, self._chunk_blocks):
                part = slice(chunk.start - begin, chunk.stop - begin)
                used_s = None if lease.used_s is None else float(lease.used_s[part.stop - 1])
                names = block_names(tier, keys, chunk.start, chunk.stop, used_s, self.era)
                write = TransferOp(
                    next(self._op_ids), STORE_OP[tier.name], chunk.start, blocks[part],
                    lease.blocks[part], names=names,
                )  # fmt: skip
                plan.graph.ops.append(write)
        for copy in supply.copies:
            assert copy.dst is not None
            low, high = max(copy.first, begin), min(copy.first + len(copy), end)
            if low < high:
                source = copy.dst[low - copy.first : high - copy.first]
                target = lease.blocks[low - begin : high - begin]
                names = block_names(tier, keys, low, high, era=self.era)
                op_id, after = next(self._op_ids), (copy.op_id,)
                write = TransferOp(op_id, STORE_OP[tier.name], low, source, target, after, names)
                plan.graph.ops.append(write)

    # -- tails ----------------------------------------------------------------------------------

    def _find_tail(self, supply: _Supply, position: int) -> bool:
        """Plan for a tail that the host tier has, without copying it; whether it has it."""
        keys, host = supply.prompt.keys, self._host
        tail = host.tails.find(keys.root, keys.key(position - 1))
        if tail is None:
            return False
        host.use_tail(tail, supply.prompt.retain_s)
        host.tails.pin(tail)
        supply.plan.tail = PlannedTail(position, tail.key, tail.units, pins=[(host, tail)])
        return True

    def _copy_tail(self, supply: _Supply, position: int, count: int) -> None:
        """Copy a tail of so many units off the GPU unless the host tier has or awaits it."""
        plan, keys = supply.plan, supply.prompt.keys
        key = keys.key(position - 1)
        if self._find_tail(supply, position) or self._host.is_tail_in_flight(keys.root, key, count):
            return
        lease = self._host.reserve_tail(keys.root, key, count)
        if lease is None:
            plan.drop("host_tier_full", count)
            return
        lease.retain_s = supply.prompt.retain_s
        units = lease.blocks.copy()
        plan.tail = PlannedTail(position, key, units, num_copied=count, staging=lease)
        for chunk in chunks(0, count, self._chunk_blocks):
            landing = units[chunk.start : chunk.stop]
            first = TAIL_FIRST + chunk.start
            op = TransferOp(next(self._op_ids), OpKind.D2H, first, None, landing)
            plan.graph.ops.append(op)
            supply.tail_copies[op.op_id] = chunk

    def _are_throttled(self, supply: _Supply, tier: Tier, num_blocks: int, has_tail: bool) -> bool:
        """Whether a tier's budget does not allow the blocks and the tail of a put, which it drops.

        Neither is of use without the other: they are written together or not at all.

        Args:
            has_tail: Whether the tail is to be written too, if the plan has one.
        """
        count, name, tail = num_blocks, tier.name, supply.plan.tail
        if has_tail and tail is not None and not self._is_tail_stored(supply, tier, tail):
            count += len(tail.units)
        if not count or self._backlog.affordable_at(name, count) is None:
            return False
        supply.plan.drop(f"{name.value.lower()}_write_throttled", count)
        return True

    def _store_tail(self, supply: _Supply, tier: Tier, tail: PlannedTail) -> None:
        """Write the plan's tail to a tier that lacks it, if there is room for all of it.

        Whether the tier's budget allows it was asked before (`_are_throttled`).
        """
        if self._is_tail_stored(supply, tier, tail):
            return
        plan, count, lease = supply.plan, len(tail.units), None
        _, reason = self._backlog.room_for(plan, tier, count, supply.max_backlog, is_paid=True)
        if reason is None:
            lease = tier.reserve_tail(plan.root, tail.key, count)
        if lease is None:
            plan.drop(reason or f"{tier.name.value.lower()}_tier_full", count)
            return
        lease.retain_s = supply.prompt.retain_s
        tail.stores[tier.name] = lease
        self._backlog.reserve(plan, tier.name, count)
        pieces: Iterable[tuple[tuple[OpId, ...], range]]
        if isinstance(tier, RemoteTier):
            plan.remote_root = tier.root_at_store(plan.root)
            # In order, by one op: its last unit tells others that all are there.
            pieces = [(tuple(supply.tail_copies), range(count))]
        elif supply.tail_copies:
            pieces = [((op,), chunk) for op, chunk in supply.tail_copies.items()]
        else:
            pieces = [((), chunk) for chunk in chunks(0, count, self._chunk_blocks)]
        for depends_on, chunk in pieces:
            part = slice(chunk.start, chunk.stop)
            write = TransferOp(
                next(self._op_ids), STORE_OP[tier.name], TAIL_FIRST + chunk.start,
                tail.units[part], lease.blocks[part], depends_on,
                tail.names(tier, plan.root, chunk, self.era),
            )  # fmt: skip
            plan.graph.ops.append(write)

    def _is_tail_stored(self, supply: _Supply, tier: Tier, planned: PlannedTail) -> bool:
        """Whether a tier has or awaits the plan's tail, which then counts as used."""
        tail = tier.tails.find(supply.plan.root, planned.key)
        if tail is not None:
            tier.use_tail(tail, supply.prompt.retain_s)
            return True
        return tier.is_tail_in_flight(supply.plan.root, planned.key, len(planned.units))
