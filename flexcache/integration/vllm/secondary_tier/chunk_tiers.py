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
from flexcache.integration.vllm.secondary_tier.lanes import Lanes, Move
from flexcache.integration.vllm.secondary_tier.presence import StorePresence
from flexcache.tasks.checksums import Checksums, SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE
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
    """What an op moves for a job, and what it holds meanwhile."""

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
        max_storing: Chunks that may be on their way down. Further ones are dropped.

    Attributes:
        dropped: Chunks that were not stored or are lost, by reason.
        hits: Chunks that loads have brought, by worker.
    """

    def __init__(
        self,
        root: RootId,
        ssd: Tier | None,
        presence: StorePresence | None,
        lanes: Lanes,
        max_storing: int,
    ) -> None:
        self._root = root
        self._ssd = ssd
        self._presence = presence
        self._lanes = lanes
        self._max_storing = max_storing
        self.checksums = SlotChecksums(0 if ssd is None else ssd.capacity)
        self._op_ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobEnd] = []
        self._num_storing = 0
        self._going_to_store: set[BlockKey] = set()
        self.dropped: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    # -- calls -----------------------------------------------------------------------------------

    def look_up(self, asker: str, key: BlockKey, now: float) -> bool | None:
        """Return whether a chunk can be loaded; None if the remote store has yet to say."""
        if self._ssd is not None and self._lanes.is_up(DISK):
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
        moves: list[Move] = []
        to_remote: list[tuple[BlockKey, int]] = []
        for key, block in zip(keys, blocks, strict=True):
            if self._num_storing + len(moves) + len(to_remote) >= self._max_storing:
                self.dropped["backlog"] += 1
                continue
            if self._wants_on_ssd(key):
                moves += self._to_ssd(job, key, block)
            if self._wants_at_store(key):
                to_remote.append((key, block))
                self._going_to_store.add(key)
        for part in _batches(to_remote):
            names = [key for key, _ in part]
            source, nowhere = _ids([block for _, block in part]), _ids([0] * len(part))
            moves.append(self._move(REMOTE, OpKind.H2REMOTE, source, nowhere, _Cargo(job, names)))
        self._num_storing += sum(len(move.op) for move in moves)
        self._start(job, moves, now)

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
        moves = [self._from_ssd(job, part) for part in _batches(from_ssd)]
        for part in _batches(from_remote):
            target, nowhere = _ids([block for _, block in part]), _ids([0] * len(part))
            cargo = _Cargo(job, [key for key, _ in part])
            moves.append(self._move(REMOTE, OpKind.REMOTE2H, nowhere, target, cargo))
        self._start(job, moves, now)

    def take_ended(self) -> list[JobEnd]:
        ended, self._ended = self._ended, []
        return ended

    @property
    def num_open_jobs(self) -> int:
        return len(self._jobs)

    # -- events ----------------------------------------------------------------------------------

    def worker_up(self, worker: str) -> None:
        self._lanes.up(worker)
        if worker == REMOTE and self._presence is not None:
            self._presence.is_up = True

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone, and with it what it was moving."""
        if worker == REMOTE and self._presence is not None:
            self._presence.went_down(reason, now)
        for move in self._lanes.down(worker):
            self._ended_move(move, 0, False, now)

    def op_done(
        self, worker: str, op_id: int, num_ok: int, now: float, *, error: str | None = None,
        bad_block: bool = False, checksums: Checksums | None = None,
    ) -> None:  # fmt: skip
        """A worker has moved the first ``num_ok`` chunks of an op; see `KVTaskEngine.op_done`."""
        move = self._lanes.done(worker, OpId(op_id), now)
        if move is None:
            return
        if move.op.kind is OpKind.H2DISK:
            covered = 0 if checksums is None else self.checksums.record(move.op, checksums)
            num_ok = min(num_ok, covered or 0)
        num_ok = max(0, min(num_ok, len(move.op)))
        if worker == REMOTE and self._presence is not None:
            if num_ok == len(move.op) or bad_block:
                self._presence.breaker.succeeded(now)
            else:
                self._presence.breaker.failed(error or "not moved", now)
        self._ended_move(move, num_ok, bad_block, now)

    def looked_up(self, lookup_id: int, num_present: int, error: str | None, now: float) -> None:
        if self._presence is not None:
            self._presence.answered(lookup_id, num_present, error, now)

    def tick(self, now: float) -> None:
        """Let deadlines pass."""
        self._lanes.expire(now)
        if self._presence is not None:
            self._presence.tick(now)

    def next_deadline(self) -> float | None:
        times = [self._lanes.next_deadline()]
        if self._presence is not None:
            times.append(self._presence.next_deadline())
        return min((time for time in times if time is not None), default=None)

    # -- moves -----------------------------------------------------------------------------------

    def _wants_on_ssd(self, key: BlockKey) -> bool:
        ssd = self._ssd
        if ssd is None or not self._lanes.is_up(DISK) or ssd.index.contains(self._root, key):
            return False
        return not ssd.num_in_flight(_alone(self._root, key), 0, 1)

    def _wants_at_store(self, key: BlockKey) -> bool:
        presence = self._presence
        if presence is None or not presence.takes_part or presence.is_there(key):
            return False
        return key not in self._going_to_store

    def _to_ssd(self, job: _Job, key: BlockKey, block: int) -> list[Move]:
        assert self._ssd is not None
        lease = self._ssd.reserve_keys(self._root, None, [key])
        if not len(lease):
            self._ssd.release(lease)
            self.dropped["no_room"] += 1
            return []
        cargo = _Cargo(job, [key], lease=lease)
        return [self._move(DISK, OpKind.H2DISK, _ids([block]), lease.blocks.copy(), cargo)]

    def _pin(self, key: BlockKey) -> PrefixMatch | None:
        if self._ssd is None or not self._lanes.is_up(DISK):
            return None
        match = self._ssd.index.locate(self._root, key)
        if match.run is None:
            return None
        self._ssd.pin(match)
        return match

    def _from_ssd(self, job: _Job, part: Sequence[tuple[BlockKey, int, PrefixMatch]]) -> Move:
        assert self._ssd is not None
        pins = [match for _, _, match in part]
        slots = np.concatenate([self._ssd.index.blocks(match) for match in pins])
        cargo = _Cargo(job, [key for key, _, _ in part], pins)
        return self._move(DISK, OpKind.DISK2H, slots, _ids([b for _, b, _ in part]), cargo)

    def _move(self, worker: str, kind: OpKind, src: BlockIds, dst: BlockIds, cargo: _Cargo) -> Move:
        names = None
        if kind is not OpKind.DISK2H:
            names = BlockNames(self._root, 0, b"", list(cargo.keys))
        op = TransferOp(OpId(next(self._op_ids)), kind, 0, src, dst, (), names)
        is_load = kind in (OpKind.DISK2H, OpKind.REMOTE2H)
        return Move(worker, op, is_load, cargo, self.checksums.expected(op))

    # -- jobs ------------------------------------------------------------------------------------

    def _begin(self, job_id: int, now: float) -> _Job:
        if self._ssd is not None:
            self._ssd.advance(now)
        job = self._jobs[job_id] = _Job(job_id, now)
        return job

    def _start(self, job: _Job, moves: list[Move], now: float) -> None:
        job.num_open = len(moves)
        self._lanes.add(moves, now)
        self._end_if_over(job, now)

    def _ended_move(self, move: Move, num_ok: int, bad_block: bool, now: float) -> None:
        cargo: _Cargo = move.job
        job = cargo.job
        for pin in cargo.pins:
            assert self._ssd is not None
            self._ssd.unpin(pin)
        if cargo.lease is not None:
            assert self._ssd is not None
            self._ssd.publish(cargo.lease, num_ok)
            self._ssd.release(cargo.lease)
        if move.is_load:
            self.hits[move.worker] += num_ok
            job.moved += cargo.keys[:num_ok]
        else:
            self._num_storing -= len(move.op)
            self.dropped["not_written"] += len(move.op) - num_ok
        if move.worker == REMOTE:
            self._learn(cargo, move, num_ok, bad_block, now)
        elif bad_block and move.is_load and self._ssd is not None:
            self._ssd.discard(self._root, cargo.keys[num_ok])
        job.num_failed += len(move.op) - num_ok
        job.num_open -= 1
        self._end_if_over(job, now)

    def _learn(self, cargo: _Cargo, move: Move, num_ok: int, bad_block: bool, now: float) -> None:
        assert self._presence is not None
        for key in cargo.keys[:num_ok]:
            self._presence.learn(key, True, now)
        if bad_block and move.is_load:
            self._presence.learn(cargo.keys[num_ok], False, now)
        if not move.is_load:
            self._going_to_store.difference_update(cargo.keys)

    def _end_if_over(self, job: _Job, now: float) -> None:
        if job.num_open == 0:
            del self._jobs[job.job_id]
            whole = job.num_failed == 0
            self._ended.append(JobEnd(job.job_id, job.moved, whole, now - job.started_s))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        self._lanes.check()
        if self._presence is not None:
            self._presence.check()
        if self._ssd is not None:
            self._ssd.check()
        if any(job.num_open <= 0 for job in self._jobs.values()):
            raise InternalError("a job is open without an op")
        if not self._jobs and (self._num_storing or self._going_to_store):
            raise InternalError("chunks are on their way down without a job")


def _alone(root: RootId, key: BlockKey) -> EngineBlockKeys:
    """A prompt of this one chunk."""
    return EngineBlockKeys(root, [key], 1)


def _ids(blocks: Sequence[int]) -> BlockIds:
    return np.array(blocks, dtype=np.int64)


def _batches(items: list[Item]) -> list[list[Item]]:
    return [items[i : i + _BATCH] for i in range(0, len(items), _BATCH)]
