"""Tasks while they are open, their ops while they run, and the sessions they belong to.

`KVTaskEngine` decides what becomes of a task; the task knows which state that puts it in. Tasks on
the cache's own account (writes to lower tiers that no put waits for) are of an internal session.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flexcache.cache.early_loads import EarlyLoad
from flexcache.cache.plan import LOAD_OP, STORE_OP, Plan, PlannedTail
from flexcache.cache.tail_index import TAIL_FIRST
from flexcache.errors import InternalError
from flexcache.ids import (
    KVStatus,
    OpId,
    OpKind,
    RootId,
    SessionId,
    TaskId,
    TaskIds,
    TaskKind,
    TaskState,
    TierName,
    id_before,
    make_session,
    session_of,
)
from flexcache.stats import TotalsStats
from flexcache.tasks.instructions import DISK, PEER, REMOTE, TaskResult, device
from flexcache.transfer.scheduler import BlockIds, TransferOp

WORKERS = {TierName.SSD: DISK, TierName.PEER: PEER, TierName.REMOTE: REMOTE}
STAGED_LOAD_TIER = {kind: tier for tier, kind in LOAD_OP.items()}
"""Loads that end in DRAM."""
LOAD_TIER = {**STAGED_LOAD_TIER, OpKind.DISK2D: TierName.SSD}
RECORDING_TIER = {kind: tier for tier, kind in STORE_OP.items()} | {OpKind.COMMIT: TierName.SSD}
"""Ops at whose end a tier has the blocks."""
STORE_TIER = {**RECORDING_TIER, OpKind.D2DISK: TierName.SSD}
LOWER_TIER = {**LOAD_TIER, **STORE_TIER}
WORKER_OF = {kind: WORKERS[tier] for kind, tier in (STAGED_LOAD_TIER | RECORDING_TIER).items()}
GPU_LOADS = (OpKind.H2D, OpKind.DISK2D)
GPU_STORES = (OpKind.D2H, OpKind.D2DISK)
GPU_OPS = GPU_LOADS + GPU_STORES

ENDS = {
    OpKind.H2D: (TierName.CPU, TierName.GPU),
    OpKind.D2H: (TierName.GPU, TierName.CPU),
    OpKind.DISK2H: (TierName.SSD, TierName.CPU),
    OpKind.H2DISK: (TierName.CPU, TierName.SSD),
    OpKind.PEER2H: (TierName.PEER, TierName.CPU),
    OpKind.REMOTE2H: (TierName.REMOTE, TierName.CPU),
    OpKind.H2REMOTE: (TierName.CPU, TierName.REMOTE),
    OpKind.DISK2D: (TierName.SSD, TierName.GPU),
    OpKind.D2DISK: (TierName.GPU, TierName.SSD),
}
"""Where each op that moves bytes reads and writes."""

_FINAL_STATE = {
    KVStatus.SUCCESS: TaskState.COMPLETED,
    KVStatus.NOT_FOUND: TaskState.COMPLETED,
    KVStatus.CANCELLED: TaskState.CANCELLED,
    KVStatus.FAILED: TaskState.FAILED,
}
_NONE_OPEN = dict.fromkeys(OpKind, 0)
MAX_ROOTS = 65_536
_MAX_ERRORS = 8  # that a response names


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Ranks of each engine, and limits of its tasks.

    Attributes:
        block_bytes: Bytes of one block over all ranks, for counters and deadlines.
        load_ranks: Ranks that must all execute an H2D.
        store_ranks: Ranks that must all execute a D2H: one for each shard.
        op_timeout_s: Deadline of an op.
        remote_timeout_s: Deadline of an op of the remote store.
        lookup_timeout_s: How long a match may wait for what the remote store has.
        match_ttl_s: A task that is not launched within this time is cancelled.
        max_open_tasks: Limit for one session; beyond it a get is a miss and a put is dropped.
    """

    block_bytes: int = 1
    load_ranks: Sequence[int] = (0,)
    store_ranks: Sequence[int] = (0,)
    op_timeout_s: float = 30.0
    remote_timeout_s: float = 3.0
    lookup_timeout_s: float = 0.25
    match_ttl_s: float = 120.0
    max_open_tasks: int = 4096


DEFAULT_LIMITS = TaskLimits()


