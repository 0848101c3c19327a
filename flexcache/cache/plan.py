"""Plan: what one get, put, prefetch or store moves, and what it holds until it is finished."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.eviction_policy import Outlook
from flexcache.cache.load_cost import LoadCost, LoadWay, LoadWays
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tail_index import TAIL_FIRST, Tail, tail_keys
from flexcache.cache.tier import BlockIds, Lease, Tier
from flexcache.cache.tiers import RemoteTier
from flexcache.config.model import UnitShape
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.messages import BlockNames
from flexcache.transfer.scheduler import TransferOpGraph

if TYPE_CHECKING:
    from flexcache.cache.admission import Admission, ReuseWatch
    from flexcache.cache.write_back import DirtyQueue, WriteBudget

LOAD_OP = {
    TierName.SSD: OpKind.DISK2H,
    TierName.PEER: OpKind.PEER2H,
    TierName.REMOTE: OpKind.REMOTE2H,
}
STORE_OP = {TierName.SSD: OpKind.H2DISK, TierName.REMOTE: OpKind.H2REMOTE}


def number_ops() -> Iterator[OpId]:
    """Number the ops of one server, from 1."""
    return map(OpId, itertools.count(1))


@dataclass(kw_only=True, slots=True)
class PlannerSettings:
    """What the planners of one cache go by.

    Attributes:
        chunk_blocks: Blocks per op if one tier feeds another, so that both work at once.
        max_store_backlog: Host blocks that may wait to be written below; blocks of a put beyond it
            stay on the host tier only.
        admissions: Policies of the tiers that do not take every block.
        write_back: Queues of the tiers with write-back.
        write_budgets: Those of the tiers whose writes per second are limited.
        reuse: The SSD tier's admission, if that depends on which prompts come back.
        ways: Chooses between loads through DRAM and past it.
        load_cost: Estimates which loads would take longer than recomputing; None to load all.
        shape: How the blocks of several groups fill its units; None for a single group.
        early_load_share: Share of the host tier that early loads may take.
        max_pinned_share: Share of each tier that pins may hold.
        early_load_ttl_s: How long their blocks wait for the requests that need them.
        keeps_on_host: Whether the host tier is a cache; else it only stages.
        op_ids: Numbers the ops.
    """

    chunk_blocks: int
    max_store_backlog: int
    admissions: Mapping[TierName, Admission] = field(default_factory=dict)
    write_back: Mapping[TierName, DirtyQueue] = field(default_factory=dict)
    write_budgets: Mapping[TierName, WriteBudget] = field(default_factory=dict)
    reuse: ReuseWatch | None = None
    ways: LoadWays = field(default_factory=LoadWays)
    load_cost: LoadCost | None = None
    shape: UnitShape | None = None
    early_load_share: float = 0.5
    max_pinned_share: float = 0.5
    early_load_ttl_s: float = 120.0
    keeps_on_host: bool = True
    op_ids: Iterator[OpId] = field(default_factory=number_ops)


class EarlyTerms(NamedTuple):
    """What an early load may take.

    Attributes:
        num_blocks: At most this many are loaded.
        wait_s: How long its request is likely to wait before it asks.
        hold_s: How long DRAM holds its blocks for each use that is made of them, on average.
        age_s: How long ago its blocks were last used, elsewhere; they are no more recent here.
        ttl_s: How long it is kept for its request, at most as long as others.
    """

    num_blocks: int
    wait_s: float
    hold_s: float
    age_s: float = 0.0
    ttl_s: float = math.inf


@dataclass(slots=True, eq=False)
class PlannedTail:
    """The tail that a plan moves. Its units are at positions from `TAIL_FIRST` on in the graph.

    Attributes:
        position: Blocks of the prompt before it.
        key: Key of the last of them.
        units: Its units on the host tier.
        num_copied: How many of them are copied from or to the GPU: all or none.
        staging: The lease on them, unless they are cached.
        stores: Leases on the tiers below the host that a put writes it to.
        pins: Tails kept in place until the plan is finished.
    """

    position: int
    key: BlockKey
    units: BlockIds
    num_copied: int = 0
    staging: Lease | None = None
    stores: dict[TierName, Lease] = field(default_factory=dict)
    pins: list[tuple[Tier, Tail]] = field(default_factory=list)

    def names(self, tier: Tier, root: RootId, units: range, era: int = 0) -> BlockNames:
        """Name some of its units, for storage that outlives this process."""
        at_store = tier.root_at_store(root) if isinstance(tier, RemoteTier) else root
        names = tail_keys(self.key, len(self.units))
        parent = names[units.start - 1] if units.start else self.key
        first = TAIL_FIRST + units.start
        own: list[bytes] = list(names[units.start : units.stop])
        return BlockNames(at_store, first, parent, own, era=era)


@dataclass(slots=True, eq=False)
class Plan:
    """What one task will move: blocks ``[start, stop)`` of its prompt, or of the whole chain that
    its prompt continues.

    Attributes:
        staging: The lease on the host tier for blocks from a lower tier or from the GPU.
        stores: Leases on the tiers below the host that a put writes through to.
        sources: For a get, how many of the blocks each tier supplies, in order.
        dropped: Blocks that a put could not store, by reason.
        skipped: Blocks that are cached and deliberately not loaded, by reason.
        load_keys: Keys of the blocks that are read from below the host, from position
            ``load_start`` on.
        is_write_back: Whether it writes dirty blocks.
        is_put_off: Whether blocks that it fails to write become dirty again, whatever failed.
        has_failed: Whether a write has failed.
        tail: The tail that it moves, if the model has tails.
        blocks_per_unit: GPU blocks for each block and unit of a tail.
        has_dense: Whether its blocks hold anything: in a model with tails only they do not.
        num_before: Blocks before the caller's prompt, which continues their chain.
        outlook: Kinds of a put's blocks, if they matter.
        may_go_direct: Whether the engine's ranks also move blocks between GPU and SSD past DRAM.
        way: How such a get loads its blocks from SSD, if there are any.
        terms: What a prefetch may take; None without limits.
        prefill_blocks_per_s: How fast the engine computes; 0 if unknown.
        num_cached: For a load, how many of the prompt's blocks some tier has, among those that were
            asked; None if none was.
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
    load_start: int = 0
    is_write_back: bool = False
    is_put_off: bool = False
    has_failed: bool = False
    tail: PlannedTail | None = None
    blocks_per_unit: int = 1
    has_dense: bool = True
    num_before: int = 0
    outlook: Outlook | None = None
    may_go_direct: bool = False
    way: LoadWay | None = None
    terms: EarlyTerms | None = None
    prefill_blocks_per_s: float = 0.0
    num_cached: int | None = None

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def age_s(self) -> float:
        """How long ago its blocks were last used."""
        return 0.0 if self.terms is None else self.terms.age_s

    @property
    def offset(self) -> int:
        """Where its blocks begin in the caller's prompt."""
        return self.start - self.num_before if self.start > self.num_before else 0

    @property
    def num_beside(self) -> int:
        """Blocks before the caller's prompt that a prefetch brings along."""
        return max(0, self.num_before - self.start)

    @property
    def num_gpu_blocks(self) -> int:
        """GPU blocks that a launch needs: those of its blocks, then those of its tail."""
        num_units = self.stop - self.start if self.has_dense else 0
        if self.tail is not None:
            num_units += self.tail.num_copied
        return num_units * self.blocks_per_unit

    @property
    def tail_at(self) -> int:
        """Blocks of the prompt before the tail that is copied from or to the GPU; 0 for none."""
        # A tail that the host has already, or that only goes below it, concerns no GPU block.
        return 0 if self.tail is None or not self.tail.num_copied else self.tail.position

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop and (self.tail is None or not self.tail.num_copied)

    def take_shape(self, shape: UnitShape) -> None:
        """Move what the units of a model with several groups hold."""
        self.blocks_per_unit = shape.blocks_per_unit
        self.has_dense = shape.dense_blocks > 0

    def bind_gpu_blocks(self, gpu_blocks: BlockIds) -> None:
        """Assign the GPU blocks that a launch brings to the ops."""
        size = self.blocks_per_unit
        # A launch lists them in one array: those of the blocks, then those of the tail.
        split = self.num_blocks * size if self.has_dense else 0
        self.graph.bind_gpu_blocks(gpu_blocks[:split], self.start, size)
        if self.tail is not None:
            self.graph.bind_gpu_blocks(gpu_blocks[split:], TAIL_FIRST, size)

    @property
    def num_backlogged(self) -> int:
        """Host blocks that wait to be written below until the plan ends."""
        return sum(self.num_reserved.values())

    def pin(self, tier: Tier, match: PrefixMatch) -> None:
        """Keep matched blocks in place until the plan is finished."""
        tier.index.pin(match)
        self.pins.append((tier, match))

    def drop(self, reason: str, count: int) -> None:
        """Count blocks or units of a tail that it cannot store."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def let_go(self, host: Tier) -> None:
        """End its leases on the host tier and its pins."""
        if self.staging is not None:
            host.release(self.staging)
        for tier, match in self.pins:
            tier.unpin(match)
        self.staging, self.pins = None, []
        if self.tail is not None:
            if self.tail.staging is not None:
                host.release(self.tail.staging)
            for tier, tail in self.tail.pins:
                tier.unpin_tail(tail)
            self.tail.staging, self.tail.pins = None, []

    def take_back(self, host: Tier) -> None:
        """Give up all that was planned to load; what was skipped remains counted."""
        self.let_go(host)
        self.stop, self.tail = self.start, None
        self.graph = TransferOpGraph()
        self.sources, self.way = {}, None


def chunks(start: int, stop: int, size: int) -> Iterator[range]:
    """Divide blocks ``[start, stop)`` into ranges of ``size``, the last possibly shorter."""
    for low in range(start, stop, size):
        yield range(low, min(low + size, stop))


def block_names(
    tier: Tier, keys: BlockKeys, start: int, stop: int, used_s: float | None = None, era: int = 0
) -> BlockNames:
    """Name blocks ``[start, stop)`` of a prompt, for storage that outlives this process."""
    root = tier.root_at_store(keys.root) if isinstance(tier, RemoteTier) else keys.root
    parent = keys.key(start - 1) if start else b""
    return BlockNames(root, start, parent, list(keys.slice(start, stop)), used_s, era)
