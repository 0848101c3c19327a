r"""Executors: which are up, what each of them moves, and what waits for a turn at a worker.

An op is carried out by one executor (the disk or the remote worker) or by several at once (the
device worker of every rank), and has ended when all of them have reported or are gone. Ops of the
GPU start at once. Ops of a worker wait in its lane, a fair queue, until the worker has room.

    start --> waiting in a lane --> running --done | down--> ended
       \            \--tier unavailable--> ended, nothing moved
        \--not connected--> ended, nothing moved

A state machine without I/O: every call that may end ops returns them, and what the executors are
to do is left as instructions. Every op that was started is returned exactly once, unless its task
withdraws it before its turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from flexcache.breaker import CircuitBreaker
from flexcache.cache.restore import Records
from flexcache.cache.tiers import Tiers
from flexcache.errors import InternalError
from flexcache.ids import OpId, OpKind, TaskId, TaskKind, TierName
from flexcache.stats import QueueStats
from flexcache.tasks.accounts import Accounts
from flexcache.tasks.instructions import (
    DISK,
    PEER,
    REMOTE,
    DropOp,
    Instruction,
    ReplaceExecutor,
    RunOp,
)
from flexcache.tasks.model import LOAD_TIER, LOWER_TIER, WORKER_OF, WORKERS, OpRun, Task, TaskLimits
from flexcache.transfer.messages import Done, unpack_checksums
from flexcache.transfer.scheduler import FairQueue, TransferOp, Urgency

Checksums = npt.NDArray[np.uint64]

_READ_OR_RECORDED = (OpKind.DISK2H, OpKind.DISK2D, OpKind.COMMIT)
_WRITTEN = (OpKind.H2DISK, OpKind.D2DISK)


class SlotChecksums:
    """One checksum per slot, as reported by the write that filled the slot."""

    def __init__(self, num_slots: int) -> None:
        self._by_slot: Checksums = np.zeros(num_slots, dtype=np.uint64)

    def expected(self, op: TransferOp) -> Checksums | None:
        """What the blocks that an op reads or records must add up to; None for other ops."""
        if op.kind in _READ_OR_RECORDED and op.src is not None:
            return self._by_slot[op.src]
        return None

    def record(self, op: TransferOp, checksums: Checksums) -> int | None:
        """Keep what a write reported; how many of its blocks that covers, None if no SSD write."""
        if op.kind not in _WRITTEN or op.dst is None:
            return None
        count = min(len(checksums), len(op.dst))
        self._by_slot[op.dst[:count]] = checksums[:count]
        return count

    def restore(self, records: Records) -> None:
        """Take over the checksums of slots that an earlier process has filled."""
        self._by_slot[records["slot"]] = records["checksum"]


_MAX_OPS_AT_ONCE = 8  # given to a worker: enough to keep it busy, few enough that a read need not
# wait behind many writes, and that a deadline means what it says
_SLOWEST_BYTES_PER_S = 1e8  # a large op gets this much longer than the configured deadline
_GATE_PATIENCE_S = 600.0  # the engine's worker may be in a long step
_MAX_ERROR = 4096  # characters of an executor's text, which goes to its task's scheduler
_MAX_STALE_DEADLINES = 64  # and as many as ops run: then those of ended ops are swept out


@dataclass(slots=True, eq=False)
class _WorkerLane:
    """A worker below the host tier: ops that wait for it, and how many it was given."""

    timeout_s: float
    queue: FairQueue[tuple[Task, TransferOp]] = field(default_factory=FairQueue)
    num_running: int = 0
    blocks_loading: int = 0
    """Blocks of the loads that it was given."""


class Executors:
    """All executors of one cache.

    Args:
        tiers: Learns which of them are unavailable.
        breaker: Circuit breaker of the remote store.
        checksums: Checksums of the SSD tier's slots.
        instructions: Receives `RunOp`, `DropOp` and `ReplaceExecutor`.

    A tier below DRAM takes part while its worker is up and its breaker, if it has one, is closed.
    One that does not is neither read nor written: gets plan what the other tiers have,
    write-throughs skip it, and what is dirty stays dirty.
    """

    def __init__(
        self,
        tiers: Tiers,
        breaker: CircuitBreaker,
        checksums: SlotChecksums,
        accounts: Accounts,
        instructions: list[Instruction],
        limits: TaskLimits,
    ) -> None:
        self._up: dict[str, bool] = {}
        """Whether each executor moves blocks between GPU and SSD past DRAM."""
        self._unavailable = tiers.unavailable
        self._breaker = breaker
        self._lower = [tier.name for tier in tiers.lower]
        self._peers = tiers.peer
        tiers.unavailable.update(self._lower)  # until their workers are up
        self._checksums = checksums
        self._instructions = instructions
        self._accounts = accounts
        self._block_bytes = limits.block_bytes
        self._op_timeout_s = limits.op_timeout_s
        self._lanes = {
            DISK: _WorkerLane(limits.op_timeout_s), PEER: _WorkerLane(limits.remote_timeout_s),
            REMOTE: _WorkerLane(limits.remote_timeout_s),
        }  # fmt: skip
        self._running: dict[OpId, OpRun] = {}
        self._direct_blocks = 0
        """How many the running ops between GPU and SSD have together."""
        # Adding and removing one takes 0.8 to 2.1 us, in a `SortedList` 2.5 to 5.9.
        self._deadlines: list[tuple[float, OpId]] = []
        """A heap; those of ops that have ended stay until they are due or swept out."""

    # -- after an error --------------------------------------------------------------------------

    def under_way(self, untaken: Iterable[Instruction]) -> list[OpRun]:
        """Return the ops that executors were given and have not reported, as runs of their own.

        Right also where a call has failed half-way.

        Args:
            untaken: Instructions that will not be carried out.
        """
        kept = {(left.executor, left.op.op_id) for left in untaken if isinstance(left, RunOp)}
        runs = []
        for op_id, run in self._running.items():
            waiting = {name: None for name in run.waiting_for if (name, op_id) not in kept}
            if waiting:
                # What it waited for has ended, and the new scheduler knows no such op.
                op = replace(run.op, depends_on=())
                runs.append(replace(run, op=op, waiting_for=waiting))
        return runs

    def succeed(self, former: Executors, running: Iterable[OpRun], now: float) -> None:
        """Serve on after everything was forgotten but these ops, which are to end early."""
        self._up = former._up
        self.sync()
        deadlines = {op_id: deadline_s for deadline_s, op_id in former._deadlines}
        for run in running:
            op = run.op
            self._running[op.op_id] = run
            # A promised op has no deadline, as in `_give`.
            if not run.task.is_promised:
                deadline_s = deadlines.get(op.op_id, now + self._op_timeout_s)
                heapq.heappush(self._deadlines, (deadline_s, op.op_id))
            if op.kind.is_direct:
                self._direct_blocks += len(op)
            if (worker := WORKER_OF.get(op.kind)) is not None:
                lane = self._lanes[worker]
                lane.num_running += 1
                lane.blocks_loading += len(op) if op.kind in LOAD_TIER else 0
            self._instructions += [DropOp(executor, op.op_id) for executor in run.waiting_for]

    # -- availability ----------------------------------------------------------------------------

    def up(self, executor: str, is_direct: bool = False) -> None:
        """An executor serves; if ``is_direct``, ops past DRAM too."""
        self._up[executor] = is_direct
        self.sync()

    def down(self, executor: str, reason: str, now: float) -> list[OpRun]:
        """An executor is gone, and with it all that it was moving."""
        self._up.pop(executor, None)
        # First: the end of an op has the next one given out, which must not go to who is gone.
        ended = self.sync(reason)
        for run in list(self._running.values()):
            if executor in run.waiting_for:
                ended += self._reported(run, executor, 0, f"{executor}: {reason}", False, now)
        return ended

    def is_up(self, executor: str) -> bool:
        return executor in self._up

    def are_up(self, executors: Sequence[str]) -> bool:
        return all(map(self._up.__contains__, executors))  # each match asks

    def are_direct(self, executors: Sequence[str]) -> bool:
        """Whether all of them serve, ops past DRAM too."""
        return all(map(self._up.get, executors))

    def is_busy(self, executor: str) -> bool:
        """Whether ops are with it."""
        return any(executor in run.waiting_for for run in self._running.values())

    def sync(self, reason: str = "") -> list[OpRun]:
        """Learn which tiers take part, and end what waits for one that no longer does."""
        ended = []
        for tier in self._lower:
            if self._takes_part(tier):
                self._unavailable.discard(tier)
                continue
            # Only a change ends ops: this is asked after every op of the store.
            if tier in self._unavailable:
                continue
            self._unavailable.add(tier)
            worker = WORKERS[tier]
            why = f"{worker}: {reason or self._breaker.last_reason}"
            while (waiting := self._lanes[worker].queue.next()) is not None:
                task, op = waiting
                task.waiting.discard(op.op_id)
                ended.append(_undone(task, op, why))
        return ended

    def _takes_part(self, tier: TierName) -> bool:
        # One rule for both tiers. What a dying worker was writing back is dirty again, and so is
        # what the store has rejected: the breaker counts each failure, which bounds the retries.
        # Failed writes of a living disk worker are not retried.
        if tier is TierName.PEER and self._peers is not None and not self._peers.can_be_asked:
            return False
        return WORKERS[tier] in self._up and (
            tier is not TierName.REMOTE or self._breaker.is_closed
        )

    # -- ops -------------------------------------------------------------------------------------

    def start(self, task: Task, op: TransferOp, now: float) -> OpRun | None:
        """Give an op to its executors, or let it wait for its turn. Returns it if it cannot run."""
        executors = task.owner.executors[op.kind]
        if down := [name for name in executors if name not in self._up]:
            return _undone(task, op, f"{', '.join(down)} not connected")
        tier, worker = LOWER_TIER.get(op.kind), WORKER_OF.get(op.kind)
        if tier is not None and tier in self._unavailable:
            return _undone(task, op, f"{tier.value} is not available")
        if worker is None:  # engines share no rank: no op of another one has to have its turn first
            self._give(task, op, now)
        else:
            lane = self._lanes[worker]
            lane.queue.add(
                op.op_id, (task, op), owner=task.owner.session, urgency=_urgency(task, op),
                num_blocks=len(op),
            )  # fmt: skip
            task.waiting.add(op.op_id)
            self._fill(lane, now)
        return None

    def blocks_ahead(self, kind: OpKind, is_early: bool) -> int:
        """Return how many blocks a worker loads before those of a new load, early or not. O(1)."""
        worker = WORKER_OF.get(kind)
        if worker is None:
            return 0  # past DRAM
        lane = self._lanes[worker]
        num_early = lane.queue.num_blocks(Urgency.EARLY) if is_early else 0
        return lane.blocks_loading + lane.queue.num_blocks(Urgency.NEEDED) + num_early

    def done(self, executor: str, done: Done, now: float) -> list[OpRun]:
        """An executor has ended its part of an op."""
        run = self._running.get(OpId(done.op_id))
        if run is None or executor not in run.waiting_for:
            return []  # it was declared gone before; what it says no longer counts
        num_ok, error = done.num_ok, done.error
        if done.checksums:
            covered = self._checksums.record(run.op, unpack_checksums(done.checksums))
            # What has no checksum could not be verified when it is read: it counts as unwritten.
            num_ok = num_ok if covered is None else min(num_ok, covered)
        # Another process says so: it must not publish more than it was given.
        num_ok = max(0, min(num_ok, len(run.op)))
        run.device_bytes += done.device_bytes
        run.copy_s = max(run.copy_s, done.seconds)
        if error is not None:
            error = error[:_MAX_ERROR]
        return self._reported(run, executor, num_ok, error, done.bad_block, now)

    def drop(self, task: Task) -> None:
        """Ask for an early end of the task's running ops. They are still reported."""
        for run in task.running.values():
            for executor in run.waiting_for:
                self._instructions.append(DropOp(executor, run.op.op_id))

    def take_back(self, task: Task, now: float) -> list[OpRun]:
        """End the ops of a promised task that no rank was given, or will move any more."""
        ended = []
        for run in list(task.running.values()):
            for executor in list(run.waiting_for):
                ended += self._reported(run, executor, 0, None, False, now)
        return ended

    def withdraw(self, task: Task) -> list[OpId]:
        """Take the task's ops that have not had their turn out of their lanes."""
        withdrawn = sorted(task.waiting)
        task.waiting.clear()
        for op_id in withdrawn:
            for lane in self._lanes.values():
                lane.queue.discard(op_id)
        return withdrawn

    def expire(self, now: float) -> list[OpRun]:
        """Have executors replaced that missed an op's deadline; these ops, which still run."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            run = self._running.get(heapq.heappop(self._deadlines)[1])
            if run is None:
                continue
            assert run.started_s is not None
            reason = (
                f"{run.op.kind.value} op {run.op.op_id} missed its deadline after "
                f"{now - run.started_s:.1f} s"
            )
            run.task.errors.append(reason)
            for executor in list(run.waiting_for):
                self._instructions.append(ReplaceExecutor(executor, reason))
            # Not ended: its copy may still land, so its blocks stay where they are.
            overdue.append(run)
        return overdue

    def next_deadline(self) -> float | None:
        """When the first op that runs misses its deadline, which a call may have set. O(1)."""
        return self._deadlines[0][0] if self._deadlines else None

    def _fill(self, lane: _WorkerLane, now: float) -> None:
        while lane.num_running < _MAX_OPS_AT_ONCE:
            waiting = lane.queue.next()
            if waiting is None:
                return
            task, op = waiting
            task.waiting.discard(op.op_id)
            lane.num_running += 1
            lane.blocks_loading += len(op) if op.kind in LOAD_TIER else 0
            self._give(task, op, now)

    def _give(self, task: Task, op: TransferOp, now: float) -> None:
        """Hand the op to its executors; its deadline starts."""
        executors = task.owner.executors[op.kind]
        gated = task.gated and op.kind.touches_gpu
        is_late = gated and op.kind is OpKind.H2D
        run = OpRun(task, op, now, dict.fromkeys(executors), len(op), counts_late=is_late)
        checksums = self._checksums.expected(op)
        # First, since it is the ops that run that tell `under_way` who has been given one: an
        # instruction that was left has not been taken before this call has ended.
        for executor in () if task.is_promised else executors:
            self._instructions.append(
                RunOp(executor, task.task_id, op, checksums, gated, task.adapter)
            )
        self._running[op.op_id] = run
        task.add_running(run)
        self._accounts.op_started(run, now)
        if task.is_promised:
            return  # no deadline: a rank that hangs has its engine hang
        lane = self._lanes.get(executors[0])
        patience_s = self._op_timeout_s if lane is None else lane.timeout_s
        num_blocks = len(op)
        if op.kind.is_direct:  # a rank has them all at once: those before it go first
            self._direct_blocks += num_blocks
            num_blocks = self._direct_blocks
        patience_s += num_blocks * self._block_bytes / _SLOWEST_BYTES_PER_S
        if gated:
            patience_s += _GATE_PATIENCE_S
        heapq.heappush(self._deadlines, (now + patience_s, op.op_id))

    def _reported(
        self, run: OpRun, executor: str, num_ok: int, error: str | None, bad_block: bool, now: float
    ) -> list[OpRun]:
        """One executor is through with its part; returns what has ended by that."""
        del run.waiting_for[executor]
        # Each rank moves its part of every block, so the one that got least far counts.
        if num_ok < run.num_ok:
            run.num_ok, run.bad_block = num_ok, bad_block
        elif num_ok == run.num_ok:
            run.bad_block |= bad_block
        run.error = run.error or error
        if error is not None:
            run.task.errors.append(error)
        if run.waiting_for:
            return []
        op = run.op
        del self._running[op.op_id]
        run.task.running.pop(op.op_id, None)  # not there if its launch was interrupted
        self._sweep_deadlines()
        self._accounts.op_ended(run, now)
        if op.kind.is_direct:
            self._direct_blocks -= len(op)
        if op.kind in WORKER_OF:
            lane = self._lanes[executor]
            lane.num_running -= 1
            lane.blocks_loading -= len(op) if op.kind in LOAD_TIER else 0
            self._fill(lane, now)
            if executor == REMOTE:
                return [run, *self._judge_store(run, now)]
        return [run]

    def _sweep_deadlines(self) -> None:
        """Keep the heap in proportion to the running ops: some deadlines are minutes away."""
        if len(self._deadlines) > 2 * len(self._running) + _MAX_STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._running]
            heapq.heapify(self._deadlines)

    def _judge_store(self, run: OpRun, now: float) -> list[OpRun]:
        """Inform the breaker how an op of the store went. A block that is missing or bad is no
        failure of the store."""
        if not self._breaker.is_closed:
            return []  # what was under way when it opened is no trial
        is_well = run.num_ok == len(run.op) or run.bad_block
        if is_well:
            self._breaker.succeeded(now)
        elif run.error is not None:
            run.store_failed = True
            self._breaker.failed(f"{run.op.kind.value}: {run.error}", now)
        return self.sync()

    # -- insight ---------------------------------------------------------------------------------

    def queues(self) -> dict[str, QueueStats]:
        """What waits for and is with each worker, and with all ranks together."""
        queues = {
            name: QueueStats(waiting=len(lane.queue), running=lane.num_running)
            for name, lane in self._lanes.items()
        }
        on_devices = sum(run.op.kind.touches_gpu for run in self._running.values())
        return {**queues, "device": QueueStats(waiting=0, running=on_devices)}

    def check(self, open_tasks: dict[TaskId, Task]) -> None:
        """Raise `InternalError` if an invariant does not hold. O(running ops)."""
        if any(self._takes_part(t) is (t in self._unavailable) for t in self._lower):
            raise InternalError(f"the tiers {self._unavailable} are not those that are away")
        for tier in self._unavailable:
            if len(self._lanes[WORKERS[tier]].queue):
                raise InternalError(f"ops wait for {tier.value}, which is unavailable")
        if len(self._deadlines) > 2 * len(self._running) + _MAX_STALE_DEADLINES:
            raise InternalError(f"{len(self._deadlines)} deadlines for {len(self._running)} ops")
        direct = (run.op for run in self._running.values() if run.op.kind.is_direct)
        if self._direct_blocks != sum(map(len, direct)):
            raise InternalError(f"{self._direct_blocks} blocks are counted between GPU and SSD")
        for worker, lane in self._lanes.items():
            lane.queue.check()
            given = [
                run.op for run in self._running.values() if WORKER_OF.get(run.op.kind) == worker
            ]
            if lane.blocks_loading != sum(len(op) for op in given if op.kind in LOAD_TIER):
                raise InternalError(f"{lane.blocks_loading} blocks are counted at {worker}")
        for op_id, run in self._running.items():
            if not run.waiting_for:
                raise InternalError(f"op {op_id} runs without an executor")
            if run.task.task_id not in open_tasks:
                raise InternalError(f"op {op_id} runs for a task that has ended")


def _urgency(task: Task, op: TransferOp) -> Urgency:
    if op.kind not in LOAD_TIER:
        return Urgency.STORE
    return Urgency.EARLY if task.plan.kind is TaskKind.PREFETCH else Urgency.NEEDED


def _undone(task: Task, op: TransferOp, error: str) -> OpRun:
    """An op that could start and ends without having been given to any executor."""
    task.errors.append(error)
    return OpRun(task, op, None, {}, 0, error=error)
