"""GlobalCacheEngine: decides what a get, a put or a prefetch moves between which tiers.

One planner over the ordered list of tiers. The first is the host tier (pinned DRAM): whatever goes
to or comes from the GPU passes through it. A plan is a graph of ops and the leases and pins that
keep its blocks in place; who asked for it ends it with `finish`.

    get, blocks of the prompt:   0      start        host           disk        end
                                 |--------|------------|--------------|-----------|
                                   engine   H2D          DISK2H, H2D    not cached
                                   has it   at once      in chunks

Pure: no I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tier import Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.graph import TransferOpGraph

LOAD_OP = {TierName.SSD: OpKind.DISK2H}
STORE_OP = {TierName.SSD: OpKind.H2DISK}


@dataclass(slots=True, eq=False)
class Plan:
    """What one task will move: blocks ``[start, stop)`` of its prompt.

    Attributes:
        staging: The lease on the host tier for blocks that come from below or from the GPU.
        stores: Leases on the tiers below the host that a put writes through to.
        sources: For a get, how many of the blocks each tier supplies, in order.
        dropped: Blocks that a put could not take on, by reason.
    """

    kind: TaskKind
    root: RootId
    start: int
    stop: int
    graph: TransferOpGraph = field(default_factory=TransferOpGraph)
    staging: Lease | None = None
    stores: dict[TierName, Lease] = field(default_factory=dict)
    store_starts: dict[TierName, int] = field(default_factory=dict)
    pins: list[tuple[Tier, PrefixMatch]] = field(default_factory=list)
    sources: dict[TierName, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    load_keys: Sequence[BlockKey] = ()
    """Keys of the blocks that are read from below the host, from position ``load_start`` on."""
    load_start: int = 0

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def num_backlogged(self) -> int:
        """Host blocks that wait to be written below until the plan ends."""
        return sum(len(lease) for lease in self.stores.values())


class GlobalCacheEngine:
    """Plans over an ordered list of tiers, the host tier first.

    Args:
        tiers: Fastest first.
        chunk_blocks: Blocks per op where one tier feeds another, so that both work at once.
        max_store_backlog: Host blocks that may wait to be written below; what of a put is beyond
            it stays on the host tier only.
    """

    def __init__(self, tiers: Sequence[Tier], chunk_blocks: int, max_store_backlog: int) -> None:
        if not tiers or tiers[0].name is not TierName.CPU:
            raise InternalError("the first tier must be the host tier")
        self.tiers = list(tiers)
        self.host = self.tiers[0]
        self.lower = self.tiers[1:]
        self.by_name = {tier.name: tier for tier in self.tiers}
        self._chunk_blocks = max(1, chunk_blocks)
        self.max_store_backlog = max_store_backlog
        self._store_backlog = 0
        self._op_ids = itertools.count(1)
        self._open_plans = 0

    def plan_get(self, keys: BlockKeys, start: int, stop: int) -> Plan:
        """Plan to bring the cached part of blocks ``[start, stop)`` to the GPU."""
        plan = self._plan_load(TaskKind.GET, keys, start, stop)
        for tier in self.tiers:
            tier.counters.hit_blocks += plan.sources.get(tier.name, 0)
        self.tiers[-1].counters.miss_blocks += stop - plan.stop
        for upper in self.tiers[:-1]:
            upper.counters.miss_blocks += (stop - start) - plan.sources.get(upper.name, 0)
        return plan

    def plan_prefetch(self, keys: BlockKeys, start: int, stop: int) -> Plan:
        """Plan to bring the cached part of blocks ``[start, stop)`` to the host tier."""
        return self._plan_load(TaskKind.PREFETCH, keys, start, stop)

    def plan_nothing(
        self, kind: TaskKind, keys: BlockKeys, start: int, stop: int, reason: str
    ) -> Plan:
        """The plan of a get that must be a miss, or of a put that is dropped, for ``reason``."""
        plan = Plan(kind, keys.root, start, start)
        self._open_plans += 1
        if kind is TaskKind.PUT and stop > start:
            plan.dropped[reason] = stop - start
        return plan

    def plan_put(
        self, keys: BlockKeys, start: int, stop: int, max_backlog: int | None = None
    ) -> Plan:
        """Plan to store what of blocks ``[start, stop)`` the host tier neither has nor awaits.

        Blocks that cannot be attached, because what precedes them is not cached, are not stored:
        nobody could find them. At most ``max_backlog`` are to be written below.
        """
        cached = self.host.match(keys)
        first = cached.num_blocks
        first += self.host.num_in_flight(keys, first, stop)
        plan = Plan(TaskKind.PUT, keys.root, first, first)
        self._open_plans += 1
        if start > first:
            plan.dropped["prefix_not_cached"] = stop - start
            return plan
        if first >= stop:
            plan.start = plan.stop = stop
            return plan
        plan.staging = self.host.reserve(keys, first, stop)
        plan.stop = first + len(plan.staging)
        if plan.stop < stop:
            plan.dropped["host_tier_full"] = stop - plan.stop
        room = self.max_store_backlog - self._store_backlog
        if max_backlog is not None:
            room = min(room, max_backlog)
        self._add_offload(plan, keys, cached, max(0, room))
        return plan

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier, or of all, that nobody holds; how many.

        Raises:
            ValueError: There is no such tier; names those there are.
        """
        names = [name.value for name in self.by_name]
        if tier is not None and tier not in names:
            raise ValueError(f"no tier {tier!r} here; there is {', '.join(names)}")
        return sum(t.clear() for t in self.tiers if tier in (None, t.name.value))

    def publish_staging(self, plan: Plan, num_ok: int) -> None:
        """The first ``num_ok`` staged blocks hold their bytes."""
        if plan.staging is not None:
            self.host.publish(plan.staging, num_ok)

    def publish_store(self, plan: Plan, name: TierName, num_ok: int) -> None:
        """The first ``num_ok`` blocks of a write-through hold their bytes."""
        self.by_name[name].publish(plan.stores[name], num_ok)

    def discard_bad_block(self, plan: Plan, name: TierName, position: int) -> None:
        """A read of the task's block ``position`` from a tier failed: drop it there."""
        key = plan.load_keys[position - plan.load_start]
        self.by_name[name].discard(plan.root, key)

    def finish(self, plan: Plan) -> None:
        """End the plan: every op has ended or was never started. Frees all that it held."""
        if plan.staging is not None:
            self.host.release(plan.staging)
        for name, lease in plan.stores.items():
            self._store_backlog -= len(lease)
            self.by_name[name].release(lease)
        for tier, match in plan.pins:
            tier.unpin(match)
        plan.staging = None
        plan.stores = {}
        plan.pins = []
        self._open_plans -= 1

    def _pin(self, plan: Plan, tier: Tier, match: PrefixMatch) -> None:
        tier.pin(match)
        plan.pins.append((tier, match))

    def _plan_load(self, kind: TaskKind, keys: BlockKeys, start: int, stop: int) -> Plan:
        plan = Plan(kind, keys.root, start, start)
        self._open_plans += 1
        on_host = self.host.match(keys)
        covered = min(on_host.num_blocks, stop)
        segments: list[tuple[Tier, PrefixMatch, int, int]] = []
        for tier in self.lower:
            if covered >= stop:
                break
            match = tier.match(keys)
            if match.num_blocks > max(covered, start):
                end = min(match.num_blocks, stop)
                segments.append((tier, match, max(covered, start), end))
                covered = end
        if covered <= start:
            return plan
        if on_host.num_blocks:
            self._pin(plan, self.host, on_host)
        for tier, match, _, _ in segments:
            self._pin(plan, tier, match)
        host_stop = max(start, min(on_host.num_blocks, stop))
        plan.stop = host_stop
        if host_stop > start:
            plan.sources[TierName.CPU] = host_stop - start
            if kind is TaskKind.GET:
                source = self.host.index.blocks(on_host, start)[: host_stop - start]
                plan.graph.add(self._op_id(), OpKind.H2D, start, source, None)
        if segments:
            self._add_staged_loads(plan, keys, on_host, segments, covered)
        return plan

    def _add_staged_loads(
        self,
        plan: Plan,
        keys: BlockKeys,
        on_host: PrefixMatch,
        segments: list[tuple[Tier, PrefixMatch, int, int]],
        stop: int,
    ) -> None:
        """Read what the host tier lacks into a lease on it, and on to the GPU chunk by chunk."""
        begin = plan.stop
        attaches = begin <= on_host.num_blocks
        if attaches and not self.host.num_in_flight(keys, begin, begin + 1):
            plan.staging = self.host.reserve(keys, begin, stop)
        else:  # somebody else brings them already, or the engine alone has what precedes them
            plan.staging = self.host.reserve_private(keys.root, stop - begin)
        staged = plan.staging.blocks.copy()
        plan.stop = begin + len(staged)
        plan.load_keys, plan.load_start = keys.slice(begin, plan.stop), begin
        for tier, match, low, high in segments:
            high = min(high, plan.stop)
            if low >= high:
                continue
            plan.sources[tier.name] = high - low
            slots = tier.index.blocks(match, low)
            for chunk in self._chunks(low, high):
                source = slots[chunk.start - low : chunk.stop - low]
                landing = staged[chunk.start - begin : chunk.stop - begin]
                load = plan.graph.add(
                    self._op_id(), LOAD_OP[tier.name], chunk.start, source, landing
                )
                if plan.kind is TaskKind.GET:
                    plan.graph.add(self._op_id(), OpKind.H2D, chunk.start, landing, None, [load])

    def _add_offload(self, plan: Plan, keys: BlockKeys, cached: PrefixMatch, room: int) -> None:
        """Copy the staged blocks off the GPU, and up to ``room`` through to each tier below."""
        assert plan.staging is not None
        staged = plan.staging.blocks.copy()
        copies = []
        for chunk in self._chunks(plan.start, plan.stop):
            landing = staged[chunk.start - plan.start : chunk.stop - plan.start]
            op = plan.graph.add(self._op_id(), OpKind.D2H, chunk.start, None, landing)
            copies.append((op, chunk, landing))
        if not copies:
            return
        for tier in self.lower:
            begin = tier.match(keys).num_blocks
            begin += tier.num_in_flight(keys, begin, plan.stop)
            if begin >= plan.stop:
                continue
            if begin < plan.start and cached.num_blocks < plan.start:
                continue  # what precedes is still on its way to the host: its own put writes it
            if plan.stop - begin > room:
                name = f"{tier.name.value.lower()}_write_backlog"
                plan.dropped[name] = plan.stop - begin - room
            lease = tier.reserve(keys, begin, min(plan.stop, begin + room))
            plan.stores[tier.name] = lease
            plan.store_starts[tier.name] = begin
            self._store_backlog += len(lease)
            end = begin + len(lease)
            if end < min(plan.stop, begin + room):
                name = f"{tier.name.value.lower()}_tier_full"
                plan.dropped[name] = min(plan.stop, begin + room) - end
            self._add_back_fill(plan, tier, lease, cached, begin, min(end, plan.start))
            for copy, chunk, landing in copies:
                low, high = max(chunk.start, begin), min(chunk.stop, end)
                if low < high:
                    plan.graph.add(
                        self._op_id(), STORE_OP[tier.name], low,
                        landing[low - chunk.start : high - chunk.start],
                        lease.blocks[low - begin : high - begin], [copy],
                    )  # fmt: skip

    def _add_back_fill(
        self, plan: Plan, tier: Tier, lease: Lease, cached: PrefixMatch, begin: int, end: int
    ) -> None:
        """Write blocks that the host tier has and a lower one lost, so that new ones attach."""
        if begin >= end:
            return
        self._pin(plan, self.host, cached)
        source = self.host.index.blocks(cached, begin)
        for chunk in self._chunks(begin, end):
            low, high = chunk.start - begin, chunk.stop - begin
            plan.graph.add(
                self._op_id(), STORE_OP[tier.name], chunk.start,
                source[low:high], lease.blocks[low:high],
            )  # fmt: skip

    def _chunks(self, start: int, stop: int) -> Iterator[range]:
        for low in range(start, stop, self._chunk_blocks):
            yield range(low, min(low + self._chunk_blocks, stop))

    def _op_id(self) -> OpId:
        return OpId(next(self._op_ids))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(capacity)."""
        for tier in self.tiers:
            tier.check()
        if self._open_plans == 0:
            if self._store_backlog:
                raise InternalError(f"{self._store_backlog} blocks of backlog without a plan")
            for tier in self.tiers:
                if tier.num_leased:
                    raise InternalError(f"{tier.name.value}: blocks leased and no plan open")
