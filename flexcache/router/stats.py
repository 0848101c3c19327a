"""Statistics of a router: one tree of counters, its metrics, and what an operator should know.

The objects that count are the statistics (see `counters`): `KVRouter` has ``routing``, ``index``
and ``workers``, the process around it the rest. ``GET /stats`` serves the tree as JSON; metrics,
`flexcache status` and the live page read it. Counts are since startup, ages and durations are in
seconds. All numbers are finite. Labels of metrics are reasons and states known in advance, and the
names of workers, sources, caches and peers: nothing from a request becomes a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import msgspec

from flexcache.counters import (
    By,
    Counters,
    Histogram,
    counter,
    from_plain,
    gauge,
    histogram,
    plain,
)
from flexcache.errors import FlexCacheError
from flexcache.ids import BreakerState
from flexcache.router.chooser import Decision, Outcome
from flexcache.router.fleet import Tier, WorkerState

_TIERS = tuple(tier.value for tier in Tier)
_REFUSED = "full", "expired", "no_worker"
_QUEUES = "engines", "router"
_WAYS = "ids", "local", "render", "unknown"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WAITS_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_CONVERSIONS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def _seconds(bounds: tuple[float, ...]) -> Histogram:
    return msgspec.field(default_factory=partial(Histogram, bounds))


def _zeros(*names: str) -> dict[str, int]:
    return msgspec.field(default_factory=lambda: dict.fromkeys(names, 0))


_prediction = partial(
    counter,
    "router_cached_token_predictions",
    "Predictions of cached tokens by result; unreported: the engine did not say.",
)


class CachedTokensStats(Counters):
    """Predicted cached tokens against those that the engines reported.

    The first three count requests with both a prediction and a report; the sums are over them.
    """

    exact: Annotated[int, _prediction(result="exact")] = 0
    over: Annotated[int, _prediction(result="over")] = 0
    """More predicted than reported, as for a block that was evicted meanwhile."""
    under: Annotated[int, _prediction(result="under")] = 0
    unreported: Annotated[int, _prediction(result="unreported")] = 0
    """Predicted, and the answer did not say: nothing is known of these."""
    unpredicted: Annotated[int, _prediction(result="unpredicted")] = 0
    """Reported, but the router did not know the prompt's tokens."""
    predicted_tokens: Annotated[
        int,
        counter("router_predicted_cached_tokens", "Cached tokens predicted, where reported."),
    ] = 0
    actual_tokens: Annotated[
        int,
        counter(
            "router_actual_cached_tokens",
            "Cached tokens reported, where predicted.",
        ),
    ] = 0
    prompt_tokens: Annotated[
        int, counter("router_compared_prompt_tokens", "Prompt tokens of requests with both.")
    ] = 0

    def add(self, predicted: int | None, actual: int | None, num_tokens: int) -> None:
        """Count an answered request.

        Args:
            predicted: Cached tokens; None if the prompt's tokens were unknown.
            actual: Cached tokens that the engine reported; None if it did not.
            num_tokens: Length of the prompt.
        """
        if actual is None:
            self.unreported += predicted is not None
            return
        if predicted is None:
            self.unpredicted += 1
            return
        self.exact += predicted == actual
        self.over += predicted > actual
        self.under += predicted < actual
        self.predicted_tokens += predicted
        self.actual_tokens += actual
        self.prompt_tokens += num_tokens


class TTFTStats(Counters):
    """Time from the choice to the first token, over the requests for which it was predicted."""

    predicted_s: Annotated[
        Histogram, histogram("router_predicted_ttft_seconds", "Predicted time to the first token.")
    ] = _seconds(_TTFT_S)
    actual_s: Annotated[
        Histogram, histogram("router_ttft_seconds", "Time from the choice to the first token.")
    ] = _seconds(_TTFT_S)
    error_s: Annotated[
        Histogram, histogram("router_ttft_error_seconds", "Absolute difference of the two.")
    ] = _seconds(_TTFT_S)

    def add(self, predicted_s: float, actual_s: float) -> None:
        self.predicted_s.observe(predicted_s)
        self.actual_s.observe(actual_s)
        self.error_s.observe(abs(predicted_s - actual_s))


class ServiceTimeStats(Counters):
    """Time that an engine needs before a first token, as learned::

        base_s + token_s * u + attention_s * u * (context + u / 2) + sum(load_s[tier] * loaded)

    with ``u`` tokens computed and ``loaded`` tokens loaded from a tier.
    """

    samples: int = 0
    """First tokens that service times were learned from."""
    is_learned: bool = False
    """False: there are too few samples, and the router multiplies tokens with requests instead."""
    base_s: float = 0.0
    """Learned time before a first token that does not depend on the prompt."""
    token_s: float = 0.0
    """Learned time to compute a token, without attention."""
    attention_s: float = 0.0
    """Learned time to compute a token for each token before it."""
    load_s: dict[str, float] = {}
    """Learned time to load a token's KV from a tier."""


