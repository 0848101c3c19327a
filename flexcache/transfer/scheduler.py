"""Scheduler of ops: a state machine over the graphs in flight, without I/O or clock. With the
graphs that it runs, and the queue of an executor that several engines share.

It visits only ops whose last dependency just ended, so a step costs O(1) per op that became ready,
whatever else is in flight. Each op of each submitted graph ends exactly once: it has run, it was
dropped because nothing was delivered to it, or it was cancelled before it started.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.errors import InternalError
from flexcache.ids import OpId, OpKind, TaskId
from flexcache.transfer.messages import BlockNames

BlockIds = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TransferOp:
    """One transfer of a list of blocks of one task, from one tier to another.

    ``first`` is the position of the op's first block among the task's blocks. An op that depends
    on another over the same positions moves at most the prefix that the other delivered.

    Attributes:
        src: Block ids to read, in the tier that ``kind`` names first; GPU ids are set at launch,
            one or more for each block. Of a COMMIT both are the slots.
        dst: Block ids to write, likewise.
        names: Names of the blocks, if the op reads or writes storage that outlives the process.
    """

    op_id: OpId
    kind: OpKind
    first: int
    src: BlockIds | None
    dst: BlockIds | None
    depends_on: tuple[OpId, ...] = ()
    names: BlockNames | None = None

    def __len__(self) -> int:
        blocks = self.src if self.kind.fills_gpu else self.dst
        assert blocks is not None
        return len(blocks)

    @property
    def peer(self) -> str:
        """Which peer it reads from; empty if from none."""
        return "" if self.names is None else self.names.peer

    def truncate(self, count: int) -> None:
        num_blocks = len(self)
        if count == num_blocks:
            return
        if self.src is not None:
            self.src = self.src[: count * (len(self.src) // num_blocks)]
        if self.dst is not None:
            self.dst = self.dst[: count * (len(self.dst) // num_blocks)]
        if self.names is not None:
            self.names = msgspec.structs.replace(self.names, keys=self.names.keys[:count])


@dataclass(slots=True, eq=False)
class TransferOpGraph:
    """The ops of one get, put or prefetch, in a valid order of execution."""

    ops: list[TransferOp] = field(default_factory=list)

    def bind_gpu_blocks(self, gpu_blocks: BlockIds, base: int, per_block: int = 1) -> None:
        """Assign ``per_block`` GPU blocks to each of the task's blocks ``base, base + 1, ...``."""
        stop = base + len(gpu_blocks) // per_block
        for op in self.ops:
            if op.kind.touches_gpu and base <= op.first < stop:
                first, size = (op.first - base) * per_block, len(op) * per_block
                chunk = gpu_blocks[first : first + size]
                if len(chunk) != size:
                    raise InternalError(f"op {op.op_id} has no GPU block for each of its blocks")
                if op.kind.fills_gpu:
                    op.dst = chunk
                else:
                    op.src = chunk


@dataclass(frozen=True, slots=True)
class StartOp:
    """Instruction to execute the op and report its end with `TransferScheduler.op_ended`."""

    task_id: TaskId
    op: TransferOp


@dataclass(frozen=True, slots=True)
class EndedOp:
    """An op has ended with its first ``num_ok`` blocks moved."""

    task_id: TaskId
    op: TransferOp
    num_ok: int


Outcome = StartOp | EndedOp


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
        # Only now is it known how much was delivered to it.
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
            outcomes.append(EndedOp(node.task_id, op, num_ok))
            for dependent_id in node.dependents:
                dependent = self._nodes.get(dependent_id)
                if dependent is None:
                    continue
                # A prefix: what stands behind a block that failed could not be found.
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


# ------------------------------------------------------------------------------------------------
# Queue of ops for an executor that several engines share.
#
# Loads that requests wait for go first, then those that are early, then stores; but a store gets
# every fourth turn. Within a class the engines take turns, and each engine's ops are served first
# come, first served. Everything is O(1) per op.

Item = TypeVar("Item")
# Stores must not starve: what waits to be written is pinned in DRAM.
_EAGER_LOADS = 3


class Urgency(Enum):
    """Class of an op.

    Attributes:
        NEEDED: A load that a request waits for.
        EARLY: A load ahead of its request.
        STORE: A write.
    """

    NEEDED = auto()
    EARLY = auto()
    STORE = auto()


_LOADS_FIRST = (Urgency.NEEDED, Urgency.EARLY, Urgency.STORE)
_STORES_FIRST = (Urgency.STORE, Urgency.NEEDED, Urgency.EARLY)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item]):
    item: Item
    owner: int
    urgency: Urgency
    num_blocks: int


class FairQueue(Generic[Item]):
    """Waiting ops by class and by owner."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, OrderedDict[int, OrderedDict[OpId, None]]] = {
            urgency: OrderedDict() for urgency in Urgency
        }
        self._waiting: dict[OpId, _Waiting[Item]] = {}
        self._num_blocks = dict.fromkeys(Urgency, 0)
        self._loads_since_store = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def num_blocks(self, urgency: Urgency) -> int:
        """Return how many blocks the waiting ops of a class have together."""
        return self._num_blocks[urgency]

    def add(
        self, op_id: OpId, item: Item, *, owner: int, urgency: Urgency, num_blocks: int = 1
    ) -> None:
        self._waiting[op_id] = _Waiting(item, owner, urgency, num_blocks)
        self._num_blocks[urgency] += num_blocks
        self._queues[urgency].setdefault(owner, OrderedDict())[op_id] = None

    def discard(self, op_id: OpId) -> None:
        """Remove an op that should no longer run, if it waits."""
        if op_id in self._waiting:
            self._remove(op_id)

    def next(self) -> Item | None:
        """Remove and return the op whose turn it is."""
        is_stores_turn = self._loads_since_store >= _EAGER_LOADS
        for urgency in _STORES_FIRST if is_stores_turn else _LOADS_FIRST:
            item = self._take(urgency)
            if item is not None:
                is_load = urgency is not Urgency.STORE
                self._loads_since_store = self._loads_since_store + 1 if is_load else 0
                return item
        return None

    def check(self) -> None:
        """Raise `InternalError` if ops or their blocks are miscounted. O(ops)."""
        counted = dict.fromkeys(Urgency, 0)
        for waiting in self._waiting.values():
            counted[waiting.urgency] += waiting.num_blocks
        if counted != self._num_blocks:
            raise InternalError(f"blocks that wait for a worker are miscounted: {counted}")
        lines = [ops for queue in self._queues.values() for ops in queue.values()]
        if sum(map(len, lines)) != len(self._waiting) or not all(lines):
            raise InternalError("an op is queued that does not wait, or an owner without ops")

    def _remove(self, op_id: OpId) -> _Waiting[Item]:
        waiting = self._waiting.pop(op_id)
        self._num_blocks[waiting.urgency] -= waiting.num_blocks
        queue = self._queues[waiting.urgency]
        ops = queue[waiting.owner]
        del ops[op_id]
        if not ops:
            del queue[waiting.owner]
        return waiting

    def _take(self, urgency: Urgency) -> Item | None:
        queue = self._queues[urgency]
        if not queue:
            return None
        owner = next(iter(queue))
        item = self._remove(next(iter(queue[owner]))).item
        if owner in queue:  # its next turn comes after those of all others
            queue.move_to_end(owner)
        return item
