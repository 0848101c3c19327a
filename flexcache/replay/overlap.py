"""Measures how long ops of two groups ran, and how long both ran at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexcache.ids import OpKind
from flexcache.replay.reader import Trace
from flexcache.tracing.records import OpEnded

DRAM_COPIES = (OpKind.H2D, OpKind.D2H)
SSD_READS = (OpKind.DISK2H, OpKind.DISK2D)
SSD_WRITES = (OpKind.H2DISK, OpKind.D2DISK)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds in which at least one op of each group was running, and of both at once."""

    first_s: float
    second_s: float
    both_s: float


def overlap(trace: Trace, first: Iterable[OpKind], second: Iterable[OpKind]) -> Overlap:
    """Measure the overlap of ops of two groups of kinds."""
    first, second = set(first), set(second)
    mine, other = [], []
    for record in trace.records():
        if isinstance(record, OpEnded):
            interval = record.started, record.time
            if record.kind in first:
                mine.append(interval)
            if record.kind in second:
                other.append(interval)
    mine, other = _union(mine), _union(other)
    return Overlap(_length(mine), _length(other), _length(_both(mine, other)))


def _union(intervals: list[Interval]) -> list[Interval]:
    """Merge intervals that touch. The result is sorted."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _both(mine: list[Interval], other: list[Interval]) -> list[Interval]:
    shared: list[Interval] = []
    i = j = 0
    while i < len(mine) and j < len(other):
        start, stop = max(mine[i][0], other[j][0]), min(mine[i][1], other[j][1])
        if start < stop:
            shared.append((start, stop))
        if mine[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)