class RoutingStats(Counters):
    """Decisions, and how good they were."""

    TITLE = "Router: decisions"

    policy: str
    decisions: dict[str, int] = {}
    """By reason."""
    _by_policy: Annotated[
        dict[str, dict[str, int]],
        counter("router_decisions", "Requests sent to a worker, by reason.", "policy", "reason"),
    ] = {}
    cached_tokens: CachedTokensStats = msgspec.field(default_factory=CachedTokensStats)
    prompt_tokens: Annotated[
        int, counter("router_prompt_tokens", "Prompt tokens of all decisions.")
    ] = 0
    """Also where the tokens themselves were unknown."""
    matched_tokens: Annotated[
        dict[str, int],
        counter("router_matched_tokens", "Prompt tokens expected on the chosen worker, by tier.",
                "tier", known=_TIERS),
    ] = _zeros(*_TIERS)  # fmt: skip
    ttft: TTFTStats = msgspec.field(default_factory=TTFTStats)
    service_time: ServiceTimeStats = msgspec.field(default_factory=ServiceTimeStats)
    expired_requests: int = 0
    """Requests forgotten because their end was never reported."""

    def __post_init__(self) -> None:
        self._by_policy = {self.policy: self.decisions}

    def add(self, decision: Decision) -> None:
        """Count a decision."""
        self.decisions[decision.reason] = self.decisions.get(decision.reason, 0) + 1
        self.prompt_tokens += decision.num_tokens
        for tier, tokens in decision.matched.items():
            self.matched_tokens[tier.value] += tokens


class WorkerStats(Counters):
    """A worker's load now, and its requests since startup."""

    TITLE = "Router: workers"

    url: str = ""
    state: Annotated[
        WorkerState,
        gauge("router_worker_state", "1 for the worker's state, 0 for the others.", "state"),
    ] = WorkerState.UP
    sources: list[str] = []
    """Endpoints of the sources whose blocks it can use."""
    circuit: Annotated[
        BreakerState | None,
        gauge(
            "router_worker_circuit",
            "1 for the state of the worker's circuit, 0 for the others; open: it gets no requests.",
            "state",
        ),
    ] = None
    """None: no proxy watches it."""
    health_failures: int | None = None
    """Failed health checks."""
    requests: Annotated[int, gauge("router_worker_requests", "Running requests.")] = 0
    waiting_requests: Annotated[
        int, gauge("router_worker_waiting_requests", "Running requests without a first token.")
    ] = 0
    wait_s: Annotated[
        float, gauge("router_worker_wait_seconds", "Predicted wait of a new request for its turn.")
    ] = 0.0
    speed_factor: Annotated[
        float, gauge("router_worker_speed_factor", "Learned service time over that of all workers.")
    ] = 1.0
    is_approximate: bool = False
    """The worker publishes no events, and its blocks are guessed from decisions."""
    decisions: Annotated[int, counter("router_worker_decisions", "Requests sent there.")] = 0
    prompt_tokens: Annotated[
        int, counter("router_worker_prompt_tokens", "Their prompt tokens.")
    ] = 0
    matched_tokens: Annotated[
        dict[str, int],
        counter("router_worker_matched_tokens", "Those of them that were expected there, by tier.",
                "tier", known=_TIERS),
    ] = _zeros(*_TIERS)  # fmt: skip

    def add(self, decision: Decision) -> None:
        """Count a decision for this worker."""
        self.decisions += 1
        self.prompt_tokens += decision.num_tokens
        for tier, tokens in decision.matched.items():
            self.matched_tokens[tier.value] += tokens


class IndexStats(Counters):
    """The index of blocks, and the events that filled it."""

    TITLE = "Router: index"

    blocks: Annotated[int, gauge("router_index_blocks", "Different blocks.")] = 0
    max_blocks: Annotated[
        int, gauge("router_index_max_blocks", "Blocks at which new ones are refused.")
    ] = 0
    bytes: Annotated[int, gauge("router_index_bytes", "Memory of the index, estimated.")] = 0
    held_blocks: Annotated[
        dict[str, dict[str, int]],
        gauge("router_held_blocks", "Blocks that a source holds, by tier.", "source", "tier",
              known=_TIERS),
    ] = {}  # fmt: skip
    orphans: Annotated[
        int, gauge("router_orphan_blocks", "Blocks that wait for the tokens of their parents.")
    ] = 0
    refused_blocks: Annotated[
        int, counter("router_refused_blocks", "Blocks not taken because the index was full.")
    ] = 0
    events: dict[str, int] = {}
    """KV events applied, by kind."""
    event_blocks: Annotated[
        dict[str, int],
        counter("router_event_blocks", "Blocks in KV events that were applied.", "kind",
                known=("stored", "removed")),
    ] = {}  # fmt: skip
    ignored_events: Annotated[
        dict[str, int],
        counter("router_ignored_events", "KV events that were ignored, by reason.", "reason",
                known=("medium",)),
    ] = {}  # fmt: skip


