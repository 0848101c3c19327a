"""TransferScheduler: random graphs against a plain model, and the cases that have a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.errors import InternalError
from flexcache.ids import OpId, OpKind, TaskId
from flexcache.transfer.scheduler import (
    EndedOp,
    Outcome,
    StartOp,
    TransferOp,
    TransferOpGraph,
    TransferScheduler,
)

# An op of a drawn graph: positions [first, first + length), and the earlier ops it depends on.
OpShape = tuple[int, int, list[int]]


@st.composite
def graph_shapes(draw: st.DrawFn) -> list[OpShape]:
    """Graphs in which an op's positions lie within those of each op it depends on."""
    shapes: list[OpShape] = []
    for _ in range(draw(st.integers(0, 8))):
        covers = [i for i, (_, length, _) in enumerate(shapes) if length]
        picked = draw(st.lists(st.sampled_from(covers), max_size=3, unique=True)) if covers else []
        dependencies: list[int] = []
        begin, end = 0, 12  # what all of them have in common
        for i in picked:
            first, length, _ = shapes[i]
            if max(begin, first) < min(end, first + length):
                begin, end = max(begin, first), min(end, first + length)
                dependencies.append(i)
        low = draw(st.integers(begin, end - 1))
        high = draw(st.integers(low, end))
        shapes.append((low, high - low, dependencies))
    return shapes


def blocks(first: int, length: int) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int64)


def make_graph(shapes: list[OpShape], base_id: int = 1) -> TransferOpGraph:
    graph = TransferOpGraph()
    for i, (first, length, dependencies) in enumerate(shapes):
        op = TransferOp(
            OpId(base_id + i),
            OpKind.DISK2H,
            first,
            blocks(first, length) + 100,
            blocks(first, length) + 200,
            tuple(OpId(base_id + d) for d in dependencies),
        )
        graph.ops.append(op)
    return graph


@dataclass
class ModelOp:
    task: int
    positions: list[int]
    depends_on: list[int]
    state: str = "waiting"
    delivered: list[int] = field(default_factory=list)


