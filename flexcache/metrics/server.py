"""Metrics of the server's process, its clients and workers, and of events and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.metrics.metric import Metric, Reader, Sample, counter, gauge, one, one_of_server
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
    """Read a counter that the server creates with its first event."""
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


PROCESSES: tuple[Metric[Stats], ...] = (
    gauge("engines", "Engines with a session.", lambda stats: [((), len(stats.engines))]),
    gauge(
        "engine_ranks",
        "Ranks of an engine that are registered and serving.",
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
        "Messages that the server failed to handle: a bug; its log has the traceback.",
        _counted("failed_messages"),
    ),
    counter(
        "cache_forgotten",
        "How often all tiers were emptied after an error while they changed: a bug, or no memory.",
        _counted("cache_forgotten"),
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
        "Batches of KV events that were created; each has a number, so that gaps are visible.",
        _of_events(lambda events: events.sequence),
    ),
    counter(
        "published_event_batches",
        "Batches of KV events that were sent.",
        _of_events(lambda events: events.published_batches),
    ),
    counter(
        "dropped_event_batches",
        "Batches dropped unsent because too many were waiting: subscribers see a gap.",
        _of_events(lambda events: events.dropped_batches),
    ),
    gauge(
        "queued_event_batches",
        "Batches waiting to be sent.",
        _of_events(lambda events: events.queued_batches),
    ),
    counter(
        "replayed_event_batches",
        "Batches resent to subscribers that had missed them.",
        _of_events(lambda events: events.replayed_batches),
    ),
    counter(
        "event_snapshot_pages",
        "Parts of snapshots that were sent to subscribers.",
        _of_events(lambda events: events.snapshot_pages),
    ),
    counter(
        "bad_replay_requests",
        "Malformed replay requests.",
        _of_events(lambda events: events.bad_replay_requests),
    ),
    gauge(
        "untaken_event_batches",
        "Batches waiting for the engine to publish them with its own events.",
        _of_events(lambda events: events.untaken_batches),
    ),
    counter(
        "lost_event_batches",
        "Batches lost because too many were waiting for the engine.",
        _of_events(lambda events: events.lost_batches),
    ),
    counter("trace_lines", "Lines written to the trace.", _of_trace(lambda trace: trace.lines)),
    counter(
        "dropped_trace_lines",
        "Lines missing from the trace because its writer was behind.",
        _of_trace(lambda trace: trace.dropped_lines),
    ),
    counter("trace_bytes", "Bytes written to the trace.", _of_trace(lambda trace: trace.bytes)),
)

SERVER = (
    gauge("build_info", "Always 1; the label is the running version.", _build, "version"),
    gauge(
        "uptime_seconds",
        "Time since startup.",
        one_of_server(lambda server: server.uptime_s),
    ),
    gauge(
        "block_bytes",
        "Size of a block over all ranks.",
        one(lambda cache: cache.identity.block_bytes),
    ),
    gauge("block_tokens", "Tokens per block.", one(lambda cache: cache.identity.tokens_per_block)),
)
