"""TaskRunner: from a launched task's graph to published blocks, an answer and an end.

    graph --TransferScheduler--> op may start --Executors--> op has ended --> publish, answer, end
               ^                                                  |
               +--------------------------------------------------+

A state machine without I/O. `run` submits a graph, `settle` takes in ops that have ended, `follow`
starts what may start then. Every public method returns only when nothing follows any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import Plan
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import KVStatus, OpId, OpKind, TaskId, TaskKind
from flexcache.tasks.accounts import Accounts
from flexcache.tasks.executors import Executors
from flexcache.tasks.instructions import Instruction, RevokeTask, TaskAnswered, TaskResult
from flexcache.tasks.model import (
    LOAD_TIER,
    RECORDING_TIER,
    STAGED_LOAD_TIER,
    STORE_TIER,
    OpRun,
    Task,
    TaskSessions,
)
from flexcache.transfer.scheduler import EndedOp, Outcome, TransferScheduler

_FROM_GPU = (OpKind.D2H,)
_FROM_BELOW = tuple(STAGED_LOAD_TIER)
_TO_HOST = _FROM_GPU + _FROM_BELOW


@dataclass(slots=True, eq=False)
class TaskRunner:
    """Runs tasks on the executors."""

    _cache: TieredCache
    _sessions: TaskSessions
    _executors: Executors
    _accounts: Accounts
    _instructions: list[Instruction]
    """Receives `TaskAnswered` and `RevokeTask`."""
    _scheduler: TransferScheduler = field(default_factory=TransferScheduler)
    _outcomes: deque[Outcome] = field(default_factory=deque)
    _left: set[OpId] = field(default_factory=set)
    """Ops that have been running since before everything was forgotten."""
    _left_with: Plan | None = None
    """Keeps their blocks."""

    # -- tasks -----------------------------------------------------------------------------------

    def run(self, task: Task, now: float) -> None:
        """Start a task whose graph is complete."""
        if task.early:
            self._cache.early.use(task.early, now)
        self._submit(task, now)
        self.follow(now)
        if not task.plan.graph.ops:  # a prefetch of what the host tier has
            self.end_unmoved(task, now)

    def store(self, plan: Plan, now: float) -> TaskId | None:
        """Carry out a plan on the cache's own account; return its task, if there is one to do."""
        task_id = self._submit_store(plan, now)
        self.follow(now)
        return task_id

    def load_early(self, plan: Plan, keys: BlockKeys, now: float, is_staged: bool = False) -> None:
        """Carry out a prefetch on the cache's own account, or for a peer."""
        task = self._sessions.internal_task(plan)
        self._cache.early.begin(task.task_id, plan, keys, now, is_staged)
        if not plan.graph.ops:
            self._cache.finish(plan)
            return
        self._sessions.open(task)
        self._submit(task, now)
        self.follow(now)

    def stop(self, task: Task, now: float) -> None:
        """Start nothing more of the task; what moves already ends by itself."""
        self._executors.drop(task)
        self.end_unstarted(task, now)

    def end_unstarted(self, task: Task, now: float) -> None:
        """End the task's ops that have not been given to executors, with nothing moved."""
        # Those that wait for a worker first: the scheduler believes that they run.
        for op_id in self._executors.withdraw(task):
            self._outcomes.extend(self._scheduler.op_ended(op_id, 0))
        self._outcomes.extend(self._scheduler.cancel(task.task_id))
        self.follow(now)

    def end_unmoved(self, task: Task, now: float) -> None:
        """End a task of which no op was ever started."""
        self._accounts.answered(task, now)
        self._finish(task, now, notify_ranks=task.gated)

    def end_empty(self, task: Task) -> None:
        """End a task without blocks. Its caller knows already."""
        result = TaskResult(KVStatus.NOT_FOUND, task.plan.offset, 0, task.num_tokens)
        task.end(result.status)
        self._accounts.ended(task, result)

    def keep_on(self, plan: Plan, tasks: Iterable[Task], now: float) -> None:
        """Await the ends of tasks that were forgotten; end those of which no op runs.

        Args:
            plan: Keeps the blocks of their ops, and is finished once the last of them has ended.
        """
        self._left_with = plan
        for task in tasks:
            self._cache.tiers.num_holders += 1  # as each of their plans is one
            self._sessions.open(task)
            self._scheduler.submit(task.task_id, task.plan.graph)  # all of them run already
            self._left.update(task.running)
            is_due = task.has_gpu_side and not task.gpu_ops_open and not task.is_told
            if task.state.is_overdue and not task.is_told:
                self._instructions.append(RevokeTask(task.task_id, task.owner.engine))
                self._notify(task, task.result(is_final=True), task.gated)
            elif is_due and task.running:
                self._notify(task, task.result(is_final=False), task.gated)
            if not task.running:
                self._finish(task, now, notify_ranks=task.gated and not task.is_told)
        self._let_go_of_left()

    def _let_go_of_left(self) -> None:
        if not self._left and self._left_with is not None:
            plan, self._left_with = self._left_with, None
            self._cache.finish(plan)

    # -- events ----------------------------------------------------------------------------------

    def settle(self, ended: list[OpRun], now: float) -> None:
        """Ops have ended at their executors."""
        for run in ended:
            self._settle_one(run)
        if ended:
            self.follow(now)

    def expire(self, now: float) -> None:
        """Answer tasks of which a copy from or to the GPU has missed its deadline.

        The copy may still land, so the blocks stay leased.
        """
        for run in self._executors.expire(now):
            task = run.task
            if run.op.kind.touches_gpu and not task.state.is_overdue:
                task.set_overdue()
                self._instructions.append(RevokeTask(task.task_id, task.owner.engine))
                self.stop(task, now)
                self._accounts.answered(task, now)
                # How long a hung rank holds up the rest is unknown: no other answer follows, not
                # for `wait(completely=True)` either.
                self._notify(task, task.result(is_final=True), task.gated)

    def follow(self, now: float) -> None:
        """Start and end ops until nothing follows any more, and write back what is due."""
        while True:
            while self._outcomes:
                outcome = self._outcomes.popleft()
                task = self._sessions.tasks[outcome.task_id]
                if isinstance(outcome, EndedOp):
                    self._op_ended(task, outcome, now)
                elif (undone := self._executors.start(task, outcome.op, now)) is not None:
                    self._settle_one(undone)
            plan = self._cache.stores.plan_write_back()
            if plan is None:
                return
            self._submit_store(plan, now)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(ops in flight)."""
        self._scheduler.check()

    # -- what follows from them ------------------------------------------------------------------

    def _submit(self, task: Task, now: float) -> None:
        self._accounts.launched(task)
        task.launch(now)
        self._outcomes.extend(self._scheduler.submit(task.task_id, task.plan.graph))

    def _submit_store(self, plan: Plan, now: float) -> TaskId | None:
        self._accounts.totals.dropped_blocks.update(plan.dropped)
        if not plan.graph.ops:
            self._cache.finish(plan)
            return None
        task = self._sessions.internal_task(plan)
        self._sessions.open(task)
        self._submit(task, now)
        return task.task_id

    def _settle_one(self, run: OpRun) -> None:
        """Count what an op has lost, drop a bad block, and tell the scheduler of the op's end."""
        task, op, num_lost = run.task, run.op, len(run.op) - run.num_ok
        if num_lost and (tier := STORE_TIER.get(op.kind)) is not None:
            if not self._cache.stores.put_off(task.plan, tier, run.store_failed):
                why = "unavailable" if run.started_s is None else "write_failed"
                self._accounts.dropped(task, f"{tier.value.lower()}_{why}", num_lost)
        elif op.op_id in self._left:
            pass  # its tier has forgotten what it was to bring
        # One that is short without a bad block, since its worker died, says nothing of its blocks.
        elif num_lost and run.bad_block and (tier := LOAD_TIER.get(op.kind)) is not None:
            self._cache.discard_bad_block(task.plan, tier, op.first + run.num_ok)
            self._accounts.dropped(task, f"{tier.value.lower()}_bad_block", 1)
        self._outcomes.extend(self._scheduler.op_ended(op.op_id, run.num_ok))

    def _op_ended(self, task: Task, ended: EndedOp, now: float) -> None:
        op = ended.op
        task.moved.setdefault(op.kind, {})[op.first] = 0 if task.ignores(op) else ended.num_ok
        task.open_ops[op.kind] -= 1
        self._publish_what_is_whole(task, op.kind)
        self._cache.early.settle(now)
        if self._left:
            self._left.discard(op.op_id)
            self._let_go_of_left()
        is_over = not any(task.open_ops.values())
        if op.kind.touches_gpu:  # a task that is overdue was answered by `expire`
            is_due = not task.gpu_ops_open and not task.state.is_overdue
        else:
            is_due = is_over and not task.has_gpu_side
        if is_due:
            self._accounts.answered(task, now)
        if is_over:
            self._finish(task, now, notify_ranks=is_due and task.gated)
        elif is_due:
            self._notify(task, task.result(is_final=False), task.gated)

    def _publish_what_is_whole(self, task: Task, kind: OpKind) -> None:
        """If an op was the last into its tier, publish there the prefix that has arrived."""
        plan = task.plan
        if kind in RECORDING_TIER:
            # By the last op, since a lease is published once.
            if not task.open_ops[kind]:
                tier = RECORDING_TIER[kind]
                count = task.contiguous([kind], plan.store_starts.get(tier, plan.stop))
                self._cache.publish_store(plan, tier, count, task.num_tail_units([kind]))
        elif kind in _TO_HOST:
            is_put = plan.kind is TaskKind.PUT
            kinds = _FROM_GPU if is_put else _FROM_BELOW
            if not any(task.open_ops[k] for k in kinds):
                begin = plan.start if is_put else plan.load_start
                count = task.contiguous(kinds, begin)
                self._cache.publish_staging(plan, count, task.num_tail_units(kinds))

    def _finish(self, task: Task, now: float, notify_ranks: bool) -> None:
        """Every op of the task has ended, or none was ever started."""
        self._cache.finish(task.plan)
        if task.plan.kind is TaskKind.PUT:
            self._cache.sessions.put_ended(task.session_id)
        elif task.plan.kind is TaskKind.PREFETCH:
            self._end_early_load(task, now)
        self._cache.early.settle(now)
        result, was_overdue = task.result(is_final=True), task.state.is_overdue
        task.end(result.status)
        self._accounts.ended(task, result)
        if not was_overdue:  # else it was answered for good
            self._notify(task, result, notify_ranks)
        self._sessions.close(task)  # last: a task that is not open has been answered
        if task.owner.is_gone:
            self._sessions.forget_if_gone(task.owner)

    def _end_early_load(self, task: Task, now: float) -> None:
        kinds = [kind for kind in _FROM_BELOW if kind in task.moved]
        num_read = sum(sum(task.moved[kind].values()) for kind in kinds)
        num_landed = 0  # what a request needed that is gone may be evicted
        if not task.state.is_cancelled:
            # Blocks behind one that failed are in DRAM and cannot be found.
            num_landed = task.contiguous(kinds, task.plan.load_start)
        self._cache.early.ended(task.plan, num_landed, num_read, now)

    def _notify(self, task: Task, result: TaskResult, notify_ranks: bool) -> None:
        owner = task.owner
        if owner is not self._sessions.internal:  # that has no caller
            answered = TaskAnswered(task.task_id, owner.engine, result, notify_ranks)
            self._instructions.append(answered)
            task.is_told = True  # afterwards: an answer that is left counts as told
