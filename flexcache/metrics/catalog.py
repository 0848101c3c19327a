"""Every metric once: its name, what it means, and where `KVServer.stats` has its value.

The collector serves them, `docs/metrics.md` is made from them, and a test moves each of them.
Names begin with ``flexcache_``, units are bytes, seconds, tokens and blocks, and what only grows
ends in ``_total``. Labels have few values, known beforehand, but for the names of engines: nothing
that a request brings along becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flexcache.ids import KVStatus, TaskKind, TierName
from flexcache.transfer.breaker import BreakerState

Report = Mapping[str, Any]
Labels = tuple[str, ...]
Sample = tuple[Labels, Any]
"""The values of the labels, and a number; of a histogram its ``bounds``, ``counts`` and ``sum``."""
Reader = Callable[[Report], Iterator[Sample]]

_WORKERS = ("disk", "remote")
_WHY_REJECTED = (
    "malformed", "oversized", "misplaced", "without_session", "version", "crowded",
    "unknown_worker",
)  # fmt: skip
_WHY_DROPPED = (
    "host_tier_full", "prefix_not_cached", "session_task_limit", "name_disputed", "ranks_missing",
    *(
        f"{tier}_{what}"
        for tier in ("ssd", "remote")
        for what in ("tier_full", "write_backlog", "write_failed", "unavailable", "bad_block",
                     "never_written")
    ),
)  # fmt: skip
_WHY_SKIPPED = ("ssd_slower_than_recompute", "remote_slower_than_recompute")


class MetricType(str, Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        labels: Their names.
        read: Finds the samples in what `KVServer.stats` returns; none where that has no such part.
    """

    name: str
    type: MetricType
    labels: Labels
    help: str
    read: Reader


def _counter(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}_total", MetricType.COUNTER, labels, help, read)


def _gauge(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.GAUGE, labels, help, read)


def _histogram(name: str, help: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.HISTOGRAM, labels, help, read)


# -- where the values are ------------------------------------------------------------------------


def _part(report: Report, path: Sequence[str]) -> Any:
    """What is at a path of keys; None if that part is not there."""
    found: Any = report
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _one(*path: str) -> Reader:
    """A single number."""

    def read(report: Report) -> Iterator[Sample]:
        value = _part(report, path)
        if value is not None:
            yield (), value

    return read


def _each(*path: str, of: str | None = None, known: Sequence[str] = ()) -> Reader:
    """A value per entry of a table; in each entry it is at ``of``, if that is given.

    Args:
        known: Labels that are served as 0 until they turn up: a counter that begins with its first
            event hides that event from `rate` and `increase`.
    """

    def read(report: Report) -> Iterator[Sample]:
        table = _part(report, path)
        if table is None:
            return
        for label, entry in {**dict.fromkeys(known, 0), **table}.items():
            value = entry[of] if of is not None else entry
            if value is not None:
                yield (label,), value

    return read


def _each_of_each(*path: str) -> Reader:
    """A value per entry of a table of tables."""

    def read(report: Report) -> Iterator[Sample]:
        for outer, table in (_part(report, path) or {}).items():
            for inner, value in table.items():
                yield (outer, inner), value

    return read


def _scaled(reader: Reader, unit: str) -> Reader:
    """Blocks in another unit: the report says at ``unit`` how much of it a block is."""

    def read(report: Report) -> Iterator[Sample]:
        for labels, blocks in reader(report):
            yield labels, blocks * report[unit]

    return read


def _our_own(reader: Reader) -> Reader:
    """Without the remote store: how much room it has is not for us to say."""

    def read(report: Report) -> Iterator[Sample]:
        return (sample for sample in reader(report) if sample[0] != (TierName.REMOTE.value,))

    return read


def _build(report: Report) -> Iterator[Sample]:
    yield (str(report.get("version", "unknown")),), 1


def _hit_ratios(report: Report) -> Iterator[Sample]:
    for window, hits in report.get("hit_rate", {}).items():
        if hits["asked_blocks"]:  # else it is no ratio, and no reason for an alert
            yield (window,), hits["rate"]


