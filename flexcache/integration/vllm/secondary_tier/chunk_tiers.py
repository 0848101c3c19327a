"""ChunkTiers: SSD and remote store below a DRAM cache that another program owns.

Chunks are independent of each other: any may be there without those before it, so each is the only
block of a prompt of its own, with the same index, leases, records and checksums as other blocks.

    store: reserve a slot --> H2DISK, H2REMOTE --> publish
    load:  pin the slot   --> DISK2H or REMOTE2H --> unpin

A job is over when all its ops have ended. Pure: calls and events with the time in, instructions
out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tier import Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId
from flexcache.integration.vllm.secondary_tier.lanes import Lanes
from flexcache.integration.vllm.secondary_tier.presence import StorePresence
from flexcache.tasks.executors import Checksums, SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE
from flexcache.tasks.model import LOAD_TIER, WORKER_OF
from flexcache.transfer.graph import BlockIds, TransferOp
from flexcache.transfer.messages import BlockNames

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
