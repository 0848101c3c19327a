"""History of a trace: records by task, one request's story, totals, and Chrome's trace events."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from flexcache.ids import KVStatus, OpKind, TaskKind
from flexcache.replay.traces import Trace
from flexcache.tracing.records import (
    Cancelled,
    ClearedTier,
    Launched,
    OpEnded,
    Record,
    TaskEnded,
    TaskMatched,
)


@dataclass(slots=True)
class TaskHistory:
    """Records of one task. Its start or its end may be missing from the trace."""

    task: int
    match: TaskMatched | None = None
    launch: Launched | None = None
    cancel: Cancelled | None = None
    ops: list[OpEnded] = field(default_factory=list)
    """Ops ordered by end time."""
    end: TaskEnded | None = None

    @property
    def kind(self) -> TaskKind | None:
        said = self.match or self.launch or self.end
        return None if said is None else said.kind

    @property
    def request(self) -> str:
        return "" if self.match is None else self.match.request

    @property
    def events(self) -> list[Record]:
        """All records of the task, ordered by time."""
        said = (self.match, self.launch, self.cancel, *self.ops, self.end)
        return sorted((record for record in said if record is not None), key=lambda r: r.time)

    @property
    def began_s(self) -> float:
        return min([self.events[0].time, *(op.started for op in self.ops)])

    @property
    def ended_s(self) -> float:
        return self.events[-1].time

    @property
    def latency_s(self) -> float | None:
        """Time from the launch to the answer; None without a launch or an end."""
        if self.launch is None or self.end is None:
            return None
        at_gpu = [op.time for op in self.ops if op.kind.touches_gpu]
        return max(at_gpu, default=self.end.time) - self.launch.time

    def ready_s(self) -> dict[int, float]:
        """Return when each op could have started: after the launch and the ops it depends on."""
        ends = {op.op: op.time for op in self.ops}
        launched = [] if self.launch is None else [self.launch.time]
        ready = {}
        for op in self.ops:
            before = launched + [ends[other] for other in op.after if other in ends]
            ready[op.op] = min(max(before, default=op.started), op.started)
        return ready


def histories(records: Iterable[Record]) -> dict[int, TaskHistory]:
    """Return tasks by id, in the order of their first records."""
    tasks: dict[int, TaskHistory] = {}
    for record in records:
        if not isinstance(record, TaskMatched | Launched | Cancelled | OpEnded | TaskEnded):
            continue
        history = tasks.setdefault(record.task, TaskHistory(record.task))
        match record:
            case TaskMatched():
                history.match = record
            case Launched():
                history.launch = record
            case Cancelled():
                history.cancel = record
            case OpEnded():
                history.ops.append(record)
            case TaskEnded():
                history.end = record
    return tasks


_WITHOUT = ("keys", "base", "base_blocks")


@dataclass(frozen=True, slots=True)
class Chapter:
    """An event, ``after_s`` seconds after the first one of the story."""

    after_s: float
    task: int
    text: str
    record: Record

    def report(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        said = msgspec.to_builtins(self.record)
        for name in _WITHOUT:
            said.pop(name, None)
        return {"after_s": self.after_s, "text": self.text, **said}


def tell(trace: Trace, wanted: str) -> list[Chapter]:
    """Return what happened to a task, by its id, or to a request, by the engine's id.

    vLLM adds a random suffix to a client's request id; it may be left out.

    Returns:
        Events in order; empty if the trace has no such id.
    """
    tasks = [task for task in histories(trace.records()).values() if _is_meant(task, wanted)]
    if not tasks:
        return []
    began_s = min(task.began_s for task in tasks)
    chapters = [
        Chapter(round(record.time - began_s, 6), task.task, _text(task, record), record)
        for task in tasks
        for record in task.events
    ]
    return sorted(chapters, key=lambda chapter: chapter.after_s)


def _is_meant(task: TaskHistory, wanted: str) -> bool:
    return wanted == str(task.task) or (
        bool(task.request) and (task.request == wanted or task.request.startswith(f"{wanted}-"))
    )


def _text(task: TaskHistory, record: Record) -> str:
    match record:
        case TaskMatched():
            return _match_text(record)
        case Launched(gated=gated):
            return "launched" + (", to wait for the engine's step" if gated else "")
        case Cancelled():
            return "cancelled"
        case OpEnded():
            return _op_text(record, task.ready_s()[record.op])
        case TaskEnded(status=KVStatus.NOT_FOUND):
            return "ended: nothing to move"
        case TaskEnded(status=status, num_ok=num_ok, error=error):
            why = f" ({error})" if error else ""
            return f"ended: {status.value}, {_blocks(num_ok)} arrived{why}"
        case _:
            raise AssertionError(f"{record} belongs to no task")


def _match_text(match: TaskMatched) -> str:
    asked = f"{match.kind.value} of blocks {match.start} to {match.stop}"
    asked += f" ({match.num_tokens:,} tokens, engine {match.engine})"
    if match.kind is TaskKind.PUT:
        found = f"{_blocks(match.num_blocks)} to store from block {match.found_start} on"
    else:
        found = f"{_blocks(match.num_blocks)} found" + _listed(": ", match.sources)
    return (
        f"{asked}: {found}{_listed('; dropped: ', match.dropped)}"
        f"{_listed('; not loaded: ', match.skipped)}"
    )


def _op_text(op: OpEnded, ready_s: float) -> str:
    took_s, waited_s = op.time - op.started, op.started - ready_s
    text = f"{op.kind.value} of blocks {op.first} to {op.first + op.blocks} took {_ms(took_s)}"
    if waited_s > 0:
        text += f", after a wait of {_ms(waited_s)}"
    if op.num_ok < op.blocks:
        text += f"; only {_blocks(op.num_ok)} moved"
    return text + (f": {op.error}" if op.error else "")


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def _listed(before: str, counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    return before + listed if counts else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


@dataclass(slots=True)
class Summary:
    """Totals in blocks, bytes and seconds.

    Attributes:
        calls: Number of tasks, by kind.
        asked_blocks: Blocks that gets looked up. Those found are in ``hit_blocks`` by tier, the
            rest in ``missed_blocks``.
        stored_blocks: Blocks that puts brought to DRAM.
        latencies_s: Times from launch to answer, by kind of task.
        moved_bytes: Bytes by kind of op.
    """

    block_bytes: int
    tokens_per_block: int
    calls: Counter[str] = field(default_factory=Counter)
    asked_blocks: int = 0
    hit_blocks: Counter[str] = field(default_factory=Counter)
    missed_blocks: int = 0
    stored_blocks: int = 0
    dropped_blocks: Counter[str] = field(default_factory=Counter)
    skipped_blocks: Counter[str] = field(default_factory=Counter)
    cleared_blocks: int = 0
    latencies_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    moved_bytes: Counter[str] = field(default_factory=Counter)
    failed_ops: int = 0
    wall_s: float = 0.0

    def quantile_s(self, kind: str, share: float) -> float | None:
        times = self.latencies_s.get(kind)
        return float(np.quantile(times, share)) if times else None

    def report(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        counted = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("block_bytes", "tokens_per_block", "latencies_s"):
            del counted[name]
        return {
            **counted,
            "hit_tokens": self.hit_blocks.total() * self.tokens_per_block,
            "latency_s": {
                kind: {"p50": self.quantile_s(kind, 0.5), "p99": self.quantile_s(kind, 0.99)}
                for kind in self.latencies_s
            },
        }


def summarise(trace: Trace) -> Summary:
    """Summarise a whole trace in one pass. Needs about as much memory as its files have bytes."""
    summary = Summary(trace.header.block_bytes, trace.header.tokens_per_block)
    records = list(trace.records())
    for task in histories(records).values():
        _add(summary, task)
    for record in records:
        if isinstance(record, ClearedTier):
            summary.cleared_blocks += record.num_blocks
    if records:
        summary.wall_s = records[-1].time - records[0].time
    return summary


def _add(summary: Summary, task: TaskHistory) -> None:
    if task.match is not None:
        _add_match(summary, task.match)
    if task.latency_s is not None and task.kind is not None and task.cancel is None:
        summary.latencies_s[task.kind.value].append(task.latency_s)
    for op in task.ops:
        summary.moved_bytes[op.kind.value] += op.num_ok * summary.block_bytes
        summary.failed_ops += op.num_ok < op.blocks
    if task.end is not None and task.kind is TaskKind.PUT:
        summary.stored_blocks += task.end.num_ok


def _add_match(summary: Summary, match: TaskMatched) -> None:
    summary.calls[match.kind.value] += 1
    summary.dropped_blocks.update(match.dropped)
    summary.skipped_blocks.update(match.skipped)
    if match.kind is TaskKind.GET:
        summary.asked_blocks += match.stop - match.start
        summary.hit_blocks.update(match.sources)
        summary.missed_blocks += match.stop - match.found_start - match.num_blocks


_TASKS, _OPS = 1, 2  # process ids of the rows
_DISK_OPS = (OpKind.DISK2H, OpKind.H2DISK, OpKind.COMMIT)
_REMOTE_OPS = (OpKind.PEER2H, OpKind.REMOTE2H, OpKind.H2REMOTE)


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return a Chrome trace, to be encoded as JSON. Its times are microseconds.

    Tasks and ops are rows; slices that overlap get rows of their own. An arrow leads from a task to
    each of its ops. Counters below show how many ops wait for each worker and how many it runs.
    """
    tasks = sorted(histories(trace.records()).values(), key=lambda task: task.began_s)
    task_rows, op_rows = _Rows(_TASKS, "tasks"), _Rows(_OPS, "ops")
    rows = {task.task: _add_task(task_rows, task) for task in tasks}
    ops = [(task, op) for task in tasks for op in task.ops]
    for task, op in sorted(ops, key=lambda pair: pair[1].started):
        row = op_rows.add(
            op.kind.value, f"{op.kind.value} {op.blocks}", op.started, op.time,
            op=op.op, task=str(task.task), request=task.request, first=op.first, blocks=op.blocks,
            moved=op.num_ok, error=op.error,
        )  # fmt: skip
        arrow = {"cat": "op", "name": "op", "id": op.op, "ts": _us(op.started)}
        op_rows.events.append({"ph": "s", "pid": _TASKS, "tid": rows[task.task], **arrow})
        op_rows.events.append({"ph": "f", "bp": "e", "pid": _OPS, "tid": row, **arrow})
    return {
        "traceEvents": [
            *task_rows.events, *op_rows.events, *task_rows.names(), *op_rows.names(),
            *_queue_events(tasks),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"fingerprint": trace.header.fingerprint, "version": trace.header.version},
    }  # fmt: skip


