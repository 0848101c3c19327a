"""LoadPlanner: plans which blocks gets and prefetches load, and from which tier.

    get, blocks of the prompt:   0      start        host           disk        end
                                 |--------|------------|--------------|-----------|
                                   engine   H2D          DISK2H, H2D    not cached
                                   has it   at once      in chunks,
                                                         or DISK2D

In a model with tails a load ends at the last position that has one, and loads it too; a plan that
falls short of that position is made again for an earlier one.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.load_cost import LoadWay, why_recomputed
from flexcache.cache.peers import PeerTier, peer_of, pieces_of
from flexcache.cache.plan import (
    LOAD_OP,
    EarlyTerms,
    Plan,
    PlannedTail,
    PlannerSettings,
    block_names,
    chunks,
)
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.prompt import Prompt
from flexcache.cache.retention import Seconds
from flexcache.cache.tail_index import TAIL_FIRST, Tail, last_tail_key
from flexcache.cache.tier import BlockIds, Tier
from flexcache.cache.tiers import RemoteTier, Tiers
from flexcache.config.model import UnitShape
from flexcache.ids import BlockKey, OpId, OpKind, TaskKind, TierName
from flexcache.transfer.messages import BlockNames
from flexcache.transfer.scheduler import TransferOp

# Mostly the last tail is near the end, and each key of a long prompt costs a hash.
_KEYS_AT_ONCE = 256
_MAX_ASKED = 1024  # of one look-up: those behind most of the prompt count


class FoundTail(NamedTuple):
    """The tail behind a prompt's first ``position`` blocks, in the fastest tier that has it."""

    position: int
    tier: Tier
    tail: Tail


class AskedTail(NamedTuple):
    """A tail that a remote store may have.

    Attributes:
        key: Key of the block behind which it is, at ``position``.
        last_unit: Key of its last unit, which is written last.
        has_blocks: Whether all blocks before it are known to be cached.
    """

    position: int
    key: BlockKey
    last_unit: BlockKey
    num_units: int
    has_blocks: bool


class TailLoads:
    """Finds and loads tails over a cache's tiers."""

    def __init__(self, tiers: Tiers, settings: PlannerSettings, shape: UnitShape) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._op_ids = settings.op_ids
        self._chunk_blocks = settings.chunk_blocks
        self._shape = shape

    @property
    def has_blocks(self) -> bool:
        """Whether a prompt has blocks beside its tails."""
        return self._shape.dense_blocks > 0

    def last(
        self, keys: BlockKeys, start: int, stop: int, tiers: Iterable[Tier]
    ) -> FoundTail | None:
        """Find the last position in ``(start, stop]`` that has a tail and all blocks before it.

        One probe per tier for each position between the end of the longest cached prefix and the
        tail.

        Args:
            tiers: Where to look; those that are unavailable are left out.
        """
        available = [tier for tier in tiers if tier.name not in self._tiers.unavailable]
        if self._shape.dense_blocks:
            cached = max((tier.index.match(keys).num_blocks for tier in available), default=0)
            stop = min(stop, cached)
        available = [tier for tier in available if tier.tails.has_any(keys.root)]
        for high in range(stop, start, -_KEYS_AT_ONCE) if available else ():
            low = max(start, high - _KEYS_AT_ONCE)
            for position, key in zip(
                range(high, low, -1), reversed(keys.slice(low, high)), strict=True
            ):
                for tier in available:
                    tail = tier.tails.find(keys.root, key)
                    if tail is not None:
                        return FoundTail(position, tier, tail)
        return None

    def unknown(self, keys: BlockKeys, stop: int, now: float, where: RemoteTier) -> list[AskedTail]:
        """Return the tails to ask the remote store or peers for, the last position first.

        Those behind the last one that is known, except those known to be missing.
        """
        # What a peer has said is soon out of date.
        known_to = [tier for tier in self._tiers if not isinstance(tier, PeerTier)]
        known = self.last(keys, 0, stop, known_to)
        start = 0 if known is None else known.position
        start = max(start, stop - _MAX_ASKED)
        cached = stop
        if self._shape.dense_blocks:
            cached = max(tier.index.match(keys).num_blocks for tier in self._tiers)
        tails = []
        for position, key in zip(
            range(stop, start, -1), reversed(keys.slice(start, stop)), strict=True
        ):
            count = self._shape.tail_units(position)
            last_unit = last_tail_key(key, count)
            if not where.is_absent(keys.root, last_unit, now):
                tails.append(AskedTail(position, key, last_unit, count, position <= cached))
        return tails

    def begin(self, plan: Plan, found: FoundTail) -> None:
        """Keep the tail in place for a plan whose blocks are planned next."""
        position, tier, tail = found
        tier.tails.pin(tail)
        plan.tail = PlannedTail(position, tail.key, tail.units, pins=[(tier, tail)])

    def add(self, plan: Plan, keys: BlockKeys, found: FoundTail) -> bool:
        """Load the tail, after `begin`. False if the host tier has no room to stage it."""
        planned, tier = plan.tail, found.tier
        assert planned is not None
        count = len(found.tail.units)
        is_use = plan.kind is TaskKind.GET  # a prefetch may be for nothing
        tier.use_tail(found.tail, is_use=is_use)
        # What another task brings is read into units of its own: to wait would tie it to that task.
        if tier is not self._host:
            if not self._host.is_tail_in_flight(keys.root, planned.key, count):
                planned.staging = self._host.reserve_tail(
                    keys.root, planned.key, count, retain_s=-plan.age_s
                )
            else:  # another task is loading it
                planned.staging = self._host.reserve_private(keys.root, count)
            if planned.staging is None or len(planned.staging) < count:
                return False
            if not is_use:
                is_known_here = not isinstance(tier, PeerTier)
                latest_s = math.inf if is_known_here else self._tiers.now - plan.age_s
                planned.staging.used_s = np.array([min(found.tail.used, latest_s)])
            planned.units = planned.staging.blocks.copy()
        if plan.kind is TaskKind.GET:
            planned.num_copied = count
        plan.sources.setdefault(tier.name, 0 if plan.has_dense else plan.num_blocks)
        at_tier = found.tail.units
        for part in pieces_of(tier, at_tier, chunks(0, count, self._chunk_blocks), 0):
            self._add_chunk(plan, planned, tier, at_tier, part)
        return True

    def _add_chunk(
        self, plan: Plan, planned: PlannedTail, tier: Tier, at_tier: BlockIds, chunk: range
    ) -> None:
        """Load some of the tail's units to the host tier, if they are below, and to the GPU."""
        first, landing = TAIL_FIRST + chunk.start, planned.units[chunk.start : chunk.stop]
        depends_on: tuple[OpId, ...] = ()
        if tier is not self._host:
            source = at_tier[chunk.start : chunk.stop]
            names = planned.names(tier, plan.root, chunk) if isinstance(tier, RemoteTier) else None
            if names is not None:
                names = _of_peer(names, tier, source[0], planned.key)
            op = next(self._op_ids)
            load = TransferOp(op, LOAD_OP[tier.name], first, source, landing, names=names)
            plan.graph.ops.append(load)
            depends_on = (op,)
        if plan.kind is TaskKind.GET:
            op = next(self._op_ids)
            plan.graph.ops.append(TransferOp(op, OpKind.H2D, first, landing, None, depends_on))


