"""A `KVTaskEngine` in a world of dictionaries: executors that move contents instead of bytes.

The content of a block is the prefix that it ends, and its layout, so a block that holds anything
else is seen at once. What an executor does not get done leaves garbage behind, and a GPU slot is
overwritten as soon as its task is answered, as an engine would. Each call carries out the engine's
instructions, and holds them against what must be true of them.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from builders import make_cache

from flexcache.cache.block_keys import ENGINE_KEYS, EngineBlockKeys, LayoutRoots, make_root
from flexcache.cache.control import CacheCall, CallName, CallOutcome
from flexcache.cache.drain import Portion
from flexcache.cache.peers import PeerTier
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import RemoteTier
from flexcache.ids import (
    BlockKey,
    KVStatus,
    OpId,
    OpKind,
    RootId,
    TaskId,
    TaskIds,
    TaskKind,
    TierName,
    make_session,
)
from flexcache.stats import BreakerStats, CacheIdentity, CacheStats
from flexcache.tasks.engine import KVTaskEngine, Takeover, stage_for_peer
from flexcache.tasks.instructions import (
    DISK,
    PEER,
    REMOTE,
    AskToStage,
    DiscardObjects,
    DropOp,
    EndLoan,
    EraseDeleted,
    Lend,
    LookUpEnded,
    ReplaceExecutor,
    RevokeTask,
    RunLookUp,
    RunOp,
    TaskAnswered,
    TaskResult,
    device,
)
from flexcache.tasks.model import TaskLimits
from flexcache.transfer.messages import Done, LookedUp, pack_checksums, unpack_ids
from flexcache.transfer.scheduler import TransferOp


class WriteBackModel:
    """Watches DRAM and one tier below it.

    A block may be missing there without being dirty only if the tier has had it and lost it since,
    had no place for it, or failed to write it, which is counted.
    """

    def __init__(self, cache: TieredCache, tier: Tier) -> None:
        self._cache = cache
        self._tier = tier
        self._excused: set[tuple[RootId, BlockKey]] = set()
        self.num_failed_writes = 0
        """Writes that the tier's worker has reported as failed."""
        cache.tiers.host.index.on_removed.append(self._gone_from_dram)
        tier.index.on_removed.append(self._gone_from_tier)
        self._unpublished, tier.on_unpublished = tier.on_unpublished, self._lease_ended
        self._plan_store: Callable[..., Plan] = cache.stores.plan_store
        cache.stores.plan_store = self._plan  # type: ignore[method-assign]

    def _gone_from_dram(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        self._excused.difference_update((root, key) for key in keys)

    def _gone_from_tier(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        self._excuse(root, keys)

    def _lease_ended(self, lease: Lease) -> None:
        assert self._unpublished is not None
        self._unpublished(lease)
        if lease.is_given_up:
            assert self.num_failed_writes, "nothing has failed"
            self._excuse(lease.root, lease.keys)

    def _plan(self, prompt: Prompt, *args: Any, **options: Any) -> Plan:
        plan = self._plan_store(prompt, *args, **options)
        if plan.dropped.get(f"{self._tier.name.value.lower()}_tier_full"):
            self._excuse(prompt.keys.root, prompt.keys.slice(0, prompt.stop))
        return plan

    def _excuse(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        on_host = self._cache.tiers.host.index
        self._excused.update((root, key) for key in keys if on_host.contains(root, key))

    def check(self) -> None:
        name: TierName = self._tier.name
        num_dirty = 0
        for root, directory in self._cache.tiers.host.index._directories.items():
            flight = self._tier._flights.get(root)
            for key in directory:
                is_dirty = self._cache.stores.is_dirty(name, root, key)
                num_dirty += is_dirty
                assert (
                    is_dirty
                    or self._tier.index.contains(root, key)
                    or (flight is not None and key in flight.owners)
                    or (root, key) in self._excused
                ), f"{key!r} is in DRAM, and {name.value} will never have it"
        assert self._cache.stores.num_dirty(name) == num_dirty, "dirty, and DRAM does not have it"


IDENTITY = CacheIdentity(fingerprint="a model", layout="", block_bytes=1, tokens_per_block=16)
ROOT = make_root("a model", [], ENGINE_KEYS)
GATE_PATIENCE_S = 600.0
ENGINE, OTHER = "an engine", "another"
SESSION = make_session(0, 0)
NAMED = (OpKind.H2DISK, OpKind.H2REMOTE, OpKind.REMOTE2H, OpKind.PEER2H, OpKind.COMMIT)
SSD_READS = (OpKind.DISK2H, OpKind.DISK2D)
SSD_WRITES = (OpKind.H2DISK, OpKind.D2DISK)

Content = tuple[str, int] | str
"""A block's prefix, with its layout, and whose share of it; or a word for what no request may ever
see."""


def keys_of(text: str, behind: int = 0) -> EngineBlockKeys:
    """The keys of a prompt in which each letter is a block: its prefixes.

    Those ``behind`` the first blocks alone are a continuation.
    """
    keys = [text[: i + 1].encode() for i in range(behind, len(text))]
    parent = BlockKey(text[:behind].encode()) if behind else None
    return EngineBlockKeys(ROOT, keys, len(keys), parent_key=parent)


@dataclass(slots=True, eq=False)
class TaskInfo:
    """What the world knows about a task."""

    kind: TaskKind
    engine: str
    text: str
    plan: Plan
    slots: np.ndarray
    layout: str = ""
    launched: bool = False
    gated: bool = False
    answered: TaskResult | None = None

    def content(self, index: int, copy: int) -> Content:
        return self.text[: self.plan.start + index + 1] + self.layout, copy


@dataclass(slots=True, eq=False)
class Errand:
    """An op that an executor was given and has not reported yet."""

    run: RunOp
    started_s: float
    dropped: bool = False


class World:
    """A task engine with tiny tiers, two serving engines, and all that their ranks can reach.

    Args:
        cpu, ssd: Blocks of the tiers; without SSD blocks there is no such tier.
        remote: Whether there is a remote store; it is empty at first.
        peers: Whether there are other hosts; their caches are empty at first.
        policy: What is written to the tiers below DRAM, and when.
        load_ranks, store_ranks: As for `KVTaskEngine`.
        past_dram: How loads from SSD go, if all ranks can move blocks past DRAM; "" if they cannot.
        keeps_on_host: Whether DRAM is a tier, or only stages.
        write_blocks_per_s: Limit of the writes to each tier below DRAM.
        retention_s: How long what is not used is kept.
    """

    def __init__(
        self,
        *,
        cpu: int = 6,
        ssd: int = 10,
        remote: bool = False,
        peers: bool = False,
        policy: str = "write_through",
        chunk: int = 2,
        backlog: int = 1000,
        load_ranks: Sequence[int] = (0,),
        store_ranks: Sequence[int] = (0,),
        op_timeout_s: float = 30.0,
        match_ttl_s: float = 120.0,
        skip_slow_loads: bool = False,
        past_dram: str = "",
        keeps_on_host: bool = True,
        write_blocks_per_s: float | None = None,
        retention_s: float | None = None,
    ) -> None:
        cache = make_cache(
            cpu, ssd, 30 if remote else 0, chunk=chunk, backlog=backlog, policy=policy,
            skip_slow_loads=skip_slow_loads, past_dram=past_dram or "never",
            keeps_on_host=keeps_on_host, write_blocks_per_s=write_blocks_per_s,
            retention_s=retention_s, peers=peers,
        )  # fmt: skip
        self._are_direct = bool(past_dram)
        self.write_backs = {
            tier.name: WriteBackModel(cache, tier)
            for tier in cache.tiers.written
            if policy == "write_back"
        }
        self.engine = KVTaskEngine(
            cache,
            TaskLimits(
                load_ranks=load_ranks,
                store_ranks=store_ranks,
                op_timeout_s=op_timeout_s,
                match_ttl_s=match_ttl_s,
            ),
        )
        self._num_sessions = 0
        self.sessions: dict[str, TaskIds] = {}
        for engine in (ENGINE, OTHER):
            self.begin_session(engine)
        self.now = 1000.0
        self.ranks = [device(e, rank) for e in (ENGINE, OTHER) for rank in load_ranks]
        workers = {DISK: ssd > 0, REMOTE: remote, PEER: peers}
        self.executors = [*self.ranks, *(name for name, is_there in workers.items() if is_there)]
        self.alive: dict[str, None] = {}
        self.tasks: dict[TaskId, TaskInfo] = {}
        self.at_work: dict[tuple[str, OpId], Errand] = {}
        self.gone: list[RunOp] = []
        """Ops that executors were running when they died."""
        self.to_replace: dict[str, str] = {}
        self.revoked: set[TaskId] = set()
        self.answers: dict[TaskId, TaskResult] = {}
        """Last answer that each task's owner received."""
        self.told_early: Counter[TaskId] = Counter()
        self.told_final: Counter[TaskId] = Counter()
        self.gpu: dict[tuple[str, int, int], Content] = {}
        self.abandoned: dict[TaskId, TaskInfo] = {}
        """Tasks whose session has ended; their outcomes are answered to no session."""
        self.stored: dict[tuple[TierName, int, int], Content] = {}
        self.store: dict[tuple[bytes, bytes], list[Content]] = {}
        """The remote store: the shares of each block, by root and key."""
        self.at_peers, self.on_ssd_of_peers, self.lent, self.asked_to_stage = _peers()
        self.asked: dict[int, RunLookUp] = {}
        self.num_lookups_ended: Counter[int] = Counter()
        self.rotten: set[int] = set()
        self.layout = ""
        self.roots = {"": LayoutRoots()}
        """Where prompts are kept, by layout, of all layouts that there were."""
        self.disputed: set[str] = set()
        self._load_ranks = list(load_ranks)
        self._copies = list(store_ranks)
        self._op_timeout_s = op_timeout_s
        self._next_slot = 0
        for executor in self.executors:
            self.up(executor)

    # -- calls -----------------------------------------------------------------------------------

    @property
    def cache(self) -> TieredCache:
        return self.engine.cache

    @property
    def ids(self) -> TaskIds:
        return self.sessions[ENGINE]

    def begin_session(self, engine: str) -> None:
        session = make_session(0, self._num_sessions)
        self._num_sessions += 1
        self.engine.add_session(session, engine)
        self.sessions[engine] = TaskIds(session)

    def end_session(self, engine: str) -> None:
        """Let the scheduler die. Its engine returns once no copy can use its slots."""
        ids = self.sessions.pop(engine)
        for task_id in [t for t in self.tasks if t in ids]:
            self.abandoned[task_id] = self.tasks.pop(task_id)
        self.engine.end_session(ids.session, self.now)
        self._carry_out()

    def look_up(self, text: str, kind: TaskKind = TaskKind.GET, behind: int = 0) -> int | None:
        """Return the look-up that a match has to wait for."""
        keys = keys_of(text, behind)
        prompt = Prompt(kind, keys, 0, keys.num_blocks, 16 * keys.num_blocks)
        lookups = self.engine.look_up(prompt, self.now)
        self._carry_out()
        assert len(lookups) <= len(self.cache.tiers.beyond)
        return lookups[0] if lookups else None

    def is_looking_up(self, lookup_id: int | None) -> bool:
        return lookup_id is not None and self.engine.queries.is_looking_up(lookup_id)

    def answer(self, lookup_id: int, error: str | None = None) -> None:
        """Let the remote worker answer what the store has, or the peer that has most of it."""
        question = self.asked.pop(lookup_id)
        if question.executor == PEER:
            counts = {name: _num_present(question, there) for name, there in self.at_peers.items()}
            later = {
                name: _num_present(question, self.at_peers[name] | there) - counts[name]
                for name, there in self.on_ssd_of_peers.items()
            }
            peer: str | None = max(counts, key=lambda name: counts[name] + later[name] / 2)
            answer = LookedUp(lookup_id, 0)
            if not error:
                answer = LookedUp(lookup_id, counts[peer or ""], num_on_ssd=later[peer or ""])
        else:
            peer = None
            count = _num_present(question, self.store)
            answer = LookedUp(lookup_id, 0 if error else count, error)
        self.engine.looked_up(answer, self.now, peer)
        self._carry_out()

    def stored_by_another(self, text: str, peer: str | None = None, on_ssd: bool = False) -> None:
        """Let another node write a prompt to the remote store, or a ``peer`` have it in DRAM, or on
        SSD."""
        store = self.store if peer is None else self.at_peers[peer]
        if peer is not None and on_ssd:
            store = self.on_ssd_of_peers[peer]
        for end in range(1, len(text) + 1):
            name = (self.placed(text).root, text[:end].encode())
            store[name] = [(text[:end] + self.layout, copy) for copy in self._copies]

    def stage_at_peer(self) -> None:
        """Let a peer bring to DRAM what it was asked to."""
        wanted = self.asked_to_stage.pop(0)
        for (root, key), content in self.on_ssd_of_peers[wanted.peer].items():
            if root == wanted.root and wanted.key.startswith(key):
                self.at_peers[wanted.peer][root, key] = content

    def stage(self, text: str) -> None:
        """Let a peer ask for what is on SSD here."""
        keys = self.placed(text)
        stage_for_peer(self.engine, keys.root, keys.key(keys.num_blocks - 1), 0, self.now)
        self._carry_out()

    def take_over(self, text: str, peer: str, age_s: float, most: int = 99) -> Takeover:
        """Let a peer that goes hand over a prompt."""
        keys = self.placed(text)
        portion = Portion(keys.root, keys.slice(0, keys.num_blocks), age_s)
        takeover = Takeover.begin(self.engine, portion, peer, most, self.now)
        self._carry_out()
        return takeover

    def lend(self, text: str, start: int, stop: int) -> bool:
        """Let a peer ask for blocks of a prompt; whether they are lent."""
        keys = self.placed(text)
        with self.engine.change:
            loan = self.engine.loans.lend(b"A", keys.root, keys.slice(start, stop), self.now)
        if loan is not None:
            part = EngineBlockKeys(keys.root, keys.slice(start, stop), stop - start)
            self.lent[loan.token] = part, self.layout, loan.blocks.tolist()
        self._carry_out()
        return loan is not None

    def give_back(self, token: bytes) -> None:
        """Let a peer say that it has read what it was lent."""
        with self.engine.change:
            assert self.engine.loans.give_back(token, b"A")
        self._carry_out()
        assert token not in self.lent

    def match(
        self, kind: TaskKind, text: str, start: int = 0, stop: int | None = None,
        engine: str = ENGINE, retain_s: float = 0.0, behind: int = 0,
    ) -> TaskId:  # fmt: skip
        """Match blocks ``[start, stop)`` of a prompt, of which the engine names only those
        ``behind`` its first blocks."""
        behind = min(behind, len(text))
        keys = keys_of(text, behind)
        stop = max(behind, len(text) if stop is None else min(stop, len(text)))
        start = max(behind, min(start, stop))
        has_parent = not behind or self._can_continue(kind, engine, text[:behind])
        task_id = self.sessions[engine].next()
        prompt = Prompt(kind, keys, start - behind, stop - behind, 16 * keys.num_blocks, retain_s)
        plan = self.engine._match(task_id, prompt, self.now)
        assert plan.num_before == (behind if has_parent else 0)
        if not has_parent:
            assert plan.is_empty
            is_missing = "parent_missing" in plan.dropped
            assert is_missing <= (kind is TaskKind.PUT and start < stop)
        if not plan.num_blocks:
            self.answers[task_id] = TaskResult(
                KVStatus.NOT_FOUND, plan.offset, 0, 16 * keys.num_blocks
            )
        count = 0 if kind is TaskKind.PREFETCH else plan.num_blocks
        slots = np.arange(self._next_slot, self._next_slot + count, dtype=np.int64)
        self._next_slot += count
        assert not self.away & {*plan.sources, *plan.stores}, "a plan for a tier that is away"
        assert not (engine in self.disputed and plan.num_blocks), "a plan for a disputed name"
        self.tasks[task_id] = info = TaskInfo(kind, engine, text, plan, slots, self.layout)
        if kind is TaskKind.PUT:
            for index, slot in enumerate(slots.tolist()):
                for rank in self._load_ranks:
                    self.gpu[engine, rank, slot] = info.content(index, self._copy(rank))
        self._carry_out()
        return task_id

    def launch(self, *task_ids: TaskId, gated: bool = False) -> None:
        are_open = [self.result(task_id) is None for task_id in task_ids]
        for task_id in task_ids:
            self.tasks[task_id].gated = gated
        slots = [self.tasks[task_id].slots for task_id in task_ids]
        self.engine.launch(task_ids, slots, self.now, gated)
        for task_id, is_open in zip(task_ids, are_open, strict=True):
            self.tasks[task_id].launched |= is_open
        self._carry_out()

    def promise(self, task_id: TaskId) -> bool:
        """Have a get promised; if it is, its engine gives it to all ranks at once."""
        info = self.tasks[task_id]
        promised = self.engine.promise(task_id, self.now)
        assert not self.engine.take_instructions(), "a rank was given an op of a promised load"
        if promised is None:
            return False
        info.launched = info.gated = True
        [op] = info.plan.graph.ops
        op.dst = info.slots
        assert op.src is not None
        pool_blocks = unpack_ids(promised.pool_blocks).tolist()
        assert (promised.op_id, pool_blocks) == (op.op_id, op.src.tolist())
        for rank in self._load_ranks:
            self._take_on(RunOp(device(info.engine, rank), task_id, op, None, gated=True))
        return True

    def _can_continue(self, kind: TaskKind, engine: str, text: str) -> bool:
        """Whether a tier that counts has all blocks of a prompt, or awaits those it lacks."""
        keys, tiers = self.placed(text), [self.cache.tiers.host]
        direct = self.cache.direct_stores
        ranks = [device(engine, rank) for rank in self._load_ranks]
        if direct is not None and self._are_direct and all(rank in self.alive for rank in ranks):
            tiers = [direct.tier]
        if kind is not TaskKind.PUT:
            tiers = list(self.cache.tiers)
        cached = [(tier, tier.index.match(keys).num_blocks) for tier in tiers]
        return any(n + t.num_in_flight(keys, n, len(text)) == len(text) for t, n in cached)

    def put(self, text: str, start: int = 0, retain_s: float = 0.0, behind: int = 0) -> TaskId:
        task_id = self.match(TaskKind.PUT, text, start, retain_s=retain_s, behind=behind)
        self.launch(task_id)
        return task_id

    def get(self, text: str, start: int = 0, behind: int = 0) -> TaskId:
        task_id = self.match(TaskKind.GET, text, start, behind=behind)
        self.launch(task_id)
        return task_id

    def prefetch(self, text: str) -> TaskId:
        task_id = self.match(TaskKind.PREFETCH, text)
        self.launch(task_id)
        return task_id

    def cancel(self, *task_ids: TaskId) -> None:
        self.engine.cancel(task_ids, self.now)
        self._carry_out()

    def cancel_all(self) -> None:
        self.engine.cancel(
            [t for t in self.tasks if self.result(t, completely=True) is None], self.now
        )
        self._carry_out()

    def result(self, task_id: TaskId, completely: bool = False) -> TaskResult | None:
        """How the task ended; None while it goes on. The GPU side counts, or ``completely`` all."""
        result = self.answers.get(task_id)
        return None if result is None or (completely and not result.is_final) else result

    def final(self, task_id: TaskId) -> TaskResult:
        result = self.result(task_id, completely=True)
        assert result is not None
        return result

    def stats(self) -> CacheStats:
        return self.engine.queries.stats(IDENTITY, self.now)

    @property
    def breaker(self) -> BreakerStats:
        remote = self.stats().remote
        assert remote is not None
        return remote.breaker

    def clear(self, tier: TierName) -> int:
        return len(self.cache.tiers.clear(tier.value)[tier])

    def control(self, name: CallName, text: str, ttl_s: float = 0.0) -> CallOutcome:
        """Make a user's call about a prompt."""
        prompt = Prompt(TaskKind.GET, keys_of(text), 0, len(text), 16 * len(text))
        call = CacheCall(name=name, prompts=[prompt], ttl_s=ttl_s)
        outcome = self.engine.control(call, self.now)
        self._carry_out()
        return outcome

    def _erase(self) -> None:
        """Erase the records of deleted blocks, none of which an op may still use."""
        lease = self.engine.withhold_deleted(TierName.SSD)
        used = {place for errand in self.at_work.values() for part in _places(errand.run)
                for place in part}  # fmt: skip
        assert not {(TierName.SSD, slot) for slot in lease.blocks.tolist()} & used
        # Their records go too: they may be read, but no record of another prompt may go with them.
        read = self.cache.tiers.by_name[TierName.SSD].doomed.in_use()
        written = {place for errand in self.at_work.values() for place in _places(errand.run)[1]}
        assert not {(TierName.SSD, slot) for slot in read.tolist()} & written
        self.engine.give_back(lease, are_erased=True)

    def cached(self, tier: TierName, text: str) -> int:
        """Return the length of the prompt's longest prefix in the tier; no side effect."""
        return self.cache.tiers.by_name[tier].index.match(self.placed(text)).num_blocks

    def placed(self, text: str, layout: str | None = None) -> EngineBlockKeys:
        """Return the keys of a prompt under a layout, by default the current one."""
        keys = keys_of(text)
        self.roots[self.layout if layout is None else layout].place(keys)
        return keys

    # -- events ----------------------------------------------------------------------------------

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.engine.tick(self.now)
        self._carry_out()

    def up(self, executor: str) -> None:
        self.alive[executor] = None
        self.engine.executor_up(executor, self._are_direct and executor in self.ranks)
        self._carry_out()

    def adopt(self, layout: str) -> None:
        """Replace all ranks by ranks of this layout, which find other KV unless it is the same."""
        for rank in self.ranks:
            if rank in self.alive:
                self.down(rank)
        if layout != self.layout:
            self.gpu = dict.fromkeys(self.gpu, "of other ranks")
        self.layout = layout
        self.roots.setdefault(layout, LayoutRoots(layout.encode()))
        self.engine.adopt_layout(layout.encode(), self.now)
        self._carry_out()
        for rank in self.ranks:
            self.up(rank)

    def dispute(self, engine: str, is_disputed: bool) -> None:
        """Let another engine claim the name, or leave."""
        (self.disputed.add if is_disputed else self.disputed.discard)(engine)
        self.engine.set_disputed(engine, is_disputed, self.now)
        self._carry_out()
        for task_id, info in self.tasks.items():
            if is_disputed and info.engine == engine and self.result(task_id) is None:
                assert self._errands_of(task_id), "a task of a disputed name goes on"
                assert all(errand.dropped for errand in self._errands_of(task_id))

    def down(self, executor: str, reason: str = "it died") -> None:
        """Let the executor die with everything it was moving half done."""
        self.alive.pop(executor, None)
        self.to_replace.pop(executor, None)
        if executor == REMOTE:
            self.asked = {i: q for i, q in self.asked.items() if q.executor == PEER}
        for key in [key for key in self.at_work if key[0] == executor]:
            self.gone.append(self.at_work.pop(key).run)
            self._move(self.gone[-1], 0)
        self.engine.executor_down(executor, reason, self.now)
        self._carry_out()

    def report_after_death(self, run: RunOp) -> None:
        """Deliver a late message that an op of the dead executor was done."""
        self.engine.op_done(run.executor, Done(run.op.op_id, len(run.op)), self.now)
        assert self.engine.take_instructions() == []

    def ops(self, kind: OpKind | None = None, task_id: TaskId | None = None) -> list[RunOp]:
        """Return the ops that executors are running, the oldest first."""
        return [
            errand.run
            for errand in self.at_work.values()
            if kind in (None, errand.run.op.kind) and task_id in (None, errand.run.task_id)
        ]

    def was_dropped(self, run: RunOp) -> bool:
        return self.at_work[run.executor, run.op.op_id].dropped

    def finish(self, run: RunOp, num_ok: int | None = None, error: str | None = None) -> None:
        """End the op; all of it has moved unless ``num_ok`` says less."""
        del self.at_work[run.executor, run.op.op_id]
        op, bad_block, checksums = run.op, False, b""
        count = len(op) if num_ok is None else num_ok
        if op.kind in SSD_READS:
            assert run.checksums is not None
            assert op.src is not None
            sums = [self._checksum(TierName.SSD, slot) for slot in op.src.tolist()]
            for index in range(count):
                if sums[index] != run.checksums[index]:
                    count, bad_block, error = index, True, "checksum mismatch"
                    break
        elif op.kind in (OpKind.REMOTE2H, OpKind.PEER2H):
            assert op.names is not None
            store = self._read_from(op)
            there = [(op.names.root, key) in store for key in op.names.keys[:count]]
            if False in there:
                count, bad_block, error = there.index(False), True, "not there"
        elif op.kind in SSD_WRITES:
            assert op.src is not None
            sums = [self._checksum_to_write(run, block) for block in op.src.tolist()]
            checksums = pack_checksums(np.array(sums, dtype=np.uint64))
        self._move(run, count)
        target = {OpKind.H2DISK: TierName.SSD, OpKind.H2REMOTE: TierName.REMOTE}.get(op.kind)
        if target in self.write_backs and count < len(op):
            self.write_backs[target].num_failed_writes += 1
        done = Done(op.op_id, count, error, bad_block, checksums)
        self.engine.op_done(run.executor, done, self.now)
        self._carry_out()

    def finish_bad(self, run: RunOp, num_ok: int = 0) -> None:
        """End the op with a block unreadable, by default its first."""
        del self.at_work[run.executor, run.op.op_id]
        self._move(run, num_ok)
        done = Done(run.op.op_id, num_ok, "a newer version", bad_block=True)
        self.engine.op_done(run.executor, done, self.now)
        self._carry_out()

    def finish_all(self) -> None:
        """Let every executor finish its work, and the work that follows from it."""
        while self.at_work:
            self.finish(next(iter(self.at_work.values())).run)

    def rot(self, text: str) -> None:
        """Let the last block of a prompt lose its content on SSD."""
        tier = self.cache.tiers.by_name[TierName.SSD]
        match = tier.index.match(self.placed(text))
        assert match.num_blocks == len(text)
        slot = int(tier.index.blocks(match)[-1])
        self.rotten.add(slot)
        for copy in self._copies:
            self.stored[TierName.SSD, copy, slot] = "rotten"

    # -- the executors ---------------------------------------------------------------------------

    def _copy(self, rank: int) -> int:
        """Return the stored share of a block that a rank loads."""
        return rank if rank in self._copies else self._copies[0]

    def _checksum(self, tier: TierName, block: int) -> int:
        return zlib.crc32(repr([self.stored.get((tier, c, block)) for c in self._copies]).encode())

    def _checksum_to_write(self, run: RunOp, block: int) -> int:
        if run.op.kind is OpKind.H2DISK:
            return self._checksum(TierName.CPU, block)
        _, engine, rank = run.executor.split(":")
        return zlib.crc32(repr([self.gpu[engine, int(rank), block]]).encode())

    def _move(self, run: RunOp, count: int) -> None:
        """Move the op's first blocks, and leave garbage where the others should have gone."""
        op = run.op
        if op.kind is OpKind.COMMIT:
            assert run.checksums is not None
            assert op.src is not None
            sums = [self._checksum(TierName.SSD, slot) for slot in op.src.tolist()]
            assert run.checksums.tolist() == sums, "recorded with the checksum of something else"
            return
        assert op.src is not None
        assert op.dst is not None
        for index, (src, dst) in enumerate(zip(op.src.tolist(), op.dst.tolist(), strict=True)):
            whole = index < count
            if op.kind.touches_gpu:
                _, engine, number = run.executor.split(":")
                rank = int(number)
                copy = self._copy(rank)
                tier = TierName.SSD if op.kind.is_direct else TierName.CPU
                if op.kind.fills_gpu:
                    content = self.stored[tier, copy, src]
                    self.gpu[engine, rank, dst] = content if whole else "torn"
                else:
                    content = self.gpu[engine, rank, src]
                    self.stored[tier, copy, dst] = content if whole else "torn"
                    if tier is TierName.SSD:
                        self.rotten.discard(dst)
                continue
            if op.kind in (OpKind.H2REMOTE, OpKind.REMOTE2H, OpKind.PEER2H):
                self._exchange(op, index, src, dst, whole)
                continue
            tiers = [TierName.SSD, TierName.CPU]
            source, target = tiers if op.kind is OpKind.DISK2H else tiers[::-1]
            for copy in self._copies:
                content = self.stored.get((source, copy, src), "never written")
                self.stored[target, copy, dst] = content if whole else "torn"
            if target is TierName.SSD:
                self.rotten.discard(dst)

    def _exchange(self, op: TransferOp, index: int, src: int, dst: int, whole: bool) -> None:
        """Move a block to or from the store, which has whole blocks or none."""
        assert op.names is not None
        name = (op.names.root, op.names.keys[index])
        if op.kind is OpKind.H2REMOTE:
            if whole:
                self.store[name] = [self.stored[TierName.CPU, c, src] for c in self._copies]
            return
        there = self._read_from(op)
        shares = there.get(name, ["torn"] * len(self._copies)) if whole else None
        for position, copy in enumerate(self._copies):
            self.stored[TierName.CPU, copy, dst] = shares[position] if shares else "torn"

    def _read_from(self, op: TransferOp) -> dict[tuple[bytes, bytes], list[Content]]:
        return self.at_peers[op.peer] if op.kind is OpKind.PEER2H else self.store

    def _carry_out(self) -> None:
        for instruction in self.engine.take_instructions():
            match instruction:
                case RunOp():
                    self._take_on(instruction)
                case DropOp(executor, op_id):
                    self.at_work[executor, op_id].dropped = True
                case Lend(token, blocks, ends_s):
                    assert self.lent[token][2] == blocks.tolist()
                    assert ends_s > self.now
                case EndLoan(token):
                    del self.lent[token]
                case RunLookUp(lookup_id, _, keys):
                    assert instruction.executor in self.alive
                    assert keys
                    self.asked[lookup_id] = instruction
                case AskToStage(peer):
                    assert instruction.num_units == 0
                    assert peer in self.at_peers
                    self.asked_to_stage.append(instruction)
                case LookUpEnded(lookup_id):
                    self.num_lookups_ended[lookup_id] += 1
                    assert self.num_lookups_ended[lookup_id] == 1
                    assert not self.is_looking_up(lookup_id)
                case TaskAnswered(task_id) if task_id in self.abandoned:
                    self._put_to_other_use(self.abandoned[task_id])
                case TaskAnswered(task_id, engine, result, notify_ranks):
                    info = self.tasks[task_id]
                    assert engine == info.engine
                    assert notify_ranks == (info.gated and info.answered is None)
                    if info.answered is None:
                        self._answer(task_id, result)
                    self._told(task_id, result)
                case RevokeTask(task_id):
                    self.revoked.add(task_id)
                case DiscardObjects(root, keys):
                    for key in keys:
                        self.store.pop((root, key), None)
                case EraseDeleted():
                    self._erase()
                case ReplaceExecutor(executor, reason):
                    assert executor in self.alive
                    if executor in (DISK, REMOTE, PEER):
                        self.to_replace[executor] = reason

    def _take_on(self, run: RunOp) -> None:
        op, info = run.op, self.tasks.get(run.task_id) or self.abandoned.get(run.task_id)
        assert run.executor in self.alive, "an op for an executor that is gone"
        assert op.src is not None
        assert op.dst is not None
        assert len(op.src) == len(op.dst) > 0
        if op.kind in NAMED:
            self._check_names(op)
        if info is None:  # the cache's own
            assert not op.kind.touches_gpu
            assert not run.gated
        else:
            assert run.gated == (info.gated and op.kind.touches_gpu)
        if op.kind.touches_gpu:
            assert info is not None
            assert run.executor.split(":")[1] == info.engine
            assert not info.answered, "a slot was given back before its use"
            assert info.layout == self.layout, "blocks of another layout than the ranks'"
            assert info.engine not in self.disputed, "bytes of a disputed name"
            mine = (op.dst if op.kind.fills_gpu else op.src).tolist()
            base = op.first - info.plan.start
            assert mine == info.slots[base : base + len(op)].tolist()
        reads, writes = _places(run)
        for errand in self.at_work.values():
            if errand.run.op is not op:
                others_read, others_write = _places(errand.run)
                assert not writes & (others_read | others_write), "two ops at one block"
                assert not reads & others_write, "a block is read while it is written"
        assert (run.executor, op.op_id) not in self.at_work
        self.at_work[run.executor, op.op_id] = Errand(run, self.now)

    def _check_names(self, op: TransferOp) -> None:
        """Check that each block has the key of its prefix, and that the parent is named."""
        names = op.names
        assert names is not None
        assert len(names.keys) == len(op)
        assert [len(key) for key in names.keys] == list(range(op.first + 1, op.first + 1 + len(op)))
        assert names.first == op.first
        assert names.keys[0][:-1] == names.parent

    def _told(self, task_id: TaskId, result: TaskResult) -> None:
        """Check that the owner is notified once of the end of the GPU side, and once of the end."""
        assert task_id not in self.told_final, "told again after the end"
        early = self.answers.get(task_id)
        if early is not None and result.status is not KVStatus.CANCELLED:
            assert (early.status, early.num_ok) == (result.status, result.num_ok)
        self.answers[task_id] = result
        (self.told_final if result.is_final else self.told_early)[task_id] += 1
        assert self.told_early[task_id] <= 1

    def _answer(self, task_id: TaskId, ended: TaskResult) -> None:
        """Answer the task, and let the engine reuse its slots."""
        info = self.tasks[task_id]
        info.answered = ended
        self._check_slots_are_unused(task_id)
        for index, slot in enumerate(info.slots.tolist()):
            for rank in self._load_ranks:
                if info.kind is TaskKind.GET and index < ended.num_ok:
                    assert self.gpu[info.engine, rank, slot] == info.content(
                        index, self._copy(rank)
                    )
        self._put_to_other_use(info)

    def _put_to_other_use(self, info: TaskInfo) -> None:
        for slot in info.slots.tolist():
            for rank in self._load_ranks:
                self.gpu[info.engine, rank, slot] = "reused"

    # -- what must be true -----------------------------------------------------------------------

    @property
    def away(self) -> set[TierName]:
        """Return the lower tiers whose worker is down or whose breaker is not closed."""
        workers = {TierName.SSD: DISK, TierName.REMOTE: REMOTE, TierName.PEER: PEER}
        away = {
            tier.name for tier in self.cache.tiers.lower if workers[tier.name] not in self.alive
        }
        if self.cache.tiers.remote is not None and self.engine.queries.store_outage is not None:
            away.add(TierName.REMOTE)
        return away

    def is_overdue(self, errand: Errand) -> bool:
        patience = self._op_timeout_s + (GATE_PATIENCE_S if errand.run.gated else 0)
        return self.now - errand.started_s >= patience

    def _errands_of(self, task_id: TaskId) -> list[Errand]:
        return [errand for errand in self.at_work.values() if errand.run.task_id == task_id]

    def _check_slots_are_unused(self, task_id: TaskId) -> None:
        """Check that only a late, revoked copy touches the slots of an answered task."""
        at_slots = [e for e in self._errands_of(task_id) if e.run.op.kind.touches_gpu]
        assert not at_slots or any(self.is_overdue(errand) for errand in at_slots)
        assert bool(at_slots) <= (task_id in self.revoked)

    def check(self) -> None:
        self.engine.check()
        for model in self.write_backs.values():
            model.check()
        assert self.cache.tiers.unavailable == self.away
        for tier in self.cache.tiers:
            stats = tier.stats()
            assert stats.free + stats.indexed + stats.leased == stats.capacity
            assert min(stats.free, stats.indexed, stats.leased) >= 0
        for text in {info.text for info in self.tasks.values()}:
            for tier, layout in itertools.product(self.cache.tiers, self.roots):
                self._check_content(tier, text, layout)
        for engine in (ENGINE, OTHER):
            touches = any(
                e.run.op.kind.touches_gpu and e.run.executor.split(":")[1] == engine
                for e in self.at_work.values()
            )
            assert self.engine.sessions.uses_gpu_of(engine) or not touches
        for errand in self.at_work.values():
            for places in _places(errand.run):
                for name, block in places:
                    assert not self.cache.tiers.by_name[name].pool.is_free(block)
        for task_id, info in self.tasks.items():
            self._check_task(task_id, info)
        for keys, layout, blocks in self.lent.values():
            names = [key.decode() for key in keys.slice(0, keys.num_blocks)]
            for name, block in zip(names, blocks, strict=True):
                for copy in self._copies:
                    assert self.stored[TierName.CPU, copy, block] == (name + layout, copy)

    def _check_content(self, tier: Tier, text: str, layout: str) -> None:
        """Check that every block that can be found has its content."""
        keys = self.placed(text, layout)
        blocks = tier.index.blocks(tier.index.match(keys)).tolist()
        if isinstance(tier, RemoteTier):  # it may have lost some, but not mistaken any
            root = tier.root_at_store(keys.root)
            for end, block in enumerate(blocks, 1):
                store = self.store
                if isinstance(tier, PeerTier):
                    store = self.at_peers[tier.peer_of(block)]
                shares = store.get((root, text[:end].encode()))
                assert shares in (None, [(text[:end] + layout, copy) for copy in self._copies])
            return
        for position, block in enumerate(blocks):
            if tier.name is TierName.SSD and block in self.rotten:
                continue
            for copy in self._copies:
                content = (text[: position + 1] + layout, copy)
                assert self.stored[tier.name, copy, block] == content

    def _check_task(self, task_id: TaskId, info: TaskInfo) -> None:
        result = self.result(task_id)
        final = self.result(task_id, completely=True)
        if info.plan.num_blocks == 0:
            assert result is not None
            assert result.status is KVStatus.NOT_FOUND
            assert info.answered is None
            return
        assert (result is not None) == (info.answered is not None)
        if result is None or info.answered is None:
            return
        self._check_slots_are_unused(task_id)
        if result.status is KVStatus.CANCELLED:
            assert result.num_ok == 0
        else:
            assert info.launched
            assert result.num_ok == info.answered.num_ok
            assert result.status is (KVStatus.SUCCESS if result.num_ok else KVStatus.FAILED)
        assert (task_id in self.told_final) == (final is not None)
        if final is not None:
            # A copy that missed its deadline may still be on its way.
            assert task_id in self.revoked or not self._errands_of(task_id)

    def drain(self) -> None:
        """Let everything end in an orderly way."""
        self.cancel(*[task_id for task_id, info in self.tasks.items() if not info.launched])
        for executor in list(self.to_replace):
            self.down(executor)
        self.finish_all()

    def check_nothing_is_held(self) -> None:
        """Check, at rest, that every task has its answer and no block belongs to one."""
        self.check()
        assert not self.at_work
        assert self.engine.sessions.num_open == 0
        for tier in self.cache.tiers:
            assert tier.num_leased == 0
        for task_id in self.tasks:
            assert self.final(task_id).is_final

    def check_every_prompt_can_be_stored(self, texts: Sequence[str]) -> None:
        """Check that no key is blocked and no block lost: any prompt can be put and got."""
        for engine in list(self.disputed):
            self.dispute(engine, False)
        for executor in self.executors:
            self.up(executor)
        if ENGINE not in self.sessions:
            self.begin_session(ENGINE)
        if self.cache.direct_stores is not None and self.rotten:
            self.clear(TierName.SSD)  # only reading shows that a block is bad; a put skips it
        for text in texts:
            self.put(text)
            self.finish_all()
            task_id = self.get(text)
            self.finish_all()
            result = self.final(task_id)  # what arrived was compared when it was answered
            assert (result.status, result.num_ok) == (KVStatus.SUCCESS, len(text))
            self.check_nothing_is_held()


AtPeers = dict[str, dict[tuple[bytes, bytes], list[Content]]]
Lent = dict[bytes, tuple[EngineBlockKeys, str, list[int]]]


def _peers() -> tuple[AtPeers, AtPeers, Lent, list[AskToStage]]:
    """What two other hosts have in DRAM and on SSD, as the remote store; of what they were lent
    prompt, layout and blocks, by token; and what they were asked to bring to DRAM."""
    return {"A": {}, "B": {}}, {"A": {}, "B": {}}, {}, []


def _num_present(question: RunLookUp, store: Mapping[tuple[bytes, bytes], object]) -> int:
    present = [(question.root, key) in store for key in question.keys]
    return present.index(False) if False in present else len(present)


def _places(run: RunOp) -> tuple[set[tuple[TierName, int]], set[tuple[TierName, int]]]:
    """Blocks of the tiers that an op reads, and those that it writes."""
    source, target = {
        OpKind.H2D: (TierName.CPU, None),
        OpKind.D2H: (None, TierName.CPU),
        OpKind.DISK2H: (TierName.SSD, TierName.CPU),
        OpKind.H2DISK: (TierName.CPU, TierName.SSD),
        OpKind.PEER2H: (None, TierName.CPU),
        OpKind.REMOTE2H: (None, TierName.CPU),
        OpKind.H2REMOTE: (TierName.CPU, None),
        OpKind.DISK2D: (TierName.SSD, None),
        OpKind.D2DISK: (None, TierName.SSD),
        OpKind.COMMIT: (TierName.SSD, None),
    }[run.op.kind]
    src, dst = run.op.src, run.op.dst
    assert src is not None
    assert dst is not None
    return (
        {(source, block) for block in src.tolist()} if source else set(),
        {(target, block) for block in dst.tolist()} if target else set(),
    )
