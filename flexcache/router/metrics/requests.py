"""Metrics of requests, and of the router's processes and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.metrics.metric import Sample, Value, counter, gauge, histogram
from flexcache.router.chooser import Outcome
from flexcache.router.metrics.readers import Reader, per_peer
from flexcache.router.stats import (
    ProcessStats,
    ProxyStats,
    QueueStats,
    RouterStats,
    TokenizerStats,
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
