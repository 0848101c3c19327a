"""What a metric is, and the ways to read one from the statistics.

Readers name the attribute that they read, so a field that is renamed or removed fails the type
check instead of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from flexcache.tasks.stats import CacheStats, HistogramStats, ServerStats, Stats

Labels = tuple[str, ...]
Value = float | HistogramStats
Sample = tuple[Labels, Value]
"""The values of the labels, and that of the metric."""
Reader = Callable[[Stats], Iterable[Sample]]
Entry = TypeVar("Entry")


class MetricType(str, Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        labels: Their names.
        read: Returns the samples; none where a cache has no such part.
    """

    name: str
    type: MetricType
    labels: Labels
    help: str
    read: Reader


def counter(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}_total", MetricType.COUNTER, labels, help, read)


def gauge(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.GAUGE, labels, help, read)


def histogram(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.HISTOGRAM, labels, help, read)


# -- readers -------------------------------------------------------------------------------------


def from_cache(samples: Callable[[CacheStats], Iterable[Sample]]) -> Reader:
    """Samples from the cache's part; none before the first engine."""

    def read(stats: Stats) -> Iterable[Sample]:
        return () if stats.cache is None else samples(stats.cache)

    return read


def one(value: Callable[[CacheStats], float | None]) -> Reader:
    """A single number of the cache; no sample where it is None."""
    return from_cache(lambda cache: _single(value(cache)))


def one_of_server(value: Callable[[ServerStats], float | None]) -> Reader:
    """A single number of the server; no sample where it is None."""
    return lambda stats: _single(value(stats.server))


def each(table: Callable[[CacheStats], Mapping[str, float]], known: Sequence[str] = ()) -> Reader:
    """A sample per entry of a table.

    Args:
        known: Labels that are served as 0 until they turn up: a counter that begins with its first
            event hides that event from `rate` and `increase`.
    """
    zeros = dict.fromkeys(known, 0)
    return from_cache(lambda c: (((k,), v) for k, v in {**zeros, **table(c)}.items()))


def per(
    table: Callable[[CacheStats], Mapping[str, Entry]], value: Callable[[Entry], Value]
) -> Reader:
    """A sample per entry of a table of parts, with a value of that part."""
    return from_cache(lambda c: (((name,), value(part)) for name, part in table(c).items()))


def in_tokens(blocks: Reader) -> Reader:
    """The same samples, counted in tokens instead of blocks."""
    return _scaled(blocks, lambda cache: cache.identity.tokens_per_block)


def in_bytes(blocks: Reader) -> Reader:
    """The same samples, counted in bytes instead of blocks."""
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


def in_blocks_and_tokens(name: str, help: str, read: Reader, *labels: str) -> tuple[Metric, ...]:
    """A counter in blocks, like capacities, and in tokens, as operators think."""
    return (
        counter(f"{name}_blocks", help.format("Blocks"), read, *labels),
        counter(f"{name}_tokens", help.format("Tokens"), in_tokens(read), *labels),
    )
