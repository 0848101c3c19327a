"""ChunkTiers: SSD and remote store below a DRAM cache that another program owns."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tier import Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskId
from flexcache.server.outbox import WorkerInstruction
from flexcache.tasks.executors import Checksums, SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE, ReplaceExecutor, RunLookUp, RunOp
from flexcache.tasks.model import LOAD_TIER, WORKER_OF
from flexcache.transfer.breaker import CircuitBreaker
from flexcache.transfer.messages import BlockNames
from flexcache.transfer.scheduler import BlockIds, FairQueue, TransferOp, Urgency

_SLOWEST_BYTES_PER_S = 1e8
_ONE_OWNER = 0


@dataclass(slots=True)
class _Lane:
    timeout_s: float
    queue: FairQueue[TransferOp] = field(default_factory=FairQueue)
    num_running: int = 0


class Lanes:
    """Gives ops to workers.

    Loads go first. Pure: calls and events with the time in, instructions out.

    Args:
        timeouts_s: Deadline of an op, for each worker.
        block_bytes: Size of a block: large ops get more time.
        checksums: What reads from SSD are verified against.
        instructions: Receives `RunOp` and `ReplaceExecutor`.
        max_ops_at_once: Ops that a worker is given before it has ended any.
    """

    def __init__(
        self,
        timeouts_s: dict[str, float],
        block_bytes: int,
        checksums: SlotChecksums,
        instructions: list[WorkerInstruction],
        max_ops_at_once: int = 64,
    ) -> None:
        self._lanes = {worker: _Lane(timeout_s) for worker, timeout_s in timeouts_s.items()}
        self._block_bytes = block_bytes
        self._checksums = checksums
        self._instructions = instructions
        self._max_ops_at_once = max_ops_at_once
        self._up: set[str] = set()
        self._running: dict[OpId, TransferOp] = {}
        self._deadlines: list[tuple[float, OpId]] = []

    def is_up(self, worker: str) -> bool:
        return worker in self._up

    def up(self, worker: str) -> None:
        self._up.add(worker)

    def down(self, worker: str) -> list[TransferOp]:
        """Return all ops of a worker that is gone: they have moved nothing."""
        self._up.discard(worker)
        ended = [op for op in self._running.values() if WORKER_OF[op.kind] == worker]
        for op in ended:
            del self._running[op.op_id]
        self._lanes[worker].num_running = 0
        return ended + self.withdraw(worker)

    def withdraw(self, worker: str) -> list[TransferOp]:
        """Return the ops that have not had their turn: they will not be started."""
        queue, waiting = self._lanes[worker].queue, []
        while (op := queue.next()) is not None:
            waiting.append(op)
        return waiting

    def num_waiting(self, worker: str) -> int:
        """Number of ops that have not had their turn."""
        return len(self._lanes[worker].queue)

    def add(self, ops: Sequence[TransferOp], now: float) -> None:
        """Start ops as their turn comes. Their workers must be up."""
        for op in ops:
            queue = self._lanes[WORKER_OF[op.kind]].queue
            urgency = Urgency.NEEDED if op.kind in LOAD_TIER else Urgency.STORE
            queue.add(op.op_id, op, owner=_ONE_OWNER, urgency=urgency)
        for worker in dict.fromkeys(WORKER_OF[op.kind] for op in ops):
            self._fill(worker, now)

    def done(self, worker: str, op_id: OpId, now: float) -> TransferOp | None:
        """Return the op that a worker has ended; None if it is not one of its ops any more."""
        op = self._running.get(op_id)
        if op is None or WORKER_OF[op.kind] != worker:
            return None
        del self._running[op_id]
        self._lanes[worker].num_running -= 1
        self._fill(worker, now)
        return op

    def expire(self, now: float) -> None:
        """Have workers replaced that missed an op's deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            op = self._running.get(heapq.heappop(self._deadlines)[1])
            if op is not None:
                reason = f"{op.kind.value} op {op.op_id} missed its deadline"
                self._instructions.append(ReplaceExecutor(WORKER_OF[op.kind], reason))

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._running:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _fill(self, worker: str, now: float) -> None:
        lane = self._lanes[worker]
        while lane.num_running < self._max_ops_at_once and (op := lane.queue.next()) is not None:
            lane.num_running += 1
            self._running[op.op_id] = op
            extra_s = len(op) * self._block_bytes / _SLOWEST_BYTES_PER_S
            heapq.heappush(self._deadlines, (now + lane.timeout_s + extra_s, op.op_id))
            expected = self._checksums.expected(op)
            self._instructions.append(RunOp(worker, TaskId(0), op, expected, gated=False))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        for worker, lane in self._lanes.items():
            num_running = sum(WORKER_OF[op.kind] == worker for op in self._running.values())
            if num_running != lane.num_running:
                raise InternalError(f"{worker}: {lane.num_running} ops counted, {num_running} run")
            if worker not in self._up and (num_running or len(lane.queue)):
                raise InternalError(f"{worker}: ops of a worker that is gone")
            if len(lane.queue) and num_running < self._max_ops_at_once:
                raise InternalError(f"{worker}: an op waits although it could run")


