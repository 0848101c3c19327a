"""Collects the records of each task in a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flexcache.ids import TaskKind
from flexcache.tracing.records import Cancelled, Ended, Launched, Matched, OpEnded, Record


@dataclass(slots=True)
class TaskHistory:
    """Records of one task. Its start or its end may be missing from the trace."""

    task: int
    match: Matched | None = None
    launch: Launched | None = None
    cancel: Cancelled | None = None
    ops: list[OpEnded] = field(default_factory=list)
    """Ops ordered by end time."""
    end: Ended | None = None

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
        if not isinstance(record, Matched | Launched | Cancelled | OpEnded | Ended):
            continue
        history = tasks.setdefault(record.task, TaskHistory(record.task))
        match record:
            case Matched():
                history.match = record
            case Launched():
                history.launch = record
            case Cancelled():
                history.cancel = record
            case OpEnded():
                history.ops.append(record)
            case Ended():
                history.end = record
    return tasks