@dataclass(slots=True, eq=False)
class Task:
    """A get, put, prefetch or store that has not ended."""

    task_id: TaskId
    owner: Session
    plan: Plan
    num_tokens: int
    state: TaskState = TaskState.CREATED
    gated: bool = False
    """Whether its launch asked for ops of the GPU to wait until the engine opens their gate."""
    is_promised: bool = False
    """Whether a step of its engine counts on it: its ranks are given it by the engine, and nothing
    but their reports or the engine's own cancel ends it."""
    session_id: str | None = None
    """Whose prompt it is, if its caller has said."""
    adapter: str = ""
    """Digest of the adapter whose KV it moves, if there is one."""
    early: list[EarlyLoad] = field(default_factory=list)
    """What a get finds that was loaded early."""
    launched_s: float | None = None
    open_ops: dict[OpKind, int] = field(default_factory=lambda: _NONE_OPEN)  # its own once launched
    moved: dict[OpKind, dict[int, int]] = field(default_factory=dict)
    """Per kind of op: position of its first block -> blocks that it moved."""
    errors: list[str] = field(default_factory=list)
    is_told: bool = False
    """Whether its owner was sent an answer."""
    running: dict[OpId, OpRun] = field(default_factory=dict)
    waiting: set[OpId] = field(default_factory=set)
    """Ops that could start and wait for their turn at a worker. `Executors` keeps both."""

    # -- transitions -----------------------------------------------------------------------------

    def forgotten(self, owner: Session, running: Sequence[OpRun], is_told: bool) -> Task:
        """Return what is left of it once the cache has forgotten everything: a cancelled task with
        the ops that still run."""
        plan = Plan(self.plan.kind, self.plan.root, self.plan.start, self.plan.start)
        plan.num_before = self.plan.num_before
        plan.graph.ops = [run.op for run in running]
        left = Task(
            self.task_id, owner, plan, self.num_tokens, gated=self.gated,
            is_promised=self.is_promised, is_told=is_told,
        )  # fmt: skip
        if self.launched_s is not None:
            left.launch(self.launched_s)
        for run in running:
            run.task = left
            left.add_running(run)
        if self.state.is_overdue:
            left.set_overdue()
        left.cancel()
        left.errors.append("the cache has forgotten everything after an error")
        return left

    def launch(self, now: float) -> None:
        """Every op of its graph is open from now on."""
        self.state, self.launched_s = TaskState.READY, now
        self.open_ops = _NONE_OPEN.copy()
        for op in self.plan.graph.ops:
            self.open_ops[op.kind] += 1

    def add_running(self, run: OpRun) -> None:
        """One of its ops was given to executors."""
        self.running[run.op.op_id] = run
        if self.state is TaskState.READY:
            self.state = TaskState.RUNNING

    def cancel(self) -> None:
        """Its caller wants it no more."""
        is_overdue = self.state.is_overdue
        self.state = TaskState.CANCELLING_OVERDUE if is_overdue else TaskState.CANCELLING

    def set_overdue(self) -> None:
        """One of its copies from or to the GPU has missed its deadline."""
        is_cancelled = self.state.is_cancelled
        self.state = TaskState.CANCELLING_OVERDUE if is_cancelled else TaskState.OVERDUE

    def end(self, status: KVStatus) -> None:
        self.state = _FINAL_STATE[status]

    # -- insight ---------------------------------------------------------------------------------

    @property
    def is_launched(self) -> bool:
        return self.launched_s is not None

    @property
    def is_gated_load(self) -> bool:
        """Whether it loads, once the engine opens its gate."""
        return self.gated and self.plan.kind is TaskKind.GET

    @property
    def gpu_ops_open(self) -> int:
        return sum(map(self.open_ops.__getitem__, GPU_OPS))

    @property
    def has_gpu_side(self) -> bool:
        return self.plan.kind is TaskKind.GET or self.plan.kind is TaskKind.PUT

    @property
    def is_answered(self) -> bool:
        """Whether its GPU side is over, so that the caller may reuse the slots."""
        # It was answered when its copy missed the deadline, although that may still land.
        if self.state.is_overdue:
            return True
        return self.is_launched and self.has_gpu_side and not self.gpu_ops_open

    @property
    def has_arrived(self) -> bool:
        """Whether a get has brought all that it was to bring."""
        is_wanted = not (self.state.is_cancelled or self.state.is_overdue)
        return is_wanted and self.contiguous(GPU_OPS, self.plan.start) == self.plan.num_blocks

    def ignores(self, op: TransferOp) -> bool:
        """Whether what the op moved no longer counts: nothing that still moved at a cancellation
        is published, nor what was copied from or to slots after the answer gave them back."""
        if self.state is TaskState.RUNNING:
            return False
        return self.state.is_cancelled or (self.state.is_overdue and op.kind.touches_gpu)

    def contiguous(self, kinds: Iterable[OpKind], start: int) -> int:
        """How many blocks from ``start`` on were moved without a gap by ops of these kinds."""
        results: dict[int, int] = {}
        for kind in kinds:
            results.update(self.moved.get(kind, {}))
        position = start
        while results.get(position, 0):
            position += results[position]
        return position - start

    def num_tail_units(self, kinds: Iterable[OpKind]) -> int:
        """How many units of its tail, if it has one, were moved without a gap by these kinds."""
        return 0 if self.plan.tail is None else self.contiguous(kinds, TAIL_FIRST)

    def result(self, is_final: bool) -> TaskResult:
        """How it ended, or its GPU side has."""
        # Each text once: the ranks of an engine tend to fail for the same reason.
        plan, error = self.plan, "; ".join(list(dict.fromkeys(self.errors))[:_MAX_ERRORS]) or None
        if self.state.is_cancelled:
            return TaskResult(KVStatus.CANCELLED, plan.offset, 0, self.num_tokens, error, is_final)
        has_tail = False
        if plan.kind is TaskKind.PREFETCH:
            on_host = plan.sources.get(TierName.CPU, 0)
            num_ok = on_host + self.contiguous(STAGED_LOAD_TIER, plan.start + on_host)
        elif plan.kind is TaskKind.STORE:
            num_ok = sum(sum(moved.values()) for moved in self.moved.values())
        else:
            num_ok = self.contiguous(GPU_OPS, plan.start)
        if plan.tail is not None and plan.kind is not TaskKind.STORE:
            num_ok, has_tail = self._with_tail(plan, plan.tail, num_ok)
        num_ok = max(0, num_ok - plan.num_beside)
        status = KVStatus.SUCCESS if num_ok or has_tail else KVStatus.FAILED
        return TaskResult(status, plan.offset, num_ok, self.num_tokens, error, is_final)

    def _with_tail(self, plan: Plan, tail: PlannedTail, num_ok: int) -> tuple[int, bool]:
        """How many blocks arrived, and whether a put has stored the tail.

        What a get or prefetch brings is of use only with all of the tail.
        """
        kinds = STAGED_LOAD_TIER if plan.kind is TaskKind.PREFETCH else GPU_OPS
        is_moved = any(op.kind in kinds and op.first >= TAIL_FIRST for op in plan.graph.ops)
        is_whole = self.num_tail_units(kinds) == (len(tail.units) if is_moved else 0)
        if plan.kind is TaskKind.PUT:
            return num_ok, is_moved and is_whole
        has_blocks = num_ok == plan.num_blocks or not plan.has_dense
        return plan.num_blocks if has_blocks and is_whole else 0, is_whole and has_blocks