class _Rows:
    """The rows of a process, and the slices in them: a slice goes to the first row of its group
    that is free at its start."""

    def __init__(self, process: int, name: str) -> None:
        self._process = process
        self._free_at: dict[str, list[tuple[float, int]]] = {}
        self._rows: dict[str, list[int]] = {}
        self._numbers = itertools.count(1)
        self.events = [
            self._metadata("process_name", 0, name=name),
            self._metadata("process_sort_index", 0, sort_index=process),
        ]

    def add(self, group: str, name: str, start: float, stop: float, **args: Any) -> int:
        """Add a slice and return its row. Slices must come in the order of their starts."""
        rows = self._free_at.setdefault(group, [])
        if rows and rows[0][0] <= start:
            _, row = heapq.heappop(rows)
        else:
            row = next(self._numbers)
            self._rows.setdefault(group, []).append(row)
        heapq.heappush(rows, (stop, row))
        known = {key: value for key, value in args.items() if value not in (None, "")}
        self.events.append({
            "ph": "X", "pid": self._process, "tid": row, "name": name, "ts": _us(start),
            "dur": _us(stop - start), "args": known,
        })  # fmt: skip
        return row

    def names(self) -> Iterator[dict[str, Any]]:
        of_groups = [(group, row) for group, rows in self._rows.items() for row in rows]
        for place, (group, row) in enumerate(of_groups):
            yield self._metadata("thread_name", row, name=group)
            yield self._metadata("thread_sort_index", row, sort_index=place)

    def _metadata(self, kind: str, row: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._process, "tid": row, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _add_task(rows: _Rows, task: TaskHistory) -> int:
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
    kind = "task" if task.kind is None else task.kind.value
    name = f"{kind} {task.request or task.task}"
    return rows.add(kind, name, task.began_s, task.ended_s, **args)


def _queue_events(tasks: Sequence[TaskHistory]) -> Iterator[dict[str, Any]]:
    """Yield counters for each worker, at each of their changes."""
    changes: list[tuple[float, str, str, int]] = []
    for task in tasks:
        ready = task.ready_s()
        for op in task.ops:
            is_remote, is_disk = op.kind in _REMOTE_OPS, op.kind in _DISK_OPS
            worker = "remote" if is_remote else "disk" if is_disk else "device"
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
