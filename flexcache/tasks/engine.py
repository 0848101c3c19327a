"""Task engine (`KVTaskEngine`): the life of every get, put and prefetch, from match to final
response.

    CREATED --launch--> READY --first op starts--> RUNNING --last op ends--> COMPLETED | FAILED
       |                  |                           |
       +------------------+----------cancel-----------+--ops that run end first--> CANCELLED

A state machine without I/O: it takes calls and events, each with the time, and leaves instructions
that the shell around it takes out (`take_instructions`) and carries out. The engine makes tasks,
launches and cancels them; `TaskRunner` runs them; `Executors` has their ops carried out;
`TaskSessions` keeps them; `Accounts` counts.

Whatever ends a change of state half-way (a bug, no memory, Ctrl-C in the engine's thread) leaves
indexes and leases in doubt, and a key may lead to another prompt's block. Nothing is mended: the
engine *forgets*. Empty parts take the place of all of them, with what a single step had set:

    sessions and the last id of each, executors that are up, ops that these have not reported

So a cache is right or empty. Calls check their arguments before they begin to change anything: what
a client sends never makes the engine forget.

Not thread-safe: the shell holds a lock around each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np

from flexcache.breaker import CircuitBreaker
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.control import CacheCall, CallOutcome
from flexcache.cache.drain import Portion, plan_takeover
from flexcache.cache.eviction_policy import EvictionPolicy, Study
from flexcache.cache.peers import PeerLoans
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.restore import Records, RestoreReport, Seconds
from flexcache.cache.tier import Lease
from flexcache.cache.tiered_cache import TieredCache
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpKind, RootId, SessionId, TaskId, TaskKind, TierName
from flexcache.stats import CacheIdentity, CacheStats, RemoteStats, TotalsStats
from flexcache.tasks.accounts import FAILING_S, Accounts
from flexcache.tasks.executors import Executors, SlotChecksums
from flexcache.tasks.instructions import (
    PEER,
    REMOTE,
    DiscardObjects,
    EndLoan,
    EraseDeleted,
    Forgotten,
    Instruction,
    Lend,
    Offer,
    PromisedLoad,
    RunLookUp,
    RunOp,
    TaskAnswered,
)
from flexcache.tasks.lookups import RemoteLookUps, look_ups_of
from flexcache.tasks.matching import Matcher
from flexcache.tasks.model import (
    DEFAULT_LIMITS,
    ENDS,
    WORKERS,
    OpRun,
    Session,
    Task,
    TaskDeadlines,
    TaskLimits,
    TaskSessions,
)
from flexcache.tasks.runner import TaskRunner
from flexcache.transfer.messages import Done, LookedUp, pack_ids
from flexcache.transfer.scheduler import BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class TaskQueries:
    """What the shell around `KVTaskEngine` asks of several of its parts; changes nothing."""

    _cache: TieredCache
    _sessions: TaskSessions
    _executors: Executors
    _accounts: Accounts
    _deadlines: TaskDeadlines
    _lookups: Mapping[str, RemoteLookUps]
    _breaker: CircuitBreaker
    _loans: PeerLoans

    def totals_of(self, session: SessionId) -> TotalsStats:
        """What a session has had of the cache."""
        return self._sessions.totals_of(session).snapshot()

    def stats(self, identity: CacheIdentity, now: float) -> CacheStats:
        """Statistics of the tiers and tasks of the cache with this identity."""
        cache, accounts, lookups = self._cache, self._accounts, self._lookups.get(REMOTE)
        remote = None
        if lookups is not None:
            is_available = TierName.REMOTE not in cache.tiers.unavailable
            remote = RemoteStats(
                available=is_available, breaker=self._breaker.stats(), lookups=lookups.counters
            )
        tiers = cache.stats()
        # Derived: an op's kind names both its tiers, so a count of their own could only disagree.
        for kind, (source, target) in ENDS.items():
            num_bytes = accounts.totals.ops[kind].bytes
            if source in tiers:
                tiers[source].read_bytes += num_bytes
            if target in tiers:
                tiers[target].written_bytes += num_bytes
        live = CacheStats(
            identity=identity,
            totals=accounts.totals,
            tiers=tiers,
            tasks=self._sessions.by_state(),
            hit_rate=accounts.hit_rate(now),
            op_seconds={kind.value: each for kind, each in accounts.op_seconds.items()},
            task_seconds={kind.value: each for kind, each in accounts.task_seconds.items()},
            queues=self._executors.queues(),
            unlaunched_tasks=self._deadlines.num_unlaunched,
            open_lookups=sum(each.num_open for each in self._lookups.values()),
            store_backlog_blocks=cache.stores.backlog,
            early_loads=cache.early.counters.snapshot(open_blocks=cache.early.num_blocks),
            sessions=cache.sessions.counters.snapshot(known=len(cache.sessions)),
            control=cache.control.stats(),
            retention_s=cache.tiers.host.retention_s,
            remote=remote,
            peers=None if cache.tiers.peer is None else self._loans.stats(),
            load_cost=None if cache.loads.cost is None else cache.loads.cost.stats(),
            failing={
                kind.value: failure.error
                for kind, failure in accounts.failures.items()
                if now < failure.at_s + FAILING_S
            },
        )
        return live.snapshot()

    def is_looking_up(self, lookup_id: int) -> bool:
        """Whether a question to the remote store or to peers is still open."""
        return any(each.is_open(lookup_id) for each in self._lookups.values())

    @property
    def store_outage(self) -> str | None:
        """Why the breaker of the remote store is open; None while it is closed."""
        return None if self._breaker.is_closed else self._breaker.last_reason

    def dirty_blocks(self) -> dict[TierName, int]:
        """Blocks that wait to be written back, by the tiers for which some do."""
        counts = {tier: self._cache.stores.num_dirty(tier) for tier in WORKERS}
        return {tier: count for tier, count in counts.items() if count}

    @property
    def num_held_up(self) -> int:
        """Dirty blocks that wait for the worker of their tier, for the end of its clearing, or for
        the limit of writes to it."""
        stores, tiers = self._cache.stores, self._cache.tiers
        return sum(
            stores.num_dirty(tier)
            for tier, worker in WORKERS.items()
            if not self._executors.is_up(worker)
            or tiers.is_withheld(tier)
            or stores.throttled_until(tier)
        )


class _Change:
    """Marks the engine as in doubt while its state changes.

    If the change fails the engine forgets. If that fails too, or an interrupt comes between two
    steps of this class, the mark stays, and the next change begins with it. A class, since a
    generator takes three times as long.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: KVTaskEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        engine = self._engine
        if engine.is_in_doubt:
            engine.forget(None)
        engine.is_in_doubt = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:
            self._engine.is_in_doubt = False
        else:
            self._engine.forget(error)