def _ended_tasks(report: Report) -> Iterator[Sample]:
    ended = report.get("ended_tasks")
    if ended is None:
        return
    for kind in TaskKind:
        for status in KVStatus:
            if status is not KVStatus.TIMEOUT:  # no end of a task: its caller's patience ran out
                yield (kind.value, status.value), ended.get(f"{kind.value}_{status.value}", 0)


def _rejected(report: Report) -> Iterator[Sample]:
    counters = report.get("counters", {})
    for why in _WHY_REJECTED:
        yield (why,), counters.get(f"rejected_{why}", 0)


def _server_counter(name: str) -> Reader:
    """One that the server makes with its first event."""

    def read(report: Report) -> Iterator[Sample]:
        yield (), report.get("counters", {}).get(name, 0)

    return read


def _worker_deaths(report: Report) -> Iterator[Sample]:
    for worker in report.get("worker_restarts", {}):
        yield (worker,), report.get("counters", {}).get(f"{worker}_worker_deaths", 0)


def _workers_up(report: Report) -> Iterator[Sample]:
    for worker in report.get("worker_restarts", {}):
        yield (worker,), int(worker in report.get("workers", {}))


def _breaker_state(report: Report) -> Iterator[Sample]:
    current = _part(report, ("remote", "breaker", "state"))
    if current is not None:
        for state in BreakerState:
            yield (state.value,), int(state.value == current)


def _num_engines(report: Report) -> Iterator[Sample]:
    yield (), len(report.get("engines", {}))


# -- the metrics ---------------------------------------------------------------------------------


def _in_blocks_and_tokens(name: str, help: str, read: Reader, *labels: str) -> tuple[Metric, ...]:
    """The same count twice: operators think in tokens, capacities are in blocks."""
    return (
        _counter(f"{name}_blocks", help.format("Blocks"), read, *labels),
        _counter(
            f"{name}_tokens", help.format("Tokens"), _scaled(read, "tokens_per_block"), *labels
        ),
    )


def _in_blocks_and_bytes(name: str, help: str, read: Reader, *labels: str) -> tuple[Metric, ...]:
    read_bytes = _scaled(_our_own(read), "block_bytes")
    return (
        _gauge(f"{name}_blocks", help.format("Blocks"), read, *labels),
        _gauge(f"{name}_bytes", help.format("Bytes"), read_bytes, *labels),
    )


def _per_tier(of: str) -> Reader:
    return _each("tiers", of=of)


_HITS_AND_MISSES = (
    *_in_blocks_and_tokens(
        "tier_hit", "{} that gets were supplied from this tier.", _per_tier("hit_blocks"), "tier"
    ),
    *_in_blocks_and_tokens(
        "tier_miss",
        "{} that gets asked for and this tier did not supply; another may have.",
        _per_tier("miss_blocks"),
        "tier",
    ),
    *_in_blocks_and_tokens(
        "missed",
        "{} that gets asked for and no tier supplied: the engine computes them.",
        _one("missed_blocks"),
    ),
    _gauge(
        "hit_ratio",
        "Share of the blocks asked for that was supplied, over the last minute, ten, and hour.",
        _hit_ratios,
        "window",
    ),
    _counter(
        "load_decision_blocks",
        "Blocks that a tier below DRAM had: loaded, or left to be recomputed as the quicker way.",
        _each_of_each("load_decisions"),
        "tier",
        "decision",
    ),
    _counter(
        "skipped_blocks",
        "Blocks that were cached and not loaded, by reason.",
        _each("skipped_blocks", known=_WHY_SKIPPED),
        "reason",
    ),
    _counter(
        "dropped_blocks",
        "Blocks that were not stored in some tier, or were lost from it, by reason.",
        _each("dropped_blocks", known=_WHY_DROPPED),
        "reason",
    ),
)

