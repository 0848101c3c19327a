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
            if status is not KVStatus.TIMEOUT:  # no end of a task: its caller's patience ran out
                yield (kind.value, status.value), ended.get(f"{kind.value}_{status.value}", 0)


def _breaker_state(cache: CacheStats) -> Iterator[Sample]:
    if cache.remote is not None:
        for state in BreakerState:
            yield (state.value,), int(state.value == cache.remote.breaker.state)


OPS = (
    counter("ops", "Ops that have ended, by kind.", _per_op(lambda op: op.ops), "op"),
    counter("failed_ops", "Ops that moved less than all.", _per_op(lambda op: op.failed_ops), "op"),
    counter("op_blocks", "Blocks that ops have moved.", _per_op(lambda op: op.blocks), "op"),
    counter("op_bytes", "Bytes that ops have moved.", _per_op(lambda op: op.bytes), "op"),
    counter(
        "op_busy_seconds",
        "Time in which at least one op of the kind was running: bytes over it is the speed.",
        _per_op(lambda op: op.seconds),
        "op",
    ),
    histogram(
        "op_duration_seconds",
        "From an op's start at its worker to its end.",
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
        "Ops that could run and wait for their turn at a worker.",
        per(lambda cache: cache.queues, lambda queue: queue.waiting),
        "worker",
    ),
    gauge(
        "running_ops",
        "Ops that a worker was given and has not reported on. device: the engines' ranks.",
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
        "From a task's launch to its answer.",
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
        "Blocks of DRAM that are pinned until a tier below has them.",
        one(lambda cache: cache.store_backlog_blocks),
    ),
)

REMOTE = (
    gauge(
        "breaker_state",
        "1 for the state that the remote store's circuit breaker is in, 0 for the others.",
        from_cache(_breaker_state),
        "state",
    ),
    counter(
        "breaker_openings",
        "How often the breaker gave the store up.",
        _of_store(lambda store: store.breaker.openings),
    ),
    counter(
        "remote_lookups",
        "Questions to the remote store about a prompt.",
        _of_store(lambda store: store.lookups.asked),
    ),
    counter(
        "late_remote_lookups",
        "Those that it did not answer in time.",
        _of_store(lambda store: store.lookups.late),
    ),
    gauge(
        "open_lookups",
        "Those that it has not answered yet.",
        one(lambda cache: cache.open_lookups),
    ),
)
