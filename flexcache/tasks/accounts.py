"""Accounts of the task engine: every counter, histogram and rate, in one place.

Each event is reported here once. It is counted for the cache as a whole and for the session it
belongs to, and passed on to the recorder, if there is one. What a tier counts itself, where its
index changes, is in `cache.tier`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from flexcache.cache.load_cost import LoadWay
from flexcache.cache.load_plan import LoadPlanner
from flexcache.cache.prompt import Prompt
from flexcache.counters import Histogram
from flexcache.ids import KVStatus, OpKind, SessionId, TaskKind, TierName
from flexcache.stats import HitRateStats, MinuteStats, TotalsStats
from flexcache.tasks.instructions import Recorder, TaskResult
from flexcache.tasks.model import LOAD_TIER, LOWER_TIER, OpRun, Task

_ENDED = {
    (kind, status): f"{kind.value}_{status.value}" for kind in TaskKind for status in KVStatus
}
"""Names of counters; to make one at each end takes a microsecond."""
_WINDOWS = {"1m": 60.0, "10m": 600.0, "1h": 3600.0}
_SLICE_S = 10.0
FAILING_S = 60.0
"""A failure counts as a present one, and is not said again, for this long."""


class OpFailure(NamedTuple):
    """Why an op has failed, and when."""

    error: str
    at_s: float


class Accounts:
    """Counts and records what happens to sessions, tasks and ops.

    Args:
        block_bytes: Bytes of one block over all ranks.
        lost_blocks: Blocks that the planner loses outside any plan, by reason; they count as
            dropped.
        loads: Decides by what loads have taken.

    Attributes:
        totals: Of all sessions together.
        num_ended: Tasks that have come to their final state since startup.
        failures: The last failure of ops of SSD and store, by their kind.
    """

    def __init__(self, block_bytes: int, lost_blocks: Counter[str], loads: LoadPlanner) -> None:
        self._block_bytes = block_bytes
        self._load_cost = loads.cost
        self._ways = loads.ways
        self.recorder: Recorder | None = None
        self.lost = lost_blocks
        self.totals = TotalsStats(dropped_blocks=lost_blocks)
        self.op_seconds = {kind: Histogram() for kind in OpKind}
        self.task_seconds = {kind: Histogram() for kind in TaskKind}
        self._recent: deque[tuple[float, dict[str, int], int]] = deque()
        """The last hour in slices of ten seconds, of those with gets: end, and what had been found,
        by tier, and missed before."""
        self.num_ended = 0
        self.failures: dict[OpKind, OpFailure] = {}

    def succeed(self, former: Accounts, running: Iterable[OpRun], now: float) -> None:
        """Count on after everything was forgotten but these ops, which still run."""
        self.recorder, self.totals, self.lost = former.recorder, former.totals, former.lost
        self.op_seconds, self.task_seconds = former.op_seconds, former.task_seconds
        self.num_ended = former.num_ended
        counts = Counter(run.op.kind.value for run in running if not run.counts_late)
        for kind, total in self.totals.ops.items():
            total.keep_running(counts[kind], now)

    # -- sessions --------------------------------------------------------------------------------

    def session_began(self, session: SessionId, engine: str) -> None:
        if self.recorder is not None:
            self.recorder.session_began(session, engine)

    def session_ended(self, session: SessionId) -> None:
        if self.recorder is not None:
            self.recorder.session_ended(session)

    # -- tasks -----------------------------------------------------------------------------------

    def matched(self, task: Task, prompt: Prompt, now: float) -> None:
        """Blocks of a prompt were asked for or offered; ``task.plan`` is what came of it."""
        plan = task.plan
        is_get = plan.kind is TaskKind.GET
        if is_get:
            self._begin_slice(now)
        for totals in (self.totals, task.owner.totals):
            # Most plans have neither: a loop over an empty table takes as long as to count.
            if plan.dropped:
                for reason, count in plan.dropped.items():
                    totals.dropped_blocks[reason] += count
            if plan.skipped:
                for reason, count in plan.skipped.items():
                    totals.skipped_blocks[reason] += count
            if is_get:
                for tier, count in plan.sources.items():
                    totals.hit_blocks[tier] += count
                totals.missed_blocks += prompt.stop - plan.stop
        if self.recorder is not None:
            self.recorder.matched(task, prompt)

    def _begin_slice(self, now: float) -> None:
        slices = self._recent
        if not slices or slices[-1][0] <= now:
            end, totals = (now // _SLICE_S + 1) * _SLICE_S, self.totals
            slices.append((end, dict(totals.hit_blocks), totals.missed_blocks))
            while slices[0][0] <= now - _WINDOWS["1h"]:
                slices.popleft()

    def hit_rate(self, now: float) -> dict[str, HitRateStats]:
        """Return the share of blocks asked for that was found, by window, each right to within a
        slice."""
        windows, totals = {}, self.totals
        for name, length in _WINDOWS.items():
            begun = next((s for s in self._recent if s[0] > now - length), None)
            asked = found = 0
            if begun is not None:
                found = sum(totals.hit_blocks.values()) - sum(begun[1].values())
                asked = found + totals.missed_blocks - begun[2]
            rate = found / asked if asked else None
            windows[name] = HitRateStats(asked_blocks=asked, hit_blocks=found, rate=rate)
        return windows

    def hits_by_minute(self, now: float) -> list[MinuteStats]:
        """Return what gets of the last hour have found, minute by minute, oldest first. Minutes
        without any are left out."""
        minutes: dict[int, MinuteStats] = {}
        later = [*self._recent, (now, self.totals.hit_blocks, self.totals.missed_blocks)][1:]
        for (end, hits, missed), (_, next_hits, next_missed) in zip(
            self._recent, later, strict=True
        ):
            ago = int(now // 60) - int((end - _SLICE_S) // 60)
            minute = minutes.setdefault(ago, MinuteStats(minutes_ago=ago))
            minute.missed_blocks += next_missed - missed
            for tier, count in next_hits.items():
                minute.hit_blocks[tier] += count - hits.get(tier, 0)
        return list(minutes.values())

    def launched(self, task: Task) -> None:
        if self.recorder is not None:
            self.recorder.launched(task)

    def cancelled(self, task: Task) -> None:
        if self.recorder is not None:
            self.recorder.cancelled(task)

    def answered(self, task: Task, now: float) -> None:
        """A task that was launched has been answered."""
        if task.launched_s is None:
            return
        seconds, plan = now - task.launched_s, task.plan
        self.task_seconds[plan.kind].observe(seconds)
        if plan.way is LoadWay.DIRECT and task.state.is_overdue:
            self._ways.failed()
        # Ways are compared by whole loads from SSD alone, without another host's time.
        is_local = not plan.sources.keys() & {TierName.PEER, TierName.REMOTE}
        if plan.way is not None and is_local and task.has_arrived:
            self._ways.ended(plan.way, plan.sources[TierName.SSD], seconds)

    def ended(self, task: Task, result: TaskResult) -> None:
        self.num_ended += 1
        name = _ENDED[task.plan.kind, result.status]
        self.totals.ended_tasks[name] += 1
        task.owner.totals.ended_tasks[name] += 1
        if self.recorder is not None:
            self.recorder.ended(task, result)

    def dropped(self, task: Task, reason: str, num_blocks: int) -> None:
        """Blocks that the task should have stored, or that were bad, are in no tier now."""
        self.totals.dropped_blocks[reason] += num_blocks
        task.owner.totals.dropped_blocks[reason] += num_blocks

    # -- ops -------------------------------------------------------------------------------------

    def op_started(self, run: OpRun, now: float) -> None:
        """The op was given to its executors."""
        task, kind = run.task, run.op.kind
        if not run.counts_late:
            self.totals.ops[kind].started(now)
            task.owner.totals.ops[kind].started(now)
        if self._load_cost is not None and kind in LOAD_TIER:
            self._load_cost.started(kind, now, run.op.peer)
        if self.recorder is not None:
            self.recorder.op_started(task, run.op)

    def op_ended(self, run: OpRun, now: float) -> None:
        """All its executors have reported."""
        assert run.started_s is not None
        kind, num_ok, seconds = run.op.kind, run.num_ok, now - run.started_s
        # A rank has measured it without the wait for its gate, which is the engine's time.
        seconds = min(seconds, run.copy_s) if run.copy_s else seconds
        # A COMMIT records what another op has moved, and was counted with.
        num_bytes = 0 if kind is OpKind.COMMIT else num_ok * self._block_bytes
        num_wanted = len(run.op)
        for totals in (self.totals, run.task.owner.totals):
            if run.counts_late:
                totals.ops[kind].started(now - seconds)
            totals.ops[kind].ended(now, num_wanted, num_ok, num_bytes, run.device_bytes)
        self.op_seconds[kind].observe(seconds)
        if run.error is not None:
            self._op_failed(run, run.error, now)
        if self._load_cost is not None and kind in LOAD_TIER:
            self._load_cost.ended(kind, now, num_ok, seconds, run.op.peer)
        if self.recorder is not None:
            self.recorder.op_ended(run.task, run.op, num_ok, run.error)

    def _op_failed(self, run: OpRun, error: str, now: float) -> None:
        kind = run.op.kind
        if kind is OpKind.DISK2D:
            self._ways.failed()
        # No failures: an object that the store has dropped, and ops of ranks that were cancelled.
        is_end = run.bad_block if kind is OpKind.REMOTE2H else kind.is_direct and not run.bad_block
        if LOWER_TIER.get(kind, TierName.PEER) is not TierName.PEER and not is_end:
            self.failures[kind] = OpFailure(error, now)
