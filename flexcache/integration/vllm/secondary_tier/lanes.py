"""Lanes: the ops of the disk and the remote worker, some at a time, each with a deadline.

Loads go first. Pure: calls and events with the time in, instructions out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexcache.errors import InternalError
from flexcache.ids import OpId, TaskId
from flexcache.server.outbox import WorkerInstruction
from flexcache.tasks.executors import SlotChecksums
from flexcache.tasks.instructions import ReplaceExecutor, RunOp
from flexcache.tasks.model import LOAD_TIER, WORKER_OF
from flexcache.transfer.fair_queue import FairQueue, Urgency
from flexcache.transfer.graph import TransferOp

_SLOWEST_BYTES_PER_S = 1e8
_ONE_OWNER = 0


@dataclass(slots=True)
class _Lane:
    timeout_s: float
    queue: FairQueue[TransferOp] = field(default_factory=FairQueue)
    num_running: int = 0


class Lanes:
    """Gives ops to workers.

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