_SSD_LOAD = {LoadWay.STAGED: LOAD_OP[TierName.SSD], LoadWay.DIRECT: OpKind.DISK2D}


class _Segment(NamedTuple):
    """Blocks ``[begin, end)`` of a prompt that a lower tier supplies."""

    tier: Tier
    match: PrefixMatch
    begin: int
    end: int


class LoadPlanner:
    """Plans gets and prefetches over a cache's tiers."""

    def __init__(self, tiers: Tiers, settings: PlannerSettings) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._op_ids = settings.op_ids
        self._chunk_blocks = settings.chunk_blocks
        self.cost = settings.load_cost
        self.ways = settings.ways
        self._shape = shape = settings.shape
        self.tails: TailLoads | None = None
        """Finds and loads tails, if the model has any."""
        if shape is not None and shape.sparse:
            self.tails = TailLoads(tiers, settings, shape)

    def plan_get(
        self, prompt: Prompt, prefill_blocks_per_s: float = 0.0, may_go_direct: bool = False
    ) -> Plan:
        """Plan to load the cached part of a prompt's blocks to the GPU.

        Args:
            prefill_blocks_per_s: How fast the engine computes; 0 if unknown. Blocks that it
                computes faster than they load are not loaded.
            may_go_direct: As in `Plan`.
        """
        keys, start, stop = prompt.keys, prompt.start, prompt.stop
        plan = Plan(TaskKind.GET, keys.root, start, start, may_go_direct=may_go_direct)
        plan.prefill_blocks_per_s = prefill_blocks_per_s
        self._fill(plan, keys, start, stop)
        last = self._tiers.last
        for tier in self._tiers:
            num_hits = plan.sources.get(tier.name, 0)
            num_missed = stop - (plan.stop if tier is last else start + num_hits)
            tier.counters.hit_blocks += num_hits
            tier.counters.miss_blocks += num_missed
            if tier.quotas is not None:
                tier.quotas.count_get(keys.root, num_hits, num_missed)
        return plan

    def plan_prefetch(
        self, prompt: Prompt, prefill_blocks_per_s: float = 0.0, terms: EarlyTerms | None = None
    ) -> Plan:
        """Plan to load the cached part of a prompt's blocks to the host tier.

        Blocks that are on their way there already are left to the tasks that bring them. Nothing is
        loaded behind a gap: the tier keeps no block without those before it.

        Args:
            prefill_blocks_per_s: As for `plan_get`.
            terms: What it may take; None: as many blocks as fit.
        """
        keys, start, stop = prompt.keys, prompt.start, prompt.stop
        have = self._host.index.match(keys).num_blocks
        if awaited := self._host.num_in_flight(keys, have, stop):
            have += awaited
            start = min(max(start, have), stop)
        # Blocks behind a gap could not be found: the index is closed under prefixes.
        if start > have:
            stop = start
        if terms is not None:
            stop = min(stop, max(start, have) + terms.num_blocks)
        plan = Plan(TaskKind.PREFETCH, keys.root, start, start, terms=terms)
        plan.prefill_blocks_per_s = prefill_blocks_per_s
        self._fill(plan, keys, start, stop)
        return plan

    def _fill(self, plan: Plan, keys: BlockKeys, start: int, stop: int) -> None:
        self._tiers.num_holders += 1
        if self._shape is not None:
            plan.take_shape(self._shape)
        if self.tails is None:
            self._add_blocks(plan, keys, start, stop)
        else:
            self._add_up_to_tail(self.tails, plan, keys, start, stop)
            # Also behind the hit: where another prompt has gone on, a tail is worth its room.
            plan.num_cached = self._tiers.most_cached(keys)
        if plan.kind is TaskKind.GET:  # what is loaded early is looked up by its get
            self._tiers.look_up(keys, plan.num_cached)

    def _add_up_to_tail(
        self, tails: TailLoads, plan: Plan, keys: BlockKeys, start: int, stop: int
    ) -> None:
        """Load up to the last tail that can be loaded with all that is before it; or nothing."""
        while (found := tails.last(keys, start, stop, self._tiers)) is not None:
            tails.begin(plan, found)
            if plan.has_dense:
                self._add_blocks(plan, keys, start, found.position)
            else:
                plan.stop = found.position
            if plan.stop == found.position and tails.add(plan, keys, found):
                return
            stop = min(plan.stop, found.position - 1)
            # The next tail is asked for as if this one had not been: half of it is of no use.
            plan.take_back(self._host)

    def _add_blocks(self, plan: Plan, keys: BlockKeys, start: int, stop: int) -> None:
        """Load the cached part of blocks ``[start, stop)``."""
        is_use = plan.kind is TaskKind.GET  # a prefetch may be for nothing
        on_host = self._host.match(keys, retain_s=-plan.age_s, is_use=is_use)
        num_cached = on_host.num_blocks
        covered = min(num_cached, stop)
        segments: list[_Segment] = []
        for tier in self._tiers.lower:
            if covered >= stop:
                break
            if tier.name in self._tiers.unavailable:
                continue
            match = tier.match(keys, retain_s=-plan.age_s, is_use=is_use)
            num_cached = max(num_cached, match.num_blocks)
            # Of what faster tiers have, nothing is read again: one supplies what lies behind.
            begin, end = max(covered, start), min(match.num_blocks, stop)
            if begin >= end:
                continue
            # A lower tier may still have more of it, and be worth its time.
            segment = _Segment(tier, match, begin, end)
            if not self._is_loaded(plan, segment):
                plan.skipped[why_recomputed(tier.name)] = end - begin
                continue
            segments.append(segment)
            covered = end
        plan.num_cached = num_cached
        if covered <= start:
            return
        # Before anything is reserved: room is made by eviction.
        if on_host.num_blocks:
            plan.pin(self._host, on_host)
        for segment in segments:
            plan.pin(segment.tier, segment.match)
        host_stop = max(start, min(on_host.num_blocks, stop))
        plan.stop = host_stop
        if host_stop > start:
            plan.sources[TierName.CPU] = host_stop - start
            if plan.kind is TaskKind.GET:
                source = self._host.index.blocks(on_host, start)[: host_stop - start]
                op = TransferOp(next(self._op_ids), OpKind.H2D, start, source, None)
                plan.graph.ops.append(op)
        if segments:
            self._add_loads(plan, keys, on_host, segments, covered)

    def _is_loaded(self, plan: Plan, segment: _Segment) -> bool:
        """Whether blocks are loaded, not recomputed; chooses the way of those on SSD."""
        cost, now, rate = self.cost, self._tiers.now, plan.prefill_blocks_per_s
        name, num_blocks = segment.tier.name, segment.end - segment.begin
        if not plan.may_go_direct or name is not TierName.SSD:
            wait_s = None if plan.terms is None else plan.terms.wait_s
            peer = ""
            if name is TierName.PEER:  # the speed of the one that has the first of them
                first = segment.tier.index.blocks(segment.match, segment.begin)[0]
                peer = peer_of(segment.tier, first)
            return cost is None or cost.pays(LOAD_OP[name], num_blocks, rate, now, wait_s, peer)
        for way in self.ways.choose():
            if cost is None or cost.pays(_SSD_LOAD[way], num_blocks, rate, now):
                plan.way = way
                return True
        return False

    def _add_loads(
        self, plan: Plan, keys: BlockKeys, on_host: PrefixMatch, segments: list[_Segment], stop: int
    ) -> None:
        """Load what the host tier lacks: past it, or through it."""
        plan.load_start = plan.stop
        if plan.way is LoadWay.DIRECT:
            tier, match, low, high = segments.pop(0)
            slots = tier.index.blocks(match, low)
            for chunk in chunks(low, high, self._chunk_blocks):
                source = slots[chunk.start - low : chunk.stop - low]
                op = TransferOp(next(self._op_ids), OpKind.DISK2D, chunk.start, source, None)
                plan.graph.ops.append(op)
            plan.sources[tier.name] = high - low
            plan.stop = high
        if segments:
            self._add_staged_loads(plan, keys, on_host, segments, stop)
        if TierName.SSD not in plan.sources:  # the host tier had no room
            plan.way = None
        plan.load_keys = keys.slice(plan.load_start, plan.stop)

    def _add_staged_loads(
        self, plan: Plan, keys: BlockKeys, on_host: PrefixMatch, segments: list[_Segment], stop: int
    ) -> None:
        """Load what the host tier lacks into a lease on it, and then to the GPU chunk by chunk."""
        begin, before = plan.stop, on_host.num_blocks
        before += self._host.num_in_flight(keys, before, begin)
        attaches = begin <= before
        if attaches and not self._host.num_in_flight(keys, begin, begin + 1):
            hold_s = None if plan.terms is None else plan.terms.hold_s
            outlook = self._tiers.recall(keys)
            plan.staging = self._host.reserve(
                keys, begin, stop, outlook, retain_s=-plan.age_s, hold_s=hold_s
            )
            if plan.staging.is_refused:
                plan.skipped[plan.staging.why_short("host")] = stop - begin - len(plan.staging)
        else:
            # Another task is loading them, or only the engine has the blocks before them. They are
            # read into blocks of its own: simple, never late, and sometimes one read too many. To
            # wait for the other task's op would tie this get to its fate.
            plan.staging = self._host.reserve_private(keys.root, stop - begin)
        if plan.kind is TaskKind.PREFETCH:
            # What a load ahead brings is as old on the host as where it comes from.
            plan.staging.used_s = _last_used(segments, self._tiers.now - plan.age_s)
        staged = plan.staging.blocks.copy()
        plan.stop = begin + len(staged)
        for tier, match, low, high in segments:
            high = min(high, plan.stop)
            if low >= high:
                continue
            plan.sources[tier.name] = high - low
            slots = tier.index.blocks(match, low)
            parts = chunks(low, high, self._chunk_blocks)
            for chunk in pieces_of(tier, slots[: high - low], parts, low):
                source = slots[chunk.start - low : chunk.stop - low]
                landing = staged[chunk.start - begin : chunk.stop - begin]
                names = None
                if isinstance(tier, RemoteTier):
                    names = block_names(tier, keys, chunk.start, chunk.stop)
                    names = _of_peer(names, tier, source[0])
                op = next(self._op_ids)
                load = TransferOp(op, LOAD_OP[tier.name], chunk.start, source, landing, names=names)
                plan.graph.ops.append(load)
                if plan.kind is TaskKind.GET:
                    upload = next(self._op_ids)
                    plan.graph.ops.append(
                        TransferOp(upload, OpKind.H2D, chunk.start, landing, None, (op,))
                    )


def _of_peer(names: BlockNames, tier: Tier, block: np.int64, tail: bytes = b"") -> BlockNames:
    """Name the peer too that has the first of these blocks, if the tier is of peers."""
    peer = peer_of(tier, block)
    return msgspec.structs.replace(names, peer=peer, tail=tail) if peer else names


def _last_used(segments: list[_Segment], latest_s: float) -> Seconds | None:
    """Return when the blocks that lower tiers supply were last used, where that matters.

    Args:
        latest_s: Of those that a peer has: when they were used there.
    """
    pieces = list[Seconds]()
    for tier, match, begin, end in segments:
        if (times := tier.last_used(match, begin)) is not None:
            is_elsewhere = isinstance(tier, PeerTier)
            times = times[: end - begin]
            pieces.append(np.minimum(times, latest_s) if is_elsewhere else times)
    return np.concatenate(pieces) if pieces else None
