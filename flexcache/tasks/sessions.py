"""Every open task and the sessions that own them.

Tasks belong to sessions of serving engines. What the cache does on its own account (writes to
lower tiers that no put waits for) are tasks too, of an internal session.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcache.cache.plan import Plan
from flexcache.errors import InternalError
from flexcache.ids import (
    OpKind,
    RootId,
    SessionId,
    TaskId,
    TaskIds,
    TaskState,
    id_before,
    make_session,
    session_of,
)
from flexcache.stats import TotalsStats
from flexcache.tasks.instructions import device
from flexcache.tasks.model import (
    GPU_LOADS,
    GPU_STORES,
    WORKER_OF,
    Session,
    Task,
    check_launchable,
    check_slot_mappings,
)
from flexcache.transfer.scheduler import BlockIds

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
