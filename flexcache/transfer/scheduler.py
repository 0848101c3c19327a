"""Decides which ops may start: a state machine over the graphs in flight, without I/O or clock.

It visits only ops whose last dependency just ended, so a step costs O(1) per op that became ready,
whatever else is in flight. Each op of each submitted graph ends exactly once: it has run, it was
dropped because nothing was delivered to it, or it was cancelled before it started.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexcache.errors import InternalError
from flexcache.ids import OpId, TaskId
from flexcache.transfer.graph import TransferOp, TransferOpGraph


@dataclass(frozen=True, slots=True)
class StartOp:
    """Instruction to execute the op and report its end with `TransferScheduler.op_ended`."""

    task_id: TaskId
    op: TransferOp


@dataclass(frozen=True, slots=True)
class OpEnded:
    """An op has ended with its first ``num_ok`` blocks moved."""

    task_id: TaskId
    op: TransferOp
    num_ok: int


Outcome = StartOp | OpEnded


@dataclass(slots=True, eq=False)
class _Node:
    task_id: TaskId
    op: TransferOp
    num_wanted: int
    num_blockers: int
    dependents: list[OpId] = field(default_factory=list)
    running: bool = False


class TransferScheduler:
    """Runs graphs. Every method that changes state returns the resulting outcomes, in order."""

    def __init__(self) -> None:
        self._nodes: dict[OpId, _Node] = {}
        self._open_ops: dict[TaskId, dict[OpId, None]] = {}

    @property
    def num_open_ops(self) -> int:
        return len(self._nodes)

    def submit(self, task_id: TaskId, graph: TransferOpGraph) -> list[Outcome]:
        """Accept a graph; ops without dependencies start at once."""
        if task_id in self._open_ops:
            raise InternalError(f"task {task_id} already has a graph in flight")
        if not graph.ops:
            return []
        self._open_ops[task_id] = {}
        for op in graph.ops:
            node = _Node(task_id, op, len(op), len(op.depends_on))
            for dependency in op.depends_on:
                self._nodes[dependency].dependents.append(op.op_id)
            self._nodes[op.op_id] = node
            self._open_ops[task_id][op.op_id] = None
        outcomes: list[Outcome] = []
        for op in graph.ops:
            if not op.depends_on:
                self._start(self._nodes[op.op_id], outcomes)
        return outcomes

    def op_ended(self, op_id: OpId, num_ok: int) -> list[Outcome]:
        """Record that a started op has ended, successfully or not."""
        node = self._nodes.get(op_id)
        if node is None or not node.running:
            raise InternalError(f"op {op_id} ended without running")
        outcomes: list[Outcome] = []
        self._end(node, num_ok, outcomes)
        return outcomes

    def cancel(self, task_id: TaskId) -> list[Outcome]:
        """End the task's ops that have not started; running ones end by themselves. Idempotent."""
        outcomes: list[Outcome] = []
        for op_id in list(self._open_ops.get(task_id, ())):
            node = self._nodes.get(op_id)
            if node is not None and not node.running:
                self._end(node, 0, outcomes)
        return outcomes

    def _start(self, node: _Node, outcomes: list[Outcome]) -> None:
        if node.num_wanted == 0:
            self._end(node, 0, outcomes)
            return
        node.op.truncate(node.num_wanted)
        node.running = True
        outcomes.append(StartOp(node.task_id, node.op))

    def _end(self, node: _Node, num_ok: int, outcomes: list[Outcome]) -> None:
        ended = [(node, num_ok)]
        while ended:  # a loop, not recursion: a long chain may be dropped at once
            node, num_ok = ended.pop()
            op = node.op
            if self._nodes.pop(op.op_id, None) is None:
                continue
            open_ops = self._open_ops[node.task_id]
            del open_ops[op.op_id]
            if not open_ops:
                del self._open_ops[node.task_id]
            outcomes.append(OpEnded(node.task_id, op, num_ok))
            for dependent_id in node.dependents:
                dependent = self._nodes.get(dependent_id)
                if dependent is None:
                    continue
                delivered = op.first + num_ok - dependent.op.first
                dependent.num_wanted = max(0, min(dependent.num_wanted, delivered))
                dependent.num_blockers -= 1
                if dependent.num_blockers == 0:
                    if dependent.num_wanted == 0:
                        ended.append((dependent, 0))
                    else:
                        self._start(dependent, outcomes)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(ops in flight)."""
        listed = [op_id for ops in self._open_ops.values() for op_id in ops]
        if sorted(listed) != sorted(self._nodes) or not all(self._open_ops.values()):
            raise InternalError("ops and the tasks they belong to disagree")
        for op_id, node in self._nodes.items():
            blockers = sum(op_id in other.dependents for other in self._nodes.values())
            if node.running and blockers:
                raise InternalError(f"op {op_id} runs before what it depends on has ended")
            if not node.running and blockers == 0:
                raise InternalError(f"op {op_id} could run and does not")
            if blockers != node.num_blockers:
                raise InternalError(f"op {op_id} counts {node.num_blockers} blockers of {blockers}")
