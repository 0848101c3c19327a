"""TieredCache: the tiers of one model, and the plans that move blocks between them.

A plan is a graph of ops and the leases and pins that keep its blocks in place. It is made by
`TieredCache.loads` or `TieredCache.stores`; the task engine executes it, publishes what arrived,
and ends it with `finish`.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from flexcache.cache.admission import Admission, ReuseWatch, Selective
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.block_pool import NO_ROOT, Quotas
from flexcache.cache.control import CacheControl
from flexcache.cache.early_loads import EarlyLoads
from flexcache.cache.eviction_policy import make_policy
from flexcache.cache.load_cost import LoadCost, LoadWays
from flexcache.cache.load_plan import LoadPlanner
from flexcache.cache.peers import PeerTier
from flexcache.cache.plan import Plan, PlannerSettings, number_ops
from flexcache.cache.prompt_sessions import PromptSessions
from flexcache.cache.restore import Records, Restoration, RestoreReport, Seconds
from flexcache.cache.store_plan import DirectStores, StorePlanner
from flexcache.cache.tail_index import TAIL_FIRST, last_tail_key
from flexcache.cache.tier import BlockIds, Tier
from flexcache.cache.tiers import ABSENT_TTL_S, RemoteTier, Tiers
from flexcache.cache.write_back import DirtyQueue, WriteBudget
from flexcache.config import CacheConfig
from flexcache.config.model import UnitShape
from flexcache.config.quotas import blocks_of
from flexcache.errors import InternalError
from flexcache.ids import OpId, TaskKind, TierName
from flexcache.stats import TierStats

# All of them take 1.2 s a million, half of it the dictionary of their keys. Without any at the
# start every match would be a miss, and every put would duplicate what is there.
_RESTORED_AT_ONCE = 1 << 16
"""Blocks of a restart that are found from the start; fewer if their prompts are short."""
_RESTORED_A_TURN, _RESTORE_PAUSE_S = 1 << 11, 0.008
"""Blocks that follow at a time, which takes 2 to 4 ms, and the time from one turn to the next."""


class TieredCache:
    """Tiers and the planners over them. `build_cache` wires one from a config.

    Attributes:
        remake: Makes an empty cache of the same kind, whose ops have other numbers.
    """

    def __init__(self, tiers: Tiers, settings: PlannerSettings) -> None:
        self.tiers = tiers
        self.remake: Callable[[], TieredCache] | None = None
        self.loads = LoadPlanner(tiers, settings)
        self.stores = StorePlanner(tiers, settings)
        self.direct_stores = None if settings.keeps_on_host else DirectStores(tiers, settings)
        """Plans puts past the host tier, if that only stages."""
        self.sessions = PromptSessions(tiers, settings.load_cost)
        self.control = CacheControl(
            tiers, self.sessions, self.loads.tails, settings.max_pinned_share
        )
        self.early = EarlyLoads(tiers.host, settings.early_load_share, settings.early_load_ttl_s)
        self.reuse = settings.reuse
        self._write_budgets = settings.write_budgets
        self._restoration: Restoration | None = None
        self._restore_at = 0.0

    def successor(self, busy: Mapping[TierName, BlockIds]) -> tuple[TieredCache, Plan]:
        """Return an empty cache in place of this one, which an error has left in doubt.

        As after a reset nothing that it had can be found, and another era of the SSD tier begins.

        Args:
            busy: Blocks that executors are still reading or writing.

        Returns:
            The cache, and a plan that keeps the busy blocks until it is finished.
        """
        if self.remake is None:
            raise InternalError("a cache that `build_cache` has not made cannot be replaced")
        cache = self.remake()
        cache.tiers.succeed(self.tiers)
        cache.stores.era = self.stores.era + 1
        cache.control.succeed(self.control)
        plan = cache.plan_nothing(TaskKind.STORE, EngineBlockKeys(NO_ROOT, (), 0), 0, 0, "")
        for name, blocks in busy.items():
            plan.stores[name] = cache.tiers.by_name[name].reserve_exactly(blocks)
        return cache, plan

    def keep_journal(self, tokens_per_block: int, *, tells_locality: bool = False) -> None:
        """Record, from now on, what every tier stores and loses."""
        self.tiers.keep_journal(tokens_per_block, tells_locality=tells_locality)
        self.stores.keep_content(tokens_per_block)

    def plan_nothing(
        self, kind: TaskKind, keys: BlockKeys, start: int, stop: int, reason: str
    ) -> Plan:
        """Plan a get that must be a miss, or a put that is dropped, for ``reason``."""
        plan = Plan(kind, keys.root, start, start)
        self.tiers.num_holders += 1
        if kind is TaskKind.PUT and stop > start:
            plan.dropped[reason] = stop - start
        return plan

    def publish_staging(self, plan: Plan, num_ok: int, num_units_ok: int = 0) -> None:
        """Make the first ``num_ok`` staged blocks findable, and the tail if all its units are
        there: they hold their bytes."""
        if plan.staging is not None:
            self.tiers.host.publish(plan.staging, num_ok)
        if plan.tail is not None and plan.tail.staging is not None:
            self.tiers.host.publish(plan.tail.staging, num_units_ok)

    def publish_store(self, plan: Plan, name: TierName, num_ok: int, num_units_ok: int = 0) -> None:
        """Likewise for what was written to a lower tier."""
        tier = self.tiers.by_name[name]
        if isinstance(tier, RemoteTier) and tier.root_at_store(plan.root) != plan.remote_root:
            num_ok = num_units_ok = 0  # the tier was cleared meanwhile and now uses other names
        if self.tiers.is_retired(plan.root):
            num_ok = num_units_ok = 0  # it would count as used now, before what is of use
        if name in plan.stores:
            lease = plan.stores[name]
            tier.publish(lease, num_ok)
            lease.is_given_up = plan.has_failed and not plan.is_put_off
        if plan.tail is not None and name in plan.tail.stores:
            tier.publish(plan.tail.stores[name], num_units_ok)

    def discard_bad_block(self, plan: Plan, name: TierName, position: int) -> None:
        """Drop the task's block ``position`` from a tier where reading it failed, or the tail."""
        tier = self.tiers.by_name[name]
        if plan.tail is not None and position >= TAIL_FIRST:
            tier.discard_tail(plan.root, plan.tail.key)
            key = last_tail_key(plan.tail.key, len(plan.tail.units))
        else:
            key = plan.load_keys[position - plan.load_start]
            tier.discard(plan.root, key)
        if isinstance(tier, RemoteTier):  # of a peer for less, whatever it says
            tier.learn_absent(plan.root, key, self.tiers.now, ABSENT_TTL_S)

    def finish(self, plan: Plan) -> None:
        """End the plan and free all that it held: every op has ended or was never started."""
        plan.let_go(self.tiers.host)
        if plan.num_reserved or plan.stores:  # else it writes nothing below
            self.stores.release(plan)
        self.tiers.num_holders -= 1

    def restore(self, records: Records, ages_s: Seconds, now: float) -> RestoreReport:
        """Index the blocks of SSD slots that outlived the last process (`Restoration`).

        Those used last are found at once; the others follow in `catch_up`.

        Args:
            ages_s: How long ago each record was written; it is dropped if that was too long.
        """
        ssd = self.tiers.by_name[TierName.SSD]
        self.tiers.advance(now)
        ssd.doomed.leave(records["slot"])
        restoration = Restoration(ssd, records, now - ages_s, _RESTORED_AT_ONCE)
        # At once, not in turns: what is too old must not be found after a restart.
        ssd.expire_all(now)
        self._restoration = None if restoration.is_over else restoration
        self._restore_at = now + _RESTORE_PAUSE_S
        return restoration.report

    def catch_up(self, now: float) -> None:
        """Do what no answer waits for: record look-ups, and index more blocks of a restart."""
        self.tiers.settle()
        if self._restoration is None or now < self._restore_at:
            return
        self._restoration.go_on(_RESTORED_A_TURN)
        self._restore_at = now + _RESTORE_PAUSE_S
        if self._restoration.is_over:
            self._restoration = None

    def finish_restoring(self) -> None:
        """Index all that is left of a restart, so that it can be found: 2 to 70 us a block."""
        while self._restoration is not None:
            self._restoration.go_on(_RESTORED_AT_ONCE)
            if self._restoration.is_over:
                self._restoration = None

    def clear(self, tier: str | None) -> int:
        """Clear a tier, or all (`Tiers.clear`); return how many unheld blocks were dropped.

        Raises:
            ValueError: There is no such tier.
        """
        self.tiers.require(tier)
        # First, since what they pin would outlast the clear.
        self.early.forget()
        self.control.end_in(tier)
        num_dropped = sum(len(blocks) for blocks in self.tiers.clear(tier).values())
        self.early.settle(self.tiers.now)  # what they waited for may not come any more
        return num_dropped

    def tick(self, now: float) -> None:
        """Let time pass: blocks expire, and budgets of writes grow."""
        self.tiers.advance(now)
        expiry_s = self.tiers.host.next_expiry
        self.tiers.expire(now)
        # After that: what is pinned until now must not go by its age in the same turn.
        if (pins := self.control.expiries) and pins[0][0] <= now:
            self.control.expire(now)
        # Only then something may have gone: to look at all loads at each tick costs their number.
        if expiry_s is not None and expiry_s <= now:
            self.early.let_go_expired(now)

    def next_deadline(self) -> float | None:
        """When something is due: to `tick`, to `catch_up`, or for `stores` to write back."""
        times = [tier.next_expiry for tier in self.tiers]
        times += [self.stores.throttled_until(tier.name) for tier in self.tiers.lower]
        times += [moment for moment, _ in self.control.expiries[:1]]
        if self._restoration is not None:
            times.append(self._restore_at)
        return min((time for time in times if time is not None), default=None)

    def stats(self) -> dict[str, TierStats]:
        """Return occupancy and counters of each tier."""
        limits = {name: int(budget.bytes_per_s) for name, budget in self._write_budgets.items()}
        return {
            tier.name.value: tier.stats(
                available=int(tier.name not in self.tiers.unavailable),
                write_limit_bytes_per_s=limits.get(tier.name),
                **self.stores.stats_of(tier.name),
            )
            for tier in self.tiers
        }

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(capacity)."""
        self.tiers.check()
        self.sessions.check()
        self.control.check()
        self.early.check()
        self.loads.ways.check()
        for budget in self._write_budgets.values():
            budget.check()
        if not self.tiers.num_holders and self.stores.backlog:
            raise InternalError(f"backlog without a plan: {self.stores.backlog} blocks")


_STORE_BLOCKS = 1 << 20
"""Size assumed for a remote store: the memory of sightings must have a bound."""
MAX_DIRTY = 0.5
"""Share of DRAM that may wait to be written back. Gets need the rest: it can be evicted at once."""
_UNFED_CHUNKS = 4  # copied by one op if no tier feeds another
_STAGING_CHUNKS = 8  # held by a host tier that only stages


# Of the remote store, at 0.2 to 1 KB of memory each. One that is forgotten costs a look-up, and
# possibly a repeated write.
REMEMBERED_BLOCKS = 262_144


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of a cache, in blocks.

    Attributes:
        num_slots: Slots of the SSD tier; 0 for none.
        chunk_blocks: Blocks that one op moves if one tier feeds another.
        max_store_backlog: Host blocks that may wait to be written below.
        keeps_on_host: Whether the host tier is a cache; else it only stages.
        max_dirty: Host blocks that may wait to be written back.
        stored_bytes: Bytes that a block takes in a tier.
        host_quotas: Blocks that each tenant is sure of, by name; empty if all share everything.
        ssd_quotas: Likewise.
        num_remembered: Blocks of the remote store of which it is known whether it has them.
    """

    num_host_blocks: int
    num_slots: int
    chunk_blocks: int
    max_store_backlog: int
    keeps_on_host: bool = True
    max_dirty: int = 0
    stored_bytes: int = 1
    host_quotas: Mapping[str, int] = field(default_factory=dict)
    ssd_quotas: Mapping[str, int] = field(default_factory=dict)
    num_remembered: int = REMEMBERED_BLOCKS

    @classmethod
    def for_blocks(cls, config: CacheConfig, block_bytes: int, stored_bytes: int) -> CacheSizes:
        """Convert the sizes of a config.

        Args:
            block_bytes: KV bytes of a block, over all ranks.
            stored_bytes: Aligned size of a block in a tier.

        Raises:
            ConfigError: A tier has no room for one block, or for what is promised of it.
        """
        # With no tier to feed, an op must only be short enough that loads do not wait long for it.
        num_chunks = 1 if config.has_workers else _UNFED_CHUNKS
        chunk_bytes = int(config.transfer_chunk_mb * 1e6 * num_chunks)
        chunk_blocks = max(1, chunk_bytes // block_bytes)
        num_host_blocks = config.cpu_blocks_for(stored_bytes)
        num_slots = config.ssd_blocks_for(stored_bytes)
        host_quotas = blocks_of(config.quotas, "dram", num_host_blocks, stored_bytes)
        keeps_on_host = num_host_blocks > 0
        if not keeps_on_host:
            num_host_blocks = _STAGING_CHUNKS * chunk_blocks
        return cls(
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            chunk_blocks=chunk_blocks,
            # Blocks that wait to be written are pinned: an eighth remains for gets to stage in. A
            # put beyond it keeps the prefix that fits, and counts the rest (`ssd_write_backlog`).
            max_store_backlog=max(1, num_host_blocks - num_host_blocks // 8),
            max_dirty=int(MAX_DIRTY * num_host_blocks),
            keeps_on_host=keeps_on_host,
            stored_bytes=stored_bytes,
            host_quotas=host_quotas,
            ssd_quotas=blocks_of(config.quotas, "ssd", num_slots, stored_bytes),
        )


def build_cache(
    config: CacheConfig, sizes: CacheSizes, shape: UnitShape | None = None,
    op_ids: Iterator[OpId] | None = None,
) -> TieredCache:  # fmt: skip
    """Build an empty cache with the tiers that the sizes and ``remote_url`` name.

    Args:
        shape: How the blocks of several groups fill the cache's units; None for a single group.
        op_ids: Numbers the ops; those of a cache that this one succeeds may still be reported.
    """
    op_ids = number_ops() if op_ids is None else op_ids
    policy = make_policy(config.eviction_policy, config.tokens_per_block)
    num_host_blocks = sizes.num_host_blocks
    # Blocks pass through the host to the tiers below: it takes them all if there are any.
    keep_s = config.retention_s
    tiers = [
        Tier(
            TierName.CPU, num_host_blocks, policy.for_tier(num_host_blocks), not config.has_workers,
            _quotas(num_host_blocks, sizes.host_quotas), keep_s,
        )
    ]  # fmt: skip
    writes: dict[TierName, str] = {}
    if sizes.num_slots:
        quotas = _quotas(sizes.num_slots, sizes.ssd_quotas)
        make_queue = policy.for_tier(sizes.num_slots)
        tiers.append(Tier(TierName.SSD, sizes.num_slots, make_queue, False, quotas, keep_s))
        writes[TierName.SSD] = config.ssd_write_policy
    if config.has_peers:
        tiers.append(PeerTier(sizes.num_remembered, keep_s))
    if config.remote_url is not None:
        tiers.append(RemoteTier(sizes.num_remembered, keep_s))
        writes[TierName.REMOTE] = config.remote_write_policy
    ordered = Tiers(tiers, policy)
    cache = TieredCache(ordered, _settings(config, sizes, ordered, writes, shape, op_ids))
    cache.remake = partial(build_cache, config, sizes, shape, op_ids)
    if config.records_changes:
        cache.keep_journal(config.tokens_per_block, tells_locality=config.kv_events_locality)
    return cache


def _settings(
    config: CacheConfig, sizes: CacheSizes, tiers: Tiers, writes: Mapping[TierName, str],
    shape: UnitShape | None, op_ids: Iterator[OpId],
) -> PlannerSettings:  # fmt: skip
    """Return what the planners go by.

    Args:
        writes: The write policy of each tier below the host.
    """
    limits = {TierName.SSD: config.ssd_write_mb_s, TierName.REMOTE: config.remote_write_mb_s}
    capacities = {TierName.SSD: sizes.num_slots, TierName.REMOTE: _STORE_BLOCKS}
    reuse: ReuseWatch | None = None
    admissions: dict[TierName, Admission] = {
        name: Selective(capacities[name]) for name, how in writes.items() if how == "selective"
    }
    # It counts on DRAM for what returns soon, and one tenant's prompts must not cost another what
    # it is sure of.
    can_watch = sizes.keeps_on_host and sizes.num_slots > 0 and not config.quotas
    is_through = config.ssd_write_policy == "write_through"
    if config.skip_useless_ssd_writes and is_through and can_watch:
        reuse = admissions[TierName.SSD] = ReuseWatch(tiers)
    return PlannerSettings(
        chunk_blocks=sizes.chunk_blocks,
        max_store_backlog=sizes.max_store_backlog,
        admissions=admissions,
        write_back={
            n: DirtyQueue(sizes.max_dirty) for n, how in writes.items() if how == "write_back"
        },
        write_budgets={
            name: WriteBudget(rate * 1e6, sizes.stored_bytes)
            for name, rate in limits.items()
            if name in writes and rate is not None
        },
        reuse=reuse,
        ways=LoadWays(config.ssd_past_dram if sizes.keeps_on_host else "always"),
        load_cost=LoadCost() if config.skip_slow_loads else None,
        shape=shape,
        early_load_share=config.early_load_share,
        max_pinned_share=config.max_pinned_share,
        early_load_ttl_s=config.match_ttl_s,
        keeps_on_host=sizes.keeps_on_host,
        op_ids=op_ids,
    )


def _quotas(capacity: int, quotas: Mapping[str, int]) -> Quotas | None:
    return Quotas(capacity, quotas) if quotas else None
