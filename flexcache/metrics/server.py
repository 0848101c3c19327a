"""Metrics of the server's process, its clients and workers, and of events and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.metrics.metric import Reader, Sample, counter, gauge, one, one_of_server
from flexcache.tasks.stats import EngineStats, EventStats, Stats, TraceStats

_WHY_REJECTED = (
    "malformed", "oversized", "misplaced", "without_session", "version", "crowded",
    "unknown_worker",
)  # fmt: skip


def _per_engine(value: Callable[[EngineStats], float]) -> Reader:
    def read(stats: Stats) -> Iterator[Sample]:
        for name, engine in stats.engines.items():
            yield (name,), value(engine)

    return read


def _counted(name: str) -> Reader:
    """A counter that the server makes with its first event."""
    return lambda stats: [((), stats.counters.get(name, 0))]


def _rejected(stats: Stats) -> Iterator[Sample]:
    for why in _WHY_REJECTED:
        yield (why,), stats.counters.get(f"rejected_{why}", 0)


def _workers_up(stats: Stats) -> Iterator[Sample]:
    for worker in stats.server.worker_restarts:
        yield (worker,), int(worker in stats.server.workers)


def _worker_restarts(stats: Stats) -> Iterator[Sample]:
    for worker, count in stats.server.worker_restarts.items():
        yield (worker,), count


def _worker_deaths(stats: Stats) -> Iterator[Sample]:
    for worker in stats.server.worker_restarts:
        yield (worker,), stats.counters.get(f"{worker}_worker_deaths", 0)


def _build(stats: Stats) -> Iterator[Sample]:
    yield (stats.server.version,), 1


def _of_events(value: Callable[[EventStats], float | None]) -> Reader:
    return one_of_server(lambda server: None if server.events is None else value(server.events))


def _of_trace(value: Callable[[TraceStats], float]) -> Reader:
    return one_of_server(lambda server: None if server.trace is None else value(server.trace))


PROCESSES = (
    gauge("engines", "Engines in session.", lambda stats: [((), len(stats.engines))]),
    gauge(
        "engine_ranks",
        "Ranks of an engine that are registered and serve.",
        _per_engine(lambda engine: engine.ranks),
        "engine",
    ),
    gauge(
        "engine_open_tasks",
        "Tasks of an engine that have not ended.",
        _per_engine(lambda engine: engine.open_tasks),
        "engine",
    ),
    gauge("worker_up", "1 while the worker's process runs.", _workers_up, "worker"),
    counter(
        "worker_restarts", "How often a worker's process was restarted.", _worker_restarts, "worker"
    ),
    counter("worker_deaths", "How often a worker's process has died.", _worker_deaths, "worker"),
    counter("rejected_messages", "Messages that were refused, by reason.", _rejected, "reason"),
    counter(
        "failed_messages",
        "Messages at which the server itself failed: a bug, its log has the traceback.",
        _counted("failed_messages"),
    ),
    counter(
        "unread_messages",
        "Messages that a client did not read in time.",
        _counted("unread_messages"),
    ),
    counter(
        "expired_clients",
        "Clients that were considered dead because they were silent.",
        _counted("expired_clients"),
    ),
)

EVENTS_AND_TRACES = (
    counter(
        "event_batches",
        "Batches of KV events that were made; each has a number, by which gaps are seen.",
        _of_events(lambda events: events.sequence),
    ),
    counter(
        "published_event_batches",
        "Batches of KV events that were sent.",
        _of_events(lambda events: events.published_batches),
    ),
    counter(
        "dropped_event_batches",
        "Batches that went unsent since too many were waiting: subscribers see a gap.",
        _of_events(lambda events: events.dropped_batches),
    ),
    gauge(
        "queued_event_batches",
        "Batches that wait to be sent.",
        _of_events(lambda events: events.queued_batches),
    ),
    counter(
        "replayed_event_batches",
        "Batches that were sent again to subscribers that had missed them.",
        _of_events(lambda events: events.replayed_batches),
    ),
    counter(
        "bad_replay_requests",
        "Requests to replay that made no sense.",
        _of_events(lambda events: events.bad_replay_requests),
    ),
    gauge(
        "untaken_event_batches",
        "Batches that wait for the engine to take them along with its own events.",
        _of_events(lambda events: events.untaken_batches),
    ),
    counter(
        "lost_event_batches",
        "Batches that the engine did not take before too many were waiting.",
        _of_events(lambda events: events.lost_batches),
    ),
    counter("trace_lines", "Lines written to the trace.", _of_trace(lambda trace: trace.lines)),
    counter(
        "dropped_trace_lines",
        "Lines that the trace lacks since its writer was behind.",
        _of_trace(lambda trace: trace.dropped_lines),
    ),
    counter("trace_bytes", "Bytes written to the trace.", _of_trace(lambda trace: trace.bytes)),
)

SERVER = (
    gauge("build_info", "Always 1; the label says what runs.", _build, "version"),
    gauge(
        "uptime_seconds",
        "Since startup.",
        one_of_server(lambda server: server.uptime_s),
    ),
    gauge(
        "block_bytes",
        "Size of a block over all ranks.",
        one(lambda cache: cache.identity.block_bytes),
    ),
    gauge("block_tokens", "Tokens of a block.", one(lambda cache: cache.identity.tokens_per_block)),
)
