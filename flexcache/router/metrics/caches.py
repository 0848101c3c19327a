"""Metrics of the early loads that a router begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.ids import BreakerState
from flexcache.metrics.metric import Sample, counter, gauge
from flexcache.router.metrics.readers import Reader
from flexcache.router.stats import CacheStats, RouterStats

RESULTS = ("accepted", "failed", "busy", "circuit")


def _results(stats: RouterStats) -> Iterator[Sample]:
    for url, cache in stats.caches.items():
        for result in RESULTS:
            yield (url, result), cache.results.get(result, 0)


def _per_cache(value: Callable[[CacheStats], int]) -> Reader:
    return lambda stats: [((url,), value(cache)) for url, cache in stats.caches.items()]


def _circuits(stats: RouterStats) -> Iterator[Sample]:
    for url, cache in stats.caches.items():
        for state in BreakerState:
            yield (url, state.value), int(cache.circuit == state)


CACHES = (
    counter(
        "router_early_loads",
        "Requests for whose blocks on SSD or remote store the cache was to be asked. accepted: it "
        "was; failed: it did not take the call; not made: busy (too many calls are open), circuit "
        "(too many have failed).",
        _results,
        "cache",
        "result",
    ),
    counter(
        "router_early_load_tokens",
        "Tokens on SSD or remote store in calls that were accepted.",
        _per_cache(lambda cache: cache.tokens),
        "cache",
    ),
    gauge(
        "router_open_early_load_calls",
        "Calls that the cache has yet to answer.",
        _per_cache(lambda cache: cache.running),
        "cache",
    ),
    gauge(
        "router_cache_circuit",
        "1 for the state of the cache's circuit, 0 for the others; open: it is not asked.",
        _circuits,
        "cache",
        "state",
    ),
)
