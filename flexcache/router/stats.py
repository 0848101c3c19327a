"""Statistics of a router as one typed, frozen tree, and as JSON with what an operator should know.

`KVRouter.stats` fills ``routing``, ``index`` and ``workers``; the process around it adds the rest.
Metrics, `flexcache status` and the live page read the tree; ``GET /stats`` serves it as JSON.
Counts are since startup, ages and durations are in seconds. All numbers are finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from flexcache.counters import Histogram
from flexcache.errors import FlexCacheError
from flexcache.ids import BreakerState
from flexcache.router.fleet import WorkerState


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Only what a router may lack has a default."""


# -- what KVRouter knows -------------------------------------------------------------------------


class CachedTokensStats(_Part, frozen=True, kw_only=True):
    """Predicted cached tokens against those that the engines reported.

    The first three count requests with both a prediction and a report; the sums are over them.
    """

    exact: int
    over: int
    """More predicted than reported, as for a block that was evicted meanwhile."""
    under: int
    unreported: int
    """Predicted, and the answer did not say: nothing is known of these."""
    unpredicted: int
    """Reported, but the router did not know the prompt's tokens."""
    predicted_tokens: int
    actual_tokens: int
    prompt_tokens: int


class TTFTStats(_Part, frozen=True, kw_only=True):
    """Time from the choice to the first token, over the requests for which it was predicted."""

    predicted_s: Histogram
    actual_s: Histogram
    error_s: Histogram
    """Absolute difference of the two."""


class ServiceTimeStats(_Part, frozen=True, kw_only=True):
    """Time that an engine needs before a first token, as learned::

        base_s + token_s * u + attention_s * u * (context + u / 2) + sum(load_s[tier] * loaded)

    with ``u`` tokens computed and ``loaded`` tokens loaded from a tier.
    """

    samples: int
    is_learned: bool
    """False: there are too few samples, and the router multiplies tokens with requests instead."""
    base_s: float
    token_s: float
    attention_s: float
    load_s: dict[str, float]
    """By tier."""


class RoutingStats(_Part, frozen=True, kw_only=True):
    """Decisions, and how good they were."""

    policy: str
    decisions: dict[str, int]
    """By reason."""
    prompt_tokens: int
    """Over all decisions, also where the tokens themselves were unknown."""
    matched_tokens: dict[str, int]
    """Over all decisions, by tier that supplies them at the chosen worker."""
    cached_tokens: CachedTokensStats
    ttft: TTFTStats
    service_time: ServiceTimeStats
    expired_requests: int
    """Requests that were forgotten because their end was never reported."""


class IndexStats(_Part, frozen=True, kw_only=True):
    """The index of blocks, and the events that filled it."""

    blocks: int
    """Different blocks."""
    held_blocks: dict[str, dict[str, int]]
    """By source and tier."""
    bytes: int
    """Estimated memory."""
    max_blocks: int
    refused_blocks: int
    """Not taken because the index was full."""
    orphans: int
    """Blocks that wait for the tokens of their parents."""
    events: dict[str, int]
    """Applied, by kind: ``stored``, ``removed``, ``cleared``."""
    event_blocks: dict[str, int]
    """Blocks in those events, by kind."""
    ignored_events: dict[str, int]
    """By reason, for example ``medium`` if it is unknown."""


class WorkerStats(_Part, frozen=True, kw_only=True):
    """A worker's load now, and its requests since startup."""

    url: str
    state: str
    """A `WorkerState`."""
    sources: list[str]
    """Endpoints of the sources whose blocks it can use."""
    requests: int
    """Running."""
    waiting_requests: int
    """Those of them without a first token."""
    wait_s: float
    """Predicted time until a new request's turn comes."""
    speed_factor: float
    """Learned: its service times relative to those of all workers; 1 until known."""
    decisions: int
    prompt_tokens: int
    matched_tokens: dict[str, int]
    """By tier."""
    is_approximate: bool
    """Its blocks are guessed from the router's own decisions, since it publishes no events."""
    circuit: str | None = None
    """``closed``, ``open`` or ``half_open``; None: no proxy watches it."""
    health_failures: int | None = None


