"""ChunkTiers: SSD and remote store below a DRAM cache that another program owns."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from flexcache.breaker import CircuitBreaker
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys, PromptContent
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiers import ABSENT_TTL_S, RemoteTier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskId, TaskKind
from flexcache.server.outbox import WorkerInstruction
from flexcache.stats import ServerCounters
from flexcache.tasks.executors import SlotChecksums
from flexcache.tasks.instructions import (
    DISK,
    REMOTE,
    Instruction,
    ReplaceExecutor,
    RunLookUp,
    RunOp,
)
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.model import LOAD_TIER, WORKER_OF
from flexcache.transfer.messages import BlockNames, Done, LookedUp, unpack_checksums
from flexcache.transfer.scheduler import BlockIds, FairQueue, TransferOp, Urgency

_SLOWEST_BYTES_PER_S = 1e8
_ONE_OWNER = 0
_BATCH = 16  # a bad chunk makes those after it in its op count as not loaded

Item = TypeVar("Item")


class Lane:
    """Ops of one worker: some at a time, loads first, each with a deadline.

    Pure: calls and events with the time in, instructions out.

    Args:
        timeout_s: Deadline of an op.
        block_bytes: Size of a block: large ops get more time.
        checksums: What reads from SSD are verified against.
        instructions: Receives `RunOp` and `ReplaceExecutor`.
        max_ops_at_once: Ops that the worker is given before it has ended any.

    Attributes:
        worker: As given.
        is_up: Whether there is the worker. Ops are only added while it is.
    """

    def __init__(
        self, worker: str, timeout_s: float, block_bytes: int, checksums: SlotChecksums,
        instructions: list[WorkerInstruction], max_ops_at_once: int = 64,
    ) -> None:  # fmt: skip
        self.worker = worker
        self._timeout_s = timeout_s
        self._block_bytes = block_bytes
        self._checksums = checksums
        self._instructions = instructions
        self._max_ops_at_once = max_ops_at_once
        self.is_up = False
        self._waiting: FairQueue[TransferOp] = FairQueue()
        self._running: dict[OpId, TransferOp] = {}
        self._deadlines: list[tuple[float, OpId]] = []

    @property
    def num_waiting(self) -> int:
        """Number of ops that have not had their turn."""
        return len(self._waiting)

    def add(self, ops: Sequence[TransferOp], now: float) -> None:
        """Start ops as their turn comes."""
        for op in ops:
            urgency = Urgency.NEEDED if op.kind in LOAD_TIER else Urgency.STORE
            self._waiting.add(op.op_id, op, owner=_ONE_OWNER, urgency=urgency)
        self._fill(now)

    def done(self, op_id: int, now: float) -> TransferOp | None:
        """Return the op that the worker has ended; None if it is not one of its ops any more."""
        op = self._running.pop(OpId(op_id), None)
        if op is not None:
            self._fill(now)
        return op

    def down(self) -> list[TransferOp]:
        """Return all ops: their worker is gone, and they have moved nothing."""
        self.is_up = False
        ended = [*self._running.values(), *self.withdraw()]
        self._running.clear()
        return ended

    def withdraw(self) -> list[TransferOp]:
        """Return the ops that have not had their turn: they will not be started."""
        return list(iter(self._waiting.next, None))

    def expire(self, now: float) -> None:
        """Have the worker replaced if it missed an op's deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            op = self._running.get(heapq.heappop(self._deadlines)[1])
            if op is not None:
                reason = f"{op.kind.value} op {op.op_id} missed its deadline"
                self._instructions.append(ReplaceExecutor(self.worker, reason))

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._running:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _fill(self, now: float) -> None:
        while len(self._running) < self._max_ops_at_once:
            if (op := self._waiting.next()) is None:
                return
            self._running[op.op_id] = op
            extra_s = len(op) * self._block_bytes / _SLOWEST_BYTES_PER_S
            heapq.heappush(self._deadlines, (now + self._timeout_s + extra_s, op.op_id))
            expected = self._checksums.expected(op)
            self._instructions.append(RunOp(self.worker, TaskId(0), op, expected, gated=False))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if not self.is_up and (self._running or self.num_waiting):
            raise InternalError(f"{self.worker}: ops of a worker that is gone")
        if self.num_waiting and len(self._running) < self._max_ops_at_once:
            raise InternalError(f"{self.worker}: an op waits although it could run")


