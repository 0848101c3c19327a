"""Metrics of hits, misses and stores, and of the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.ids import TierName
from flexcache.metrics.metric import (
    Metric,
    Reader,
    Sample,
    counter,
    each,
    from_cache,
    gauge,
    in_blocks_and_tokens,
    in_bytes,
    one,
    per,
)
from flexcache.tasks.stats import CacheStats, QuotaStats, Stats, TierStats

_WHY_DROPPED = (
    "host_tier_full", "prefix_not_cached", "parent_missing", "session_task_limit", "name_disputed",
    "ranks_missing", "ssd_nothing_returns",
    *(
        f"{tier}_{what}"
        for tier in ("ssd", "remote")
        for what in ("tier_full", "write_backlog", "write_throttled", "write_failed",
                     "unavailable", "bad_block", "never_written")
    ),
)  # fmt: skip
_WHY_SKIPPED = ("ssd_slower_than_recompute", "remote_slower_than_recompute", "host_worth_less")


def _per_tier(value: Callable[[TierStats], float]) -> Reader:
    return per(lambda cache: cache.tiers, value)


def _per_tenant(value: Callable[[QuotaStats], float]) -> Reader:
    def read(cache: CacheStats) -> Iterator[Sample]:
        for name, tier in cache.tiers.items():
            for tenant, part in (tier.quotas or {}).items():
                yield (name, tenant), value(part)

    return from_cache(read)


def _without_store(read: Reader) -> Reader:
    """Leave out the remote store, whose free space is unknown."""

    def read_ours(stats: Stats) -> Iterator[Sample]:
        return (sample for sample in read(stats) if sample[0] != (TierName.REMOTE.value,))

    return read_ours


def _in_blocks_and_bytes(
    name: str, help: str, value: Callable[[TierStats], float]
) -> tuple[Metric[Stats], ...]:
    read = _per_tier(value)
    read_bytes = in_bytes(_without_store(read))
    return (
        gauge(f"{name}_blocks", help.format("Blocks"), read, "tier"),
        gauge(f"{name}_bytes", help.format("Bytes"), read_bytes, "tier"),
    )


def _hit_ratios(cache: CacheStats) -> Iterator[Sample]:
    for window, hits in cache.hit_rate.items():
        if hits.asked_blocks:  # without requests there is no ratio, and no reason for an alert
            yield (window,), hits.rate


def _load_decisions(cache: CacheStats) -> Iterator[Sample]:
    for tier, decided in cache.load_decisions.items():
        yield (tier, "load"), decided.load
        yield (tier, "recompute"), decided.recompute


def _where_known(value: Callable[[TierStats], float | None]) -> Reader:
    """Leave out tiers that do not have the figure."""

    def read(cache: CacheStats) -> Iterator[Sample]:
        for name, tier in cache.tiers.items():
            if (figure := value(tier)) is not None:
                yield (name,), figure

    return from_cache(read)


HITS_AND_MISSES = (
    *in_blocks_and_tokens(
        "tier_hit",
        "{} that gets found in this tier, also if a load failed or was cancelled.",
        _per_tier(lambda tier: tier.hit_blocks),
        "tier",
    ),
    *in_blocks_and_tokens(
        "tier_miss",
        "{} requested by gets that this tier did not supply; another may have.",
        _per_tier(lambda tier: tier.miss_blocks),
        "tier",
    ),
    *in_blocks_and_tokens(
        "missed",
        "{} requested by gets that were in no tier: the engine computes them.",
        one(lambda cache: cache.totals.missed_blocks),
    ),
    gauge(
        "hit_ratio",
        "Share of requested blocks that were found, over the last minute, 10 minutes and hour.",
        from_cache(_hit_ratios),
        "window",
    ),
    counter(
        "load_decision_blocks",
        "Blocks found in a tier below DRAM: loaded, or recomputed because that is faster.",
        from_cache(_load_decisions),
        "tier",
        "decision",
    ),
    counter(
        "skipped_blocks",
        "Blocks that were cached but not loaded, by reason.",
        each(lambda cache: cache.totals.skipped_blocks, known=_WHY_SKIPPED),
        "reason",
    ),
    counter(
        "dropped_blocks",
        "Blocks that were not stored in some tier, or were lost from it, by reason.",
        each(lambda cache: cache.totals.dropped_blocks, known=_WHY_DROPPED),
        "reason",
    ),
)

TIERS = (
    *in_blocks_and_tokens(
        "tier_stored",
        "{} that became findable in the tier.",
        _per_tier(lambda tier: tier.stored_blocks),
        "tier",
    ),
    *in_blocks_and_tokens(
        "tier_evicted",
        "{} evicted to make room for others. For REMOTE: only forgotten here.",
        _per_tier(lambda tier: tier.evicted_blocks),
        "tier",
    ),
    *in_blocks_and_tokens(
        "tier_dropped",
        "{} found to be bad or missing, and those that depend on them.",
        _per_tier(lambda tier: tier.dropped_blocks),
        "tier",
    ),
    *in_blocks_and_tokens(
        "tier_expired",
        "{} dropped since they were not used for longer than `retention_s`.",
        _per_tier(lambda tier: tier.expired_blocks),
        "tier",
    ),
    gauge(
        "tier_available",
        "1 while the tier is in use; 0 while its worker or store is down and every lookup misses.",
        _per_tier(lambda tier: tier.available),
        "tier",
    ),
    counter(
        "tier_read_bytes",
        "Bytes read from the tier.",
        _per_tier(lambda tier: tier.read_bytes),
        "tier",
    ),
    counter(
        "tier_written_bytes",
        "Bytes written to the tier.",
        _per_tier(lambda tier: tier.written_bytes),
        "tier",
    ),
    gauge(
        "tier_write_limit_bytes_per_second",
        "Most that is written to the tier per second. Blocks beyond it count as dropped, as "
        "`ssd_write_throttled` or `remote_write_throttled`.",
        _where_known(lambda tier: tier.write_limit_bytes_per_s),
        "tier",
    ),
    gauge(
        "tier_writes_paused",
        "1 while nothing is written to the tier, since nothing that was written there comes back "
        "(`skip_useless_ssd_writes`). Its blocks count as dropped, as `ssd_nothing_returns`.",
        _where_known(lambda tier: tier.writes_paused),
        "tier",
    ),
    counter(
        "tier_refused_returns",
        "Prompts that came back and would have been found, had they been written to the tier.",
        _where_known(lambda tier: tier.refused_returns),
        "tier",
    ),
    gauge(
        "retention_seconds",
        "How long blocks are kept that are not used.",
        one(lambda cache: cache.retention_s),
    ),
    *_in_blocks_and_bytes(
        "tier_capacity",
        "{} that the tier can hold. For REMOTE: how many can be remembered.",
        lambda tier: tier.capacity,
    ),
    *_in_blocks_and_bytes("tier_free", "{} that are empty.", lambda tier: tier.free),
    *_in_blocks_and_bytes(
        "tier_indexed",
        "{} that can be found. For REMOTE: known to be in the store.",
        lambda tier: tier.indexed,
    ),
    *_in_blocks_and_bytes("tier_leased", "{} that tasks have reserved.", lambda tier: tier.leased),
    *_in_blocks_and_bytes(
        "tier_restoring",
        "{} that survived a restart and cannot be found yet: a matter of seconds.",
        lambda tier: tier.restoring,
    ),
)

QUOTAS = (
    gauge(
        "quota_blocks",
        "Blocks of the tier that a namespace is sure of; * is all that are not named.",
        _per_tenant(lambda part: part.quota),
        "tier",
        "namespace",
    ),
    gauge(
        "quota_used_blocks",
        "Blocks of the tier that a namespace has, borrowed ones included.",
        _per_tenant(lambda part: part.used),
        "tier",
        "namespace",
    ),
    counter(
        "quota_evicted_blocks",
        "Blocks of a namespace evicted to make room for its own or others' blocks.",
        _per_tenant(lambda part: part.evicted),
        "tier",
        "namespace",
    ),
    counter(
        "quota_hit_blocks",
        "Blocks that gets of a namespace found in the tier.",
        _per_tenant(lambda part: part.hit),
        "tier",
        "namespace",
    ),
    counter(
        "quota_miss_blocks",
        "Blocks requested by gets of a namespace that the tier did not supply; another may have.",
        _per_tenant(lambda part: part.missed),
        "tier",
        "namespace",
    ),
)

REMOTE_COST = (
    gauge(
        "load_bytes_per_second",
        "Recent speed of loads from the tier, or of those 'SSD past DRAM', by which FlexCache "
        "decides to load or to recompute.",
        in_bytes(per(lambda cache: cache.load_cost or {}, lambda cost: cost.blocks_per_s)),
        "tier",
    ),
    gauge(
        "load_seconds_per_op",
        "Recent duration of an op that loads from the tier.",
        per(lambda cache: cache.load_cost or {}, lambda cost: cost.seconds_per_op),
        "tier",
    ),
)
