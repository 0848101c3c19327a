"""KVTaskEngine: the life of every get, put and prefetch, from match to final response.

    CREATED --launch--> READY --first op starts--> RUNNING --last op ends--> COMPLETED | FAILED
       |                  |                           |
       +------------------+----------cancel-----------+--ops that run end first--> CANCELLED

A state machine without I/O: it takes calls and events, each with the time, and leaves instructions
that the shell around it takes out (`take_instructions`) and carries out. An op is carried out by
one executor (the disk or the remote worker) or by several at once (the device worker of every
rank), and has ended when all of them said so or are gone.

Tasks belong to sessions of serving engines, which share the tiers and their workers; each has
ranks of its own. The id of a task names its session. What the cache does on its own account (writes
to lower tiers that no put waits for) are tasks too, of a session that nobody calls.

Not thread-safe: the shell holds a lock around each call.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import BlockKeys, PromptKeys
from flexcache.cache.hit_rate import HitRates
from flexcache.cache.layout_roots import LayoutRoots
from flexcache.cache.load_cost import why_recomputed
from flexcache.cache.plan import LOAD_OP, STORE_OP, Plan
from flexcache.cache.restore import Records, RestoreReport, restore_tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.errors import InternalError
from flexcache.ids import (
    KVStatus,
    OpId,
    OpKind,
    SessionId,
    TaskId,
    TaskKind,
    TaskState,
    TierName,
)
from flexcache.tasks.availability import WORKERS, Availability
from flexcache.tasks.ids import TaskIds, id_before, make_session, session_of
from flexcache.tasks.instructions import (
    DISK,
    REMOTE,
    DropOp,
    Instruction,
    ReplaceExecutor,
    RevokeTask,
    RunOp,
    TaskAnswered,
    TaskEnded,
    TaskResult,
    device,
)
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.model import RunningOp, Session, Task, count_plan
from flexcache.tasks.recorder import Recorder
from flexcache.transfer.breaker import CircuitBreaker
from flexcache.transfer.fair_queue import FairQueue
from flexcache.transfer.graph import BlockIds, TransferOp
from flexcache.transfer.histogram import BYTES, SECONDS, Histogram
from flexcache.transfer.scheduler import OpEnded, Outcome, StartOp, TransferScheduler
from flexcache.transfer.totals import Totals

_LOAD_TIER = {kind: tier for tier, kind in LOAD_OP.items()}
_STORE_TIER = {kind: tier for tier, kind in STORE_OP.items()}
_EXECUTORS = {kind: WORKERS[tier] for kind, tier in {**_LOAD_TIER, **_STORE_TIER}.items()}
_DEVICE_OPS = {TaskKind.GET: OpKind.H2D, TaskKind.PUT: OpKind.D2H}
_MAX_OPS_AT_ONCE = 8  # given to a worker: enough to keep it busy, few enough that a read need not
# wait behind many writes, and that a deadline means what it says
_OWN_SESSION = make_session(0, 0xFFFF)  # no server has the epoch 0
_SLOWEST_BYTES_PER_S = 1e8  # a large op gets this much longer than the configured deadline
_GATE_PATIENCE_S = 600.0  # the engine's worker may be in a long step
_SHORTEST_LOAD_PATIENCE_S = 0.25  # with the remote store, however fast the engine computes
_MAX_ERRORS = 8  # that a response names
NUM_REMEMBERED = 16_384  # finished tasks whose response can still be asked for


@dataclass(slots=True, eq=False)
class _Lane:
    """A worker below the host tier: the ops that wait for it, and how many it was given."""

    timeout_s: float
    queue: FairQueue[tuple[Task, TransferOp]] = field(default_factory=FairQueue)
    num_running: int = 0


class KVTaskEngine:
    """Tasks over a planner and a scheduler.

    Args:
        cache: The planner with its tiers.
        block_bytes: Bytes of one block over all ranks, for the counters.
        load_ranks: Ranks that must all execute an H2D.
        store_ranks: Ranks that must all execute a D2H (MLA: one).
        op_timeout_s: Deadline of an op.
        remote_timeout_s: Deadline of an op of the remote store.
        lookup_timeout_s: How long a match may wait for what the remote store has.
        match_ttl_s: A task that is not launched for so long is cancelled.
        max_open_tasks: Of one session; beyond it a get is a miss and a put is dropped.
    """

    def __init__(
        self,
        cache: TieredCache,
        *,
        block_bytes: int,
        load_ranks: Sequence[int] = (0,),
        store_ranks: Sequence[int] = (0,),
        op_timeout_s: float = 30.0,
        remote_timeout_s: float = 3.0,
        lookup_timeout_s: float = 0.25,
        match_ttl_s: float = 120.0,
        max_open_tasks: int = 4096,
    ) -> None:
        self.cache = cache
        self._roots = LayoutRoots()
        self._scheduler = TransferScheduler()
        self._block_bytes = block_bytes
        self._load_ranks = tuple(load_ranks)
        self._store_ranks = tuple(store_ranks)
        self._max_open_tasks = max_open_tasks
        self._owners: dict[SessionId, Session] = {}
        self._disputed: set[str] = set()
        """Engines whose tasks might move another engine's bytes."""
        self._op_timeout_s = op_timeout_s
        self._match_ttl_s = match_ttl_s
        self._up: dict[str, None] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._running: dict[OpId, RunningOp] = {}
        self._deadlines: list[tuple[float, OpId]] = []
        self._unlaunched: OrderedDict[TaskId, float] = OrderedDict()
        """Matches that nobody has acted upon, oldest first, and until when they are kept."""
        self._awaited_loads: list[tuple[float, TaskId]] = []
        """Gets from the remote store, and when it is better to compute what has not come."""
        self._lanes = {DISK: _Lane(op_timeout_s), REMOTE: _Lane(remote_timeout_s)}
        self.breaker = CircuitBreaker()
        self.lookups: RemoteLookUps | None = None
        if cache.tiers.remote is not None:
            self.lookups = RemoteLookUps(cache.tiers.remote, self.breaker, lookup_timeout_s)
        self._availability = Availability(
            (tier.name for tier in cache.tiers.lower),
            {TierName.REMOTE: self.breaker},
            cache.tiers.unavailable,
        )
        self._outcomes: deque[Outcome] = deque()
        self._instructions: list[Instruction] = []
        disk = cache.tiers.by_name.get(TierName.SSD)
        self._checksums = np.zeros(0 if disk is None else disk.capacity, dtype=np.uint64)
        self.totals = Totals()
        cache.tiers.lost = self.totals.dropped_blocks
        self.hit_rates = HitRates()
        self.recorder: Recorder | None = None
        self._op_seconds = {kind: Histogram(SECONDS) for kind in OpKind}
        self._op_bytes = {kind: Histogram(BYTES) for kind in OpKind}
        self._task_seconds = {kind: Histogram(SECONDS) for kind in TaskKind}
        self._now = 0.0
        self._num_ended = 0
        self.add_session(_OWN_SESSION, "", num_remembered=0)
        self._own_ids = TaskIds(_OWN_SESSION)

    # -- sessions --------------------------------------------------------------------------------

    def add_session(
        self, session: SessionId, engine: str, num_remembered: int = NUM_REMEMBERED
    ) -> None:
        """A serving engine may make tasks from now on.

        Args:
            engine: Its name; its ranks' executors are ``device(engine, rank)``.
            num_remembered: Finished tasks whose result can still be asked for.
        """
        loads = tuple(device(engine, rank) for rank in self._load_ranks)
        stores = tuple(device(engine, rank) for rank in self._store_ranks)
        executors: dict[OpKind, tuple[str, ...]] = {k: (n,) for k, n in _EXECUTORS.items()}
        executors |= {OpKind.H2D: loads, OpKind.D2H: stores}
        self._owners[session] = Session(
            session, engine, num_remembered, executors, id_before(session)
        )
        if self.recorder is not None:
            self.recorder.session_began(session, engine)

    def end_session(self, session: SessionId, now: float) -> None:
        """The engine is gone: its tasks are cancelled, but for what goes on below the GPU.

        The session is forgotten once the last of them has ended.
        """
        owner = self._owners.get(session)
        if owner is None:
            return
        owner.is_gone = True
        if self.recorder is not None:
            self.recorder.session_ended(session)
        self._cancel_unanswered(owner, now)
        self._forget_if_gone(owner)

    def _cancel_unanswered(self, owner: Session, now: float) -> None:
        """But not what only goes on below the GPU."""
        self.cancel([task_id for task_id, t in owner.tasks.items() if not t.announced], now)

    def _cancel_all(self, now: float) -> None:
        """Cancel what engines wait for, but not writes below the GPU."""
        for owner in list(self._owners.values()):
            if owner.session != _OWN_SESSION:
                self._cancel_unanswered(owner, now)

    def set_disputed(self, engine: str, is_disputed: bool, now: float) -> None:
        """Cancel what sessions of this name have open, and match nothing for them meanwhile."""
        if not is_disputed:
            self._disputed.discard(engine)
            return
        self._disputed.add(engine)
        for owner in list(self._owners.values()):
            if owner.engine == engine:
                self._cancel_unanswered(owner, now)

    def uses_gpu_of(self, engine: str) -> bool:
        """Whether tasks can still be copying from or to the slots of an engine of this name."""
        return any(
            task.gpu_ops_open or not task.announced
            for owner in self._owners.values()
            if owner.engine == engine
            for task in owner.tasks.values()
        )

    def session_totals(self, session: SessionId) -> Totals:
        return self._owners[session].totals

    def report_prefill(self, session: SessionId, blocks_per_s: float) -> None:
        """How fast the engine computes: what would take longer to load is not loaded for it."""
        self._owners[session].prefill_blocks_per_s = blocks_per_s

    def was_launched(self, task_id: TaskId) -> bool:
        """Raises `KeyError` for a task that is not open."""
        return self._tasks[task_id].launched

    def num_open_tasks_of(self, session: SessionId) -> int:
        return len(self._owners[session].tasks)

    # -- calls of the engine's adapter -----------------------------------------------------------

    def look_up(self, kind: TaskKind, keys: PromptKeys, stop: int, now: float) -> int | None:
        """Ask the remote store what it has of a prompt, where that may matter to a `match`.

        Returns:
            The question to wait for (`is_looking_up`, or `LookUpEnded`); None if nothing is asked.
        """
        if kind is TaskKind.PUT or self.lookups is None or REMOTE not in self._up:
            return None
        self._roots.place(keys)
        if self.cache.tiers.have_locally(keys, stop):
            return None
        return self.lookups.look_up(keys, stop, now, self._instructions)

    def is_looking_up(self, lookup_id: int) -> bool:
        return self.lookups is not None and self.lookups.is_open(lookup_id)

    def match(
        self, task_id: TaskId, kind: TaskKind, keys: PromptKeys, start: int, stop: int,
        num_tokens: int, now: float, retain_s: float = 0.0,
    ) -> Plan:  # fmt: skip
        """Make a task for blocks ``[start, stop)`` of a prompt. An empty one has ended already.

        Args:
            retain_s: What a put stores counts as used this much later when room is needed.

        Raises:
            ValueError: The id is not above all earlier ones of its session.
            KeyError: There is no such session.
        """
        owner = self._owner_of(task_id)
        if task_id <= owner.last_id:
            raise ValueError(f"task {task_id} was given out before")
        owner.last_id = task_id
        self._roots.place(keys)
        self.cache.tiers.advance(now)
        plan = self._plan(owner, kind, keys, start, stop, retain_s)
        count_plan(self.totals, plan, stop)
        count_plan(owner.totals, plan, stop)
        if kind is TaskKind.GET:
            self.hit_rates.add(now, stop - start, plan.num_blocks)
        task = Task(task_id, owner, plan, num_tokens)
        if self.recorder is not None:
            self.recorder.matched(task, keys, start, stop, retain_s)
        if plan.num_blocks == 0:
            self.cache.finish(plan)
            self._remember(task, TaskState.COMPLETED, KVStatus.NOT_FOUND, 0)
            if kind is TaskKind.PUT and start < stop and not plan.dropped:
                backlog = self._backlog_share(owner)
                store = self.cache.stores.plan_store(keys, stop, backlog, retain_s)
                self._follow(self._begin_store(store, now), now)
            return plan
        self._tasks[task_id] = owner.tasks[task_id] = task
        owner.store_backlog += plan.num_backlogged
        self._unlaunched[task_id] = now + self._match_ttl_s
        return plan

    def _plan(
        self,
        owner: Session,
        kind: TaskKind,
        keys: BlockKeys,
        start: int,
        stop: int,
        retain_s: float,
    ) -> Plan:
        if len(owner.tasks) >= self._max_open_tasks:
            return self.cache.plan_nothing(kind, keys, start, stop, "session_task_limit")
        if owner.engine in self._disputed:
            return self.cache.plan_nothing(kind, keys, start, stop, "name_disputed")
        device_op = _DEVICE_OPS.get(kind)
        if device_op and any(name not in self._up for name in owner.executors[device_op]):
            return self.cache.plan_nothing(kind, keys, start, stop, "ranks_missing")
        if kind is TaskKind.GET:
            return self.cache.loads.plan_get(keys, start, stop, owner.prefill_blocks_per_s)
        if kind is TaskKind.PREFETCH:
            return self.cache.loads.plan_prefetch(keys, start, stop)
        return self.cache.stores.plan_put(keys, start, stop, self._backlog_share(owner), retain_s)

    def _backlog_share(self, owner: Session) -> int:
        """How many more blocks of an engine may wait to be written below.

        Engines that have something going on share the room.
        """
        num_sharing = sum(bool(other.tasks) or other is owner for other in self._owners.values())
        return self.cache.stores.max_backlog // num_sharing - owner.store_backlog

    def _begin_store(self, plan: Plan, now: float) -> list[Outcome]:
        """Carry out a plan on the cache's own account."""
        self.totals.dropped_blocks.update(plan.dropped)
        if not plan.graph.ops:
            self.cache.finish(plan)
            return []
        owner = self._owners[_OWN_SESSION]
        task_id = self._own_ids.next()
        owner.last_id = task_id
        self._tasks[task_id] = owner.tasks[task_id] = task = Task(task_id, owner, plan, 0)
        owner.store_backlog += plan.num_backlogged
        if self.recorder is not None:
            self.recorder.launched(task)
        return self._submit(task, now)

    def close_down(self, now: float) -> None:
        """Cancel what is open, but not writes below the GPU, and write what is dirty."""
        self._cancel_all(now)
        self.cache.stores.begin_closing()
        self._follow([], now)

    def launch(
        self,
        task_ids: Sequence[TaskId],
        gpu_blocks: Sequence[BlockIds],
        now: float,
        gated: bool = False,
    ) -> None:
        """Start tasks with the GPU blocks for each. All are checked before any is started.

        A task that was cancelled meanwhile, or had nothing to move, stays as it is.
        """
        if len(task_ids) != len(gpu_blocks) or len(set(task_ids)) != len(task_ids):
            raise ValueError(f"{len(task_ids)} distinct tasks need {len(task_ids)} slot mappings")
        to_start: list[tuple[Task, BlockIds]] = []
        for task_id, blocks in zip(task_ids, gpu_blocks, strict=True):
            task = self._tasks.get(task_id)
            if task is None:
                result = self._owner_of(task_id).result(task_id)
                if result.status in (KVStatus.SUCCESS, KVStatus.FAILED):
                    raise ValueError(f"task {task_id} was launched before")
                continue
            if task.launched:
                raise ValueError(f"task {task_id} was launched before")
            if task.plan.kind is not TaskKind.PREFETCH and len(blocks) != task.plan.num_blocks:
                raise ValueError(
                    f"task {task_id} needs slots for {task.plan.num_blocks} blocks, "
                    f"{len(blocks)} were given"
                )
            to_start.append((task, blocks))
        for task, blocks in to_start:
            task.gated = gated
            if self.recorder is not None:
                self.recorder.launched(task)
            task.plan.graph.bind_gpu_blocks(blocks, task.plan.start)
            if task.plan.kind is TaskKind.GET and TierName.REMOTE in task.plan.sources:
                patience_s = self._load_patience_s(task)
                heapq.heappush(self._awaited_loads, (now + patience_s, task.task_id))
            self._follow(self._submit(task, now), now)
            if not task.plan.graph.ops:  # a prefetch of what the host tier has
                self._finish(task)

    def _load_patience_s(self, task: Task) -> float:
        """For how long a get waits for the remote store: no longer than to compute it all."""
        longest, rate = self._lanes[REMOTE].timeout_s, task.owner.prefill_blocks_per_s
        if rate <= 0:
            return longest
        return min(longest, max(_SHORTEST_LOAD_PATIENCE_S, task.plan.num_blocks / rate))

    def _give_up_late_loads(self, now: float) -> None:
        """Answer gets with what has come so far. A read under way still ends in DRAM."""
        while self._awaited_loads and self._awaited_loads[0][0] <= now:
            task = self._tasks.get(heapq.heappop(self._awaited_loads)[1])
            if task is None or task.announced or not task.open_ops[OpKind.REMOTE2H]:
                continue
            task.errors.append("the remote store takes longer than computing would")
            self._end_queued(task)
            self._follow(self._scheduler.cancel(task.task_id), now)

    def _submit(self, task: Task, now: float) -> list[Outcome]:
        task.launched, task.launched_s = True, now
        self._unlaunched.pop(task.task_id, None)
        task.state = TaskState.READY
        task.open_ops = Counter(op.kind for op in task.plan.graph.ops)
        return self._scheduler.submit(task.task_id, task.plan.graph)

    def cancel(self, task_ids: Iterable[TaskId], now: float) -> None:
        """Stop what has not started. Idempotent; a finished task stays as it is.

        All ids are checked before any task is cancelled.
        """
        to_cancel = list(task_ids)
        for task_id in to_cancel:
            self._owner_of(task_id).require_known(task_id)
        for task_id in to_cancel:
            task = self._tasks.get(task_id)
            if task is None or task.cancelled:
                continue
            task.cancelled = True
            if self.recorder is not None:
                self.recorder.cancelled(task)
            if task.launched:
                self._stop(task, now)
            else:
                self._finish(task)

    @property
    def num_ended_tasks(self) -> int:
        """Tasks that have come to their final state since the start."""
        return self._num_ended

    @property
    def num_open_tasks(self) -> int:
        return len(self._tasks)

    @property
    def num_held_up(self) -> int:
        """Dirty blocks that wait for the worker of their tier, or for the end of its clearing."""
        return sum(
            self.cache.stores.num_dirty(tier)
            for tier, worker in WORKERS.items()
            if worker not in self._up or self.cache.tiers.is_withheld(tier)
        )

    def result(self, task_id: TaskId, completely: bool = False) -> TaskResult | None:
        """How the task ended; None while it goes on. Without ``completely``, the GPU side counts.

        Raises `KeyError` for an id that was never given out or is forgotten.
        """
        task = self._tasks.get(task_id)
        if task is None:
            return self._owner_of(task_id).result(task_id)
        if task.overdue or (not completely and task.announced):
            return self._judge(task, is_final=False)
        return None

    def collected(self, task_id: TaskId) -> None:
        """The final response was handed over: the task no longer counts, and may be forgotten."""
        owner = self._owner_of(task_id)
        owner.collect(task_id)

    # -- events ----------------------------------------------------------------------------------

    def adopt_layout(self, layout: bytes, now: float) -> None:
        """Keep blocks under this layout (a digest) from now on.

        Tasks that were matched under another one are cancelled: their blocks' bytes mean something
        else to the ranks that move them now.
        """
        if layout == self._roots.layout:
            return
        self._roots = LayoutRoots(layout)
        self._cancel_all(now)

    def restore(self, records: Records) -> RestoreReport:
        """Index what the SSD tier was found to hold at the start (`DiskPool.load`)."""
        self._checksums[records["slot"]] = records["checksum"]
        return restore_tier(self.cache.tiers.by_name[TierName.SSD], records)

    def executor_up(self, executor: str) -> None:
        """An executor serves. What waited for its tier starts with the next `tick`."""
        self._up[executor] = None
        self._availability.sync(self._up)

    def executor_down(self, executor: str, reason: str, now: float) -> None:
        """An executor is gone, and with it all that it was moving."""
        self._up.pop(executor, None)
        if executor == REMOTE and self.lookups is not None:
            self.breaker.trip(reason, now)
            self.lookups.give_up(now, self._instructions)
        self._sync_availability(now, reason)
        for running in list(self._running.values()):
            if executor in running.waiting_for:
                self._one_done(running, executor, 0, f"{executor}: {reason}", False, now)

    def _give_up_waiting(self, executor: str, reason: str, now: float) -> None:
        """Ops that have not had their turn at a worker end with nothing moved."""
        while (waiting := self._lanes[executor].queue.next()) is not None:
            task, op = waiting
            task.waiting.discard(op.op_id)
            task.errors.append(f"{executor}: {reason}")
            self._end_undone(task, op)
        self._follow([], now)

    def _end_undone(self, task: Task, op: TransferOp) -> None:
        """An op that could start ends without having been given to any executor."""
        if op.kind in _STORE_TIER:
            self._not_stored(task, op.kind, "unavailable", len(op))
        self._outcomes.extend(self._scheduler.op_ended(op.op_id, 0))

    def _sync_availability(self, now: float, reason: str = "") -> None:
        """End what waits for a tier that has become unavailable."""
        for tier in self._availability.sync(self._up):
            self._give_up_waiting(WORKERS[tier], reason or self.breaker.last_reason, now)

    def looked_up(self, lookup_id: int, num_present: int, error: str | None, now: float) -> None:
        """The remote worker has answered a question."""
        if self.lookups is not None:
            self.lookups.looked_up(lookup_id, max(0, num_present), error, now, self._instructions)
            self._sync_availability(now)

    def is_up(self, executor: str) -> bool:
        return executor in self._up

    def is_busy(self, executor: str) -> bool:
        """Whether ops are with it."""
        return any(executor in running.waiting_for for running in self._running.values())

    def op_done(
        self,
        executor: str,
        op_id: OpId,
        num_ok: int,
        now: float,
        *,
        error: str | None = None,
        bad_block: bool = False,
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """An executor has ended its part of an op with the first ``num_ok`` blocks moved.

        Args:
            bad_block: The block after these is unreadable or has wrong bytes.
            checksums: Of the blocks written, where the op wrote to a tier that verifies.
        """
        running = self._running.get(op_id)
        if running is None or executor not in running.waiting_for:
            return  # it was declared gone before; what it says no longer counts
        op = running.op
        if checksums is not None and op.kind is OpKind.H2DISK and op.dst is not None:
            count = min(len(checksums), len(op.dst))
            self._checksums[op.dst[:count]] = checksums[:count]
            num_ok = min(num_ok, count)
        num_ok = max(0, min(num_ok, len(op)))
        self._one_done(running, executor, num_ok, error, bad_block, now)

    def tick(self, now: float) -> None:
        """Let deadlines pass, and write what is due to tiers that are available again."""
        self._give_up_late_loads(now)
        if self.lookups is not None:
            self.lookups.tick(now, REMOTE in self._up, self._instructions)
        self._sync_availability(now)
        self._follow([], now)
        while self._unlaunched and next(iter(self._unlaunched.values())) <= now:
            task = self._tasks[self._unlaunched.popitem(last=False)[0]]
            task.errors.append(f"not launched within {self._match_ttl_s:g} s")
            self.cancel([task.task_id], now)
        while self._deadlines and self._deadlines[0][0] <= now:
            running = self._running.get(heapq.heappop(self._deadlines)[1])
            if running is None:
                continue
            reason = (
                f"{running.op.kind.value} op {running.op.op_id} missed its deadline after "
                f"{now - running.started_s:.1f} s"
            )
            running.task.errors.append(reason)
            for executor in list(running.waiting_for):
                self._instructions.append(ReplaceExecutor(executor, reason))
            if running.op.kind.touches_gpu and not running.task.overdue:
                # The copy may still land, so its blocks stay leased; only the answer is given.
                task = running.task
                task.overdue = True
                self._instructions.append(RevokeTask(task.task_id, task.owner.engine))
                self._stop(task, now)
                self._announce(task)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        times = [queue[0][0] for queue in (self._deadlines, self._awaited_loads) if queue]
        if self._unlaunched:
            times.append(next(iter(self._unlaunched.values())))
        asked = None
        if self.lookups is not None:
            asked = self.lookups.next_deadline(REMOTE in self._up)
        if asked is not None:
            times.append(asked)
        return min(times) if times else None

    def take_instructions(self) -> list[Instruction]:
        instructions, self._instructions = self._instructions, []
        return instructions

    # -- what follows from them ------------------------------------------------------------------

    def _follow(self, outcomes: list[Outcome], now: float) -> None:
        self._now = now
        self._outcomes.extend(outcomes)
        while True:
            while self._outcomes:
                outcome = self._outcomes.popleft()
                if isinstance(outcome, StartOp):
                    self._start(outcome, now)
                else:
                    self._op_ended(outcome)
            plan = self.cache.stores.plan_write_back()
            if plan is None:
                return
            self._outcomes.extend(self._begin_store(plan, now))

    def _start(self, outcome: StartOp, now: float) -> None:
        task, op = self._tasks[outcome.task_id], outcome.op
        down = [name for name in task.owner.executors[op.kind] if name not in self._up]
        tier = _LOAD_TIER.get(op.kind) or _STORE_TIER.get(op.kind)
        if down or tier in self.cache.tiers.unavailable:
            who = ", ".join(down)
            task.errors.append(f"{who} not connected" if down else f"{tier} is not available")
            self._end_undone(task, op)
        elif op.kind.touches_gpu:
            self._dispatch(task, op, now)
        else:
            lane, is_load = self._lanes[_EXECUTORS[op.kind]], op.kind in _LOAD_TIER
            lane.queue.add(op.op_id, (task, op), owner=task.owner.session, is_load=is_load)
            task.waiting.add(op.op_id)
            self._fill(lane, now)

    def _fill(self, lane: _Lane, now: float) -> None:
        while lane.num_running < _MAX_OPS_AT_ONCE:
            waiting = lane.queue.next()
            if waiting is None:
                return
            task, op = waiting
            task.waiting.discard(op.op_id)
            lane.num_running += 1
            self._dispatch(task, op, now)

    def _stop(self, task: Task, now: float) -> None:
        """Start nothing more of the task; what moves already ends by itself."""
        for running in task.running.values():
            for executor in running.waiting_for:
                self._instructions.append(DropOp(executor, running.op.op_id))
        self._end_queued(task)
        self._follow(self._scheduler.cancel(task.task_id), now)

    def _end_queued(self, task: Task) -> None:
        """The task's ops that have not had their turn at a worker end with nothing moved."""
        for op_id in sorted(task.waiting):
            for lane in self._lanes.values():
                lane.queue.discard(op_id)
            self._outcomes.extend(self._scheduler.op_ended(op_id, 0))
        task.waiting.clear()

    def _dispatch(self, task: Task, op: TransferOp, now: float) -> None:
        """Hand the op to its executors; its deadline starts."""
        task.state = TaskState.RUNNING
        executors = task.owner.executors[op.kind]
        running = RunningOp(task, op, now, dict.fromkeys(executors), len(op))
        self._running[op.op_id] = task.running[op.op_id] = running
        for totals in (self.totals, task.owner.totals):
            totals.ops[op.kind].started(now)
        if self.recorder is not None:
            self.recorder.op_started(task, op)
        gated = task.gated and op.kind.touches_gpu
        lane = self._lanes.get(executors[0])
        patience = self._op_timeout_s if lane is None else lane.timeout_s
        patience += len(op) * self._block_bytes / _SLOWEST_BYTES_PER_S
        if gated:
            patience += _GATE_PATIENCE_S
        heapq.heappush(self._deadlines, (now + patience, op.op_id))
        checksums = None
        if op.kind is OpKind.DISK2H and op.src is not None:
            checksums = self._checksums[op.src]
        if op.kind in _LOAD_TIER and self.cache.loads.cost is not None:
            self.cache.loads.cost.started(_LOAD_TIER[op.kind], now)
        for executor in executors:
            self._instructions.append(RunOp(executor, task.task_id, op, checksums, gated))

    def _one_done(
        self,
        running: RunningOp,
        executor: str,
        num_ok: int,
        error: str | None,
        bad_block: bool,
        now: float,
    ) -> None:
        del running.waiting_for[executor]
        running.num_ok = min(running.num_ok, num_ok)
        running.bad_block |= bad_block
        if error is not None:
            running.task.errors.append(error)
        if running.waiting_for:
            return
        op, task = running.op, running.task
        if self.recorder is not None:
            self.recorder.op_ended(task, op, running.num_ok, error)
        del self._running[op.op_id], task.running[op.op_id]
        if not op.kind.touches_gpu:
            lane = self._lanes[_EXECUTORS[op.kind]]
            lane.num_running -= 1
            self._fill(lane, now)
        has_failed = executor == REMOTE and self._judge_store(running, error, now)
        self._count(running, now)
        if op.kind in _STORE_TIER and running.num_ok < len(op):
            num_lost = len(op) - running.num_ok
            self._not_stored(task, op.kind, "write_failed", num_lost, has_failed)
        if running.bad_block and op.kind in _LOAD_TIER and running.num_ok < len(op):
            tier, position = _LOAD_TIER[op.kind], op.first + running.num_ok
            self.cache.discard_bad_block(task.plan, tier, position)
            self._drop(task, f"{tier.value.lower()}_bad_block", 1)
        self._follow(self._scheduler.op_ended(op.op_id, running.num_ok), now)

    def _count(self, running: RunningOp, now: float) -> None:
        op, moved = running.op, running.num_ok * self._block_bytes
        for totals in (self.totals, running.task.owner.totals):
            totals.ops[op.kind].ended(now, len(op), running.num_ok, self._block_bytes)
        self._op_seconds[op.kind].observe(now - running.started_s)
        self._op_bytes[op.kind].observe(moved)
        host = self.cache.tiers.host.counters
        if op.kind in (OpKind.H2D, *_STORE_TIER):
            host.read_bytes += moved
        else:
            host.written_bytes += moved
        if op.kind in _LOAD_TIER:
            tier, cost = _LOAD_TIER[op.kind], self.cache.loads.cost
            self.cache.tiers.by_name[tier].counters.read_bytes += moved
            if cost is not None:
                cost.ended(tier, now, running.num_ok, now - running.started_s)
        if op.kind in _STORE_TIER:
            self.cache.tiers.by_name[_STORE_TIER[op.kind]].counters.written_bytes += moved

    def _judge_store(self, running: RunningOp, error: str | None, now: float) -> bool:
        """Tell the breaker how an op went; whether it counts as a failure of the store. A block
        that is missing or bad does not."""
        op = running.op
        if not self.breaker.is_closed:
            return False  # what was under way when it opened is no trial
        is_well = running.num_ok == len(op) or running.bad_block
        if is_well:
            self.breaker.succeeded(now)
        elif error is not None:
            self.breaker.failed(f"{op.kind.value}: {error}", now)
        self._sync_availability(now)
        return not is_well and error is not None

    def _not_stored(
        self, task: Task, kind: OpKind, why: str, num_blocks: int, has_failed: bool = False
    ) -> None:
        """Count blocks that a store op lost, unless they stay dirty until their tier is back."""
        tier = _STORE_TIER[kind]
        if not self.cache.stores.put_off(task.plan, tier, has_failed):
            self._drop(task, f"{tier.value.lower()}_{why}", num_blocks)

    def _drop(self, task: Task, reason: str, num_blocks: int) -> None:
        self.totals.dropped_blocks[reason] += num_blocks
        task.owner.totals.dropped_blocks[reason] += num_blocks

    def _op_ended(self, ended: OpEnded) -> None:
        task, op = self._tasks[ended.task_id], ended.op
        # What still moved when the task was cancelled is published to nobody; nor is what was
        # copied from or to slots after the answer gave them back.
        is_void = task.cancelled or (task.overdue and op.kind.touches_gpu)
        num_ok = 0 if is_void else ended.num_ok
        task.moved.setdefault(op.kind, {})[op.first] = num_ok
        task.open_ops[op.kind] -= 1
        self._publish_what_is_whole(task, op.kind)
        if task.gpu_ops_open == 0 and (op.kind.touches_gpu or task.open_ops.total() == 0):
            self._announce(task)
        if task.open_ops.total() == 0:
            self._finish(task)

    def _publish_what_is_whole(self, task: Task, kind: OpKind) -> None:
        plan = task.plan
        if kind in _STORE_TIER:
            if task.open_ops[kind] == 0:
                tier = _STORE_TIER[kind]
                count = task.contiguous([kind], plan.store_starts[tier])
                self.cache.publish_store(plan, tier, count)
        elif kind is not OpKind.H2D and plan.staging is not None:
            kinds = [OpKind.D2H] if plan.kind is TaskKind.PUT else list(_LOAD_TIER)
            if not any(task.open_ops[k] for k in kinds):
                begin = plan.start if plan.kind is TaskKind.PUT else plan.load_start
                self.cache.publish_staging(plan, task.contiguous(kinds, begin))

    def _announce(self, task: Task) -> None:
        if not task.announced:
            task.announced = True
            if task.launched:
                self._task_seconds[task.plan.kind].observe(self._now - task.launched_s)
            if task.owner.session == _OWN_SESSION:
                return  # nobody waits for it
            result = self._judge(task, is_final=False)
            self._instructions.append(
                TaskEnded(task.task_id, task.owner.engine, result.num_ok, task.gated)
            )
            if task.open_ops.total():
                self._instructions.append(TaskAnswered(task.task_id, result))

    def _judge(self, task: Task, is_final: bool = True) -> TaskResult:
        plan, error = task.plan, "; ".join(list(dict.fromkeys(task.errors))[:_MAX_ERRORS]) or None
        if task.cancelled:
            return TaskResult(KVStatus.CANCELLED, plan.start, 0, task.num_tokens, error, is_final)
        if plan.kind is TaskKind.PREFETCH:
            on_host = plan.sources.get(TierName.CPU, 0)
            num_ok = on_host + task.contiguous(_LOAD_TIER, plan.start + on_host)
        elif plan.kind is TaskKind.STORE:
            num_ok = sum(sum(moved.values()) for moved in task.moved.values())
        else:
            num_ok = task.contiguous([OpKind.H2D, OpKind.D2H], plan.start)
        status = KVStatus.SUCCESS if num_ok else KVStatus.FAILED
        return TaskResult(status, plan.start, num_ok, task.num_tokens, error, is_final)

    def _finish(self, task: Task) -> None:
        """Every op of the task has ended, or none was ever started."""
        task.owner.store_backlog -= task.plan.num_backlogged
        self.cache.finish(task.plan)
        self._announce(task)
        result = self._judge(task)
        state = {
            KVStatus.SUCCESS: TaskState.COMPLETED,
            KVStatus.CANCELLED: TaskState.CANCELLED,
            KVStatus.FAILED: TaskState.FAILED,
        }[result.status]
        del self._tasks[task.task_id], task.owner.tasks[task.task_id]
        self._unlaunched.pop(task.task_id, None)
        self._remember(task, state, result.status, result.num_ok, result.error)
        self._forget_if_gone(task.owner)

    def _remember(
        self, task: Task, state: TaskState, status: KVStatus, num_ok: int, error: str | None = None
    ) -> None:
        task.state = state
        self._num_ended += 1
        owner, name = task.owner, f"{task.plan.kind.value}_{status.value}"
        for totals in (self.totals, owner.totals):
            totals.ended_tasks[name] += 1
        result = TaskResult(status, task.plan.start, num_ok, task.num_tokens, error)
        owner.remember(task.task_id, result)
        if self.recorder is not None:
            self.recorder.ended(task, result)
        if status is not KVStatus.NOT_FOUND and owner.session != _OWN_SESSION:
            self._instructions.append(TaskAnswered(task.task_id, result))
        # An empty match needs no answer, and a gated task's goes to the engine's workers.
        if task.gated or status is KVStatus.NOT_FOUND:
            owner.collect(task.task_id)

    def _forget_if_gone(self, owner: Session) -> None:
        if owner.is_gone and not owner.tasks:
            self._owners.pop(owner.session, None)

    def _owner_of(self, task_id: TaskId) -> Session:
        owner = self._owners.get(session_of(task_id))
        if owner is None:
            raise KeyError(f"task {task_id} was never given out")
        return owner

    # -- insight ---------------------------------------------------------------------------------

    def tasks_by_state(self) -> dict[str, int]:
        """Tasks whose final response was not collected yet, by state."""
        counts = {state.value: 0 for state in TaskState}
        for task in self._tasks.values():
            counts[task.state.value] += 1
        ended = {
            KVStatus.CANCELLED: TaskState.CANCELLED,
            KVStatus.FAILED: TaskState.FAILED,
        }
        for owner in self._owners.values():
            for result in owner.uncollected():
                counts[ended.get(result.status, TaskState.COMPLETED).value] += 1
        return counts

    def times(self) -> dict[str, Any]:
        """How long ops and tasks took, and how much an op moved, as histograms. Tasks count from
        their launch to their answer."""
        return {
            "op_histograms": {
                kind.value: {
                    "seconds": self._op_seconds[kind].report(),
                    "bytes": self._op_bytes[kind].report(),
                }
                for kind in OpKind
            },
            "task_histograms": {
                kind.value: times.report() for kind, times in self._task_seconds.items()
            },
        }

    def queues(self) -> dict[str, Any]:
        """What waits for whom."""
        lanes = {
            name: {"waiting": len(lane.queue), "running": lane.num_running}
            for name, lane in self._lanes.items()
        }
        on_devices = sum(running.op.kind.touches_gpu for running in self._running.values())
        return {
            "queues": {**lanes, "device": {"waiting": 0, "running": on_devices}},
            "unlaunched_tasks": len(self._unlaunched),
            "open_lookups": 0 if self.lookups is None else self.lookups.num_open,
            "store_backlog_blocks": self.cache.stores.backlog,
        }

    def load_decisions(self) -> dict[str, dict[str, int]]:
        """Blocks of the tiers below DRAM that gets loaded, and that computing was faster for."""
        hits, skipped = self.totals.hit_blocks, self.totals.skipped_blocks
        return {
            tier.name.value: {
                "load": hits[tier.name.value],
                "recompute": skipped[why_recomputed(tier.name)],
            }
            for tier in self.cache.tiers.lower
        }

    def remote_stats(self) -> dict[str, Any]:
        """How the remote store does, and how fast the lower tiers are."""
        report: dict[str, Any] = {}
        if self.lookups is not None:
            asked = {"asked": self.lookups.num_asked, "late": self.lookups.num_late}
            report["remote"] = {
                "available": TierName.REMOTE not in self.cache.tiers.unavailable,
                "breaker": self.breaker.report(),
                "lookups": asked,
            }
        if self.cache.loads.cost is not None:
            report["load_cost"] = self.cache.loads.cost.report()
        return report

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(everything)."""
        if self.lookups is not None and not self.lookups.check():
            raise InternalError("an open question to the store cannot be found or has no deadline")
        if not self._availability.check(self._up):
            raise InternalError(
                f"the tiers {self.cache.tiers.unavailable} are not those that are away"
            )
        for tier in self.cache.tiers.unavailable:
            if len(self._lanes[WORKERS[tier]].queue):
                raise InternalError(f"ops wait for {tier.value}, which is unavailable")
        self.cache.check()
        self._scheduler.check()
        owned = [task_id for owner in self._owners.values() for task_id in owner.tasks]
        if sorted(owned) != sorted(self._tasks):
            raise InternalError("sessions and open tasks disagree")
        for owner in self._owners.values():
            backlog = sum(task.plan.num_backlogged for task in owner.tasks.values())
            if owner.store_backlog != backlog:
                raise InternalError(
                    f"session {owner.session} counts {owner.store_backlog} blocks "
                    f"of backlog, its tasks have {backlog}"
                )
            if owner.is_gone and not owner.tasks:
                raise InternalError(f"session {owner.session} is gone and still kept")
        for op_id, running in self._running.items():
            if not running.waiting_for:
                raise InternalError(f"op {op_id} waits for nobody")
            if running.task.task_id not in self._tasks:
                raise InternalError(f"op {op_id} runs for a task that has ended")
        for task_id, task in self._tasks.items():
            if task.state.is_final or task_id in task.owner.results:
                raise InternalError(f"task {task_id} has ended and is still kept open")
            if not task.launched and task.open_ops.total():
                raise InternalError(f"task {task_id} has open ops without a launch")
        unlaunched = [task_id for task_id, task in self._tasks.items() if not task.launched]
        if unlaunched != list(self._unlaunched):
            raise InternalError("tasks that wait for their launch and those watched disagree")
