"""Metrics of a router: name, meaning, and where the statistics have the value.

Names begin with ``flexcache_router_``. Labels are reasons and states known in advance, and the
names of workers, sources, caches and peers, which come from the router's configuration or
discovery: nothing from a request becomes a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flexcache.ids import BreakerState
from flexcache.metrics.metric import ReaderOf, Reading, Sample, Value, counter, gauge, histogram
from flexcache.router.chooser import Outcome
from flexcache.router.fleet import Tier, WorkerState
from flexcache.router.stats import (
    CachedTokensStats,
    CacheStats,
    PeerStats,
    ProcessStats,
    ProxyStats,
    QueueStats,
    RouterStats,
    RoutingStats,
    SourceStats,
    TokenizerStats,
    WorkerStats,
)

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


_CIRCUITS = ("closed", "open", "half_open")


def _decisions(stats: RouterStats) -> Iterator[Sample]:
    for reason, count in stats.routing.decisions.items():
        yield (stats.routing.policy, reason), count


def _cached_tokens(value: Callable[[CachedTokensStats], int]) -> Reader:
    return one(lambda stats: value(stats.routing.cached_tokens))


def _predictions(routing: RoutingStats) -> dict[str, float]:
    counts = routing.cached_tokens
    return {
        "exact": counts.exact,
        "over": counts.over,
        "under": counts.under,
        "unreported": counts.unreported,
        "unpredicted": counts.unpredicted,
    }


def _worker_states(stats: RouterStats) -> Iterator[Sample]:
    for name, worker in stats.workers.items():
        for state in WorkerState:
            yield (name, state.value), int(worker.state == state.value)


def _worker_circuits(stats: RouterStats) -> Iterator[Sample]:
    for name, worker in stats.workers.items():
        if worker.circuit is not None:
            for circuit in _CIRCUITS:
                yield (name, circuit), int(worker.circuit == circuit)


def _worker_matches(stats: RouterStats) -> Iterator[Sample]:
    for name, worker in stats.workers.items():
        for tier in TIERS:
            yield (name, tier), worker.matched_tokens.get(tier, 0)


DECISIONS = (
    counter(
        "router_decisions", "Requests sent to a worker, by reason.", _decisions, "policy", "reason"
    ),
    counter(
        "router_cached_token_predictions",
        "Predictions of cached tokens by result; unreported: the engine did not say.",
        each(lambda stats: _predictions(stats.routing)),
        "result",
    ),
    counter(
        "router_predicted_cached_tokens",
        "Cached tokens that were predicted, for requests whose engine reported them.",
        _cached_tokens(lambda counts: counts.predicted_tokens),
    ),
    counter(
        "router_actual_cached_tokens",
        "Cached tokens that engines reported for the same requests.",
        _cached_tokens(lambda counts: counts.actual_tokens),
    ),
    counter(
        "router_compared_prompt_tokens",
        "Prompt tokens of the same requests.",
        _cached_tokens(lambda counts: counts.prompt_tokens),
    ),
    counter(
        "router_prompt_tokens",
        "Prompt tokens of all decisions.",
        one(lambda stats: stats.routing.prompt_tokens),
    ),
    counter(
        "router_matched_tokens",
        "Prompt tokens expected on the chosen worker, by tier.",
        each(lambda stats: stats.routing.matched_tokens, TIERS),
        "tier",
    ),
    histogram(
        "router_predicted_ttft_seconds",
        "Predicted time from the choice to the first token.",
        one(lambda stats: stats.routing.ttft.predicted_s),
    ),
    histogram(
        "router_ttft_seconds",
        "Time from the choice to the first token, of the same requests.",
        one(lambda stats: stats.routing.ttft.actual_s),
    ),
    histogram(
        "router_ttft_error_seconds",
        "Absolute difference of the two.",
        one(lambda stats: stats.routing.ttft.error_s),
    ),
    gauge(
        "router_service_time_learned",
        "1 once there are enough first tokens to predict times.",
        one(lambda stats: int(stats.routing.service_time.is_learned)),
    ),
    counter(
        "router_service_time_samples",
        "First tokens that service times were learned from.",
        one(lambda stats: stats.routing.service_time.samples),
    ),
    gauge(
        "router_service_time_base_seconds",
        "Learned time before a first token that does not depend on the prompt.",
        one(lambda stats: stats.routing.service_time.base_s),
    ),
    gauge(
        "router_prefill_seconds_per_token",
        "Learned time to compute a token, without attention.",
        one(lambda stats: stats.routing.service_time.token_s),
    ),
    gauge(
        "router_attention_seconds_per_token",
        "Learned time to compute a token for each token before it.",
        one(lambda stats: stats.routing.service_time.attention_s),
    ),
    gauge(
        "router_load_seconds_per_token",
        "Learned time to load a token's KV from a tier.",
        each(lambda stats: stats.routing.service_time.load_s),
        "tier",
    ),
    counter(
        "router_expired_requests",
        "Requests forgotten because their end was never reported.",
        one(lambda stats: stats.routing.expired_requests),
    ),
)

WORKERS = (
    gauge(
        "router_worker_state",
        "1 for the worker's state, 0 for the others.",
        _worker_states,
        "worker",
        "state",
    ),
    gauge(
        "router_worker_circuit",
        "1 for the state of the worker's circuit, 0 for the others; open: it gets no requests.",
        _worker_circuits,
        "worker",
        "state",
    ),
    counter(
        "router_worker_health_failures",
        "Failed health checks.",
        per_worker(lambda worker: worker.health_failures),
        "worker",
    ),
    gauge(
        "router_worker_requests",
        "Running requests.",
        per_worker(lambda worker: worker.requests),
        "worker",
    ),
    gauge(
        "router_worker_waiting_requests",
        "Running requests without a first token.",
        per_worker(lambda worker: worker.waiting_requests),
        "worker",
    ),
    gauge(
        "router_worker_wait_seconds",
        "Predicted time until a new request's turn comes.",
        per_worker(lambda worker: worker.wait_s),
        "worker",
    ),
    gauge(
        "router_worker_speed_factor",
        "Learned service time relative to all workers; 2: twice as slow.",
        per_worker(lambda worker: worker.speed_factor),
        "worker",
    ),
    gauge(
        "router_worker_approximate",
        "1 if the worker publishes no events, and its blocks are guessed from decisions.",
        per_worker(lambda worker: int(worker.is_approximate)),
        "worker",
    ),
    counter(
        "router_worker_decisions",
        "Requests sent to the worker.",
        per_worker(lambda worker: worker.decisions),
        "worker",
    ),
    counter(
        "router_worker_prompt_tokens",
        "Prompt tokens of those requests.",
        per_worker(lambda worker: worker.prompt_tokens),
        "worker",
    ),
    counter(
        "router_worker_matched_tokens",
        "Those of them that were expected there, by tier.",
        _worker_matches,
        "worker",
        "tier",
    ),
)


def _held_blocks(stats: RouterStats) -> Iterator[Sample]:
    for source, tiers in stats.index.held_blocks.items():
        for tier in TIERS:
            yield (source, tier), tiers.get(tier, 0)


INDEX = (
    gauge("router_index_blocks", "Different blocks.", one(lambda stats: stats.index.blocks)),
    gauge(
        "router_index_max_blocks",
        "Blocks at which the oldest are forgotten.",
        one(lambda stats: stats.index.max_blocks),
    ),
    gauge(
        "router_index_bytes",
        "Memory of the index, estimated.",
        one(lambda stats: stats.index.bytes),
    ),
    gauge(
        "router_held_blocks",
        "Blocks that a source holds, by tier.",
        _held_blocks,
        "source",
        "tier",
    ),
    gauge(
        "router_orphan_blocks",
        "Blocks that wait for the tokens of their parents.",
        one(lambda stats: stats.index.orphans),
    ),
    counter(
        "router_refused_blocks",
        "Blocks not taken because the index was full.",
        one(lambda stats: stats.index.refused_blocks),
    ),
    counter(
        "router_events",
        "KV events applied, by kind.",
        each(lambda stats: stats.index.events, ("stored", "removed", "cleared")),
        "kind",
    ),
    counter(
        "router_event_blocks",
        "Blocks in those events.",
        each(lambda stats: stats.index.event_blocks, ("stored", "removed")),
        "kind",
    ),
    counter(
        "router_ignored_events",
        "KV events that were ignored, by reason.",
        each(lambda stats: stats.index.ignored_events, ("medium",)),
        "reason",
    ),
)

SOURCES = (
    gauge(
        "router_source_connected",
        "1 while the router is connected to the publisher.",
        per_source(lambda source: int(source.is_connected)),
        "source",
    ),
    gauge(
        "router_source_silent",
        "1 if its workers answer requests and it has published nothing for too long.",
        per_source(lambda source: int(source.is_silent)),
        "source",
    ),
    gauge(
        "router_source_unmatched",
        "1 if its workers report cached tokens and none of them was predicted.",
        per_source(lambda source: int(source.is_unmatched)),
        "source",
    ),
    gauge(
        "router_source_last_batch_age_seconds",
        "Time since its last batch; no sample before the first.",
        per_source(lambda source: source.last_batch_age_s),
        "source",
    ),
    counter(
        "router_source_batches",
        "Batches received.",
        per_source(lambda source: source.batches),
        "source",
    ),
    gauge(
        "router_source_waiting_batches",
        "Batches received and not applied yet.",
        per_source(lambda source: source.waiting_batches),
        "source",
    ),
    counter(
        "router_source_gaps",
        "Gaps in the numbers of batches.",
        per_source(lambda source: source.gaps),
        "source",
    ),
    counter(
        "router_source_losses",
        "Gaps that were not filled: the source's blocks were forgotten.",
        per_source(lambda source: source.losses),
        "source",
    ),
    counter(
        "router_source_replayed_batches",
        "Batches that filled gaps.",
        per_source(lambda source: source.replayed_batches),
        "source",
    ),
    counter(
        "router_source_restarts",
        "Restarts of the publisher.",
        per_source(lambda source: source.restarts),
        "source",
    ),
    counter(
        "router_source_snapshots",
        "Snapshots of all blocks that were received.",
        per_source(lambda source: source.snapshots),
        "source",
    ),
    counter(
        "router_source_bad_batches",
        "Batches that could not be decoded.",
        per_source(lambda source: source.bad_batches),
        "source",
    ),
)

RESULTS = ("accepted", "failed", "busy", "circuit")


def _results(stats: RouterStats) -> Iterator[Sample]:
    for url, cache in stats.caches.items():
        for result in RESULTS:
            yield (url, result), cache.results.get(result, 0)


def _per_cache(value: Callable[[CacheStats], int]) -> Reader:
    return lambda stats: [((url,), value(cache)) for url, cache in stats.caches.items()]


def _cache_circuits(stats: RouterStats) -> Iterator[Sample]:
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
        _cache_circuits,
        "cache",
        "state",
    ),
)


def _of_tokens(value: Callable[[TokenizerStats], Value]) -> Reader:
    return lambda stats: () if stats.tokens is None else [((), value(stats.tokens))]


def _of_queue(value: Callable[[QueueStats], Value]) -> Reader:
    return lambda stats: () if stats.queue is None else [((), value(stats.queue))]


def _of_proxy(value: Callable[[ProxyStats], float]) -> Reader:
    return lambda stats: () if stats.proxy is None else [((), value(stats.proxy))]


def _of_process(value: Callable[[ProcessStats], float]) -> Reader:
    return lambda stats: () if stats.process is None else [((), value(stats.process))]


def _conversions(stats: RouterStats) -> Iterator[Sample]:
    if stats.tokens is not None:
        for way in ("ids", "local", "render", "unknown"):
            yield (way,), stats.tokens.requests.get(way, 0)


def _unknown_prompts(stats: RouterStats) -> Iterator[Sample]:
    if stats.tokens is not None:
        for reason, count in stats.tokens.unknown.items():
            yield (reason,), count


def _refused(stats: RouterStats) -> Iterator[Sample]:
    if stats.queue is not None:
        for reason in ("full", "expired", "no_worker"):
            yield (reason,), stats.queue.refused.get(reason, 0)


def _ended(stats: RouterStats) -> Iterator[Sample]:
    if stats.proxy is not None:
        for outcome in Outcome:
            yield (outcome.value,), stats.proxy.ended.get(outcome.value, 0)


def _rejected(stats: RouterStats) -> Iterator[Sample]:
    if stats.proxy is not None:
        for reason in ("unauthorized", "too_large", "malformed"):
            yield (reason,), stats.proxy.rejected.get(reason, 0)


def _build(stats: RouterStats) -> Iterator[Sample]:
    if stats.process is not None:
        yield (stats.process.version,), 1


REQUESTS = (
    counter(
        "router_ended_requests",
        "Requests that ended at a worker, by outcome.",
        _ended,
        "outcome",
    ),
    gauge(
        "router_open_requests",
        "Requests of clients that are in the router.",
        _of_proxy(lambda proxy: proxy.open_requests),
    ),
    counter(
        "router_retries",
        "Requests sent to another worker because one failed.",
        _of_proxy(lambda proxy: proxy.retries),
    ),
    counter(
        "router_rejected_requests",
        "Requests refused before any worker was chosen, by reason.",
        _rejected,
        "reason",
    ),
    counter(
        "router_refused_requests",
        "Requests answered with 429 or 503, by reason.",
        _refused,
        "reason",
    ),
    gauge(
        "router_queued_requests",
        "Requests that wait for a worker.",
        _of_queue(lambda queue: queue.waiting),
    ),
    gauge(
        "router_queue_capacity",
        "Requests that may wait.",
        _of_queue(lambda queue: queue.capacity),
    ),
    histogram(
        "router_queue_wait_seconds",
        "How long routed requests have waited for a worker.",
        _of_queue(lambda queue: queue.waits_s),
    ),
    counter(
        "router_converted_requests",
        "Requests by how their token ids were found; unknown: routed by load.",
        _conversions,
        "way",
    ),
    counter(
        "router_unknown_prompts",
        "Requests whose token ids were not found, by reason.",
        _unknown_prompts,
        "reason",
    ),
    gauge(
        "router_tokenizer_memo_bytes",
        "Memory of remembered token ids.",
        _of_tokens(lambda tokens: tokens.memo_bytes),
    ),
    counter(
        "router_converted_tokens",
        "Tokens of those requests.",
        _of_tokens(lambda tokens: tokens.tokens),
    ),
    counter(
        "router_remembered_tokens",
        "Those of them that were not tokenized again.",
        _of_tokens(lambda tokens: tokens.remembered_tokens),
    ),
    histogram(
        "router_conversion_seconds",
        "Time to find a request's token ids.",
        _of_tokens(lambda tokens: tokens.seconds),
    ),
    counter(
        "router_tokenizer_checks",
        "Comparisons of the router's token ids with an engine's.",
        _of_tokens(lambda tokens: tokens.checks),
    ),
    counter(
        "router_tokenizer_mismatches",
        "Comparisons that differed: the engine is asked from then on.",
        _of_tokens(lambda tokens: tokens.mismatches),
    ),
)

PROCESSES = (
    gauge("router_build_info", "Always 1; the label is the running version.", _build, "version"),
    gauge(
        "router_uptime_seconds",
        "Time since startup.",
        _of_process(lambda process: process.uptime_s),
    ),
    gauge(
        "router_ready",
        "1 once the router has learned what the publishers hold.",
        _of_process(lambda process: int(process.ready)),
    ),
    gauge(
        "router_proxies",
        "Proxy processes that are up.",
        _of_proxy(lambda proxy: proxy.processes),
    ),
    counter(
        "router_proxy_restarts",
        "Proxy processes that were restarted.",
        _of_proxy(lambda proxy: proxy.restarts),
    ),
    counter(
        "router_unsupervised_requests",
        "Requests that proxies routed by themselves because the decider was away.",
        _of_proxy(lambda proxy: proxy.unsupervised_requests),
    ),
    gauge(
        "router_peer_up",
        "1 while another decider's requests are known.",
        per_peer(lambda peer: int(peer.is_up)),
        "peer",
    ),
    gauge(
        "router_peer_requests",
        "Running requests that the peer routed.",
        per_peer(lambda peer: peer.requests),
        "peer",
    ),
    counter(
        "router_peer_batches",
        "Batches received from the peer.",
        per_peer(lambda peer: peer.batches),
        "peer",
    ),
    counter(
        "router_peer_gaps",
        "Gaps in the numbers of the peer's batches.",
        per_peer(lambda peer: peer.gaps),
        "peer",
    ),
)

SECTIONS: Mapping[str, Sequence[Reading[RouterStats]]] = {
    "Router: decisions": DECISIONS,
    "Router: workers": WORKERS,
    "Router: index": INDEX,
    "Router: sources of events": SOURCES,
    "Router: early loads": CACHES,
    "Router: requests": REQUESTS,
    "Router: processes and peers": PROCESSES,
}
CATALOG: Sequence[Reading[RouterStats]] = [
    metric for section in SECTIONS.values() for metric in section
]