class _ChunksAtStore(RemoteTier):
    """Knowledge of chunks, each the only block of a prompt of its own.

    The keys of a question are independent here: what is there says nothing of those before it.
    """

    def first_unknown(self, keys: BlockKeys, stop: int, now: float) -> int | None:
        for position in range(stop):
            if not self.index.contains(keys.root, key := keys.key(position)):
                return None if self.is_absent(keys.root, key, now) else position
        return None

    def learn(
        self, root: RootId, parent: BlockKey | None, keys: Sequence[BlockKey], first: int = 0,
        content: PromptContent | None = None,
        peer: str = "",
    ) -> int:  # fmt: skip
        for key in keys:
            super().learn(root, None, [key])
        return len(keys)


class StorePresence:
    """Knowledge of one store, and open questions to it.

    vLLM looks chunks up one by one, and asks again at its next step while the answer is missing.
    What it asks for in one step is one question to the store:

        look_up(key) --> unknown, noted --step ends--> question --> answered | late | store gone

    Answers are kept for a while. Repeated failures open a circuit breaker; until it closes, every
    chunk is missing. Pure: the time is handed in.

    Args:
        root: Root under which the chunks are kept.
        capacity: Chunks to remember at most.
        timeout_s: How long vLLM may be kept waiting for an answer.
        instructions: Receives `RunLookUp`.
    """

    def __init__(
        self, root: RootId, capacity: int, timeout_s: float, instructions: list[WorkerInstruction]
    ) -> None:
        self._root = root
        self._instructions = instructions
        self._known = _ChunksAtStore(capacity)
        self.breaker = CircuitBreaker()
        self._questions = RemoteLookUps(self._known, self.breaker, timeout_s)
        self._noted: dict[str, dict[BlockKey, None]] = {}
        self.is_up = False

    @property
    def takes_part(self) -> bool:
        return self.is_up and self.breaker.is_closed

    def look_up(self, asker: str, key: BlockKey, now: float) -> bool | None:
        """Return whether a chunk is there; None if the store has yet to say.

        Args:
            asker: What one asker asks for in a step is one question: until the first chunk that is
                missing.
        """
        if self.is_there(key):
            return True
        if not self.takes_part or self._known.is_absent(self._root, key, now):
            return False
        self._noted.setdefault(asker, {})[key] = None
        return None

    def is_there(self, key: BlockKey) -> bool:
        """Whether a chunk was there when last heard of."""
        return self.takes_part and self._known.index.contains(self._root, key)

    def learn(self, key: BlockKey, is_there: bool, now: float) -> None:
        """Remember that a chunk was stored, or that it did not come."""
        self._known.advance(now)
        if is_there:
            self._known.learn(self._root, None, [key])
        else:
            self._known.discard(self._root, key)
            self._known.learn_absent(self._root, key, now, ABSENT_TTL_S)

    def ask(self, now: float) -> None:
        """Ask the store about what was noted."""
        noted, self._noted = self._noted, {}
        left: list[Instruction] = []
        for keys in noted.values() if self.takes_part else ():
            chunks = EngineBlockKeys(self._root, list(keys), len(keys))
            prompt = Prompt(TaskKind.GET, chunks, 0, len(keys), 0)
            self._questions.look_up(prompt, now, left)
        self._pass_on(left)

    def op_ended(self, is_well: bool, reason: str, now: float) -> None:
        """Inform the breaker how an op of the store went. What was under way when it opened is no
        trial."""
        if not self.breaker.is_closed:
            return
        if is_well:
            self.breaker.succeeded(now)
        else:
            self.breaker.failed(reason, now)

    def answered(self, answer: LookedUp, now: float) -> None:
        """Take an answer; one that comes too late is ignored."""
        self._known.advance(now)
        self._questions.looked_up(answer, now, [])

    def tick(self, now: float) -> None:
        """Let deadlines pass, and try a store again that was given up."""
        left: list[Instruction] = []
        self._questions.tick(now, self.is_up, left)
        self._pass_on(left)

    def went_down(self, reason: str, now: float) -> None:
        """The store's worker is gone: nothing that was asked will be answered."""
        self.is_up = False
        self.breaker.trip(reason, now)
        self._questions.give_up(now, [])
        self._noted.clear()

    def next_deadline(self) -> float | None:
        return self._questions.next_deadline(self.is_up)

    def _pass_on(self, left: Iterable[Instruction]) -> None:
        """Leave the questions to the worker. That one has ended is seen by asking again."""
        self._instructions += [each for each in left if isinstance(each, RunLookUp)]

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        self._known.check()
        if not self._questions.check():
            raise InternalError("questions to the store cannot be found, or have no deadline")


