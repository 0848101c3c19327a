"""Definition of a metric, and readers that take its value from the statistics.

Readers name the attribute that they read, so renaming or removing a field fails the type check
instead of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from flexcache.tasks.stats import CacheStats, HistogramStats, ServerStats, Stats

Labels = tuple[str, ...]
Value = float | HistogramStats
Sample = tuple[Labels, Value]
"""Values of the labels, and value of the metric."""
Tree = TypeVar("Tree")
"""Statistics: of a server, or of a router."""
ReaderOf = Callable[[Tree], Iterable[Sample]]
Reader = ReaderOf[Stats]
Entry = TypeVar("Entry")


class MetricType(str, Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric(Generic[Tree]):
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


def counter(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Metric[Tree]:
    return Metric(f"flexcache_{name}_total", MetricType.COUNTER, labels, help, read)


def gauge(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Metric[Tree]:
    return Metric(f"flexcache_{name}", MetricType.GAUGE, labels, help, read)


def histogram(name: str, help: str, read: ReaderOf[Tree], *labels: str) -> Metric[Tree]:
    return Metric(f"flexcache_{name}", MetricType.HISTOGRAM, labels, help, read)


# -- readers -------------------------------------------------------------------------------------


def from_cache(samples: Callable[[CacheStats], Iterable[Sample]]) -> Reader:
    """Read samples from the cache's part of the statistics; none before the first engine."""

    def read(stats: Stats) -> Iterable[Sample]:
        return () if stats.cache is None else samples(stats.cache)

    return read


def one(value: Callable[[CacheStats], float | None]) -> Reader:
    """Read a single number of the cache; no sample if it is None."""
    return from_cache(lambda cache: _single(value(cache)))


def one_of_server(value: Callable[[ServerStats], float | None]) -> Reader:
    """Read a single number of the server; no sample if it is None."""
    return lambda stats: _single(value(stats.server))


def each(table: Callable[[CacheStats], Mapping[str, float]], known: Sequence[str] = ()) -> Reader:
    """Read one sample per entry of a table.

    Args:
        known: Labels served as 0 until they occur: a counter that begins with its first event hides
            that event from `rate` and `increase`.
    """
    zeros = dict.fromkeys(known, 0)
    return from_cache(lambda c: (((k,), v) for k, v in {**zeros, **table(c)}.items()))


def per(
    table: Callable[[CacheStats], Mapping[str, Entry]], value: Callable[[Entry], Value]
) -> Reader:
    """Read one sample per part in a table of parts, with a value of that part."""
    return from_cache(lambda c: (((name,), value(part)) for name, part in table(c).items()))


def in_tokens(blocks: Reader) -> Reader:
    """Convert samples from blocks to tokens."""
    return _scaled(blocks, lambda cache: cache.identity.tokens_per_block)


def in_bytes(blocks: Reader) -> Reader:
    """Convert samples from blocks to bytes."""
    return _scaled(blocks, lambda cache: cache.identity.block_bytes)


def _scaled(blocks: Reader, unit: Callable[[CacheStats], int]) -> Reader:
    def read(stats: Stats) -> Iterator[Sample]:
        for labels, value in blocks(stats):
            assert stats.cache is not None
            assert not isinstance(value, HistogramStats)
            yield labels, value * unit(stats.cache)

    return read


def _single(value: float | None) -> Iterable[Sample]:
    return () if value is None else (((), value),)


# -- the same count in two units -----------------------------------------------------------------


def in_blocks_and_tokens(
    name: str, help: str, read: Reader, *labels: str
) -> tuple[Metric[Stats], ...]:
    """Make two counters: in blocks, like capacities, and in tokens, as operators count."""
    return (
        counter(f"{name}_blocks", help.format("Blocks"), read, *labels),
        counter(f"{name}_tokens", help.format("Tokens"), in_tokens(read), *labels),
    )