_MAX_KEYS = 8192
_TRIAL_KEY = BlockKey(b"flexcache-trial")


@dataclass(frozen=True, slots=True)
class _Question:
    keys: list[BlockKey]
    deadline_s: float
    is_trial: bool = False


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
        absent_ttl_s: How long a missing chunk is assumed to stay missing.
        instructions: Receives `RunLookUp`.
    """

    def __init__(
        self,
        root: bytes,
        capacity: int,
        timeout_s: float,
        absent_ttl_s: float,
        instructions: list[WorkerInstruction],
    ) -> None:
        self._root = root
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._absent_ttl_s = absent_ttl_s
        self._instructions = instructions
        self._known: OrderedDict[BlockKey, float | None] = OrderedDict()
        """None for a chunk that is there; for a missing one the time until which it is missing."""
        self._noted: dict[str, dict[BlockKey, None]] = {}
        self._ids = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._asked: set[BlockKey] = set()
        self.breaker = CircuitBreaker()
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
        if not self.takes_part:
            return False
        if key in self._known:
            until = self._known[key]
            if until is None or until > now:
                return until is None
            del self._known[key]
        if key not in self._asked:
            self._noted.setdefault(asker, {})[key] = None
        return None

    def is_there(self, key: BlockKey) -> bool:
        """Whether a chunk was there when last heard of."""
        return self.takes_part and key in self._known and self._known[key] is None

    def learn(self, key: BlockKey, is_there: bool, now: float) -> None:
        """Remember that a chunk was stored, found, or not found."""
        self._known[key] = None if is_there else now + self._absent_ttl_s
        self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def ask(self, now: float) -> None:
        """Ask the store about what was noted."""
        noted, self._noted = self._noted, {}
        for keys in noted.values():
            new = [key for key in keys if key not in self._asked][:_MAX_KEYS]
            if new and self.takes_part:
                self._asked.update(new)
                self._put(_Question(new, now + self._timeout_s))

    def op_ended(self, is_well: bool, reason: str, now: float) -> None:
        """Inform the breaker how an op of the store went. What was under way when it opened is no
        trial."""
        if not self.breaker.is_closed:
            return
        if is_well:
            self.breaker.succeeded(now)
        else:
            self.breaker.failed(reason, now)

    def answered(self, lookup_id: int, num_present: int, error: str | None, now: float) -> None:
        """Take an answer; one that comes too late is ignored."""
        question = self._open.pop(lookup_id, None)
        if question is None:
            return
        self._asked.difference_update(question.keys)
        if error is not None:
            self.breaker.failed(f"look-up: {error}", now)
        else:
            self.breaker.succeeded(now)
        if question.is_trial:
            return
        num_present = min(max(0, num_present), len(question.keys))
        for key in question.keys[:num_present]:
            self.learn(key, True, now)
        for key in question.keys[num_present : num_present + 1]:
            self.learn(key, False, now)
        if error is not None:
            self._assume_absent(question.keys[num_present:], now)

    def tick(self, now: float) -> None:
        """Let deadlines pass, and try a store again that was given up."""
        late = [number for number, q in self._open.items() if q.deadline_s <= now]
        for number in late:
            question = self._open.pop(number)
            self._asked.difference_update(question.keys)
            self._assume_absent(question.keys, now)
            self.breaker.failed("no answer in time", now)
        has_trial = any(question.is_trial for question in self._open.values())
        if self.is_up and not has_trial and self.breaker.wants_trial(now):
            self._put(_Question([_TRIAL_KEY], now + self._timeout_s, is_trial=True))

    def went_down(self, reason: str, now: float) -> None:
        """The store's worker is gone: nothing that was asked will be answered."""
        self.is_up = False
        self.breaker.trip(reason, now)
        self._open.clear()
        self._asked.clear()
        self._noted.clear()

    def next_deadline(self) -> float | None:
        times = [question.deadline_s for question in self._open.values()]
        retry = self.breaker.next_deadline()
        if retry is not None and self.is_up:
            times.append(retry)
        return min(times, default=None)

    def _assume_absent(self, keys: list[BlockKey], now: float) -> None:
        for key in keys:
            if key != _TRIAL_KEY and self._known.get(key, now) is not None:
                self.learn(key, False, now)

    def _put(self, question: _Question) -> None:
        lookup_id = next(self._ids)
        self._open[lookup_id] = question
        self._instructions.append(RunLookUp(lookup_id, self._root, question.keys))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        asked = [key for q in self._open.values() if not q.is_trial for key in q.keys]
        if sorted(asked) != sorted(self._asked):
            raise InternalError("a chunk is asked about twice, or by no question")
        if len(self._known) > self._capacity:
            raise InternalError("more chunks are remembered than allowed")


