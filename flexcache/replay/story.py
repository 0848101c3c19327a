"""Story of a request: every call, op and end recorded for it, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from flexcache.ids import KVStatus, TaskKind
from flexcache.replay.history import TaskHistory, histories
from flexcache.replay.reader import Trace
from flexcache.tracing.records import (
    Cancelled,
    Ended,
    Launched,
    Matched,
    OpEnded,
    Record,
)

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
        case Matched():
            return _match_text(record)
        case Launched(gated=gated):
            return "launched" + (", to wait for the engine's step" if gated else "")
        case Cancelled():
            return "cancelled"
        case OpEnded():
            return _op_text(record, task.ready_s()[record.op])
        case Ended(status=KVStatus.NOT_FOUND):
            return "ended: nothing to move"
        case Ended(status=status, num_ok=num_ok, error=error):
            why = f" ({error})" if error else ""
            return f"ended: {status.value}, {_blocks(num_ok)} arrived{why}"
        case _:
            raise AssertionError(f"{record} belongs to no task")


def _match_text(match: Matched) -> str:
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
    return before + _joined(f"{count:,} {name}" for name, count in counts.items()) if counts else ""


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
