"""Takes a snapshot of a cache's statistics."""

from __future__ import annotations

from dataclasses import asdict

from flexcache.cache.block_pool import Quotas
from flexcache.cache.load_cost import why_recomputed
from flexcache.cache.plan import LOAD_OP
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import OpKind, TierName
from flexcache.tasks.accounts import Accounts
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.model import ENDS, TaskSessions
from flexcache.tasks.stats import (
    BreakerStats,
    CacheIdentity,
    CacheStats,
    EarlyLoadStats,
    LoadCostStats,
    LoadDecisions,
    LookUpStats,
    OpHistograms,
    QueueStats,
    QuotaStats,
    RemoteStats,
    SessionStats,
    TierStats,
)
from flexcache.tasks.totals import Totals
from flexcache.transfer.breaker import CircuitBreaker

_LOADS = {kind: tier.value for tier, kind in LOAD_OP.items()} | {OpKind.DISK2D: "SSD past DRAM"}
"""What the measured loads are called."""


def cache_stats(
    identity: CacheIdentity, cache: TieredCache, accounts: Accounts, sessions: TaskSessions,
    queues: dict[str, QueueStats], num_unlaunched: int, lookups: RemoteLookUps | None,
    breaker: CircuitBreaker, now: float,
) -> CacheStats:  # fmt: skip
    """The parts of a `KVTaskEngine` as statistics."""
    op_times, op_sizes = accounts.op_seconds, accounts.op_bytes
    load_cost = None
    if cache.loads.cost is not None:
        measured = cache.loads.cost.report()
        load_cost = {_LOADS[kind]: LoadCostStats(**cost) for kind, cost in measured.items()}
    return CacheStats(
        identity=identity,
        totals=accounts.totals.stats(),
        tiers=_tiers(cache, accounts.totals),
        tasks=sessions.by_state(),
        hit_rate=accounts.hit_rates.stats(now),
        op_histograms={
            kind.value: OpHistograms(seconds=op_times[kind].stats(), bytes=op_sizes[kind].stats())
            for kind in OpKind
        },
        task_histograms={kind.value: h.stats() for kind, h in accounts.task_seconds.items()},
        queues=queues,
        unlaunched_tasks=num_unlaunched,
        open_lookups=0 if lookups is None else lookups.num_open,
        store_backlog_blocks=cache.stores.backlog,
        load_decisions=_load_decisions(cache, accounts.totals),
        early_loads=EarlyLoadStats(
            open_blocks=cache.early.num_blocks, **asdict(cache.early.counters)
        ),
        sessions=SessionStats(known=len(cache.sessions), **asdict(cache.sessions.counters)),
        retention_s=cache.tiers.host.retention_s,
        remote=None if lookups is None else _remote(cache, lookups, breaker),
        load_cost=load_cost,
    )


def _tiers(cache: TieredCache, totals: Totals) -> dict[str, TierStats]:
    """Bytes are those of the ops that read and wrote the tier."""
    num_read = dict.fromkeys(TierName, 0)
    num_written = dict.fromkeys(TierName, 0)
    for kind, (source, target) in ENDS.items():
        num_read[source] += totals.ops[kind].bytes
        num_written[target] += totals.ops[kind].bytes
    return {
        name: TierStats(
            read_bytes=num_read[TierName(name)],
            written_bytes=num_written[TierName(name)],
            quotas=_quotas(cache.tiers.by_name[TierName(name)].quotas),
            **tier,
        )
        for name, tier in cache.stats().items()
    }


def _quotas(quotas: Quotas | None) -> dict[str, QuotaStats] | None:
    if quotas is None:
        return None
    return {tenant: QuotaStats(**use._asdict()) for tenant, use in quotas.uses().items()}


def _load_decisions(cache: TieredCache, totals: Totals) -> dict[str, LoadDecisions]:
    return {
        tier.name.value: LoadDecisions(
            load=totals.hit_blocks[tier.name],
            recompute=totals.skipped_blocks[why_recomputed(tier.name)],
        )
        for tier in cache.tiers.lower
    }


def _remote(cache: TieredCache, lookups: RemoteLookUps, breaker: CircuitBreaker) -> RemoteStats:
    return RemoteStats(
        available=TierName.REMOTE not in cache.tiers.unavailable,
        breaker=BreakerStats(**breaker.report()),
        lookups=LookUpStats(asked=lookups.num_asked, late=lookups.num_late),
    )