@dataclass(slots=True, eq=False)
class OpRun:
    """An op that executors carry out, and in the end how that went."""

    task: Task
    op: TransferOp
    started_s: float | None
    """None if it ended without having been given to any executor."""
    waiting_for: dict[str, None]
    """Executors that have not reported yet."""
    num_ok: int
    bad_block: bool = False
    """Whether the block after the first ``num_ok`` is unreadable or has wrong bytes."""
    error: str | None = None
    device_bytes: int = 0
    """What the disk worker moved on the device."""
    counts_late: bool = False
    """Whether its time is counted when it has ended: ranks are given it before they may begin."""
    copy_s: float = 0.0
    """What the copies then took; 0 if no rank has told."""
    store_failed: bool = False
    """Whether the remote store, not a single block, was at fault."""


@dataclass(slots=True, eq=False)
class Session:
    """A session of a serving engine, and its open tasks."""

    session: SessionId
    engine: str
    executors: dict[OpKind, tuple[str, ...]]
    last_id: TaskId
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    store_backlog: int = 0
    roots: dict[RootId, None] = field(default_factory=dict)
    """Under which it has matched since its weights had another name; not more than `MAX_ROOTS`."""
    named_at: int = 0
    """How often the remote tier had been cleared when its weights were named last."""
    prefill_blocks_per_s: float = 0.0
    """What the engine computes: whatever would take longer to load is not loaded for it."""
    is_gone: bool = False
    totals: TotalsStats = field(default_factory=TotalsStats)

    def uses(self, root: RootId) -> None:
        """The engine has matched a prompt under this root."""
        if root not in self.roots:
            if len(self.roots) >= MAX_ROOTS:
                del self.roots[next(iter(self.roots))]
            self.roots[root] = None

    def take_id(self, task_id: TaskId) -> None:
        """Raises `ValueError` for an id that is not above all earlier ones."""
        # Ids rise, so no table of ended tasks is needed to tell an old id from one never given out.
        if task_id <= self.last_id:
            raise ValueError(f"task {task_id} was given out before")
        self.last_id = task_id

    def require_known(self, task_id: TaskId) -> None:
        """Raises `KeyError` for an id that was never given out."""
        if not id_before(self.session) < task_id <= self.last_id:
            raise KeyError(f"task {task_id} was never given out")


