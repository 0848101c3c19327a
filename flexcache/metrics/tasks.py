"""Metrics of ops and tasks, and of the remote store's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flexcache.ids import KVStatus, TaskKind
from flexcache.metrics.metric import (
    Reader,
    Sample,
    counter,
    each,
    from_cache,
    gauge,
    histogram,
    one,
    per,
)
from flexcache.tasks.stats import CacheStats, OpStats, RemoteStats
from flexcache.transfer.breaker import BreakerState


def _per_op(value: Callable[[OpStats], float]) -> Reader:
    return per(lambda cache: cache.totals.ops, value)


def _of_store(value: Callable[[RemoteStats], float]) -> Reader:
    return one(lambda cache: None if cache.remote is None else value(cache.remote))


def _ended_tasks(cache: CacheStats) -> Iterator[Sample]:
    ended = cache.totals.ended_tasks
    for kind in TaskKind:
        for status in KVStatus:
            if status is not KVStatus.TIMEOUT:  # the caller stopped waiting; the task continues
                yield (kind.value, status.value), ended.get(f"{kind.value}_{status.value}", 0)


def _breaker_state(cache: CacheStats) -> Iterator[Sample]:
    if cache.remote is not None:
        for state in BreakerState:
            yield (state.value,), int(state.value == cache.remote.breaker.state)


def _early_loads(cache: CacheStats) -> Iterator[Sample]:
    early = cache.early_loads
    yield ("early",), early.early
    yield ("late",), early.late
    yield ("wasted",), early.wasted


def _hints(cache: CacheStats) -> Iterator[Sample]:
    sessions = cache.sessions
    yield ("over",), sessions.over
    yield ("returning",), sessions.returning
    yield ("unknown",), sessions.unknown


def _hinted_blocks(cache: CacheStats) -> Iterator[Sample]:
    yield ("retired",), cache.sessions.retired_blocks
    yield ("kept",), cache.sessions.kept_blocks
    yield ("fetched",), cache.sessions.fetched_blocks


OPS = (
    counter("ops", "Ops that have ended, by kind.", _per_op(lambda op: op.ops), "op"),
    counter(
        "failed_ops",
        "Ops that did not move all of their blocks.",
        _per_op(lambda op: op.failed_ops),
        "op",
    ),
    counter("op_blocks", "Blocks that ops have moved.", _per_op(lambda op: op.blocks), "op"),
    counter("op_bytes", "Bytes that ops have moved.", _per_op(lambda op: op.bytes), "op"),
    counter(
        "op_device_bytes",
        "Bytes that the disk worker has moved on the SSD, as they are there (`ssd_compression`).",
        _per_op(lambda op: op.device_bytes),
        "op",
    ),
    counter(
        "op_busy_seconds",
        "Time in which at least one op of the kind was running; speed is bytes divided by it.",
        _per_op(lambda op: op.seconds),
        "op",
    ),
    histogram(
        "op_duration_seconds",
        "Time from an op's start at its worker to its end.",
        per(lambda cache: cache.op_histograms, lambda op: op.seconds),
        "op",
    ),
    histogram(
        "op_size_bytes",
        "Bytes that an op has moved.",
        per(lambda cache: cache.op_histograms, lambda op: op.bytes),
        "op",
    ),
    gauge(
        "waiting_ops",
        "Ops that are ready and wait for their turn at a worker.",
        per(lambda cache: cache.queues, lambda queue: queue.waiting),
        "worker",
    ),
    gauge(
        "running_ops",
        "Ops sent to a worker that it has not finished. device: the engines' ranks.",
        per(lambda cache: cache.queues, lambda queue: queue.running),
        "worker",
    ),
)

TASKS = (
    gauge(
        "tasks",
        "Open tasks by state.",
        each(lambda cache: cache.tasks),
        "state",
    ),
    counter("ended_tasks", "Tasks that have ended.", from_cache(_ended_tasks), "kind", "status"),
    histogram(
        "task_duration_seconds",
        "Time from a task's launch to its answer.",
        per(lambda cache: cache.task_histograms, lambda seconds: seconds),
        "kind",
    ),
    gauge(
        "unlaunched_tasks",
        "Matches that have not been launched yet.",
        one(lambda cache: cache.unlaunched_tasks),
    ),
    gauge(
        "store_backlog_blocks",
        "Blocks in DRAM that are pinned until they are written to a tier below.",
        one(lambda cache: cache.store_backlog_blocks),
    ),
)

SESSIONS = (
    counter(
        "early_load_blocks",
        "Blocks that were loaded to DRAM ahead of their request: early, there when it asked; late, "
        "still on their way; wasted, not asked for in time.",
        from_cache(_early_loads),
        "outcome",
    ),
    gauge(
        "open_early_load_blocks",
        "Blocks of early loads that are on their way or wait for their request.",
        one(lambda cache: cache.early_loads.open_blocks),
    ),
    gauge("sessions", "Sessions of users that are remembered.", one(lambda c: c.sessions.known)),
    counter(
        "session_hints",
        "Hints about users' sessions: over, returning; unknown counts those that name no session.",
        from_cache(_hints),
        "hint",
    ),
    counter(
        "session_hint_blocks",
        "Blocks that hints were about: retired (first to be evicted), kept, or fetched to DRAM.",
        from_cache(_hinted_blocks),
        "effect",
    ),
    counter(
        "returned_sessions",
        "Sessions that went on after a hint that they were over.",
        one(lambda cache: cache.sessions.returned_sessions),
    ),
)

REMOTE = (
    gauge(
        "breaker_state",
        "1 for the current state of the remote store's circuit breaker, 0 for the others.",
        from_cache(_breaker_state),
        "state",
    ),
    counter(
        "breaker_openings",
        "How often the breaker opened and cut off the store.",
        _of_store(lambda store: store.breaker.openings),
    ),
    counter(
        "remote_lookups",
        "Lookups of a prompt in the remote store.",
        _of_store(lambda store: store.lookups.asked),
    ),
    counter(
        "late_remote_lookups",
        "Remote lookups that were not answered in time.",
        _of_store(lambda store: store.lookups.late),
    ),
    gauge(
        "open_lookups",
        "Remote lookups that have not been answered yet.",
        one(lambda cache: cache.open_lookups),
    ),
)