_TIERS = (
    *_in_blocks_and_tokens(
        "tier_stored",
        "{} that became findable in the tier.",
        _per_tier("stored_blocks"),
        "tier",
    ),
    *_in_blocks_and_tokens(
        "tier_evicted",
        "{} that made room for others. Of REMOTE: that were forgotten here.",
        _per_tier("evicted_blocks"),
        "tier",
    ),
    *_in_blocks_and_tokens(
        "tier_dropped",
        "{} that were found to be bad or missing, and those that build on them.",
        _per_tier("dropped_blocks"),
        "tier",
    ),
    _gauge(
        "tier_available",
        "1 while the tier takes part; 0 while its worker or its store is away and it answers miss.",
        _each("tiers", of="available"),
        "tier",
    ),
    _counter("tier_read_bytes", "Bytes read from the tier.", _per_tier("read_bytes"), "tier"),
    _counter(
        "tier_written_bytes", "Bytes written to the tier.", _per_tier("written_bytes"), "tier"
    ),
    *_in_blocks_and_bytes(
        "tier_capacity",
        "{} of the whole tier. Of REMOTE: how many can be known of.",
        _per_tier("capacity"),
        "tier",
    ),
    *_in_blocks_and_bytes("tier_free", "{} with nothing in them.", _per_tier("free"), "tier"),
    *_in_blocks_and_bytes(
        "tier_indexed",
        "{} that can be found. Of REMOTE: that are known to be there.",
        _per_tier("indexed"),
        "tier",
    ),
    *_in_blocks_and_bytes(
        "tier_leased", "{} that tasks have reserved.", _per_tier("leased"), "tier"
    ),
)

_OPS = (
    _counter("ops", "Ops that have ended, by kind.", _each("ops", of="ops"), "op"),
    _counter("failed_ops", "Ops that moved less than all.", _each("ops", of="failed_ops"), "op"),
    _counter("op_blocks", "Blocks that ops have moved.", _each("ops", of="blocks"), "op"),
    _counter("op_bytes", "Bytes that ops have moved.", _each("ops", of="bytes"), "op"),
    _counter(
        "op_busy_seconds",
        "Time in which at least one op of the kind was running: bytes over it is the speed.",
        _each("ops", of="seconds"),
        "op",
    ),
    _histogram(
        "op_duration_seconds",
        "From an op's start at its worker to its end.",
        _each("op_histograms", of="seconds"),
        "op",
    ),
    _histogram(
        "op_size_bytes", "Bytes that an op has moved.", _each("op_histograms", of="bytes"), "op"
    ),
    _gauge(
        "waiting_ops",
        "Ops that could run and wait for their turn at a worker.",
        _each("queues", of="waiting"),
        "worker",
    ),
    _gauge(
        "running_ops",
        "Ops that a worker was given and has not reported on. device: the engines' ranks.",
        _each("queues", of="running"),
        "worker",
    ),
)

_TASKS = (
    _gauge(
        "tasks",
        "Tasks by state. One that has ended counts until its answer was collected.",
        _each("tasks"),
        "state",
    ),
    _counter("ended_tasks", "Tasks that have ended.", _ended_tasks, "kind", "status"),
    _histogram(
        "task_duration_seconds",
        "From a task's launch to its answer.",
        _each("task_histograms"),
        "kind",
    ),
    _gauge("unlaunched_tasks", "Matches that nobody has launched yet.", _one("unlaunched_tasks")),
    _gauge(
        "store_backlog_blocks",
        "Blocks of DRAM that are pinned until a tier below has them.",
        _one("store_backlog_blocks"),
    ),
)

_REMOTE = (
    _gauge(
        "breaker_state",
        "1 for the state that the remote store's circuit breaker is in, 0 for the others.",
        _breaker_state,
        "state",
    ),
    _counter(
        "breaker_openings",
        "How often the breaker gave the store up.",
        _one("remote", "breaker", "openings"),
    ),
    _counter(
        "remote_lookups",
        "Questions to the remote store about a prompt.",
        _one("remote", "lookups", "asked"),
    ),
    _counter(
        "late_remote_lookups",
        "Those that it did not answer in time.",
        _one("remote", "lookups", "late"),
    ),
    _gauge("open_lookups", "Those that it has not answered yet.", _one("open_lookups")),
    _gauge(
        "load_bytes_per_second",
        "How fast loads from the tier were of late: what load or recompute is decided by.",
        _scaled(_each("load_cost", of="blocks_per_s"), "block_bytes"),
        "tier",
    ),
    _gauge(
        "load_seconds_per_op",
        "How long an op that loads from the tier took of late.",
        _each("load_cost", of="seconds_per_op"),
        "tier",
    ),
)