def check_slot_mappings(task_ids: Sequence[int], gpu_blocks: Sequence[object]) -> None:
    """Raise `ValueError` unless each task is named once and has its blocks."""
    if len(task_ids) != len(gpu_blocks):
        raise ValueError(f"{len(task_ids)} tasks need as many slot mappings, not {len(gpu_blocks)}")
    if len(set(task_ids)) != len(task_ids):
        raise ValueError("task_ids name a task twice")


def check_launchable(
    task_id: int, kind: TaskKind, is_launched: bool, num_blocks: int, blocks: BlockIds
) -> None:
    """Raise `ValueError` if a task was launched before, or needs another number of GPU blocks."""
    if is_launched:
        raise ValueError(f"task {task_id} was launched before")
    if kind is not TaskKind.PREFETCH and len(blocks) != num_blocks:
        raise ValueError(
            f"task {task_id} needs slots for {num_blocks} blocks, {len(blocks)} were given"
        )


_SHORTEST_LOAD_PATIENCE_S = 0.25  # however fast the engine computes


def load_patience_s(num_blocks: int, prefill_blocks_per_s: float, longest_s: float) -> float:
    """Return how long to wait for a load: no longer than computing its blocks would take.

    Args:
        prefill_blocks_per_s: How fast the engine computes; 0 if unknown.
    """
    if prefill_blocks_per_s <= 0:
        return longest_s
    return min(longest_s, max(_SHORTEST_LOAD_PATIENCE_S, num_blocks / prefill_blocks_per_s))


class TaskDeadlines:
    """Remembers until when each task may wait for its launch or for the remote store.

    Args:
        match_ttl_s: How long a match may remain unlaunched.
        longest_load_s: How long a get waits for the remote store at most.
    """

    def __init__(self, match_ttl_s: float, longest_load_s: float) -> None:
        self.match_ttl_s = match_ttl_s
        self._longest_load_s = longest_load_s
        self._unlaunched: OrderedDict[TaskId, float] = OrderedDict()
        """The oldest match comes first."""
        self._loads: list[tuple[float, TaskId]] = []

    @property
    def num_unlaunched(self) -> int:
        return len(self._unlaunched)

    def matched(self, task_id: TaskId, now: float) -> None:
        self._unlaunched[task_id] = now + self.match_ttl_s

    def launched(self, task: Task, now: float) -> None:
        """A get waits for another host no longer than computing its blocks would take."""
        self._unlaunched.pop(task.task_id, None)
        sources = task.plan.sources
        is_from_afar = TierName.PEER in sources or TierName.REMOTE in sources
        if task.plan.kind is TaskKind.GET and is_from_afar:
            rate = task.owner.prefill_blocks_per_s
            patience_s = load_patience_s(task.plan.num_blocks, rate, self._longest_load_s)
            heapq.heappush(self._loads, (now + patience_s, task.task_id))

    def cancelled(self, task_id: TaskId) -> None:
        self._unlaunched.pop(task_id, None)

    def take_late_load(self, now: float) -> TaskId | None:
        """A get that has waited long enough for the remote store; it may have ended since."""
        if self._loads and self._loads[0][0] <= now:
            return heapq.heappop(self._loads)[1]
        return None

    def take_unlaunched(self, now: float) -> TaskId | None:
        """A match whose time to be launched is up."""
        if self._unlaunched and next(iter(self._unlaunched.values())) <= now:
            return self._unlaunched.popitem(last=False)[0]
        return None

    def next(self) -> float | None:
        """When one of these has something to return at the earliest."""
        times = [self._loads[0][0]] if self._loads else []
        if self._unlaunched:
            times.append(next(iter(self._unlaunched.values())))
        return min(times, default=None)

    def check(self, unlaunched: list[TaskId]) -> None:
        """Raise `InternalError` unless exactly these tasks, oldest first, await their launch."""
        if unlaunched != list(self._unlaunched):
            raise InternalError("tasks that wait for their launch and those watched disagree")