class Takeover(NamedTuple):
    """What is being read of what a peer has handed over.

    Attributes:
        keys: Of the prompt, as far as it is handed over.
        leases: On DRAM, of blocks and of a tail.
        task_id: None if there is nothing to read.
    """

    cache: TieredCache
    keys: BlockKeys
    leases: list[Lease]
    task_id: TaskId | None

    @classmethod
    def begin(
        cls, tasks: KVTaskEngine, portion: Portion, peer: str, most: int, now: float
    ) -> Takeover:
        """Begin to read what a peer hands over before it goes, as of `plan_takeover`."""
        with tasks.change:
            tasks.cache.tiers.advance(now)
            plan = plan_takeover(tasks.cache, portion, peer, most)
            tail = None if plan.tail is None else plan.tail.staging
            leases = [lease for lease in (plan.staging, tail) if lease is not None]
            keys = EngineBlockKeys(portion.root, portion.keys, len(portion.keys))
            return cls(tasks.cache, keys, leases, tasks._runner.store(plan, now))

    def is_over(self, tasks: KVTaskEngine) -> bool:
        """Whether what has come can be found. It may wait for another portion's blocks."""
        if tasks.cache is not self.cache:
            return True  # forgotten
        if self.task_id in tasks.sessions.tasks or any(lease.waiting for lease in self.leases):
            return False
        # Others may read some of its blocks: whether they come is not known before they have.
        host, keys = self.cache.tiers.host, self.keys
        return host.num_in_flight(keys, host.index.match(keys).num_blocks, keys.num_blocks) == 0


