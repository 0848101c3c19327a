"""GlobalCacheEngine: decides what a get, a put or a prefetch moves between which tiers.

One planner over the ordered list of tiers. The first is the host tier (pinned DRAM): whatever goes
to or comes from the GPU passes through it. A plan is a graph of ops and the leases and pins that
keep its blocks in place; who asked for it ends it with `finish`.

    get, blocks of the prompt:   0      start        host           disk        end
                                 |--------|------------|--------------|-----------|
                                   engine   H2D          DISK2H, H2D    not cached
                                   has it   at once      in chunks

What a put copies to the host tier goes on to the tiers below by each one's write policy: at once
(write-through), as far as an `Admission` lets it, or when a `DirtyQueue` is full (write-back).

Pure: no I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flexcache.cache.admission import Admission
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.journal import MEDIUM_OF, Journal, TierJournal
from flexcache.cache.load_cost import LoadCost, why_recomputed
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.write_back import DirtyQueue, WriteBack
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.graph import BlockIds, TransferOpGraph
from flexcache.transfer.messages import BlockNames

LOAD_OP = {TierName.SSD: OpKind.DISK2H, TierName.REMOTE: OpKind.REMOTE2H}
STORE_OP = {TierName.SSD: OpKind.H2DISK, TierName.REMOTE: OpKind.H2REMOTE}
_REMOTE_SHARE_OF_BACKLOG = 4  # a quarter: a store that hangs must not hold up the disk


@dataclass(slots=True, eq=False)
class Plan:
    """What one task will move: blocks ``[start, stop)`` of its prompt.

    Attributes:
        staging: The lease on the host tier for blocks that come from below or from the GPU.
        stores: Leases on the tiers below the host that a put writes through to.
        sources: For a get, how many of the blocks each tier supplies, in order.
        dropped: Blocks that a put could not take on, by reason.
        skipped: Blocks that are cached and are not loaded all the same, by reason.
        is_write_back: Whether it writes what was dirty.
        is_put_off: Whether what it does not get written becomes dirty again, whatever failed.
        has_failed: Whether a write has failed.
    """

    kind: TaskKind
    root: RootId
    start: int
    stop: int
    graph: TransferOpGraph = field(default_factory=TransferOpGraph)
    staging: Lease | None = None
    stores: dict[TierName, Lease] = field(default_factory=dict)
    store_starts: dict[TierName, int] = field(default_factory=dict)
    num_reserved: dict[TierName, int] = field(default_factory=dict)
    remote_root: bytes = b""
    pins: list[tuple[Tier, PrefixMatch]] = field(default_factory=list)
    sources: dict[TierName, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    load_keys: Sequence[BlockKey] = ()
    """Keys of the blocks that are read from below the host, from position ``load_start`` on."""
    load_start: int = 0
    is_write_back: bool = False
    is_put_off: bool = False
    has_failed: bool = False

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def num_backlogged(self) -> int:
        """Host blocks that wait to be written below until the plan ends."""
        return sum(self.num_reserved.values())


@dataclass(frozen=True, slots=True)
class _Copy:
    """An op that brings the blocks of a chunk from the GPU to ``landing``."""

    op: OpId
    chunk: range
    landing: BlockIds


class GlobalCacheEngine:
    """Plans over an ordered list of tiers, the host tier first.

    Args:
        tiers: Fastest first.
        chunk_blocks: Blocks per op where one tier feeds another, so that both work at once.
        max_store_backlog: Host blocks that may wait to be written below; what of a put is beyond
            it stays on the host tier only.
        admissions: For tiers that do not take every block.
        write_back: For tiers that are written to late.
        load_cost: Tells loads that would take longer than to compute anew; None to make them all.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        chunk_blocks: int,
        max_store_backlog: int,
        admissions: Mapping[TierName, Admission] | None = None,
        write_back: Mapping[TierName, DirtyQueue] | None = None,
        load_cost: LoadCost | None = None,
    ) -> None:
        if not tiers or tiers[0].name is not TierName.CPU:
            raise InternalError("the first tier must be the host tier")
        self.tiers = list(tiers)
        self.host = self.tiers[0]
        self.lower = self.tiers[1:]
        self.by_name = {tier.name: tier for tier in self.tiers}
        self._chunk_blocks = max(1, chunk_blocks)
        self.max_store_backlog = max_store_backlog
        self.load_cost = load_cost
        self.unavailable: set[TierName] = set()
        """Tiers that are neither read nor written for the time being (`availability`)."""
        self.is_recording = True
        """Whether what is written to SSD is to outlive this process."""
        self._admissions = dict(admissions or {})
        self._write_back = {
            name: WriteBack(self.host, self.by_name[name], dirty, self._lose)
            for name, dirty in (write_back or {}).items()
        }
        self.lost: Counter[str] = Counter()
        """Blocks that went and no plan says so, by reason."""
        self._backlog = dict.fromkeys(self.by_name, 0)
        self._withheld = Counter[TierName]()
        self.journal: Journal | None = None
        self._now = 0.0
        self._op_ids = itertools.count(1)
        self._open_plans = 0

    def keep_journal(self, tokens_per_block: int) -> None:
        """Write down, from now on, what every tier stores and loses."""
        self.journal = Journal(tokens_per_block)
        for tier in self.tiers:
            others = [
                other.index.contains
                for other in self.tiers
                if other is not tier and MEDIUM_OF[other.name] is MEDIUM_OF[tier.name]
            ]
            journal = TierJournal(self.journal, tier.name, others)
            tier.on_stored.append(journal.stored)
            tier.index.on_removed.append(journal.removed)
        for late in self._write_back.values():
            late.tokens_per_block = tokens_per_block

    @property
    def remote(self) -> RemoteTier | None:
        last = self.tiers[-1]
        return last if isinstance(last, RemoteTier) else None

    @property
    def store_backlog(self) -> int:
        """Host blocks that wait to be written below, counted once per tier."""
        return sum(self._backlog.values())

    def advance(self, now: float) -> None:
        """Time has passed: recency is counted in seconds."""
        self._now = now
        for tier in self.tiers:
            tier.advance(now)

    def num_local(self, keys: BlockKeys) -> int:
        """Blocks of a prompt, from its first on, that the tiers on this machine can supply."""
        return max(
            tier.index.match(keys).num_blocks
            for tier in self.tiers
            if tier.name is not TierName.REMOTE and tier.name not in self.unavailable
        )

    def plan_get(
        self, keys: BlockKeys, start: int, stop: int, prefill_blocks_per_s: float = 0.0
    ) -> Plan:
        """Plan to bring the cached part of blocks ``[start, stop)`` to the GPU.

        Args:
            prefill_blocks_per_s: What the engine computes; what can be computed in less time than
                loaded is not loaded. 0 if that is not known.
        """
        plan = self._plan_load(TaskKind.GET, keys, start, stop, prefill_blocks_per_s)
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
        self,
        keys: BlockKeys,
        start: int,
        stop: int,
        max_backlog: int | None = None,
        retain_s: float = 0.0,
    ) -> Plan:
        """Plan to store what of blocks ``[start, stop)`` the host tier neither has nor awaits.

        Blocks that cannot be attached, because what precedes them is not cached, are not stored:
        nobody could find them.

        Args:
            max_backlog: At most so many are to be written below.
            retain_s: In every tier the prompt counts as used this much later.
        """
        cached = self.host.refresh(keys, retain_s)
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
        plan.staging.retain_s = retain_s
        plan.stop = first + len(plan.staging)
        if plan.stop < stop:
            plan.dropped["host_tier_full"] = stop - plan.stop
        copies = self._add_copies(plan)
        if copies:
            self._add_stores(plan, keys, cached, copies, None, max_backlog, retain_s)
        return plan

    def plan_store(
        self,
        keys: BlockKeys,
        stop: int,
        max_backlog: int | None = None,
        retain_s: float = 0.0,
        tiers: Iterable[Tier] | None = None,
    ) -> Plan:
        """Plan to write what the host has of a prompt's first blocks to the tiers that lack it.

        Nothing of it touches the GPU. The graph is empty where nobody lacks anything.

        Args:
            tiers: Only to these, whatever their write policy.
        """
        cached = self.host.index.match(keys)
        stop = min(stop, cached.num_blocks)
        plan = Plan(TaskKind.STORE, keys.root, stop, stop)
        self._open_plans += 1
        self._add_stores(plan, keys, cached, [], tiers, max_backlog, retain_s)
        return plan

    def plan_write_back(self) -> Plan | None:
        """Plan to write what a tier with write-back is due, if any is; possibly without an op."""
        for name, late in self._write_back.items():
            if name in self.unavailable or self.is_withheld(name):
                continue
            tier = self.by_name[name]
            while (prompt := late.dirty.peek()) is not None:
                room = self._room(tier)
                if not room or (self._backlog[name] and room < len(prompt.keys)):
                    break  # until what is under way has been written
                prompt = late.dirty.pop()
                root, content, last = prompt.root, prompt.content, next(reversed(prompt.keys))
                path = self.host.index.path_keys(self.host.index.locate(root, last))
                keys = EngineBlockKeys(root, path, len(path), content)
                plan = self.plan_store(keys, len(path), tiers=[tier])
                plan.is_write_back = True
                if num_beyond := plan.dropped.pop(f"{name.value.lower()}_write_backlog", 0):
                    late.dirty.add(root, path[-num_beyond:], content, is_old=True)
                if plan.graph.ops or plan.dropped:
                    return plan
                self.finish(plan)
        return None

    def put_off(self, plan: Plan, name: TierName, has_failed: bool) -> bool:
        """Whether what a plan does not get written to a tier is dirty again, instead of lost.

        It is if the plan writes back and the tier is away, or has failed as a whole.
        """
        plan.has_failed = True
        plan.is_put_off |= plan.is_write_back and (has_failed or name in self.unavailable)
        return plan.is_put_off

    def begin_closing(self) -> None:
        """Have `plan_write_back` give out all that is still to be written."""
        for late in self._write_back.values():
            late.dirty.drain()

    def num_dirty(self, name: TierName) -> int:
        """Blocks that wait to be written back to a tier."""
        late = self._write_back.get(name)
        return 0 if late is None else late.dirty.num_blocks

    def is_dirty(self, name: TierName, root: RootId, key: BlockKey) -> bool:
        late = self._write_back.get(name)
        return late is not None and late.dirty.contains(root, key)

    def _lose(self, tier: Tier, num_blocks: int) -> None:
        """DRAM no longer has what a tier with write-back was still to be given."""
        self.lost[f"{tier.name.value.lower()}_never_written"] += num_blocks

    def stats(self) -> dict[str, dict[str, int]]:
        """Occupancy and counters of each tier."""
        report = {}
        for tier in self.tiers:
            name = tier.name
            report[name.value] = tier.stats()
            report[name.value]["available"] = int(name not in self.unavailable)
            if name in self._admissions:
                report[name.value] |= self._admissions[name].stats()
            if name in self._write_back:
                report[name.value]["dirty_blocks"] = self.num_dirty(name)
        return report

    def clear(self, tier: str | None) -> dict[TierName, BlockIds]:
        """Drop the blocks of one tier, or of all, that nobody holds; which, by tier.

        Raises:
            ValueError: There is no such tier; names those there are.
        """
        names = [name.value for name in self.by_name]
        if tier is not None and tier not in names:
            raise ValueError(f"no tier {tier!r} here; there is {', '.join(names)}")
        mark = 0 if self.journal is None else len(self.journal)
        kept, self.lost = self.lost, Counter()  # what was to go is not lost
        dropped = {t.name: t.clear() for t in self.tiers if tier in (None, t.name.value)}
        self.lost = kept
        is_empty = not any(t.index.num_blocks for t in self.tiers)
        if self.journal is not None and tier is None and is_empty:
            self.journal.cleared_since(mark)
        return dropped

    def withhold_free(self, tier: Tier) -> Lease:
        """Keep a tier's free blocks from everybody until `give_back`; what is dirty waits."""
        self._open_plans += 1
        self._withheld[tier.name] += 1
        return tier.reserve_private(RootId(b""), tier.pool.num_free)

    def give_back(self, lease: Lease) -> None:
        self._open_plans -= 1
        self._withheld[TierName.SSD] -= 1
        self.by_name[TierName.SSD].release(lease)

    def is_withheld(self, name: TierName) -> bool:
        return self._withheld[name] > 0

    def publish_staging(self, plan: Plan, num_ok: int) -> None:
        """The first ``num_ok`` staged blocks hold their bytes."""
        if plan.staging is not None:
            self.host.publish(plan.staging, num_ok)

    def publish_store(self, plan: Plan, name: TierName, num_ok: int) -> None:
        """The first ``num_ok`` blocks of a write-through hold their bytes."""
        tier = self.by_name[name]
        if isinstance(tier, RemoteTier) and tier.root_at_store(plan.root) != plan.remote_root:
            num_ok = 0  # it was cleared meanwhile, and goes by other names now
        lease = plan.stores[name]
        tier.publish(lease, num_ok)
        lease.is_given_up = plan.has_failed and not plan.is_put_off

    def discard_bad_block(self, plan: Plan, name: TierName, position: int) -> None:
        """A read of the task's block ``position`` from a tier failed: drop it there."""
        key = plan.load_keys[position - plan.load_start]
        tier = self.by_name[name]
        tier.discard(plan.root, key)
        if isinstance(tier, RemoteTier):
            tier.learn_absent(plan.root, key, self._now)

    def finish(self, plan: Plan) -> None:
        """End the plan: every op has ended or was never started. Frees all that it held."""
        if plan.staging is not None:
            self.host.release(plan.staging)
        for name, lease in plan.stores.items():
            self._backlog[name] -= plan.num_reserved[name]
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

    def _plan_load(
        self,
        kind: TaskKind,
        keys: BlockKeys,
        start: int,
        stop: int,
        prefill_blocks_per_s: float = 0.0,
    ) -> Plan:
        plan = Plan(kind, keys.root, start, start)
        self._open_plans += 1
        on_host = self.host.match(keys)
        covered = min(on_host.num_blocks, stop)
        segments: list[tuple[Tier, PrefixMatch, int, int]] = []
        for tier in self.lower:
            if covered >= stop:
                break
            if tier.name in self.unavailable:
                continue
            match = tier.match(keys)
            begin, end = max(covered, start), min(match.num_blocks, stop)
            if begin >= end:
                continue
            if not self._pays(tier.name, end - begin, prefill_blocks_per_s):
                plan.skipped[why_recomputed(tier.name)] = end - begin
                continue
            segments.append((tier, match, begin, end))
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
                names = None
                if isinstance(tier, RemoteTier):
                    names = self._names(tier, keys, chunk.start, chunk.stop)
                load = plan.graph.add(
                    self._op_id(), LOAD_OP[tier.name], chunk.start, source, landing, names=names
                )
                if plan.kind is TaskKind.GET:
                    plan.graph.add(self._op_id(), OpKind.H2D, chunk.start, landing, None, [load])

    def _pays(self, name: TierName, num_blocks: int, prefill_blocks_per_s: float) -> bool:
        cost = self.load_cost
        return cost is None or cost.pays(name, num_blocks, prefill_blocks_per_s, self._now)

    def _add_copies(self, plan: Plan) -> list[_Copy]:
        """Copy the staged blocks off the GPU, in chunks."""
        assert plan.staging is not None
        staged = plan.staging.blocks.copy()
        copies = []
        for chunk in self._chunks(plan.start, plan.stop):
            landing = staged[chunk.start - plan.start : chunk.stop - plan.start]
            op = plan.graph.add(self._op_id(), OpKind.D2H, chunk.start, None, landing)
            copies.append(_Copy(op, chunk, landing))
        return copies

    def _add_stores(
        self,
        plan: Plan,
        keys: BlockKeys,
        cached: PrefixMatch,
        copies: Sequence[_Copy],
        tiers: Iterable[Tier] | None,
        max_backlog: int | None,
        retain_s: float,
    ) -> None:
        """Write to the tiers below what they lack: of what the host has, and of what is copied.

        Args:
            copies: What brings blocks ``[plan.start, plan.stop)`` to the host.
            tiers: None for all, each by its own policy.
        """
        for tier in self.lower if tiers is None else tiers:
            begin = tier.refresh(keys, retain_s).num_blocks
            begin += tier.num_in_flight(keys, begin, plan.stop)
            end = plan.stop if tiers is not None else self._admitted(tier, keys, plan.stop)
            if begin >= end:
                if tiers is None and begin < plan.start <= cached.num_blocks:
                    self._mark_dirty(tier, keys, begin, plan.start)
                continue
            if begin < plan.start and cached.num_blocks < plan.start:
                continue  # what precedes is still on its way to the host: its own put writes it
            end = self._bounded(plan, tier, begin, end, max_backlog)
            if begin >= end:
                continue
            lease = tier.reserve(keys, begin, end)
            lease.retain_s = retain_s
            plan.stores[tier.name] = lease
            plan.store_starts[tier.name] = begin
            plan.num_reserved[tier.name] = len(lease)
            if isinstance(tier, RemoteTier):
                plan.remote_root = tier.root_at_store(plan.root)
            self._backlog[tier.name] += len(lease)
            if begin + len(lease) < end:
                plan.dropped[f"{tier.name.value.lower()}_tier_full"] = end - begin - len(lease)
            end = begin + len(lease)
            self._add_back_fill(plan, tier, keys, lease, cached, begin, min(end, plan.start))
            for copy in copies:
                low, high = max(copy.chunk.start, begin), min(copy.chunk.stop, end)
                if low < high:
                    source = copy.landing[low - copy.chunk.start : high - copy.chunk.start]
                    target = lease.blocks[low - begin : high - begin]
                    self._add_store(plan, tier, keys, low, source, target, [copy.op])

    def _mark_dirty(self, tier: Tier, keys: BlockKeys, begin: int, end: int) -> None:
        """A tier with write-back lacks what the host has had for longer: it failed once, say."""
        late = self._write_back.get(tier.name)
        if late is not None:
            late.mark(keys.root, keys.slice(begin, end), keys.content, begin)

    def _admitted(self, tier: Tier, keys: BlockKeys, stop: int) -> int:
        """How many blocks of a prompt, from the first on, the tier's policy writes now."""
        if tier.name in self._write_back:
            return 0
        admission = self._admissions.get(tier.name)
        return stop if admission is None else admission.admit(keys, stop)

    def _room(self, tier: Tier) -> int:
        """How many more host blocks may wait to be written to a tier."""
        room = self.max_store_backlog - self.store_backlog
        if tier.name is TierName.REMOTE:
            share = self.max_store_backlog // _REMOTE_SHARE_OF_BACKLOG
            room = min(room, share - self._backlog[tier.name])
        return max(0, room)

    def _bounded(
        self, plan: Plan, tier: Tier, begin: int, end: int, max_backlog: int | None
    ) -> int:
        """Where to stop writing so that not too much waits; what is beyond is counted."""
        name, room = tier.name.value.lower(), self._room(tier)
        if max_backlog is not None:
            room = max(0, min(room, max_backlog))
        reason = f"{name}_write_backlog"
        if tier.name in self.unavailable:
            room, reason = 0, f"{name}_unavailable"
        if end - begin > room:
            plan.dropped[reason] = end - begin - room
        return min(end, begin + room)

    def _add_back_fill(
        self,
        plan: Plan,
        tier: Tier,
        keys: BlockKeys,
        lease: Lease,
        cached: PrefixMatch,
        begin: int,
        end: int,
    ) -> None:
        """Write blocks that the host tier has and a lower one lacks."""
        if begin >= end:
            return
        self._pin(plan, self.host, cached)
        source = self.host.index.blocks(cached, begin)
        for chunk in self._chunks(begin, end):
            low, high = chunk.start - begin, chunk.stop - begin
            self._add_store(
                plan, tier, keys, chunk.start, source[low:high], lease.blocks[low:high], []
            )

    def _add_store(
        self,
        plan: Plan,
        tier: Tier,
        keys: BlockKeys,
        first: int,
        source: BlockIds,
        target: BlockIds,
        depends_on: Sequence[OpId],
    ) -> None:
        names = None
        if self.is_recording or isinstance(tier, RemoteTier):
            names = self._names(tier, keys, first, first + len(target))
        plan.graph.add(self._op_id(), STORE_OP[tier.name], first, source, target, depends_on, names)

    @staticmethod
    def _names(tier: Tier, keys: BlockKeys, start: int, stop: int) -> BlockNames:
        """What blocks are called where they outlive this process."""
        root = tier.root_at_store(keys.root) if isinstance(tier, RemoteTier) else keys.root
        parent = keys.key(start - 1) if start else b""
        return BlockNames(root, start, parent, list(keys.slice(start, stop)))

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
            if any(self._backlog.values()):
                raise InternalError(f"backlog without a plan: {self._backlog}")
            for tier in self.tiers:
                if tier.num_leased:
                    raise InternalError(f"{tier.name.value}: blocks leased and no plan open")
