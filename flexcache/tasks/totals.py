"""Running totals of what was asked for and what was moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from flexcache.cache.plan import Plan
from flexcache.ids import OpKind, TaskKind, TierName
from flexcache.tasks.stats import OpStats, TotalsStats


@dataclass(slots=True)
class OpTotals:
    """What ops of one kind have done since startup."""

    ops: int = 0
    failed_ops: int = 0
    blocks: int = 0
    bytes: int = 0
    device_bytes: int = 0
    seconds: float = 0.0
    """Time during which at least one was running: bytes / seconds is what they reach together."""
    running: int = 0
    busy_since_s: float = 0.0
    counted_until_s: float = 0.0

    def stats(self) -> OpStats:
        return OpStats(
            ops=self.ops, failed_ops=self.failed_ops, blocks=self.blocks, bytes=self.bytes,
            device_bytes=self.device_bytes, seconds=self.seconds,
        )  # fmt: skip

    def started(self, now: float) -> None:
        if self.running == 0:
            self.busy_since_s = max(now, self.counted_until_s)  # a start may be told late
        self.running += 1

    def ended(
        self, now: float, num_wanted: int, num_ok: int, num_bytes: int, device_bytes: int = 0
    ) -> None:
        self.ops += 1
        self.failed_ops += num_ok < num_wanted
        self.blocks += num_ok
        self.bytes += num_bytes
        self.device_bytes += device_bytes
        self.running -= 1
        if self.running == 0:
            self.seconds += now - self.busy_since_s
            self.counted_until_s = now

    def keep_running(self, count: int, now: float) -> None:
        """Count only so many of the ops that run on; how the others ended is not known."""
        if self.running and not count:
            self.seconds += now - self.busy_since_s
        self.running = count


@dataclass(slots=True)
class Totals:
    """What one session, or all of them together, have had of the cache."""

    hit_blocks: Counter[TierName] = field(default_factory=Counter)
    """By tier."""
    missed_blocks: int = 0
    dropped_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks that were not stored, by reason."""
    skipped_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks that were cached and not loaded, by reason."""
    ended_tasks: Counter[str] = field(default_factory=Counter)
    ops: dict[OpKind, OpTotals] = field(
        default_factory=lambda: {kind: OpTotals() for kind in OpKind}
    )

    def matched(self, plan: Plan, stop: int) -> None:
        """Count the plan of a match up to block ``stop``."""
        if plan.dropped:
            self.dropped_blocks.update(plan.dropped)
        if plan.skipped:
            self.skipped_blocks.update(plan.skipped)
        if plan.kind is TaskKind.GET:
            for tier, count in plan.sources.items():
                self.hit_blocks[tier] += count
            self.missed_blocks += stop - plan.stop

    def stats(self) -> TotalsStats:
        return TotalsStats(
            hit_blocks={tier.value: count for tier, count in self.hit_blocks.items()},
            missed_blocks=self.missed_blocks,
            dropped_blocks=dict(self.dropped_blocks),
            skipped_blocks=dict(self.skipped_blocks),
            ended_tasks=dict(self.ended_tasks),
            ops={kind.value: total.stats() for kind, total in self.ops.items()},
        )
