"""Report of what a replay found, compared with its trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flexcache.config import CacheConfig
from flexcache.ids import TaskKind, TierName
from flexcache.replay.reader import Trace
from flexcache.replay.summary import Summary
from flexcache.tracing.records import Matched, TraceHeader


@dataclass(frozen=True, slots=True)
class Difference:
    """A get that found different blocks than in the trace.

    Attributes:
        then: Blocks by tier, in the trace.
        now: Blocks by tier, in the replay.
    """

    call: int
    time: float
    request: str
    then: dict[str, int]
    now: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        then: Summary of the trace; None if it has no outcomes.
        now: Summary of the replay; its wall time includes all calls.
        tiers: `KVManager.stats()["tiers"]` at the end.
        latest_s: Largest delay behind the trace's pace.
        notes: Parts of the trace that could not be repeated.
    """

    then: Summary | None
    now: Summary
    differences: list[Difference]
    tiers: dict[str, dict[str, int]]
    latest_s: float
    notes: list[str]

    def report(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "trace": None if self.then is None else self.then.report(),
            "replay": self.now.report(),
            "differing_gets": len(self.differences),
            "tiers": self.tiers,
            "latest_s": self.latest_s,
            "notes": self.notes,
        }


def differences_between(then: Trace, now: Trace) -> Iterator[Difference]:
    """Yield the gets that found different blocks in the replay than in the trace."""
    for number, (first, second) in enumerate(zip(_matches(then), _matches(now), strict=False)):
        is_get = first.kind is TaskKind.GET
        if is_get and (first.num_blocks, first.sources) != (second.num_blocks, second.sources):
            yield Difference(number, first.time, first.request, first.sources, second.sources)


def _matches(trace: Trace) -> Iterator[Matched]:
    return (record for record in trace.records() if isinstance(record, Matched))


def notes_on(header: TraceHeader, config: CacheConfig, num_dropped: int) -> list[str]:
    """Return notes on what a replay with this configuration cannot repeat.

    Args:
        num_dropped: Lines missing from the replay's own trace.
    """
    notes = []
    if header.file > 1:
        notes.append(
            f"the trace's first {header.file - 1} files are gone: the replay begins in the middle"
        )
    held = {tier: count for tier, count in header.indexed.items() if count}
    if held:
        listed = ", ".join(f"{count:,} in {tier}" for tier, count in held.items())
        notes.append(f"blocks that were cached when the trace began are missing: {listed}")
    if TierName.REMOTE in header.capacities and config.remote_url is None:
        notes.append("the trace had a remote store, the replay has none (--set remote_url=...)")
    if num_dropped:
        notes.append(f"{num_dropped:,} lines of the replay's own trace were dropped")
    return notes