def stage_for_peer(
    tasks: KVTaskEngine, root: RootId, key: BlockKey, num_units: int, now: float
) -> None:
    """Begin to bring to DRAM what SSD has of a prompt (`Matcher.stage`)."""
    with tasks.change:
        tasks._matcher.stage(root, key, num_units, now)


class KVTaskEngine:
    """Tasks over a planner and a scheduler.

    Args:
        cache: The planner with its tiers.
        limits: Of its engines' ranks, and of time.

    Attributes:
        is_in_doubt: Whether its state is being changed, or the last change has failed half-way.
        executors: To be asked only which are up, and what they run.
        sessions: To be asked only for what is open.
        queries: Answers questions about several parts.
        change: To be held while a part is changed from outside: `loans`.
        loans: What peers are lent.
        accounts: Counts; a `Recorder` that is set there follows sessions, tasks and ops.
    """

    def __init__(self, cache: TieredCache, limits: TaskLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self.is_in_doubt = False
        self.change = _Change(self)
        self.cache = cache
        self.sessions = TaskSessions(limits.load_ranks, limits.store_ranks)
        self.accounts = Accounts(limits.block_bytes, cache.tiers.lost, cache.loads)
        self._breaker = CircuitBreaker()
        self._instructions: list[Instruction] = []
        """All parts leave theirs here, in order, until `take_instructions`."""
        ssd = cache.tiers.by_name.get(TierName.SSD)
        self._checksums = SlotChecksums(0 if ssd is None else ssd.capacity)
        self.executors = Executors(
            cache.tiers, self._breaker, self._checksums, self.accounts, self._instructions, limits
        )
        if cache.tiers.remote is not None:
            cache.tiers.remote.on_void = self._discard_voided
        self._lookups = look_ups_of(cache, self._breaker, limits.lookup_timeout_s)
        self.loans = PeerLoans(cache.tiers)
        self._runner = TaskRunner(
            cache, self.sessions, self.executors, self.accounts, self._instructions
        )
        self._matcher = Matcher(
            cache, self.sessions, self.executors, self._runner, self._lookups,
            self._instructions, limits.max_open_tasks,
        )  # fmt: skip
        self._deadlines = TaskDeadlines(limits.match_ttl_s, limits.remote_timeout_s)
        self.queries = TaskQueries(
            cache, self.sessions, self.executors, self.accounts, self._deadlines,
            self._lookups, self._breaker, self.loans,
        )  # fmt: skip

    # -- after an error --------------------------------------------------------------------------

    def forget(self, error: BaseException | None) -> None:
        """Empty all tiers, as after a reset, and end all tasks: what is here is in doubt.

        Tasks of which executors still move bytes end once these have reported, and until the last
        of them has, none of the blocks that they read or write is used again.
        """
        now = self.cache.tiers.now
        runs = self.executors.under_way(self._instructions)
        cache, plan = self.cache.successor(_busy_blocks(runs))
        fresh = KVTaskEngine(cache, self._limits)
        fresh._take_over(self, runs, plan, now)
        fresh._instructions.append(Forgotten(error))
        parts = vars(fresh)
        del parts["change"]  # it marks that one
        vars(self).update(parts)  # in one step, which also ends the doubt

    def _take_over(self, former: KVTaskEngine, runs: list[OpRun], plan: Plan, now: float) -> None:
        # Answers that were decided are still sent, so their tasks must not be answered again.
        told = [left for left in former._instructions if isinstance(left, TaskAnswered)]
        # What no executor has been given yet must not begin: its blocks are free now.
        self._instructions += [
            left for left in former._instructions if not isinstance(left, RunOp | RunLookUp)
        ]
        self.sessions.succeed(former.sessions)
        self.accounts.succeed(former.accounts, runs, now)
        self.cache.tiers.lost = self.accounts.lost
        self.executors.succeed(former.executors, runs, now)
        for name, lookups in self._lookups.items():
            lookups.succeed(former._lookups[name], self._instructions)
        self.loans.succeed(former.loans)
        self._matcher.adopt_layout(former._matcher.layout)
        running: dict[TaskId, list[OpRun]] = {}
        for run in runs:
            running.setdefault(run.task.task_id, []).append(run)
        ended = {answer.task_id for answer in told if answer.result.is_final}
        have_heard = {answer.task_id for answer in told}
        tasks = []
        for task_id, task in former.sessions.tasks.items():
            owner = self.sessions.get(task.owner.session)
            if owner is None or (task_id in ended and task_id not in running):
                continue
            is_told = task.is_told or task_id in have_heard
            tasks.append(task.forgotten(owner, running.get(task_id, []), is_told))
        self._runner.keep_on(plan, tasks, now)
        for session in self.sessions.of_engines():
            self.sessions.forget_if_gone(session)

    def _take_in(self, event: Callable[..., object], *args: object) -> None:
        """Take in what has happened. If that fails it has happened all the same: it is taken in
        once more by an engine that has forgotten, and the server's loop goes on."""
        try:
            with self.change:
                event(*args)
        except BaseException as error:
            with self.change:
                event(*args)
            if not isinstance(error, Exception):
                raise

    # -- sessions --------------------------------------------------------------------------------

    def add_session(self, session: SessionId, engine: str) -> None:
        """A serving engine may make tasks from now on.

        Args:
            engine: Its name; its ranks' executors are ``device(engine, rank)``.
        """
        self._take_in(lambda: self.sessions.add(session, engine))
        self.accounts.session_began(session, engine)

    def end_session(self, session: SessionId, now: float, is_counted_on: bool = True) -> None:
        """The engine is gone: its tasks are cancelled, except for what goes on below the GPU and,
        as long as a step may count on its ranks, for what was promised. Idempotent.

        The session is forgotten once the last of them has ended.
        """

        def change() -> None:
            owner = self.sessions.get(session)
            if owner is None:
                return
            if not owner.is_gone:
                owner.is_gone = True
                self.accounts.session_ended(session)
                self._cancel_unanswered([owner], now)
            if not is_counted_on:
                self._cancel([t for t, task in owner.tasks.items() if task.is_promised], now)
            self.sessions.forget_if_gone(owner)

        self._take_in(change)

    def report_prefill(self, session: SessionId, blocks_per_s: float) -> None:
        """How fast the engine computes, for load or recompute."""
        self.sessions.report_prefill(session, blocks_per_s)

    def set_disputed(self, engine: str, is_disputed: bool, now: float) -> None:
        """Cancel what sessions of this name have open, and match nothing for them meanwhile."""

        def change() -> None:
            self.sessions.set_disputed(engine, is_disputed)
            if is_disputed:
                self._cancel_unanswered(self.sessions.of_engine(engine), now)

        self._take_in(change)

    def set_weights(self, engine: str, generation: int, is_other: bool, now: float) -> None:
        """The weights of an engine are of this generation: what it has open is cancelled, and
        nothing is matched for another one.

        Args:
            is_other: They have another name too: what it has stored so far is due first, unless
                others use it.
        """

        def change() -> None:
            self.sessions.set_weights(engine, generation)
            if is_other:
                for session in self.sessions.of_engine(engine):
                    session.named_at = self.cache.tiers.num_clears
            self._cancel_unanswered(self.sessions.of_engine(engine), now)
            if is_other:
                unused = self.sessions.take_unused_roots(engine)
                self.cache.control.end_roots(unused, "weights")
                self.cache.tiers.retire(unused)

        self._take_in(change)

    def _cancel_unanswered(self, sessions: Iterable[Session], now: float) -> None:
        """Cancel what callers wait for, but neither writes below the GPU nor what was promised."""
        # Writes below the GPU go on when an engine dies: their bytes are in DRAM and published.
        for session in sessions:
            unanswered = [
                task_id
                for task_id, task in session.tasks.items()
                if not task.is_answered and not task.is_promised
            ]
            self._cancel(unanswered, now)

    def session_hint(
        self, session_id: str, over: bool, returns_in_s: float | None, now: float
    ) -> bool:
        """Act on a hint about a user's session (`PromptSessions.hint`)."""
        with self.change:
            return self.cache.sessions.hint(session_id, over, returns_in_s, now)

    def control(self, call: CacheCall, now: float, session: SessionId | None = None) -> CallOutcome:
        """Carry out a user's call about what is cached (`CacheControl`).

        Args:
            session: Of the engine that calls; None if it is none.

        Raises:
            ValueError: The call makes no sense.
        """
        call.check()
        with self.change:
            cache, owner = self.cache, None if session is None else self.sessions.get(session)
            cache.tiers.advance(now)
            # What a restart has yet to index is in no tier, so it could not be deleted.
            if call.name == "delete":
                cache.finish_restoring()
            call = self._matcher.placed(owner, call)
            outcome = cache.control.carry_out(call, now, self.sessions.puts_of(call.session_id))
            for root, keys in outcome.objects.items():
                self._discard_objects(root, keys)
            cache.early.settle(now)  # what they waited for may not come any more
            if self.accounts.recorder is not None:
                self.accounts.recorder.controlled(call, outcome.blocks)
            return outcome

    def _discard_voided(self, lease: Lease) -> None:
        if (remote := self.cache.tiers.remote) is not None:
            remote.learn_voided(lease)
            self._discard_objects(lease.root, lease.keys[lease.limit :])

    def _discard_objects(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        if (remote := self.cache.tiers.remote) is not None and keys:
            self._instructions.append(DiscardObjects(remote.root_at_store(root), keys))

    # -- calls of the engine's adapter -----------------------------------------------------------

    def look_up(self, prompt: Prompt, now: float, session: SessionId | None = None) -> list[int]:
        """Ask peers and the remote store what they have of a prompt, where that may matter to a
        `match`.

        Returns:
            The questions to wait for (`is_looking_up`, or `LookUpEnded`).
        """
        with self.change:
            owner = None if session is None else self.sessions.get(session)
            return self._matcher.look_up(owner, prompt, now)

    def awaits_load(self, session: SessionId, prompt: Prompt, now: float) -> bool:
        """Whether a get that can wait should ask again a little later."""
        with self.change:
            return self._matcher.awaits_load(session, prompt, now)

    def match(self, task_id: TaskId, prompt: Prompt, now: float) -> Offer:
        """Make a task for a prompt. An empty one has ended already.

        Raises:
            ValueError: The id is not above all earlier ones of its session.
            KeyError: There is no such session.
        """
        plan = self._match(task_id, prompt, now)
        num_cached = max(0, (plan.num_cached or 0) - plan.num_before)
        return Offer(
            task_id, prompt.kind, prompt.num_tokens, plan.offset, plan.num_blocks, plan.sources,
            plan.num_gpu_blocks, plan.tail_at, num_cached,
        )  # fmt: skip

    def _match(self, task_id: TaskId, prompt: Prompt, now: float) -> Plan:
        if self.is_in_doubt:  # the last change has failed, and so has what was to follow from that
            self.forget(None)
        # Before the change: what a client sends must never make the engine forget.
        owner = self.sessions.of(task_id)
        owner.take_id(task_id)
        with self.change:
            cache, kind = self.cache, prompt.kind
            cache.tiers.advance(now)
            prompt, plan = self._matcher.plan(owner, prompt)
            keys = prompt.keys
            if kind is TaskKind.PREFETCH and not plan.is_empty:
                cache.early.begin(task_id, plan, keys, now)
            session_id, adapter = prompt.session_id, prompt.adapter
            task = Task(
                task_id, owner, plan, prompt.num_tokens, session_id=session_id, adapter=adapter
            )
            has_blocks = prompt.start < prompt.stop
            if has_blocks or kind is TaskKind.PUT:  # else it only looks the prompt up
                cache.sessions.used(session_id, keys, plan)
            if kind is TaskKind.GET:
                task.early = cache.early.find(keys)
            self.accounts.matched(task, prompt, now)
            if not plan.is_empty:
                self.sessions.open(task)
                self._deadlines.matched(task_id, now)
                return plan
            cache.finish(plan)
            self._runner.end_empty(task)
            # DRAM lacks nothing of it, but a tier below may: it evicted blocks, or was away.
            stores_below = kind is TaskKind.PUT and has_blocks and not plan.dropped
            if stores_below and cache.tiers.written:
                self._runner.store(self._matcher.plan_store(owner, prompt), now)
            return plan

    def launch(
        self, task_ids: Sequence[TaskId], gpu_blocks: Sequence[BlockIds], now: float,
        gated: bool = False,
    ) -> list[TaskId]:  # fmt: skip
        """Start tasks with their GPU blocks (`Launch`). All are checked before any is started.

        Returns:
            Those that had ended before: cancelled, say. They stay as they are.
        """
        if self.is_in_doubt:  # the last change has failed, and so has what was to follow from that
            self.forget(None)
        to_start, had_ended = self.sessions.launchable(task_ids, gpu_blocks)
        with self.change:
            for task, blocks in to_start:
                task.gated = gated
                task.plan.bind_gpu_blocks(blocks)
                self._deadlines.launched(task, now)
                self._runner.run(task, now)
        return had_ended

    def promise(self, task_id: TaskId, now: float) -> PromisedLoad | None:
        """Start a matched get from DRAM that its engine has its ranks carry out: until they have
        reported or the engine cancels it, its blocks stay where they are.

        Returns:
            None if it cannot be promised, and is to be launched.

        Raises:
            KeyError: The id was never given out.
        """
        if self.is_in_doubt:  # the last change has failed, and so has what was to follow from that
            self.forget(None)
        task = self.sessions.tasks.get(task_id)
        if task is None:
            self.sessions.of(task_id).require_known(task_id)
            return None
        ops, ranks = task.plan.graph.ops, task.owner.executors[OpKind.H2D]
        # The rank copies it without asking: what may have to wait, or be refused, is not promised.
        is_from_host = [op.kind for op in ops] == [OpKind.H2D] and task.plan.tail is None
        may_start = not task.is_launched and not task.state.is_cancelled
        if not (is_from_host and may_start and not task.adapter and self.executors.are_up(ranks)):
            return None
        with self.change:
            task.gated = task.is_promised = True
            # Only the ranks know the GPU blocks, and an op has some from its start on.
            task.plan.bind_gpu_blocks(np.zeros(task.plan.num_gpu_blocks, np.int64))
            self._deadlines.launched(task, now)
            self._runner.run(task, now)
        source = ops[0].src
        assert source is not None
        return PromisedLoad(task_id, ops[0].op_id, pack_ids(source))

    def cancel(self, task_ids: Iterable[TaskId], now: float) -> list[TaskId]:
        """Stop what has not started; pin no prefetched blocks. Idempotent. Checks all ids first.
        What was promised ends at once: no step may count on it.

        Returns:
            Those that were never launched and have ended by this.
        """
        if self.is_in_doubt:  # the last change has failed, and so has what was to follow from that
            self.forget(None)
        # Twice over the ids: an unknown one must not leave the others half cancelled.
        to_cancel = list(task_ids)
        for task_id in to_cancel:
            self.sessions.of(task_id).require_known(task_id)
        with self.change:
            for task_id in to_cancel:
                task = self.sessions.tasks.get(task_id)
                if task is not None and task.is_promised:
                    task.gated = False  # no rank was given it, so none hears of its end
            return self._cancel(to_cancel, now)

    def _cancel(self, task_ids: Iterable[TaskId], now: float) -> list[TaskId]:
        unlaunched = []
        for task_id in task_ids:
            task = self.sessions.tasks.get(task_id)
            # A prefetch that has ended left blocks pinned for its request.
            if task is None:
                self.cache.early.cancel(task_id, now)
            if task is None or (task.state.is_cancelled and not task.is_promised):
                continue
            if not task.state.is_cancelled:
                task.cancel()
                self.accounts.cancelled(task)
            if task.is_promised:
                self._runner.settle(self.executors.take_back(task, now), now)
            elif task.is_launched:
                self._runner.stop(task, now)
            else:
                unlaunched.append(task_id)
                self._deadlines.cancelled(task_id)
                self._runner.end_unmoved(task, now)
        return unlaunched

    def close_down(self, now: float) -> None:
        """Cancel what engines can do without, and write what is dirty."""

        def change() -> None:
            self._cancel(self.sessions.dispensable(), now)
            self.cache.stores.begin_closing()
            self._runner.follow(now)

        self._take_in(change)

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier that are not in use, or all of all tiers; return how many.

        Raises:
            ValueError: There is no such tier.
        """
        self.cache.tiers.require(tier)
        with self.change:
            num_dropped = self.cache.clear(tier)
            if tier is None:
                # A write that was planned before is not recorded: a restart would find it again.
                self.cache.stores.era += 1
            if self.accounts.recorder is not None:
                self.accounts.recorder.cleared(tier, num_dropped)
            return num_dropped

    def withhold_free(self, tier: TierName) -> Lease:
        """Keep a tier's free blocks from every plan until `give_back`."""
        with self.change:
            return self.cache.tiers.withhold_free(tier)

    def withhold_deleted(self, tier: TierName) -> Lease:
        """Keep blocks that were deleted, and free ones that may have records of before, from every
        plan until `give_back`."""
        with self.change:
            return self.cache.tiers.withhold_deleted(tier)

    def give_back(self, lease: Lease, are_erased: bool = False) -> None:
        """End `withhold_free` or `withhold_deleted`, whether or not the blocks' records could be
        erased; what was withheld before everything was forgotten is free."""
        self._take_in(lambda: self.cache.tiers.give_back(lease, are_erased))

    # -- events ----------------------------------------------------------------------------------

    def adopt_layout(self, layout: bytes, now: float) -> None:
        """Keep blocks under this layout (a digest) from now on.

        Tasks that were matched under another one are cancelled: their blocks' bytes mean something
        else to the ranks that move them now.
        """

        def change() -> None:
            if self._matcher.adopt_layout(layout):
                self.cache.control.end_roots(None, "layout")
                self._cancel_unanswered(self.sessions.of_engines(), now)

        self._take_in(change)

    def layouts_noted(self, num_others: int) -> bool:
        """Note in how many other layouts the remote store has the model; whether that is news."""
        lookups = self._lookups.get(REMOTE)
        if lookups is None or num_others == lookups.counters.other_layouts:
            return False
        lookups.counters.other_layouts = num_others
        return True

    def restore(self, records: Records, ages_s: Seconds, now: float) -> RestoreReport:
        """Index what the SSD tier was found to hold at startup, written this long ago."""
        with self.change:
            self._checksums.restore(records)
            return self.cache.restore(records, ages_s, now)

    def catch_up(self, now: float) -> None:
        """Do what no answer waits for."""
        self._take_in(lambda: self.cache.catch_up(now))

    def record_lookups(self) -> None:
        """Record the look-ups of prompts that have been answered."""
        self._take_in(lambda: self.cache.tiers.settle())

    def executor_up(self, executor: str, is_direct: bool = False) -> None:
        """An executor serves, GPU to SSD too if ``is_direct``. Waiting ops start in `tick`."""
        self._take_in(lambda: self.executors.up(executor, is_direct))

    def executor_down(self, executor: str, reason: str, now: float) -> None:
        """An executor is gone, and with it all that it was moving."""

        def change() -> None:
            if executor == REMOTE and (lookups := self._lookups.get(REMOTE)) is not None:
                self._breaker.trip(reason, now)
                lookups.give_up(now, self._instructions)
            elif executor == PEER:
                self.loans.end_all()  # with it went what was to send them
            self._runner.settle(self.executors.down(executor, reason, now), now)

        self._take_in(change)

    def looked_up(self, answer: LookedUp, now: float, peer: str | None = None) -> None:
        """The remote worker has answered a question; or a ``peer``, empty if none has it."""

        def change() -> None:
            lookups = self._lookups.get(REMOTE if peer is None else PEER)
            if lookups is not None:
                lookups.looked_up(answer, now, self._instructions, peer or "")
                self._runner.settle(self.executors.sync(), now)

        self._take_in(change)

    def op_done(self, executor: str, done: Done, now: float) -> None:
        """An executor has ended its part of an op."""
        self._take_in(lambda: self._runner.settle(self.executors.done(executor, done, now), now))

    def tick(self, now: float) -> None:
        """Let deadlines pass, and write what is due to tiers that are available again."""
        self._take_in(self._tick, now)

    def _tick(self, now: float) -> None:
        self.cache.tick(now)
        while (late := self._deadlines.take_late_load(now)) is not None:
            task = self.sessions.tasks.get(late)
            if task is None or task.is_answered:
                continue
            ops = task.open_ops
            if not ops[OpKind.REMOTE2H] and not ops[OpKind.PEER2H]:
                continue  # else it is answered with what has come; a read under way ends in DRAM
            # No failure of the other host: too slow for one engine, it may be of use to another.
            task.errors.append("the load from another host takes longer than computing would")
            self._runner.end_unstarted(task, now)
        for executor, lookups in self._lookups.items():
            lookups.tick(now, self.executors.is_up(executor), self._instructions)
        if self.cache.tiers.peer is not None:
            self.loans.expire(now)
        self._runner.settle(self.executors.sync(), now)
        self._runner.follow(now)
        while (unlaunched := self._deadlines.take_unlaunched(now)) is not None:
            reason = f"not launched within {self._deadlines.match_ttl_s:g} s"
            self.sessions.tasks[unlaunched].errors.append(reason)
            self._cancel([unlaunched], now)
        self._runner.expire(now)
        self._matcher.tick_early(now)

    def begin_study(self) -> tuple[EvictionPolicy, Study] | None:
        """Return what the eviction policy is to learn aside, if it is time for that."""
        policy = self.cache.tiers.policy
        if not policy.wants_study:
            return None
        with self.change:  # on the engine's thread too, where a signal's error must get out
            study = policy.begin_study()
        return None if study is None else (policy, study)

    def adopt_study(self, policy: EvictionPolicy, study: Study) -> None:
        """Take over what was learned; ignored if everything was forgotten meanwhile."""
        if policy is self.cache.tiers.policy:
            self._take_in(lambda: policy.adopt(study))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        if self.is_in_doubt:
            # At once: the next call forgets and ends the tasks.
            return self.cache.tiers.now
        times = [self._deadlines.next(), self.executors.next_deadline()]
        times += [self.cache.next_deadline(), self._matcher.next_early()]
        for executor, lookups in self._lookups.items():
            times.append(lookups.next_deadline(self.executors.is_up(executor)))
        if self.cache.tiers.peer is not None:
            times.append(self.loans.next_end)
        return min((time for time in times if time is not None), default=None)

    def take_instructions(self) -> list[Instruction]:
        if self.is_in_doubt:
            self.forget(None)
        ssd = self.cache.tiers.by_name.get(TierName.SSD)
        # One for all that was set aside: each has the whole tier looked at.
        if ssd is not None and ssd.doomed.has_news:
            self._instructions.append(EraseDeleted())
            ssd.doomed.has_news = False
        if self.cache.tiers.peer is not None:
            begun, ended = self.loans.take_news()
            self._instructions += [Lend(loan.token, loan.blocks, loan.ends_s) for loan in begun]
            self._instructions += map(EndLoan, ended)
        try:  # an interrupt between two lines loses none
            return self._instructions.copy()
        finally:
            # The list itself stays: the parts of the engine that leave instructions share it.
            self._instructions.clear()

    # -- insight ---------------------------------------------------------------------------------

    def check_counts(self) -> None:
        """Raise `InternalError` if the counts say that blocks were lost, and forget. O(1)."""
        with self.change:
            for tier in self.cache.tiers:
                tier.check_counts()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold, and forget. O(everything)."""
        with self.change:
            if not all(lookups.check() for lookups in self._lookups.values()):
                raise InternalError(
                    "an open question to another host cannot be found or has no deadline"
                )
            self.loans.check()
            self.executors.check(self.sessions.tasks)
            self.cache.check()
            self._runner.check()
            self.sessions.check()
            tasks = self.sessions.tasks.items()
            self._deadlines.check([task_id for task_id, task in tasks if not task.is_launched])


def _busy_blocks(runs: Iterable[OpRun]) -> dict[TierName, BlockIds]:
    """Return the blocks of this machine's tiers that ops read or write."""
    blocks: dict[TierName, list[BlockIds]] = {}
    for run in runs:
        op = run.op
        source, target = ENDS.get(op.kind, (TierName.SSD, TierName.SSD))
        for tier, ids in ((source, op.src), (target, op.dst)):
            if tier in (TierName.CPU, TierName.SSD) and ids is not None:
                blocks.setdefault(tier, []).append(ids)
    return {tier: np.unique(np.concatenate(ids)) for tier, ids in blocks.items()}
