"""KVTaskEngine: the life of every get, put and prefetch, from match to final response.

    CREATED --launch--> READY --first op starts--> RUNNING --last op ends--> COMPLETED | FAILED
       |                  |                           |
       +------------------+----------cancel-----------+--ops that run end first--> CANCELLED

A state machine without I/O: it takes calls and events, each with the time, and leaves instructions
that the shell around it takes out (`take_instructions`) and carries out. The engine makes tasks,
launches and cancels them; `TaskRunner` runs them; `Executors` has their ops carried out;
`TaskSessions` keeps them; `Accounts` counts.

Not thread-safe: the shell holds a lock around each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.plan import Plan
from flexcache.cache.restore import Records, RestoreReport, Seconds
from flexcache.cache.tiered_cache import TieredCache
from flexcache.errors import InternalError
from flexcache.ids import (
    OpId,
    OpKind,
    SessionId,
    TaskId,
    TaskKind,
    TierName,
)
from flexcache.tasks.accounts import Accounts
from flexcache.tasks.checksums import Checksums, SlotChecksums
from flexcache.tasks.deadlines import TaskDeadlines
from flexcache.tasks.early_tasks import EarlyTasks
from flexcache.tasks.executors import Executors
from flexcache.tasks.instructions import REMOTE, Instruction
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.matching import Matcher
from flexcache.tasks.model import Session, Task
from flexcache.tasks.queries import TaskQueries
from flexcache.tasks.recorder import Recorder
from flexcache.tasks.runner import TaskRunner
from flexcache.tasks.sessions import TaskSessions
from flexcache.transfer.breaker import CircuitBreaker
from flexcache.transfer.graph import BlockIds


class KVTaskEngine:
    """Tasks over a planner and a scheduler.

    Args:
        cache: The planner with its tiers.
        block_bytes: Bytes of one block over all ranks, for the counters.
        load_ranks: Ranks that must all execute an H2D.
        store_ranks: Ranks that must all execute a D2H: one for each shard.
        op_timeout_s: Deadline of an op.
        remote_timeout_s: Deadline of an op of the remote store.
        lookup_timeout_s: How long a match may wait for what the remote store has.
        match_ttl_s: A task that is not launched within this time is cancelled.
        max_open_tasks: Limit for one session; beyond it a get is a miss and a put is dropped.

    Attributes:
        queries: Answers questions about tasks, executors and the remote store.
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
        self._sessions = TaskSessions(load_ranks, store_ranks)
        self._accounts = Accounts(block_bytes, cache.tiers.lost, cache.loads)
        self._breaker = CircuitBreaker()
        self._instructions: list[Instruction] = []
        ssd = cache.tiers.by_name.get(TierName.SSD)
        self._checksums = SlotChecksums(0 if ssd is None else ssd.capacity)
        self._executors = Executors(
            cache.tiers, self._breaker, self._checksums, self._accounts, self._instructions,
            block_bytes=block_bytes, op_timeout_s=op_timeout_s,
            remote_timeout_s=remote_timeout_s,
        )  # fmt: skip
        self._lookups: RemoteLookUps | None = None
        if cache.tiers.remote is not None:
            self._lookups = RemoteLookUps(cache.tiers.remote, self._breaker, lookup_timeout_s)
        self._runner = TaskRunner(
            cache, self._sessions, self._executors, self._accounts, self._instructions
        )
        self._matcher = Matcher(
            cache, self._sessions, self._executors, self._lookups, self._instructions,
            max_open_tasks,
        )  # fmt: skip
        self._early = EarlyTasks(cache, self._sessions, self._matcher, self._runner)
        self._deadlines = TaskDeadlines(match_ttl_s, remote_timeout_s)
        self.queries = TaskQueries(
            cache, self._sessions, self._executors, self._accounts, self._deadlines,
            self._lookups, self._breaker,
        )  # fmt: skip

    # -- sessions --------------------------------------------------------------------------------

    def add_session(self, session: SessionId, engine: str) -> None:
        """A serving engine may make tasks from now on.

        Args:
            engine: Its name; its ranks' executors are ``device(engine, rank)``.
        """
        self._sessions.add(session, engine)
        self._accounts.session_began(session, engine)

    def end_session(self, session: SessionId, now: float) -> None:
        """The engine is gone: its tasks are cancelled, except for what goes on below the GPU.

        The session is forgotten once the last of them has ended.
        """
        owner = self._sessions.get(session)
        if owner is None:
            return
        owner.is_gone = True
        self._accounts.session_ended(session)
        self._cancel_unanswered([owner], now)
        self._sessions.forget_if_gone(owner)

    def report_prefill(self, session: SessionId, blocks_per_s: float) -> None:
        """How fast the engine computes, for load or recompute."""
        self._sessions.report_prefill(session, blocks_per_s)

    def set_disputed(self, engine: str, is_disputed: bool, now: float) -> None:
        """Cancel what sessions of this name have open, and match nothing for them meanwhile."""
        self._sessions.set_disputed(engine, is_disputed)
        if is_disputed:
            self._cancel_unanswered(self._sessions.of_engine(engine), now)

    def set_weights(self, engine: str, generation: int, is_other: bool, now: float) -> None:
        """The weights of an engine are of this generation: what it has open is cancelled, and
        nothing is matched for another one.

        Args:
            is_other: They have another name too: what it has stored so far is due first, unless
                others use it.
        """
        self._sessions.set_weights(engine, generation)
        if is_other and (remote := self.cache.tiers.remote) is not None:
            for session in self._sessions.of_engine(engine):
                session.named_at = remote.num_clears
        self._cancel_unanswered(self._sessions.of_engine(engine), now)
        if is_other:
            for root in self._sessions.take_unused_roots(engine):
                self.cache.tiers.retire(root)

    def _cancel_unanswered(self, sessions: Iterable[Session], now: float) -> None:
        """Cancel what callers wait for, but not writes below the GPU."""
        for session in sessions:
            self.cancel([t for t, task in session.tasks.items() if not task.is_answered], now)

    # -- calls of the engine's adapter -----------------------------------------------------------

    def look_up(
        self, kind: TaskKind, keys: PromptKeys, stop: int, now: float,
        session: SessionId | None = None,
    ) -> int | None:  # fmt: skip
        """Ask the remote store what it has of a prompt, where that may matter to a `match`.

        Returns:
            The question to wait for (`is_looking_up`, or `LookUpEnded`); None if nothing is asked.
        """
        owner = None if session is None else self._sessions.get(session)
        return self._matcher.look_up(kind, keys, stop, now, owner)

    def awaits_load(self, session: SessionId, keys: PromptKeys, stop: int, now: float) -> bool:
        """Whether a get that can wait should ask again a little later (`EarlyTasks`)."""
        return self._early.awaits(session, keys, stop, now)

    def match(
        self, task_id: TaskId, kind: TaskKind, keys: PromptKeys, start: int, stop: int,
        num_tokens: int, now: float, retain_s: float = 0.0, tail_at: int = 0,
        session_id: str | None = None, weights: int = 0, adapter: str = "",
    ) -> Plan:  # fmt: skip
        """Make a task for blocks ``[start, stop)`` of a prompt. An empty one has ended already.

        Arguments as for `Prompt`.

        Raises:
            ValueError: The id is not above all earlier ones of its session.
            KeyError: There is no such session.
        """
        owner = self._sessions.of(task_id)
        owner.take_id(task_id)
        plan, keys, start, stop = self._matcher.plan(
            owner, task_id, kind, keys, start, stop, retain_s, now, tail_at, weights
        )
        task = Task(task_id, owner, plan, num_tokens, session_id=session_id, adapter=adapter)
        if start < stop or kind is TaskKind.PUT:  # else it only looks the prompt up
            self.cache.sessions.used(session_id, keys, plan)
        if kind is TaskKind.GET:
            task.early = self.cache.early.find(keys)
        self._accounts.matched(task, keys, start, stop, retain_s, now)
        if not plan.is_empty:
            self._sessions.open(task)
            self._deadlines.matched(task_id, now)
            return plan
        self.cache.finish(plan)
        self._runner.end_empty(task)
        if kind is TaskKind.PUT and start < stop and not plan.dropped and self.cache.tiers.lower:
            store = self._matcher.plan_store(plan, owner, keys, start, stop, retain_s, tail_at)
            self._runner.store(store, now)
        return plan

    def launch(
        self, task_ids: Sequence[TaskId], gpu_blocks: Sequence[BlockIds], now: float,
        gated: bool = False,
    ) -> list[TaskId]:  # fmt: skip
        """Start tasks with their GPU blocks (`Launch`). All are checked before any is started.

        Returns:
            Those that had ended before: cancelled, say. They stay as they are.
        """
        to_start, had_ended = self._sessions.launchable(task_ids, gpu_blocks)
        for task, blocks in to_start:
            task.gated = gated
            task.plan.bind_gpu_blocks(blocks)
            self._deadlines.launched(task, now)
            self._runner.run(task, now)
        return had_ended

    def cancel(self, task_ids: Iterable[TaskId], now: float) -> list[TaskId]:
        """Stop what has not started; pin no prefetched blocks. Idempotent. Checks all ids first.

        Returns:
            Those that were never launched and have ended by this.
        """
        to_cancel, unlaunched = list(task_ids), []
        for task_id in to_cancel:
            self._sessions.of(task_id).require_known(task_id)
        for task_id in to_cancel:
            task = self._sessions.tasks.get(task_id)
            if task is None:
                self.cache.early.cancel(task_id, now)
            if task is None or task.state.is_cancelled:
                continue
            task.cancel()
            self._accounts.cancelled(task)
            if task.is_launched:
                self._runner.stop(task, now)
            else:
                unlaunched.append(task_id)
                self._deadlines.cancelled(task_id)
                self._runner.end_unmoved(task, now)
        return unlaunched

    def close_down(self, now: float) -> None:
        """Cancel what engines can do without, and write what is dirty."""
        self.cancel(self._sessions.dispensable(), now)
        self.cache.stores.begin_closing()
        self._runner.follow(now)

    # -- events ----------------------------------------------------------------------------------

    def adopt_layout(self, layout: bytes, now: float) -> None:
        """Keep blocks under this layout (a digest) from now on.

        Tasks that were matched under another one are cancelled: their blocks' bytes mean something
        else to the ranks that move them now.
        """
        if self._matcher.adopt_layout(layout):
            self._cancel_unanswered(self._sessions.of_engines(), now)

    def restore(self, records: Records, ages_s: Seconds, now: float) -> RestoreReport:
        """Index what the SSD tier was found to hold at startup, written this long ago."""
        self._checksums.restore(records)
        return self.cache.restore(records, ages_s, now)

    def executor_up(self, executor: str, is_direct: bool = False) -> None:
        """An executor serves, GPU to SSD too if ``is_direct``. Waiting ops start in `tick`."""
        self._executors.up(executor, is_direct)

    def executor_down(self, executor: str, reason: str, now: float) -> None:
        """An executor is gone, and with it all that it was moving."""
        if executor == REMOTE and self._lookups is not None:
            self._breaker.trip(reason, now)
            self._lookups.give_up(now, self._instructions)
        self._runner.settle(self._executors.down(executor, reason, now), now)

    def looked_up(
        self, lookup_id: int, num_present: int, error: str | None, now: float, tail: int = -1
    ) -> None:
        """The remote worker has answered a question."""
        if self._lookups is not None:
            self._lookups.looked_up(
                lookup_id, max(0, num_present), error, now, self._instructions, tail
            )
            self._runner.settle(self._executors.sync(), now)

    def op_done(
        self, executor: str, op_id: OpId, num_ok: int, now: float, *, error: str | None = None,
        bad_block: bool = False, checksums: Checksums | None = None, device_bytes: int = 0,
    ) -> None:  # fmt: skip
        """An executor has ended its part of an op with the first ``num_ok`` blocks moved.

        ``bad_block``: the next one is unreadable or has wrong bytes. ``checksums``: of the blocks
        written to a tier that verifies. ``device_bytes``: what the SSD had to move.
        """
        report = error, bad_block, checksums, device_bytes
        self._runner.settle(self._executors.done(executor, op_id, num_ok, now, *report), now)

    def tick(self, now: float) -> None:
        """Let deadlines pass, and write what is due to tiers that are available again."""
        self.cache.tick(now)
        while (late := self._deadlines.take_late_load(now)) is not None:
            task = self._sessions.tasks.get(late)
            if task is None or task.is_answered or not task.open_ops[OpKind.REMOTE2H]:
                continue  # else it is answered with what has come; a read under way ends in DRAM
            task.errors.append("the remote store takes longer than computing would")
            self._runner.end_unstarted(task, now)
        if self._lookups is not None:
            self._lookups.tick(now, self._executors.is_up(REMOTE), self._instructions)
        self._runner.settle(self._executors.sync(), now)
        self._runner.follow(now)
        while (unlaunched := self._deadlines.take_unlaunched(now)) is not None:
            reason = f"not launched within {self._deadlines.match_ttl_s:g} s"
            self._sessions.tasks[unlaunched].errors.append(reason)
            self.cancel([unlaunched], now)
        self._runner.expire(now)
        self._early.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        times = [self._deadlines.next(), self._executors.next_deadline()]
        times += [self.cache.next_deadline(), self._early.next_deadline()]
        if self._lookups is not None:
            times.append(self._lookups.next_deadline(self._executors.is_up(REMOTE)))
        return min((time for time in times if time is not None), default=None)

    def take_instructions(self) -> list[Instruction]:
        # The list itself stays: the parts of the engine that leave instructions share it.
        taken = self._instructions.copy()
        self._instructions.clear()
        return taken

    # -- insight ---------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder | None:
        """Follows what happens to sessions, tasks and ops, if there is one."""
        return self._accounts.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._accounts.recorder = recorder

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(everything)."""
        if self._lookups is not None and not self._lookups.check():
            raise InternalError("an open question to the store cannot be found or has no deadline")
        self._executors.check(self._sessions.tasks)
        self.cache.check()
        self._runner.check()
        self._sessions.check()
        tasks = self._sessions.tasks.items()
        self._deadlines.check([task_id for task_id, task in tasks if not task.is_launched])
