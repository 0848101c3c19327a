"""Rates: what happened between two looks at a server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexcache.tasks.stats import CacheStats, Stats


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over ``seconds``.

    Attributes:
        hit_tokens: Found, in any tier.
        missed_tokens: Requested and not found.
        ended_tasks: Of any kind and with any outcome.
        op_bytes: Moved, by kind of op.
        evicted_blocks: By tier.
    """

    seconds: float
    hit_tokens: float
    missed_tokens: float
    ended_tasks: float
    op_bytes: Mapping[str, float]
    evicted_blocks: Mapping[str, float]


def rates_between(before: Stats, after: Stats, seconds: float) -> Rates | None:
    """Rates from one look to the next, or None if they are not comparable.

    They are not if another server answered, or one of them had no engine yet. In a container a
    restarted server has the process id of the one before.
    """
    is_another = before.server.server_pid != after.server.server_pid
    if is_another or after.server.uptime_s < seconds:
        return None
    if before.cache is None or after.cache is None:
        return None
    was, now = before.cache.totals, after.cache.totals
    per_block = after.cache.identity.tokens_per_block / seconds
    return Rates(
        seconds,
        hit_tokens=(_sum(now.hit_blocks) - _sum(was.hit_blocks)) * per_block,
        missed_tokens=(now.missed_blocks - was.missed_blocks) * per_block,
        ended_tasks=(_sum(now.ended_tasks) - _sum(was.ended_tasks)) / seconds,
        op_bytes={kind: (op.bytes - was.ops[kind].bytes) / seconds for kind, op in now.ops.items()},
        evicted_blocks=_evicted(before.cache, after.cache, seconds),
    )


def _evicted(before: CacheStats, after: CacheStats, seconds: float) -> dict[str, float]:
    return {
        name: (tier.evicted_blocks - before.tiers[name].evicted_blocks) / seconds
        for name, tier in after.tiers.items()
    }


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts.values())
