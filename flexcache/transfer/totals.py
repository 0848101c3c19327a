"""Counters of what was asked for and what was moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flexcache.ids import OpKind


@dataclass(slots=True)
class OpTotals:
    """What ops of one kind did since the start."""

    ops: int = 0
    failed_ops: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Time during which at least one was running: bytes / seconds is what they reach together."""
    running: int = 0
    busy_since_s: float = 0.0

    def report(self) -> dict[str, float]:
        return {
            "ops": self.ops,
            "failed_ops": self.failed_ops,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }

    def started(self, now: float) -> None:
        if self.running == 0:
            self.busy_since_s = now
        self.running += 1

    def ended(self, now: float, num_wanted: int, num_ok: int, block_bytes: int) -> None:
        self.ops += 1
        self.failed_ops += num_ok < num_wanted
        self.blocks += num_ok
        self.bytes += num_ok * block_bytes
        self.running -= 1
        if self.running == 0:
            self.seconds += now - self.busy_since_s


@dataclass(slots=True)
class Totals:
    """What one engine, or all of them together, have had of the cache."""

    hit_blocks: Counter[str] = field(default_factory=Counter)
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

    def report(self) -> dict[str, Any]:
        return {
            "hit_blocks": dict(self.hit_blocks),
            "missed_blocks": self.missed_blocks,
            "dropped_blocks": dict(self.dropped_blocks),
            "skipped_blocks": dict(self.skipped_blocks),
            "ended_tasks": dict(self.ended_tasks),
            "ops": {kind.value: total.report() for kind, total in self.ops.items()},
        }
