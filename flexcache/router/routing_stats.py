"""Fills the statistics that a `KVRouter` knows."""

from __future__ import annotations

from collections.abc import Mapping

from flexcache.router.decision_counts import TokenCounts
from flexcache.router.dispatcher import Dispatcher
from flexcache.router.fleet import Member
from flexcache.router.holdings import Holdings
from flexcache.router.service_time import ServiceTime
from flexcache.router.stats import IndexStats, ServiceTimeStats, WorkerStats
from flexcache.router.workers import Tier


def by_tier_name(tokens: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.value: count for tier, count in tokens.items()}


def service_time_stats(times: ServiceTime) -> ServiceTimeStats:
    base_s, token_s, attention_s, dram_s, disk_s = times.coefficients
    return ServiceTimeStats(
        samples=times.num_samples,
        is_learned=times.is_known,
        base_s=base_s,
        token_s=token_s,
        attention_s=attention_s,
        load_s={Tier.DRAM.value: dram_s, Tier.DISK.value: disk_s},
    )


def index_stats(holdings: Holdings) -> IndexStats:
    index, applier = holdings.index, holdings.applier
    held: dict[str, dict[str, int]] = {}
    for holder in index.holders:
        tiers = held.setdefault(holder.source, {})
        name = holder.tier.value
        tiers[name] = tiers.get(name, 0) + index.num_held(holder)
    return IndexStats(
        blocks=index.num_blocks,
        held_blocks=held,
        bytes=applier.num_bytes,
        max_blocks=index.max_blocks,
        refused_blocks=index.num_refused,
        orphans=applier.num_waiting,
        events=dict(applier.applied),
        event_blocks=dict(applier.blocks),
        ignored_events=dict(applier.ignored),
    )


def worker_stats(
    member: Member,
    dispatcher: Dispatcher,
    counts: TokenCounts,
    wait_s: float,
    *,
    is_approximate: bool,
) -> WorkerStats:
    number, load = member.number, dispatcher.load
    return WorkerStats(
        url=member.spec.url,
        state=member.state.value,
        sources=[source.endpoint for source in member.spec.sources],
        requests=int(load.num_requests[number]),
        waiting_requests=int(load.num_waiting[number]),
        wait_s=wait_s,
        speed_factor=float(dispatcher.service_time.factors[number]),
        decisions=counts.decisions,
        prompt_tokens=counts.prompt_tokens,
        matched_tokens=by_tier_name(counts.matched_tokens),
        is_approximate=is_approximate,
    )
