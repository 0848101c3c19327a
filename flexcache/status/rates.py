"""What happened between two looks at a server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Stats = Mapping[str, Any]
"""`KVManager.stats` of a server. Before its first engine it has no tiers, and little else."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over ``seconds``.

    Attributes:
        hit_tokens: Found, in any tier.
        missed_tokens: Asked for and not found.
        ended_tasks: Whatever they were and however they ended.
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
    """None where the two looks are not at the same server, or one had no engine yet.

    In a container a restarted server has the process id of the one before.
    """
    is_another = before["server_pid"] != after["server_pid"] or after["uptime_s"] < seconds
    if is_another or not before["tiers"] or not after["tiers"]:
        return None
    per_block = after["tokens_per_block"] / seconds
    return Rates(
        seconds,
        hit_tokens=(_hits(after) - _hits(before)) * per_block,
        missed_tokens=(after["missed_blocks"] - before["missed_blocks"]) * per_block,
        ended_tasks=(_ended(after) - _ended(before)) / seconds,
        op_bytes={
            kind: (op["bytes"] - before["ops"][kind]["bytes"]) / seconds
            for kind, op in after["ops"].items()
        },
        evicted_blocks={
            name: (tier["evicted_blocks"] - before["tiers"][name]["evicted_blocks"]) / seconds
            for name, tier in after["tiers"].items()
        },
    )


def _hits(stats: Stats) -> int:
    return sum(stats["hit_blocks"].values())


def _ended(stats: Stats) -> int:
    return sum(stats["ended_tasks"].values())