class JobEnd(NamedTuple):
    """How a job ended. ``moved`` has the keys of a load that have arrived."""

    job_id: int
    moved: list[BlockKey]
    is_whole: bool
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    started_s: float
    num_open: int = 0
    moved: list[BlockKey] = field(default_factory=list)
    num_failed: int = 0


@dataclass(slots=True, eq=False)
class _Cargo:
    """What an op that has not ended moves for a job, and what it holds meanwhile."""

    job: _Job
    keys: list[BlockKey]
    pins: list[PrefixMatch] = field(default_factory=list)
    lease: Lease | None = None


class ChunkTiers:
    """The tiers of one engine. ``presence`` and ``lanes`` leave the instructions to its workers,
    whose owner this is (`WorkerOwner`).

    Chunks are independent of each other: any may be there without those before it, so each is the
    only block of a prompt of its own, with the same index, leases, records and checksums as other
    blocks. There is no task engine: a task is a prefix, so each chunk would be a task, an op and a
    question to the store of its own, where here ops and questions have many.

        store: reserve a slot --> H2DISK, H2REMOTE --> publish
        load:  pin the slot   --> DISK2H or REMOTE2H --> unpin

    A job is over when all its ops have ended. Pure: calls and events with the time in, instructions
    out.

    Args:
        root: Identity of what chunks of this engine's kind mean.
        ssd: The SSD tier; None without one.
        presence: The remote store; None without one.
        lanes: Give ops to the workers; one for each of them.
        checksums: Checksums of the SSD tier's slots.
        max_storing: Chunks that may be on their way down. Further ones are dropped.

    Attributes:
        counters: Deaths of workers, and messages of theirs that were refused.
        dropped: Chunks that were not stored or are lost, by reason.
        hits: Chunks that loads have brought, by worker.
    """

    def __init__(
        self, root: RootId, ssd: Tier | None, presence: StorePresence | None,
        lanes: Sequence[Lane], checksums: SlotChecksums, max_storing: int,
    ) -> None:  # fmt: skip
        self._root = root
        self._ssd = ssd
        self._presence = presence
        self._lanes = {lane.worker: lane for lane in lanes}
        self._max_storing = max_storing
        self._checksums = checksums
        self._op_ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._cargo: dict[OpId, _Cargo] = {}
        self._ended: list[JobEnd] = []
        self._num_storing = 0
        self._going_to_store: set[BlockKey] = set()
        self.counters = ServerCounters()
        self.dropped: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    # -- calls -----------------------------------------------------------------------------------

    def look_up(self, asker: str, key: BlockKey, now: float) -> bool | None:
        """Return whether a chunk can be loaded; None if the remote store has yet to say."""
        if self._ssd is not None and self._lanes[DISK].is_up:
            self._ssd.advance(now)
            if self._ssd.match(_alone(self._root, key)).run is not None:
                return True
        if self._presence is None:
            return False
        return self._presence.look_up(asker, key, now)

    def step_ended(self, now: float) -> None:
        """Ask the remote store about the chunks that this step has looked up."""
        if self._presence is not None:
            self._presence.ask(now)

    def store(
        self, job_id: int, keys: Sequence[BlockKey], blocks: Sequence[int], now: float
    ) -> None:
        """Store chunks from host blocks, which stay as they are until the job is over."""
        job, presence = self._begin(job_id, now), self._presence
        ops: list[TransferOp] = []
        to_remote: list[tuple[BlockKey, int]] = []
        for key, block in zip(keys, blocks, strict=True):
            if self._num_storing + len(ops) + len(to_remote) >= self._max_storing:
                self.dropped["backlog"] += 1
                continue
            ops += self._to_ssd(job, key, block)
            if (
                presence is not None
                and presence.takes_part
                and not (presence.is_there(key) or key in self._going_to_store)
            ):
                to_remote.append((key, block))
                self._going_to_store.add(key)
        for part in _batches(to_remote):
            names = [key for key, _ in part]
            source, nowhere = _ids([block for _, block in part]), _ids([0] * len(part))
            ops.append(self._op(OpKind.H2REMOTE, source, nowhere, _Cargo(job, names)))
        self._num_storing += sum(len(op) for op in ops)
        self._start(job, ops, now)

    def load(
        self, job_id: int, keys: Sequence[BlockKey], blocks: Sequence[int], now: float
    ) -> None:
        """Load chunks into host blocks."""
        job = self._begin(job_id, now)
        from_ssd: list[tuple[BlockKey, int, PrefixMatch]] = []
        from_remote: list[tuple[BlockKey, int]] = []
        for key, block in zip(keys, blocks, strict=True):
            match = self._pin(key)
            if match is not None:
                from_ssd.append((key, block, match))
            elif self._presence is not None and self._presence.is_there(key):
                from_remote.append((key, block))
            else:
                job.num_failed += 1
        ops = []
        for pinned in _batches(from_ssd):
            assert self._ssd is not None
            pins = [match for _, _, match in pinned]
            slots = np.concatenate([self._ssd.index.blocks(match) for match in pins])
            cargo = _Cargo(job, [key for key, _, _ in pinned], pins)
            target = _ids([block for _, block, _ in pinned])
            ops.append(self._op(OpKind.DISK2H, slots, target, cargo))
        for part in _batches(from_remote):
            target, nowhere = _ids([block for _, block in part]), _ids([0] * len(part))
            cargo = _Cargo(job, [key for key, _ in part])
            ops.append(self._op(OpKind.REMOTE2H, nowhere, target, cargo))
        self._start(job, ops, now)

    def take_ended(self) -> list[JobEnd]:
        ended, self._ended = self._ended, []
        return ended

    @property
    def num_open_jobs(self) -> int:
        return len(self._jobs)

    # -- events ----------------------------------------------------------------------------------

    def worker_up(self, worker: str) -> None:
        self._lanes[worker].is_up = True
        if worker == REMOTE and self._presence is not None:
            self._presence.is_up = True

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone, and with it what it was moving."""
        if worker == REMOTE and self._presence is not None:
            self._presence.went_down(reason, now)
        for op in self._lanes[worker].down():
            self._op_ended(op, 0, False, now)

    def op_done(self, worker: str, done: Done, now: float) -> None:
        op = self._lanes[worker].done(done.op_id, now)
        if op is None:
            return
        num_ok = done.num_ok
        if done.checksums:
            covered = self._checksums.record(op, unpack_checksums(done.checksums))
            num_ok = num_ok if covered is None else min(num_ok, covered)
        num_ok = max(0, min(num_ok, len(op)))
        if worker == REMOTE and self._presence is not None:
            is_well = num_ok == len(op) or done.bad_block
            self._presence.op_ended(is_well, done.error or "not moved", now)
        self._op_ended(op, num_ok, done.bad_block, now)
        self._sync_store(now)

    def looked_up(self, answer: LookedUp, now: float) -> None:
        if self._presence is not None:
            self._presence.answered(answer, now)
            self._sync_store(now)

    def layouts_noted(self, others: Sequence[str]) -> None:
        """Do nothing: the layouts of chunks are vLLM's, and none is noted."""

    def tick(self, now: float) -> None:
        """Let deadlines pass."""
        for lane in self._lanes.values():
            lane.expire(now)
        if self._presence is not None:
            self._presence.tick(now)
            self._sync_store(now)

    def next_deadline(self) -> float | None:
        times = [lane.next_deadline() for lane in self._lanes.values()]
        if self._presence is not None:
            times.append(self._presence.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def _sync_store(self, now: float) -> None:
        """End what waits for a store that was given up, without waiting for deadlines."""
        if self._presence is not None and not self._presence.takes_part:
            for op in self._lanes[REMOTE].withdraw():
                self._op_ended(op, 0, False, now)

    # -- ops -------------------------------------------------------------------------------------

    def _to_ssd(self, job: _Job, key: BlockKey, block: int) -> list[TransferOp]:
        """Make the op that stores a chunk on SSD, unless it is there or on its way."""
        ssd = self._ssd
        if ssd is None or not self._lanes[DISK].is_up or ssd.index.contains(self._root, key):
            return []
        if ssd.num_in_flight(_alone(self._root, key), 0, 1):
            return []
        lease = ssd.reserve_keys(self._root, None, [key])
        if not len(lease):
            ssd.release(lease)
            self.dropped["no_room"] += 1
            return []
        cargo = _Cargo(job, [key], lease=lease)
        return [self._op(OpKind.H2DISK, _ids([block]), lease.blocks.copy(), cargo)]

    def _pin(self, key: BlockKey) -> PrefixMatch | None:
        if self._ssd is None or not self._lanes[DISK].is_up:
            return None
        match = self._ssd.index.locate(self._root, key)
        if match.run is None:
            return None
        self._ssd.index.pin(match)
        return match

    def _op(self, kind: OpKind, src: BlockIds, dst: BlockIds, cargo: _Cargo) -> TransferOp:
        names = None
        if kind is not OpKind.DISK2H:
            names = BlockNames(self._root, 0, b"", list(cargo.keys))
        op = TransferOp(OpId(next(self._op_ids)), kind, 0, src, dst, (), names)
        self._cargo[op.op_id] = cargo
        return op

    # -- jobs ------------------------------------------------------------------------------------

    def _begin(self, job_id: int, now: float) -> _Job:
        if self._ssd is not None:
            self._ssd.advance(now)
        job = self._jobs[job_id] = _Job(job_id, now)
        return job

    def _start(self, job: _Job, ops: list[TransferOp], now: float) -> None:
        job.num_open = len(ops)
        for worker, lane in self._lanes.items():
            lane.add([op for op in ops if WORKER_OF[op.kind] == worker], now)
        self._end_if_over(job, now)

    def _op_ended(self, op: TransferOp, num_ok: int, bad_block: bool, now: float) -> None:
        cargo = self._cargo.pop(op.op_id)
        worker, is_load, num_failed = WORKER_OF[op.kind], op.kind in LOAD_TIER, len(op) - num_ok
        if self._ssd is not None:
            for pin in cargo.pins:
                self._ssd.unpin(pin)
            if cargo.lease is not None:
                self._ssd.publish(cargo.lease, num_ok)
                self._ssd.release(cargo.lease)
        job = cargo.job
        if is_load:
            self.hits[worker] += num_ok
            job.moved += cargo.keys[:num_ok]
        else:
            self._num_storing -= len(op)
            self.dropped["not_written"] += num_failed
        if worker == REMOTE:
            self._learn(cargo.keys, num_ok, is_load, now)
        elif bad_block and is_load and self._ssd is not None:
            self._ssd.discard(self._root, cargo.keys[num_ok])
        job.num_failed += num_failed
        job.num_open -= 1
        self._end_if_over(job, now)

    def _learn(self, keys: list[BlockKey], num_ok: int, is_load: bool, now: float) -> None:
        """Learn from an op of the store. A chunk that did not come, for whatever reason, counts as
        missing: vLLM would ask for it again and again."""
        assert self._presence is not None
        for key in keys[:num_ok]:
            self._presence.learn(key, True, now)
        if not is_load:
            self._going_to_store.difference_update(keys)
        elif num_ok < len(keys):
            self._presence.learn(keys[num_ok], False, now)

    def _end_if_over(self, job: _Job, now: float) -> None:
        if job.num_open == 0:
            del self._jobs[job.job_id]
            whole = job.num_failed == 0
            self._ended.append(JobEnd(job.job_id, job.moved, whole, now - job.started_s))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        for lane in self._lanes.values():
            lane.check()
        if self._presence is not None:
            self._presence.check()
            if not self._presence.takes_part and self._lanes[REMOTE].num_waiting:
                raise InternalError("ops wait for a store that was given up")
        if self._ssd is not None:
            self._ssd.check()
        open_ops = Counter(cargo.job.job_id for cargo in self._cargo.values())
        if open_ops != {number: job.num_open for number, job in self._jobs.items()}:
            raise InternalError("jobs count other ops than there are")
        if not self._jobs and (self._num_storing or self._going_to_store):
            raise InternalError("chunks are on their way down without a job")


def _alone(root: RootId, key: BlockKey) -> EngineBlockKeys:
    """A prompt of this one chunk."""
    return EngineBlockKeys(root, [key], 1)


def _ids(blocks: Sequence[int]) -> BlockIds:
    return np.array(blocks, dtype=np.int64)


def _batches(items: list[Item]) -> list[list[Item]]:
    return [items[i : i + _BATCH] for i in range(0, len(items), _BATCH)]
