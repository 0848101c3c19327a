"""Statistics of a router as JSON, with what an operator should look at in words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from flexcache.errors import FlexCacheError
from flexcache.ids import BreakerState
from flexcache.router.stats import RouterStats
from flexcache.router.workers import WorkerState

_ENOUGH_REQUESTS = 20
"""Before these, shares say nothing."""


def to_json(stats: RouterStats) -> bytes:
    """Encode the statistics, with their trouble."""
    return msgspec.json.encode(msgspec.structs.replace(stats, trouble=list(find_trouble(stats))))


def from_json(data: bytes) -> RouterStats:
    """Decode what `to_json` returns.

    Raises:
        FlexCacheError: It is no router's, or a router's of another version.
    """
    try:
        return msgspec.json.decode(data, type=RouterStats)
    except msgspec.MsgspecError as error:
        raise FlexCacheError(f"statistics of a router cannot be read: {error}") from None


def find_trouble(stats: RouterStats) -> Iterator[str]:
    """Yield a sentence for each thing that keeps requests from where their KV is."""
    if stats.process is not None and not stats.process.ready:
        yield "The router is not ready: it still learns what the engines hold."
    yield from _of_workers(stats)
    yield from _of_sources(stats)
    yield from _of_predictions(stats)
    for url, cache in stats.caches.items():
        if cache.circuit != BreakerState.CLOSED:
            yield f"Cache {url} takes no early loads: {cache.failure}"
    if stats.index.blocks >= stats.index.max_blocks:
        yield "The index is full and misses blocks that engines hold: raise max_blocks."
    if stats.tokens is not None:
        total, unknown = (
            sum(stats.tokens.requests.values()),
            stats.tokens.requests.get("unknown", 0),
        )
        if total >= _ENOUGH_REQUESTS and unknown > total / 2:
            reason = max(stats.tokens.unknown.items(), key=lambda each: each[1], default=("", 0))[0]
            yield (
                f"The tokens of {unknown:,} of {total:,} prompts are unknown, so these requests go "
                f"by load. Most frequent reason: {reason}."
            )
    if stats.proxy is not None and stats.proxy.processes == 0:
        yield "No proxy process is up."
    for name, peer in stats.peers.items():
        if not peer.is_up:
            yield f"Router {name} is away: its requests are not counted as load."


def _of_workers(stats: RouterStats) -> Iterator[str]:
    if not stats.workers:
        yield "The router knows no engine."
    elif not any(worker.state == WorkerState.UP for worker in stats.workers.values()):
        yield "No engine is up."
    for name, worker in stats.workers.items():
        if worker.state == WorkerState.DOWN:
            yield f"Engine {name} is down."
        elif worker.circuit == "open":
            yield f"Engine {name} gets no requests: too many have failed there."


def _of_sources(stats: RouterStats) -> Iterator[str]:
    for endpoint, source in stats.sources.items():
        if not source.is_connected:
            yield f"Publisher {endpoint} cannot be reached, so its blocks are unknown."
        elif source.is_silent:
            yield (
                f"Publisher {endpoint} is silent although its engines answer requests: check its "
                "endpoint, topic and whether prefix caching is on."
            )
        elif source.is_unmatched:
            yield (
                f"Engines of publisher {endpoint} report cached tokens, and none was predicted: "
                "check that it publishes their blocks, and the tokenizer."
            )


def _of_predictions(stats: RouterStats) -> Iterator[str]:
    routing = stats.routing
    counts = routing.cached_tokens
    compared = counts.exact + counts.over + counts.under
    if counts.unreported >= _ENOUGH_REQUESTS and not compared:
        yield (
            "No answer reports cached tokens, so predictions cannot be checked: start vLLM with "
            "--enable-prompt-tokens-details and --enable-force-include-usage."
        )
    if compared >= _ENOUGH_REQUESTS and counts.exact < 0.9 * compared:
        yield (
            f"Only {counts.exact:,} of {compared:,} predictions of cached tokens were right "
            f"({counts.over:,} too high, {counts.under:,} too low)."
        )
    decisions = sum(routing.decisions.values())
    if decisions >= _ENOUGH_REQUESTS and not any(routing.matched_tokens.values()):
        yield f"None of {decisions:,} prompts was found on any engine."
