"""Metrics of decisions and of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.metrics.metric import Sample, counter, gauge, histogram
from flexcache.router.metrics.readers import TIERS, Reader, each, one, per_worker
from flexcache.router.stats import CachedTokensStats, RouterStats, RoutingStats
from flexcache.router.workers import WorkerState

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


def _circuits(stats: RouterStats) -> Iterator[Sample]:
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
        _circuits,
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
