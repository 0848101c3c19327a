"""Readers that take a metric's value from a router's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from flexcache.metrics.metric import ReaderOf, Sample, Value
from flexcache.router.stats import PeerStats, RouterStats, SourceStats, WorkerStats
from flexcache.router.workers import Tier

Reader = ReaderOf[RouterStats]

TIERS = tuple(tier.value for tier in Tier)


def one(value: Callable[[RouterStats], Value]) -> Reader:
    return lambda stats: [((), value(stats))]


def each(table: Callable[[RouterStats], Mapping[str, float]], known: Iterable[str] = ()) -> Reader:
    """Read one sample per entry of a table; 0 for labels that are known and not in it."""
    zeros = dict.fromkeys(known, 0)
    return lambda stats: [((k,), v) for k, v in {**zeros, **table(stats)}.items()]


def per_worker(value: Callable[[WorkerStats], float | None]) -> Reader:
    def read(stats: RouterStats) -> Iterator[Sample]:
        for name, worker in stats.workers.items():
            if (found := value(worker)) is not None:
                yield (name,), found

    return read


def per_source(value: Callable[[SourceStats], float | None]) -> Reader:
    def read(stats: RouterStats) -> Iterator[Sample]:
        for endpoint, source in stats.sources.items():
            if (found := value(source)) is not None:
                yield (endpoint,), found

    return read


def per_peer(value: Callable[[PeerStats], float]) -> Reader:
    return lambda stats: [((name,), value(peer)) for name, peer in stats.peers.items()]
