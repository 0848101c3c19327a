"""Rates: changes per second between two readings of a server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexcache.tasks.stats import CacheStats, Stats


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, averaged over ``seconds``.

    Attributes:
        hit_tokens: Tokens found, in any tier.
        missed_tokens: Tokens requested and not found.
        ended_tasks: Tasks of any kind that ended, with any outcome.
        op_bytes: Bytes moved, by kind of op.
        evicted_blocks: Blocks evicted, by tier.
    """

    seconds: float
    hit_tokens: float
    missed_tokens: float
    ended_tasks: float
    op_bytes: Mapping[str, float]
    evicted_blocks: Mapping[str, float]


def rates_between(before: Stats, after: Stats, seconds: float) -> Rates | None:
    """Return the rates between two readings, or None if the readings are not comparable.

    They are not if another server answered, or if the server had no engine yet in one of them. In
    a container a restarted server has the same process id as before.
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