class SourceStats(Counters):
    """Subscription to a publisher of KV events."""

    TITLE = "Router: sources of events"

    is_connected: Annotated[bool, gauge("router_source_connected", "1 while it is connected.")] = (
        False
    )
    is_silent: Annotated[
        bool, gauge("router_source_silent", "1 if its workers answer and it publishes nothing.")
    ] = False
    is_unmatched: Annotated[
        bool, gauge("router_source_unmatched", "1 if its workers' cached tokens are not predicted.")
    ] = False
    last_batch_age_s: float | None = None
    """Time since its last batch; None before the first."""
    batches: int = 0
    """Batches received."""
    lag_s: float | None = None
    """From the publication of the last batch, by the publisher's clock, until it was applied."""
    gaps: Annotated[int, counter("router_source_gaps", "Gaps in the numbers of batches.")] = 0
    """Whether or not they could be filled."""
    losses: Annotated[
        int, counter("router_source_losses", "Gaps that were not filled: its blocks are forgotten.")
    ] = 0
    replayed_batches: int = 0
    """Batches that filled gaps."""
    restarts: Annotated[int, counter("router_source_restarts", "Restarts of the publisher.")] = 0
    snapshots: int = 0
    """Snapshots of all blocks that were received."""
    bad_batches: Annotated[
        int, counter("router_source_bad_batches", "Batches that could not be decoded.")
    ] = 0


class PrefetchStats(Counters):
    """Early loads that a cache was asked for, as requests were placed before it."""

    TITLE = "Router: early loads"

    circuit: BreakerState = BreakerState.CLOSED
    """While it is not closed, the cache gets only trials."""
    running: int = 0
    """Calls that the cache has yet to answer."""
    results: Annotated[
        dict[str, int],
        counter(
            "router_early_loads",
            "Requests for whose blocks on SSD or remote store the cache was to be asked. accepted: "
            "it was; failed: it did not take the call; not made: busy (too many calls are open), "
            "circuit (too many have failed).",
            "result",
            known=("accepted", "failed", "busy", "circuit"),
        ),
    ] = msgspec.field(default_factory=Counter)
    tokens: int = 0
    """Tokens on SSD or remote store in calls that were accepted."""
    failure: str = ""
    """How the last call failed; empty if it did not."""


class ProxyStats(Counters):
    """Requests as clients see them, over all proxy processes."""

    TITLE = "Router: requests"

    ended: Annotated[
        dict[str, int],
        counter(
            "router_ended_requests", "Requests that ended at a worker, by outcome.", "outcome",
            known=tuple(outcome.value for outcome in Outcome),
        ),
    ] = {}  # fmt: skip
    open_requests: Annotated[
        int, gauge("router_open_requests", "Requests of clients that are in the router.")
    ] = 0
    retries: Annotated[
        int, counter("router_retries", "Requests sent to another worker because one failed.")
    ] = 0
    rejected: Annotated[
        dict[str, int],
        counter(
            "router_rejected_requests",
            "Requests refused before any worker was chosen, by reason.", "reason",
            known=("unauthorized", "too_large", "malformed"),
        ),
    ] = {}  # fmt: skip
    processes: Annotated[int, gauge("router_proxies", "Proxy processes that are up.")] = 0
    restarts: Annotated[
        int, counter("router_proxy_restarts", "Proxy processes that were restarted.")
    ] = 0
    unsupervised_requests: Annotated[
        int, counter("router_unsupervised_requests", "Requests routed while the decider was away.")
    ] = 0


class LineStats(Counters):
    """Requests that wait because every worker is busy."""

    TITLE = "Router: requests"

    refused: Annotated[
        dict[str, int],
        counter("router_refused_requests", "Requests answered with 429 or 503, by reason.",
                "reason", known=_REFUSED),
    ] = _zeros(*_REFUSED)  # fmt: skip
    waiting: Annotated[int, gauge("router_queued_requests", "Requests that wait for a worker.")] = 0
    queued_prefill_s: Annotated[
        dict[str, float],
        gauge("router_queued_prefill_seconds", "Predicted seconds of prefill that are not done: of "
              "requests at engines, and of those that wait in the router.", "at", known=_QUEUES),
    ] = {}  # fmt: skip
    """By place: the sum of the workers' ``wait_s``; what waits here, each by the worker that would
    need least for it."""
    capacity: int = 0
    """Requests that may wait."""
    waits_s: Annotated[
        Histogram,
        histogram("router_queue_wait_seconds", "How long routed requests have waited."),
    ] = _seconds(_WAITS_S)
    """Mostly 0."""


