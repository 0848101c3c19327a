"""Summarises a trace: hits, bytes moved, latencies."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexcache.ids import TaskKind
from flexcache.replay.history import TaskHistory, histories
from flexcache.replay.reader import Trace
from flexcache.tracing.records import ClearedTier, Matched


@dataclass(slots=True)
class Summary:
    """Totals in blocks, bytes and seconds.

    Attributes:
        calls: Number of tasks, by kind.
        asked_blocks: Blocks that gets looked up. Those found are in ``hit_blocks`` by tier, the
            rest in ``missed_blocks``.
        stored_blocks: Blocks that puts brought to DRAM.
        latencies_s: Times from launch to answer, by kind of task.
        moved_bytes: Bytes by kind of op.
    """

    block_bytes: int
    tokens_per_block: int
    calls: Counter[str] = field(default_factory=Counter)
    asked_blocks: int = 0
    hit_blocks: Counter[str] = field(default_factory=Counter)
    missed_blocks: int = 0
    stored_blocks: int = 0
    dropped_blocks: Counter[str] = field(default_factory=Counter)
    skipped_blocks: Counter[str] = field(default_factory=Counter)
    cleared_blocks: int = 0
    latencies_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    moved_bytes: Counter[str] = field(default_factory=Counter)
    failed_ops: int = 0
    wall_s: float = 0.0

    def quantile_s(self, kind: str, share: float) -> float | None:
        times = self.latencies_s.get(kind)
        return float(np.quantile(times, share)) if times else None

    def report(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "calls": dict(self.calls),
            "asked_blocks": self.asked_blocks,
            "hit_blocks": dict(self.hit_blocks),
            "hit_tokens": self.hit_blocks.total() * self.tokens_per_block,
            "missed_blocks": self.missed_blocks,
            "stored_blocks": self.stored_blocks,
            "dropped_blocks": dict(self.dropped_blocks),
            "skipped_blocks": dict(self.skipped_blocks),
            "cleared_blocks": self.cleared_blocks,
            "latency_s": {
                kind: {"p50": self.quantile_s(kind, 0.5), "p99": self.quantile_s(kind, 0.99)}
                for kind in self.latencies_s
            },
            "moved_bytes": dict(self.moved_bytes),
            "failed_ops": self.failed_ops,
            "wall_s": self.wall_s,
        }


def summarise(trace: Trace) -> Summary:
    """Summarise a whole trace in one pass. Needs about as much memory as its files have bytes."""
    summary = Summary(trace.header.block_bytes, trace.header.tokens_per_block)
    records = list(trace.records())
    for task in histories(records).values():
        _add(summary, task)
    for record in records:
        if isinstance(record, ClearedTier):
            summary.cleared_blocks += record.num_blocks
    if records:
        summary.wall_s = records[-1].time - records[0].time
    return summary


def _add(summary: Summary, task: TaskHistory) -> None:
    if task.match is not None:
        _add_match(summary, task.match)
    if task.latency_s is not None and task.kind is not None and task.cancel is None:
        summary.latencies_s[task.kind.value].append(task.latency_s)
    for op in task.ops:
        summary.moved_bytes[op.kind.value] += op.num_ok * summary.block_bytes
        summary.failed_ops += op.num_ok < op.blocks
    if task.end is not None and task.kind is TaskKind.PUT:
        summary.stored_blocks += task.end.num_ok


def _add_match(summary: Summary, match: Matched) -> None:
    summary.calls[match.kind.value] += 1
    summary.dropped_blocks.update(match.dropped)
    summary.skipped_blocks.update(match.skipped)
    if match.kind is TaskKind.GET:
        summary.asked_blocks += match.stop - match.start
        summary.hit_blocks.update(match.sources)
        summary.missed_blocks += match.stop - match.found_start - match.num_blocks