_MAX_ENGINES = 4096
_INTERNAL = make_session(0, 0xFFFF)  # no server has the epoch 0


class TaskSessions:
    """Registry of sessions and of their open tasks.

    Args:
        load_ranks: Ranks that must all execute an H2D.
        store_ranks: Ranks that must all execute a D2H: one for each shard.
    """

    def __init__(self, load_ranks: Sequence[int], store_ranks: Sequence[int]) -> None:
        self._load_ranks = tuple(load_ranks)
        self._store_ranks = tuple(store_ranks)
        self._sessions: dict[SessionId, Session] = {}
        self._of_engines: dict[str, list[Session]] = {}
        """The same, by engine: rarely more than one each."""
        self._disputed: set[str] = set()
        """Engines whose tasks might move another engine's bytes."""
        self._weights: dict[str, int] = {}
        self.tasks: dict[TaskId, Task] = {}
        """All open tasks."""
        self.internal = self.add(_INTERNAL, "")
        self._internal_ids = TaskIds(_INTERNAL)

    def add(self, session: SessionId, engine: str) -> Session:
        loads = tuple(device(engine, rank) for rank in self._load_ranks)
        stores = tuple(device(engine, rank) for rank in self._store_ranks)
        executors: dict[OpKind, tuple[str, ...]] = {k: (n,) for k, n in WORKER_OF.items()}
        executors |= dict.fromkeys(GPU_LOADS, loads) | dict.fromkeys(GPU_STORES, stores)
        added = Session(session, engine, executors, id_before(session))
        self._sessions[session] = added
        self._of_engines.setdefault(engine, []).append(added)
        return added

    def succeed(self, former: TaskSessions) -> None:
        """Keep the sessions after everything was forgotten, without their tasks."""
        for before in list(former._sessions.values()):
            kept = self.add(before.session, before.engine)
            kept.last_id, kept.is_gone, kept.totals = before.last_id, before.is_gone, before.totals
            kept.prefill_blocks_per_s = before.prefill_blocks_per_s
            kept.named_at = before.named_at
        self.internal, self._internal_ids = self._sessions[_INTERNAL], former._internal_ids
        self._disputed, self._weights = former._disputed, former._weights

    def get(self, session: SessionId) -> Session | None:
        return self._sessions.get(session)

    def of(self, task_id: TaskId) -> Session:
        """The session that gave out an id. Raises `KeyError` if there is none."""
        session = self._sessions.get(session_of(task_id))
        if session is None:
            raise KeyError(f"task {task_id} was never given out")
        return session

    def of_engine(self, engine: str) -> list[Session]:
        return list(self._of_engines.get(engine, ()))

    def of_engines(self) -> list[Session]:
        """All but the internal one."""
        return [session for session in self._sessions.values() if session is not self.internal]

    def dispensable(self) -> list[TaskId]:
        """Tasks that engines can do without: neither gated loads, which they may count on, nor
        writes below the GPU."""
        return [
            task_id
            for session in self.of_engines()
            for task_id, task in session.tasks.items()
            if not task.is_answered and not task.is_gated_load
        ]

    def forget_if_gone(self, session: Session) -> None:
        """A session that has ended is kept until the last of its tasks has."""
        if session.is_gone and not session.tasks and session.session in self._sessions:
            del self._sessions[session.session]
            of_engine = self._of_engines[session.engine]
            of_engine.remove(session)
            if not of_engine:
                del self._of_engines[session.engine]
                self._weights.pop(session.engine, None)

    # -- tasks -----------------------------------------------------------------------------------

    def open(self, task: Task) -> None:
        self.tasks[task.task_id] = task.owner.tasks[task.task_id] = task
        task.owner.store_backlog += task.plan.num_backlogged

    def launchable(
        self, task_ids: Sequence[TaskId], gpu_blocks: Sequence[BlockIds]
    ) -> tuple[list[tuple[Task, BlockIds]], list[TaskId]]:
        """Check a launch; return the tasks to start, and the ids of those that have ended.

        Raises:
            ValueError: A number of blocks is wrong, or a task was launched before.
            KeyError: An id was never given out.
        """
        check_slot_mappings(task_ids, gpu_blocks)
        to_start: list[tuple[Task, BlockIds]] = []
        had_ended: list[TaskId] = []
        for task_id, blocks in zip(task_ids, gpu_blocks, strict=True):
            task = self.tasks.get(task_id)
            if task is None:
                self.of(task_id).require_known(task_id)
                had_ended.append(task_id)
                continue
            plan = task.plan
            check_launchable(task_id, plan.kind, task.is_launched, plan.num_gpu_blocks, blocks)
            to_start.append((task, blocks))
        return to_start, had_ended

    def internal_task(self, plan: Plan) -> Task:
        """A new task of the internal session."""
        self.internal.last_id = task_id = self._internal_ids.next()
        return Task(task_id, self.internal, plan, num_tokens=0)

    def puts_of(self, session_id: str | None) -> list[Plan]:
        """Return the plans of the open puts of a user's session."""
        return [
            task.plan
            for task in self.tasks.values()
            if session_id is not None
            and task.session_id == session_id
            and task.plan.kind is TaskKind.PUT
        ]

    def close(self, task: Task) -> None:
        """The task has ended, and with it its backlog."""
        del self.tasks[task.task_id], task.owner.tasks[task.task_id]
        task.owner.store_backlog -= task.plan.num_backlogged

    @property
    def num_open(self) -> int:
        return len(self.tasks)

    # -- engines ---------------------------------------------------------------------------------

    def report_prefill(self, session: SessionId, blocks_per_s: float) -> None:
        """How fast the engine computes, for load or recompute."""
        self._sessions[session].prefill_blocks_per_s = blocks_per_s

    @property
    def highest_prefill_rate(self) -> float:
        """Blocks per second of the engine that computes fastest; 0 if none has said."""
        return max(session.prefill_blocks_per_s for session in self._sessions.values())

    def set_disputed(self, engine: str, is_disputed: bool) -> None:
        (self._disputed.add if is_disputed else self._disputed.discard)(engine)

    def set_weights(self, engine: str, generation: int) -> None:
        """The weights of an engine are of this generation from now on."""
        if len(self._weights) > _MAX_ENGINES:  # without a session most of them: told again with it
            self._weights = {e: g for e, g in self._weights.items() if e in self._of_engines}
        self._weights[engine] = generation

    def has_weights(self, engine: str, generation: int) -> bool:
        """Whether they are now."""
        return self._weights.get(engine, 0) == generation

    def take_unused_roots(self, engine: str) -> list[RootId]:
        """Return the roots that an engine has used so far, and none of the others uses."""
        own = self.of_engine(engine)
        unused = dict.fromkeys(root for session in own for root in session.roots)
        # They have been renamed: from now on they use others.
        for session in own:
            session.roots = {}
        others = set().union(*(session.roots for session in self.of_engines()))
        return [root for root in unused if root not in others]

    def is_disputed(self, engine: str) -> bool:
        return engine in self._disputed

    def uses_gpu_of(self, engine: str) -> bool:
        """Whether tasks can still be copying from or to the slots of an engine of this name."""
        return any(
            task.gpu_ops_open or not task.is_answered
            for session in self._of_engines.get(engine, ())
            for task in session.tasks.values()
        )

    def num_with_tasks(self, including: Session) -> int:
        """Sessions that have open tasks, counting this one in any case."""
        return sum(bool(s.tasks) or s is including for s in self._sessions.values())

    # -- insight ---------------------------------------------------------------------------------

    def totals_of(self, session: SessionId) -> TotalsStats:
        return self._sessions[session].totals

    def num_open_of(self, session: SessionId) -> int:
        return len(self._sessions[session].tasks)

    def by_state(self) -> dict[str, int]:
        """Open tasks by state."""
        counts = {state.reported.value: 0 for state in TaskState if not state.is_final}
        for task in self.tasks.values():
            counts[task.state.reported.value] += 1
        return counts

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(open tasks)."""
        owned = [task_id for session in self._sessions.values() for task_id in session.tasks]
        if sorted(owned) != sorted(self.tasks):
            raise InternalError("sessions and open tasks disagree")
        for session in self._sessions.values():
            backlog = sum(task.plan.num_backlogged for task in session.tasks.values())
            if session.store_backlog != backlog:
                raise InternalError(
                    f"session {session.session} counts {session.store_backlog} blocks "
                    f"of backlog, its tasks have {backlog}"
                )
            if session.is_gone and not session.tasks:
                raise InternalError(f"session {session.session} is gone and still kept")
        for task_id, task in self.tasks.items():
            if task.state.is_final:
                raise InternalError(f"task {task_id} has ended and is still kept open")
            if not task.is_launched and any(task.open_ops.values()):
                raise InternalError(f"task {task_id} has open ops without a launch")
