"""What is known of tasks while they are open, and of the sessions they belong to.

Plain state: `KVTaskEngine` says what becomes of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flexcache.cache.plan import Plan
from flexcache.ids import OpId, OpKind, SessionId, TaskId, TaskKind, TaskState
from flexcache.tasks.ids import id_before
from flexcache.tasks.instructions import TaskResult
from flexcache.transfer.graph import TransferOp
from flexcache.transfer.totals import Totals

_NONE_OPEN: Counter[OpKind] = Counter()


@dataclass(slots=True, eq=False)
class Task:
    """A get, put, prefetch or store on its way."""

    task_id: TaskId
    owner: Session
    plan: Plan
    num_tokens: int
    state: TaskState = TaskState.CREATED
    launched: bool = False
    gated: bool = False
    cancelled: bool = False
    overdue: bool = False
    launched_s: float = 0.0
    announced: bool = False
    open_ops: Counter[OpKind] = field(default_factory=lambda: _NONE_OPEN)  # its own once launched
    moved: dict[OpKind, dict[int, int]] = field(default_factory=dict)
    """Per kind of op: position of its first block -> blocks that it moved."""
    errors: list[str] = field(default_factory=list)
    running: dict[OpId, RunningOp] = field(default_factory=dict)
    waiting: set[OpId] = field(default_factory=set)
    """Ops that may start and wait for a turn at a worker."""

    def contiguous(self, kinds: Iterable[OpKind], start: int) -> int:
        """How many blocks from ``start`` on were moved without a gap by ops of these kinds."""
        results: dict[int, int] = {}
        for kind in kinds:
            results.update(self.moved.get(kind, {}))
        position = start
        while results.get(position, 0):
            position += results[position]
        return position - start

    @property
    def gpu_ops_open(self) -> int:
        return self.open_ops[OpKind.H2D] + self.open_ops[OpKind.D2H]


@dataclass(slots=True, eq=False)
class RunningOp:
    """An op that executors are at, and who of them has not reported yet."""

    task: Task
    op: TransferOp
    started_s: float
    waiting_for: dict[str, None]
    num_ok: int
    bad_block: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """A session of a serving engine: its open tasks, and the results it may still ask for."""

    session: SessionId
    engine: str
    num_remembered: int
    executors: dict[OpKind, tuple[str, ...]]
    last_id: TaskId
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    results: OrderedDict[TaskId, TaskResult] = field(default_factory=OrderedDict)
    collected: dict[TaskId, None] = field(default_factory=dict)
    store_backlog: int = 0
    prefill_blocks_per_s: float = 0.0
    is_gone: bool = False
    totals: Totals = field(default_factory=Totals)

    def require_known(self, task_id: TaskId) -> None:
        """Raises `KeyError` for an id that was never given out."""
        if not id_before(self.session) < task_id <= self.last_id:
            raise KeyError(f"task {task_id} was never given out")

    def remember(self, task_id: TaskId, result: TaskResult) -> None:
        """A task has ended. The oldest result goes when there are too many."""
        self.results[task_id] = result
        while len(self.results) > self.num_remembered:
            forgotten, _ = self.results.popitem(last=False)
            self.collected.pop(forgotten, None)

    def result(self, task_id: TaskId) -> TaskResult:
        """Of a task that has ended. Raises `KeyError` if it is forgotten."""
        self.require_known(task_id)
        result = self.results.get(task_id)
        if result is None:
            raise KeyError(f"task {task_id} was answered long ago and is forgotten")
        return result

    def collect(self, task_id: TaskId) -> None:
        """The result was handed over, or nobody asks for it."""
        if task_id in self.results:
            self.collected[task_id] = None

    def uncollected(self) -> Iterator[TaskResult]:
        """Results that were not handed over yet."""
        return (r for task_id, r in self.results.items() if task_id not in self.collected)


def count_plan(totals: Totals, plan: Plan, stop: int) -> None:
    """Count what a match up to block ``stop`` came to."""
    if plan.dropped:
        totals.dropped_blocks.update(plan.dropped)
    if plan.skipped:
        totals.skipped_blocks.update(plan.skipped)
    if plan.kind is TaskKind.GET:
        for tier, count in plan.sources.items():
            totals.hit_blocks[tier.value] += count
        totals.missed_blocks += stop - plan.stop