# -- what the process around it adds -------------------------------------------------------------


class ProcessStats(_Part, frozen=True, kw_only=True):
    """The decider's process."""

    version: str
    pid: int
    uptime_s: float
    ready: bool
    address: str
    """Where it takes requests, for people."""


class SourceStats(_Part, frozen=True, kw_only=True):
    """Subscription to a publisher of KV events."""

    is_connected: bool
    is_silent: bool
    """Its workers answer requests, and it has published nothing for too long."""
    is_unmatched: bool
    """Its workers report cached tokens, and the index predicted none of them."""
    last_batch_age_s: float | None
    """None: there was no batch yet."""
    batches: int
    waiting_batches: int
    """Received and not applied yet."""
    gaps: int
    """Missed batches were noticed, whether or not they could be replayed."""
    losses: int
    """Gaps that were not filled: the source's blocks were forgotten."""
    replayed_batches: int
    restarts: int
    snapshots: int
    bad_batches: int


class CacheStats(_Part, frozen=True, kw_only=True):
    """Early loads that a cache was asked for, as requests were placed before it."""

    circuit: str
    """A `BreakerState`: while it is not closed, the cache gets only trials."""
    running: int
    """Calls without an answer."""
    results: dict[str, int]
    """Calls ``accepted`` and ``failed``; not made: ``busy`` (too many open), ``circuit``."""
    tokens: int
    """In calls that were accepted."""
    failure: str
    """How the last call failed; empty if it did not."""


class TokenizerStats(_Part, frozen=True, kw_only=True):
    """Conversion of requests to token ids."""

    requests: dict[str, int]
    """By way: ``ids`` (the request has them), ``local``, ``render`` (an engine was asked),
    ``unknown``."""
    unknown: dict[str, int]
    """Those that are unknown, by reason."""
    tokens: int
    remembered_tokens: int
    """Those of them that were taken from the memo."""
    seconds: Histogram
    checks: int
    """Comparisons with an engine's own rendering."""
    mismatches: int
    models: dict[str, str]
    """How prompts are converted, by served model and kind of prompt (``NAME chat``, ``NAME tools``,
    ``NAME completion``): ``local``, ``render`` or ``unknown``."""
    reasons: dict[str, str]
    """Why so, by the same names: ``checked``, ``differs from the engine``, ..."""
    memo_bytes: int
    """Memory of the memos."""


class QueueStats(_Part, frozen=True, kw_only=True):
    """Requests that wait because every worker is busy."""

    waiting: int
    capacity: int
    waits_s: Histogram
    """Waits of those that were routed in the end, mostly 0."""
    refused: dict[str, int]
    """By reason: ``full``, ``expired``, ``no_worker``."""


class ProxyStats(_Part, frozen=True, kw_only=True):
    """Requests as clients see them, over all proxy processes."""

    processes: int
    restarts: int
    open_requests: int
    ended: dict[str, int]
    """Sent to a worker and ended there, by `Outcome`."""
    retries: int
    rejected: dict[str, int]
    """Refused without a worker, by reason: ``unauthorized``, ``too_large``, ``malformed``."""
    unsupervised_requests: int
    """Routed by a proxy of its own accord because the decider was away."""


class PeerStats(_Part, frozen=True, kw_only=True):
    """Another decider of the same workers."""

    is_up: bool
    requests: int
    """Running requests that it routed."""
    batches: int
    gaps: int
    last_batch_age_s: float | None


class RouterStats(_Part, frozen=True, kw_only=True):
    """Everything that a router tells of itself. What a library user lacks is None or empty."""

    routing: RoutingStats
    index: IndexStats
    workers: dict[str, WorkerStats]
    process: ProcessStats | None = None
    sources: dict[str, SourceStats] = {}
    """By endpoint."""
    caches: dict[str, CacheStats] = {}
    """By URL."""
    tokens: TokenizerStats | None = None
    queue: QueueStats | None = None
    proxy: ProxyStats | None = None
    peers: dict[str, PeerStats] = {}
    trouble: list[str] = []
    """Sentences for an operator; `report.to_json` adds them."""


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
