"""Lanes: the ops of the disk and the remote worker, a few at a time, each with a deadline.

Loads go first. Pure: calls and events with the time in, instructions out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.errors import InternalError
from flexcache.ids import OpId, TaskId
from flexcache.server.outbox import WorkerInstruction
from flexcache.tasks.instructions import ReplaceExecutor, RunOp
from flexcache.transfer.fair_queue import FairQueue
from flexcache.transfer.graph import TransferOp

_MAX_OPS_AT_ONCE = 64
_SLOWEST_BYTES_PER_S = 1e8
_ONE_OWNER = 0


@dataclass(slots=True, eq=False)
class Move:
    """An op of one worker, and whom its end concerns.

    Attributes:
        checksums: What the blocks read must add up to, where they are verified.
        job: For the caller.
    """

    worker: str
    op: TransferOp
    is_load: bool
    job: Any
    checksums: npt.NDArray[np.uint64] | None = None


@dataclass(slots=True)
class _Lane:
    timeout_s: float
    queue: FairQueue[Move] = field(default_factory=FairQueue)
    num_running: int = 0


class Lanes:
    """Gives ops to workers.

    Args:
        timeouts_s: Deadline of an op, for each worker.
        block_bytes: Size of a block: large ops get more time.
        instructions: Receives `RunOp` and `ReplaceExecutor`.
    """

    def __init__(
        self, timeouts_s: dict[str, float], block_bytes: int, instructions: list[WorkerInstruction]
    ) -> None:
        self._lanes = {worker: _Lane(timeout_s) for worker, timeout_s in timeouts_s.items()}
        self._block_bytes = block_bytes
        self._instructions = instructions
        self._up: set[str] = set()
        self._running: dict[OpId, Move] = {}
        self._deadlines: list[tuple[float, OpId]] = []

    def is_up(self, worker: str) -> bool:
        return worker in self._up

    def up(self, worker: str) -> None:
        self._up.add(worker)

    def down(self, worker: str) -> list[Move]:
        """Return all ops of a worker that is gone: they have moved nothing."""
        self._up.discard(worker)
        lane = self._lanes[worker]
        ended = [move for move in self._running.values() if move.worker == worker]
        for move in ended:
            del self._running[move.op.op_id]
        while (move_next := lane.queue.next()) is not None:
            ended.append(move_next)
        lane.num_running = 0
        return ended

    def add(self, moves: Sequence[Move], now: float) -> None:
        """Start ops as their turn comes. Their workers must be up."""
        for move in moves:
            queue = self._lanes[move.worker].queue
            queue.add(move.op.op_id, move, owner=_ONE_OWNER, is_load=move.is_load)
        for worker in dict.fromkeys(move.worker for move in moves):
            self._fill(self._lanes[worker], now)

    def done(self, worker: str, op_id: OpId, now: float) -> Move | None:
        """Return the op that a worker has ended; None if it is not one of its ops any more."""
        move = self._running.get(op_id)
        if move is None or move.worker != worker:
            return None
        del self._running[op_id]
        lane = self._lanes[worker]
        lane.num_running -= 1
        self._fill(lane, now)
        return move

    def expire(self, now: float) -> None:
        """Have workers replaced that missed an op's deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            move = self._running.get(heapq.heappop(self._deadlines)[1])
            if move is not None:
                reason = f"{move.op.kind.value} op {move.op.op_id} missed its deadline"
                self._instructions.append(ReplaceExecutor(move.worker, reason))

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._running:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _fill(self, lane: _Lane, now: float) -> None:
        while lane.num_running < _MAX_OPS_AT_ONCE and (move := lane.queue.next()) is not None:
            lane.num_running += 1
            self._running[move.op.op_id] = move
            extra_s = len(move.op) * self._block_bytes / _SLOWEST_BYTES_PER_S
            heapq.heappush(self._deadlines, (now + lane.timeout_s + extra_s, move.op.op_id))
            self._instructions.append(
                RunOp(move.worker, TaskId(0), move.op, move.checksums, gated=False)
            )

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        for worker, lane in self._lanes.items():
            num_running = sum(move.worker == worker for move in self._running.values())
            if num_running != lane.num_running:
                raise InternalError(f"{worker}: {lane.num_running} ops counted, {num_running} run")
            if worker not in self._up and (num_running or len(lane.queue)):
                raise InternalError(f"{worker}: ops of a worker that is gone")
            if len(lane.queue) and num_running < _MAX_OPS_AT_ONCE:
                raise InternalError(f"{worker}: an op waits although it could run")