class SchedulerAgainstModel(RuleBasedStateMachine):
    """The scheduler against a model that checks every op after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = TransferScheduler()
        self.model: dict[int, ModelOp] = {}
        self.num_ends: Counter[int] = Counter()
        self.num_tasks = 0

    def open_ops(self) -> list[ModelOp]:
        return [op for op in self.model.values() if op.state != "ended"]

    def settle(self) -> None:
        """Start or drop in the model whatever no longer waits for anything."""
        changed = True
        while changed:
            changed = False
            for op in self.open_ops():
                needs = [self.model[d] for d in op.depends_on]
                if op.state != "waiting" or any(need.state != "ended" for need in needs):
                    continue
                wanted: list[int] = []
                for position in op.positions:
                    if not all(position in need.delivered for need in needs):
                        break
                    wanted.append(position)
                op.positions = wanted
                op.state = "running" if wanted else "ended"
                changed = True

    def take(self, outcomes: list[Outcome]) -> None:
        """Check that each outcome is possible when it comes, and that all match the model."""
        before = {i for i, op in self.model.items() if op.state == "running"}
        started = set()
        for outcome in outcomes:
            op_id, model = outcome.op.op_id, self.model[outcome.op.op_id]
            assert outcome.task_id == model.task
            if isinstance(outcome, StartOp):
                assert self.num_ends[op_id] == 0
                assert all(self.num_ends[d] == 1 for d in model.depends_on)
                started.add(op_id)
            else:
                self.num_ends[op_id] += 1
                assert self.num_ends[op_id] == 1
        self.settle()
        for outcome in outcomes:
            model = self.model[outcome.op.op_id]
            if isinstance(outcome, StartOp):
                assert outcome.op.src is not None
                assert outcome.op.dst is not None
                assert (outcome.op.src - 100).tolist() == model.positions
                assert (outcome.op.dst - 200).tolist() == model.positions
            else:
                assert outcome.num_ok == len(model.delivered)
        running = {i for i, op in self.model.items() if op.state == "running"}
        assert started == running - before
        assert {i for i, n in self.num_ends.items() if n} == {
            i for i, op in self.model.items() if op.state == "ended"
        }

    @precondition(lambda self: len(self.open_ops()) < 16)
    @rule(shapes=graph_shapes())
    def submit(self, shapes: list[OpShape]) -> None:
        self.num_tasks += 1
        base = len(self.model) + 1
        for i, (first, length, dependencies) in enumerate(shapes):
            self.model[base + i] = ModelOp(
                self.num_tasks,
                list(range(first, first + length)),
                [base + d for d in dependencies],
            )
        self.take(self.scheduler.submit(TaskId(self.num_tasks), make_graph(shapes, base)))

    def running(self) -> list[int]:
        return [i for i, op in self.model.items() if op.state == "running"]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def finish(self, data: st.DataObject, share: float) -> None:
        op_id = data.draw(st.sampled_from(self.running()))
        op = self.model[op_id]
        num_ok = int(share * len(op.positions))
        op.state, op.delivered = "ended", op.positions[:num_ok]
        self.take(self.scheduler.op_ended(OpId(op_id), num_ok))

    @precondition(lambda self: self.num_tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task = data.draw(st.integers(1, self.num_tasks))
        for op in self.model.values():
            if op.task == task and op.state == "waiting":
                op.state = "ended"
        running = self.running()
        outcomes = self.scheduler.cancel(TaskId(task))
        self.take(outcomes)
        assert all(isinstance(outcome, EndedOp) for outcome in outcomes)
        assert self.running() == running
        assert self.scheduler.cancel(TaskId(task)) == []

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_open_ops == len(self.open_ops())

    def teardown(self) -> None:
        while running := self.running():
            op = self.model[running[0]]
            op.state, op.delivered = "ended", list(op.positions)
            self.take(self.scheduler.op_ended(OpId(running[0]), len(op.positions)))
            self.scheduler.check()
        assert all(self.num_ends[op_id] == 1 for op_id in self.model)
        assert self.scheduler.num_open_ops == 0
        for task in range(1, self.num_tasks + 1):  # a task that has ended may come again
            self.scheduler.submit(TaskId(task), make_graph([]))


SchedulerAgainstModel.TestCase.settings = settings(stateful_step_count=40)
TestSchedulerAgainstModel = SchedulerAgainstModel.TestCase


def started(outcomes: list[Outcome]) -> list[int]:
    return [outcome.op.op_id for outcome in outcomes if isinstance(outcome, StartOp)]


def ended(outcomes: list[Outcome]) -> dict[int, int]:
    return {o.op.op_id: o.num_ok for o in outcomes if isinstance(o, EndedOp)}


def test_ops_without_dependencies_start_in_the_order_of_the_graph() -> None:
    scheduler = TransferScheduler()
    outcomes = scheduler.submit(TaskId(1), make_graph([(0, 2, []), (2, 2, []), (4, 1, [])]))
    assert started(outcomes) == [1, 2, 3]


def test_an_op_starts_with_the_prefix_that_was_delivered_to_it() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(2, 4, []), (3, 3, [0])]))
    outcomes = scheduler.op_ended(OpId(1), 3)
    assert started(outcomes) == [2]
    op = outcomes[-1].op
    assert len(op) == 2
    assert op.src is not None
    assert op.src.tolist() == [103, 104]


def test_an_op_to_which_nothing_was_delivered_ends_without_a_start() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 2, []), (1, 1, [0]), (1, 1, [1])]))
    outcomes = scheduler.op_ended(OpId(1), 1)
    assert started(outcomes) == []
    assert ended(outcomes) == {1: 1, 2: 0, 3: 0}
    assert scheduler.num_open_ops == 0


def test_a_chain_of_many_thousand_ops_can_be_dropped_at_once() -> None:
    scheduler = TransferScheduler()
    length = 20_000
    chain = make_graph([(0, 1, [i - 1] if i else []) for i in range(length)])
    scheduler.submit(TaskId(1), chain)
    outcomes = scheduler.op_ended(OpId(1), 0)
    assert len(ended(outcomes)) == length


def test_cancel_leaves_running_ops_to_end_by_themselves() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 2, []), (2, 2, []), (0, 2, [0]), (2, 2, [1])]))
    assert ended(scheduler.cancel(TaskId(1))) == {3: 0, 4: 0}
    assert ended(scheduler.op_ended(OpId(1), 2)) == {1: 2}
    assert ended(scheduler.op_ended(OpId(2), 1)) == {2: 1}
    assert scheduler.num_open_ops == 0


def test_cancelling_an_unknown_or_ended_task_does_nothing() -> None:
    scheduler = TransferScheduler()
    assert scheduler.cancel(TaskId(7)) == []
    scheduler.submit(TaskId(1), make_graph([(0, 1, [])]))
    scheduler.op_ended(OpId(1), 1)
    assert scheduler.cancel(TaskId(1)) == []


def test_other_tasks_go_on_when_one_is_cancelled() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 1, []), (0, 1, [0])], base_id=1))
    scheduler.submit(TaskId(2), make_graph([(0, 1, []), (0, 1, [0])], base_id=3))
    scheduler.cancel(TaskId(1))
    assert started(scheduler.op_ended(OpId(3), 1)) == [4]


def test_an_empty_graph_leaves_nothing_behind() -> None:
    scheduler = TransferScheduler()
    assert scheduler.submit(TaskId(1), make_graph([])) == []
    assert scheduler.submit(TaskId(1), make_graph([])) == []
    assert scheduler.num_open_ops == 0


def test_a_second_graph_of_a_task_in_flight_is_an_internal_error() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 1, [])]))
    with pytest.raises(InternalError, match="task 1"):
        scheduler.submit(TaskId(1), make_graph([(0, 1, [])], base_id=9))


def test_the_end_of_an_op_that_does_not_run_is_an_internal_error() -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 1, []), (0, 1, [0])]))
    for op_id in (2, 99):
        with pytest.raises(InternalError, match=f"op {op_id}"):
            scheduler.op_ended(OpId(op_id), 1)
    scheduler.op_ended(OpId(1), 1)
    with pytest.raises(InternalError, match="op 1"):
        scheduler.op_ended(OpId(1), 1)


def lose_an_op(scheduler: TransferScheduler) -> None:
    del scheduler._nodes[OpId(2)]


def keep_a_task_without_ops(scheduler: TransferScheduler) -> None:
    scheduler._open_ops[TaskId(9)] = {}


def start_too_early(scheduler: TransferScheduler) -> None:
    scheduler._nodes[OpId(2)].running = True


def forget_to_start(scheduler: TransferScheduler) -> None:
    scheduler._nodes[OpId(1)].running = False


def miscount_blockers(scheduler: TransferScheduler) -> None:
    scheduler._nodes[OpId(2)].num_blockers = 2


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lose_an_op, "disagree"),
        (keep_a_task_without_ops, "disagree"),
        (start_too_early, "op 2 runs before"),
        (forget_to_start, "op 1 could run"),
        (miscount_blockers, "op 2 counts 2 blockers of 1"),
    ],
)
def test_the_checker_notices_a_broken_state(
    damage: Callable[[TransferScheduler], None], complaint: str
) -> None:
    scheduler = TransferScheduler()
    scheduler.submit(TaskId(1), make_graph([(0, 1, []), (0, 1, [0])]))
    scheduler.check()
    damage(scheduler)
    with pytest.raises(InternalError, match=complaint):
        scheduler.check()


def test_gpu_blocks_are_bound_by_position_to_the_side_that_is_the_gpu() -> None:
    store = TransferOp(OpId(1), OpKind.D2H, 3, None, blocks(0, 2))
    write = TransferOp(OpId(2), OpKind.H2DISK, 3, blocks(0, 2), blocks(7, 2), (OpId(1),))
    load = TransferOp(OpId(3), OpKind.H2D, 5, blocks(2, 1), None)
    graph = TransferOpGraph([store, write, load])
    graph.bind_gpu_blocks(np.array([40, 41, 42], dtype=np.int64), base=3)
    assert (store.src.tolist(), store.dst.tolist()) == ([40, 41], [0, 1])
    assert (load.src.tolist(), load.dst.tolist()) == ([2], [42])
    assert (write.src.tolist(), write.dst.tolist()) == ([0, 1], [7, 8])


def test_too_few_gpu_blocks_for_an_op_are_an_internal_error() -> None:
    graph = TransferOpGraph([TransferOp(OpId(1), OpKind.D2H, 0, None, blocks(0, 2))])
    with pytest.raises(InternalError, match="op 1"):
        graph.bind_gpu_blocks(np.array([40], dtype=np.int64), base=0)


def test_truncating_an_op_shortens_the_sides_that_it_has() -> None:
    op = TransferOp(OpId(1), OpKind.D2H, 0, None, blocks(0, 3))
    op.truncate(2)
    assert len(op) == 2
    assert op.src is None
