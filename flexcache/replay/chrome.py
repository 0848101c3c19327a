"""A trace as Chrome's trace events, for chrome://tracing and Perfetto.

Tasks and ops are rows; slices that overlap get rows of their own. An arrow leads from a task to
each of its ops. Counters below show how many ops wait for each worker and how many it runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from flexcache.ids import OpKind
from flexcache.replay.history import TaskHistory, histories
from flexcache.replay.reader import Trace
from flexcache.tracing.records import OpEnded

_TASKS, _OPS = 1, 2  # process ids of the rows
_WORKERS = {
    OpKind.H2D: "device",
    OpKind.D2H: "device",
    OpKind.DISK2H: "disk",
    OpKind.H2DISK: "disk",
    OpKind.REMOTE2H: "remote",
    OpKind.H2REMOTE: "remote",
    OpKind.DISK2D: "device",
    OpKind.D2DISK: "device",
    OpKind.COMMIT: "disk",
}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return a Chrome trace, to be encoded as JSON. Its times are microseconds."""
    tasks = list(histories(trace.records()).values())
    ops = sorted(
        ((task, op) for task in tasks for op in task.ops), key=lambda pair: pair[1].started
    )
    task_rows = _Rows()
    events = [*_names(_TASKS, "tasks"), *_names(_OPS, "ops")]
    rows_of_tasks = {}
    for task in sorted(tasks, key=lambda task: task.began_s):
        row = task_rows.take(_kind(task), task.began_s, task.ended_s)
        rows_of_tasks[task.task] = row
        events.append(_task_event(task, row))
    op_rows = _Rows()
    for task, op in ops:
        row = op_rows.take(op.kind.value, op.started, op.time)
        events += _op_events(task, op, rows_of_tasks[task.task], row)
    events += task_rows.names(_TASKS)
    events += op_rows.names(_OPS)
    events += _queue_events(tasks)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"fingerprint": trace.header.fingerprint, "version": trace.header.version},
    }


class _Rows:
    """Assigns rows: a slice goes to the first row of its group that is free at its start."""

    def __init__(self) -> None:
        self._free_at: dict[str, list[tuple[float, int]]] = {}
        self._rows: dict[str, list[int]] = {}
        self._numbers = itertools.count(1)

    def take(self, group: str, start: float, stop: float) -> int:
        """Return a row for a slice. Slices must come in the order of their starts."""
        rows = self._free_at.setdefault(group, [])
        if rows and rows[0][0] <= start:
            _, row = heapq.heappop(rows)
        else:
            row = next(self._numbers)
            self._rows.setdefault(group, []).append(row)
        heapq.heappush(rows, (stop, row))
        return row

    def names(self, process: int) -> Iterator[dict[str, Any]]:
        of_groups = [(group, row) for group, rows in self._rows.items() for row in rows]
        for place, (group, row) in enumerate(of_groups):
            yield _metadata("thread_name", process, row, {"name": group})
            yield _metadata("thread_sort_index", process, row, {"sort_index": place})


def _names(process: int, name: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})


def _metadata(name: str, process: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": row, "args": args}


def _kind(task: TaskHistory) -> str:
    return "task" if task.kind is None else task.kind.value


def _slice(
    process: int, row: int, name: str, start: float, stop: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": row, "name": name, "ts": _us(start),
        "dur": _us(stop - start), "args": {k: v for k, v in args.items() if v not in (None, "")},
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _task_event(task: TaskHistory, row: int) -> dict[str, Any]:
    args: dict[str, Any] = {"task": str(task.task), "request": task.request}
    if task.match is not None:
        args |= {
            "engine": task.match.engine,
            "blocks": f"{task.match.start} to {task.match.stop}",
            "found": task.match.num_blocks,
            "sources": dict(task.match.sources),
        }
    if task.end is not None:
        args |= {"status": task.end.status.value, "moved": task.end.num_ok, "error": task.end.error}
    name = f"{_kind(task)} {task.request or task.task}"
    return _slice(_TASKS, row, name, task.began_s, task.ended_s, args)


def _op_events(task: TaskHistory, op: OpEnded, task_row: int, row: int) -> Iterator[dict[str, Any]]:
    args = {
        "op": op.op,
        "task": str(task.task),
        "request": task.request,
        "first": op.first,
        "blocks": op.blocks,
        "moved": op.num_ok,
        "error": op.error,
    }
    yield _slice(_OPS, row, f"{op.kind.value} {op.blocks}", op.started, op.time, args)
    arrow = {"cat": "op", "name": "op", "id": op.op, "ts": _us(op.started)}
    yield {"ph": "s", "pid": _TASKS, "tid": task_row, **arrow}
    yield {"ph": "f", "bp": "e", "pid": _OPS, "tid": row, **arrow}


def _queue_events(tasks: Sequence[TaskHistory]) -> Iterator[dict[str, Any]]:
    """Yield counters for each worker, at each of their changes."""
    changes: list[tuple[float, str, str, int]] = []
    for task in tasks:
        ready = task.ready_s()
        for op in task.ops:
            worker = _WORKERS[op.kind]
            changes.append((ready[op.op], worker, "waiting", 1))
            changes.append((op.started, worker, "waiting", -1))
            changes.append((op.started, worker, "running", 1))
            changes.append((op.time, worker, "running", -1))
    counts: dict[str, Counter[str]] = {}
    for at, worker, name, step in sorted(changes, key=lambda change: change[0]):
        count = counts.setdefault(worker, Counter(waiting=0, running=0))
        count[name] += step
        yield {
            "ph": "C", "pid": _OPS, "tid": 0, "name": f"ops of {worker}", "ts": _us(at),
            "args": dict(count),
        }  # fmt: skip
