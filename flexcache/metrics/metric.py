"""Metrics of a router as catalogs: a name, and a reader of the statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flexcache.counters import Histogram, MetricType

Labels = tuple[str, ...]
Value = float | Histogram
Sample = tuple[Labels, Value]
"""Values of the labels, and value of the metric."""
Tree = TypeVar("Tree")
ReaderOf = Callable[[Tree], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Reading(Generic[Tree]):
    """One metric.

    Args:
        labels: Names of the labels.
        read: Returns the samples; none if the part that they describe is missing.
    """

    name: str
    type: MetricType
    labels: Labels
    help: str
    read: ReaderOf[Tree]


def counter(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Reading[Tree]:
    return Reading(f"flexcache_{name}_total", MetricType.COUNTER, labels, help, read)


def gauge(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Reading[Tree]:
    return Reading(f"flexcache_{name}", MetricType.GAUGE, labels, help, read)


def histogram(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Reading[Tree]:
    return Reading(f"flexcache_{name}", MetricType.HISTOGRAM, labels, help, read)