Item = TypeVar("Item")
_BATCH = 16  # a bad chunk makes those after it in its op count as not loaded


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
    """The tiers of one engine. ``presence`` and ``lanes`` leave the instructions to its workers.

    Chunks are independent of each other: any may be there without those before it, so each is the
    only block of a prompt of its own, with the same index, leases, records and checksums as other
    blocks.

        store: reserve a slot --> H2DISK, H2REMOTE --> publish
        load:  pin the slot   --> DISK2H or REMOTE2H --> unpin

    A job is over when all its ops have ended. Pure: calls and events with the time in, instructions
    out.

    Args:
        root: Identity of what chunks of this engine's kind mean.
        ssd: The SSD tier; None without one.
        presence: The remote store; None without one.
        lanes: Give ops to the workers.
        checksums: Checksums of the SSD tier's slots.
        max_storing: Chunks that may be on their way down. Further ones are dropped.

    Attributes:
        lanes: As given.
        dropped: Chunks that were not stored or are lost, by reason.
        hits: Chunks that loads have brought, by worker.
    """

    def __init__(
        self,
        root: RootId,
        ssd: Tier | None,
        presence: StorePresence | None,
        lanes: Lanes,
        checksums: SlotChecksums,
        max_storing: int,
    ) -> None:
        self._root = root
        self._ssd = ssd
        self._presence = presence
        self.lanes = lanes
        self._max_storing = max_storing
        self._checksums = checksums
        self._op_ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._cargo: dict[OpId, _Cargo] = {}
        self._ended: list[JobEnd] = []
        self._num_storing = 0
        self._going_to_store: set[BlockKey] = set()
        self.dropped: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    # -- calls -----------------------------------------------------------------------------------

    def look_up(self, asker: str, key: BlockKey, now: float) -> bool | None:
        """Return whether a chunk can be loaded; None if the remote store has yet to say."""
        if self._ssd is not None and self.lanes.is_up(DISK):
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
        job = self._begin(job_id, now)
        ops: list[TransferOp] = []
        to_remote: list[tuple[BlockKey, int]] = []
        for key, block in zip(keys, blocks, strict=True):
            if self._num_storing + len(ops) + len(to_remote) >= self._max_storing:
                self.dropped["backlog"] += 1
                continue
            if self._wants_on_ssd(key):
                ops += self._to_ssd(job, key, block)
            if self._wants_at_store(key):
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
        self.lanes.up(worker)
        if worker == REMOTE and self._presence is not None:
            self._presence.is_up = True

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone, and with it what it was moving."""
        if worker == REMOTE and self._presence is not None:
            self._presence.went_down(reason, now)
        for op in self.lanes.down(worker):
            self._op_ended(op, 0, False, now)

    def op_done(
        self, worker: str, op_id: int, num_ok: int, now: float, *, error: str | None = None,
        bad_block: bool = False, checksums: Checksums | None = None,
    ) -> None:  # fmt: skip
        """A worker has moved the first ``num_ok`` chunks of an op; see `KVTaskEngine.op_done`."""
        op = self.lanes.done(worker, OpId(op_id), now)
        if op is None:
            return
        if checksums is not None:
            covered = self._checksums.record(op, checksums)
            num_ok = num_ok if covered is None else min(num_ok, covered)
        num_ok = max(0, min(num_ok, len(op)))
        if worker == REMOTE and self._presence is not None:
            is_well = num_ok == len(op) or bad_block
            self._presence.op_ended(is_well, error or "not moved", now)
        self._op_ended(op, num_ok, bad_block, now)
        self._sync_store(now)

    def looked_up(self, lookup_id: int, num_present: int, error: str | None, now: float) -> None:
        if self._presence is not None:
            self._presence.answered(lookup_id, num_present, error, now)
            self._sync_store(now)

    def tick(self, now: float) -> None:
        """Let deadlines pass."""
        self.lanes.expire(now)
        if self._presence is not None:
            self._presence.tick(now)
            self._sync_store(now)

    def next_deadline(self) -> float | None:
        times = [self.lanes.next_deadline()]
        if self._presence is not None:
            times.append(self._presence.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def _sync_store(self, now: float) -> None:
        """End what waits for a store that was given up, without waiting for deadlines."""
        if self._presence is not None and not self._presence.takes_part:
            for op in self.lanes.withdraw(REMOTE):
                self._op_ended(op, 0, False, now)

    # -- ops -------------------------------------------------------------------------------------

    def _wants_on_ssd(self, key: BlockKey) -> bool:
        ssd = self._ssd
        if ssd is None or not self.lanes.is_up(DISK) or ssd.index.contains(self._root, key):
            return False
        return not ssd.num_in_flight(_alone(self._root, key), 0, 1)

    def _wants_at_store(self, key: BlockKey) -> bool:
        presence = self._presence
        if presence is None or not presence.takes_part or presence.is_there(key):
            return False
        return key not in self._going_to_store

    def _to_ssd(self, job: _Job, key: BlockKey, block: int) -> list[TransferOp]:
        assert self._ssd is not None
        lease = self._ssd.reserve_keys(self._root, None, [key])
        if not len(lease):
            self._ssd.release(lease)
            self.dropped["no_room"] += 1
            return []
        cargo = _Cargo(job, [key], lease=lease)
        return [self._op(OpKind.H2DISK, _ids([block]), lease.blocks.copy(), cargo)]

    def _pin(self, key: BlockKey) -> PrefixMatch | None:
        if self._ssd is None or not self.lanes.is_up(DISK):
            return None
        match = self._ssd.index.locate(self._root, key)
        if match.run is None:
            return None
        self._ssd.pin(match)
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
        self.lanes.add(ops, now)
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
        self.lanes.check()
        if self._presence is not None:
            self._presence.check()
            if not self._presence.takes_part and self.lanes.num_waiting(REMOTE):
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