_PROCESSES = (
    _gauge("engines", "Engines in session.", _num_engines),
    _gauge(
        "engine_ranks",
        "Ranks of an engine that are registered and serve.",
        _each("engines", of="ranks"),
        "engine",
    ),
    _gauge(
        "engine_open_tasks",
        "Tasks of an engine that have not ended.",
        _each("engines", of="open_tasks"),
        "engine",
    ),
    _gauge("worker_up", "1 while the worker's process runs.", _workers_up, "worker"),
    _counter(
        "worker_restarts",
        "How often a worker's process was started anew.",
        _each("worker_restarts"),
        "worker",
    ),
    _counter("worker_deaths", "How often it had died before.", _worker_deaths, "worker"),
    _counter("rejected_messages", "Messages that were refused, by reason.", _rejected, "reason"),
    _counter(
        "failed_messages",
        "Messages at which the server itself failed: a bug, its log has the traceback.",
        _server_counter("failed_messages"),
    ),
    _counter(
        "unread_messages",
        "Messages that a client did not read in time.",
        _server_counter("unread_messages"),
    ),
    _counter(
        "expired_clients",
        "Clients that were taken for dead since they were silent.",
        _server_counter("expired_clients"),
    ),
)

_FOLLOWERS = (
    _counter(
        "event_batches",
        "Batches of KV events that were made; each has a number, by which gaps are seen.",
        _one("events", "sequence"),
    ),
    _counter(
        "published_event_batches",
        "Batches of KV events that were sent.",
        _one("events", "published_batches"),
    ),
    _counter(
        "dropped_event_batches",
        "Batches that went unsent since too many were waiting: subscribers see a gap.",
        _one("events", "dropped_batches"),
    ),
    _gauge(
        "queued_event_batches", "Batches that wait to be sent.", _one("events", "queued_batches")
    ),
    _counter(
        "replayed_event_batches",
        "Batches that were sent again to who had missed them.",
        _one("events", "replayed_batches"),
    ),
    _counter(
        "bad_replay_requests",
        "Requests to replay that made no sense.",
        _one("events", "bad_replay_requests"),
    ),
    _gauge(
        "untaken_event_batches",
        "Batches that wait for the engine to take them along with its own events.",
        _one("events", "untaken_batches"),
    ),
    _counter(
        "lost_event_batches",
        "Batches that the engine did not take before too many were waiting.",
        _one("events", "lost_batches"),
    ),
    _counter("trace_lines", "Lines written to the trace.", _one("trace", "lines")),
    _counter(
        "dropped_trace_lines",
        "Lines that the trace lacks since its writer was behind.",
        _one("trace", "dropped_lines"),
    ),
    _counter("trace_bytes", "Bytes written to the trace.", _one("trace", "bytes")),
)

_SERVER = (
    _gauge("build_info", "Always 1; the label says what runs.", _build, "version"),
    _gauge("uptime_seconds", "Since the server's start.", _one("uptime_s")),
    _gauge("block_bytes", "Size of a block over all ranks.", _one("block_bytes")),
    _gauge("block_tokens", "Tokens of a block.", _one("tokens_per_block")),
)

SECTIONS: Mapping[str, Sequence[Metric]] = {
    "Hits and misses": _HITS_AND_MISSES,
    "Tiers": _TIERS,
    "Ops": _OPS,
    "Tasks": _TASKS,
    "Remote store and slow tiers": _REMOTE,
    "Processes and messages": _PROCESSES,
    "Events and traces": _FOLLOWERS,
    "Server": _SERVER,
}
CATALOG: Sequence[Metric] = [metric for section in SECTIONS.values() for metric in section]


def describe_metrics() -> list[dict[str, str]]:
    """Section, name, type, labels and meaning of each metric, for the documentation."""
    return [
        {
            "section": title,
            "name": metric.name,
            "type": metric.type.value,
            "labels": ", ".join(metric.labels),
            "meaning": metric.help,
        }
        for title, section in SECTIONS.items()
        for metric in section
    ]