class TokenizerStats(Counters):
    """Conversion of requests to token ids."""

    TITLE = "Router: requests"

    requests: Annotated[
        dict[str, int],
        counter("router_converted_requests", "Requests by how their token ids were found.", "way",
                known=_WAYS),
    ] = _zeros(*_WAYS)  # fmt: skip
    """By way: ``ids`` (the request has them), ``local``, ``render`` (an engine was asked),
    ``unknown``."""
    unknown: Annotated[
        dict[str, int],
        counter("router_unknown_prompts", "Requests without token ids, by reason.", "reason"),
    ] = {}
    memo_bytes: int = 0
    """Memory of remembered token ids."""
    tokens: Annotated[int, counter("router_converted_tokens", "Tokens of those requests.")] = 0
    remembered_tokens: Annotated[
        int, counter("router_remembered_tokens", "Those of them that were not tokenized again.")
    ] = 0
    seconds: Annotated[
        Histogram, histogram("router_conversion_seconds", "Time to find a request's token ids.")
    ] = _seconds(_CONVERSIONS_S)
    checks: int = 0
    """Comparisons of the router's token ids with an engine's."""
    mismatches: Annotated[
        int, counter("router_tokenizer_mismatches", "Comparisons of tokens that differed.")
    ] = 0
    models: dict[str, str] = {}
    """How prompts are converted, by served model and kind of prompt (``NAME chat``, ``NAME tools``,
    ``NAME completion``): ``local``, ``render`` or ``unknown``."""
    reasons: dict[str, str] = {}
    """Why so, by the same names: ``checked``, ``differs from the engine``, ..."""


class ProcessStats(Counters):
    """The decider's process."""

    TITLE = "Router: processes and peers"

    version: Annotated[str, gauge("router_build_info", "Always 1, by version.", "version")]
    pid: int
    uptime_s: float
    """Time since startup."""
    ready: Annotated[bool, gauge("router_ready", "1 once engines are known and one is up.")]
    address: str
    """Where it takes requests, for people."""


class PeerStats(Counters):
    """Another decider of the same workers."""

    TITLE = "Router: processes and peers"

    is_up: Annotated[
        bool, gauge("router_peer_up", "1 while another decider's requests are known.")
    ] = False
    requests: int = 0
    """Running requests that the peer routed."""
    batches: int = 0
    """Batches received from the peer."""
    gaps: int = 0
    """Gaps in the numbers of the peer's batches."""
    last_batch_age_s: float | None = None


class RouterStats(Counters):
    """Everything that a router tells of itself. What a library user lacks is None or empty."""

    routing: RoutingStats
    index: IndexStats
    workers: Annotated[dict[str, WorkerStats], By("worker")]
    sources: Annotated[dict[str, SourceStats], By("source")] = {}
    """By endpoint."""
    caches: Annotated[dict[str, PrefetchStats], By("cache")] = {}
    """By URL."""
    proxy: ProxyStats | None = None
    queue: LineStats | None = None
    tokens: TokenizerStats | None = None
    process: ProcessStats | None = None
    peers: Annotated[dict[str, PeerStats], By("peer")] = {}
    trouble: list[str] = []
    """Sentences for an operator; `to_json` adds them."""


_ENOUGH_REQUESTS = 20
"""Before these, shares say nothing."""


def to_json(stats: RouterStats) -> bytes:
    """Encode the statistics, with their trouble."""
    return msgspec.json.encode(plain(stats) | {"trouble": list(find_trouble(stats))})


def from_json(data: bytes) -> RouterStats:
    """Decode what `to_json` returns.

    Raises:
        FlexCacheError: It is no router's, or a router's of another version.
    """
    try:
        return from_plain(RouterStats, msgspec.json.decode(data))
    except (msgspec.MsgspecError, ValueError) as error:
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
        yield from _of_tokens(stats.tokens)
    if stats.proxy is not None and stats.proxy.processes == 0:
        yield "No proxy process is up."
    for name, peer in stats.peers.items():
        if not peer.is_up:
            yield f"Router {name} is away: its requests are not counted as load."


def _of_tokens(tokens: TokenizerStats) -> Iterator[str]:
    total, unknown = sum(tokens.requests.values()), tokens.requests.get("unknown", 0)
    if total >= _ENOUGH_REQUESTS and unknown > total / 2:
        reason = max(tokens.unknown.items(), key=lambda each: each[1], default=("", 0))[0]
        yield (
            f"The tokens of {unknown:,} of {total:,} prompts are unknown, so these requests go "
            f"by load. Most frequent reason: {reason}."
        )


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
            yield (
                f"Publisher {endpoint} cannot be reached, so its blocks are unknown: check the "
                "address, and that its engine (--kv-events-config) or cache (kv_events_endpoint) "
                "publishes KV events."
            )
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
