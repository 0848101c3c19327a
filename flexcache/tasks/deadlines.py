"""Deadlines of whole tasks: matches that are never launched, and loads not worth the wait.

Pure: time is handed in. The deadlines of single ops are in `executors`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from flexcache.errors import InternalError
from flexcache.ids import TaskId, TaskKind, TierName
from flexcache.tasks.model import Task

_SHORTEST_LOAD_PATIENCE_S = 0.25  # however fast the engine computes


def load_patience_s(num_blocks: int, prefill_blocks_per_s: float, longest_s: float) -> float:
    """Return how long to wait for a load: no longer than computing its blocks would take.

    Args:
        prefill_blocks_per_s: How fast the engine computes; 0 if unknown.
    """
    if prefill_blocks_per_s <= 0:
        return longest_s
    return min(longest_s, max(_SHORTEST_LOAD_PATIENCE_S, num_blocks / prefill_blocks_per_s))


class TaskDeadlines:
    """Remembers until when each task may wait for its launch or for the remote store.

    Args:
        match_ttl_s: How long a match may remain unlaunched.
        longest_load_s: How long a get waits for the remote store at most.
    """

    def __init__(self, match_ttl_s: float, longest_load_s: float) -> None:
        self.match_ttl_s = match_ttl_s
        self._longest_load_s = longest_load_s
        self._unlaunched: OrderedDict[TaskId, float] = OrderedDict()
        """The oldest match comes first."""
        self._loads: list[tuple[float, TaskId]] = []

    @property
    def num_unlaunched(self) -> int:
        return len(self._unlaunched)

    def matched(self, task_id: TaskId, now: float) -> None:
        self._unlaunched[task_id] = now + self.match_ttl_s

    def launched(self, task: Task, now: float) -> None:
        """A get waits for the remote store no longer than computing its blocks would take."""
        self._unlaunched.pop(task.task_id, None)
        if task.plan.kind is TaskKind.GET and TierName.REMOTE in task.plan.sources:
            rate = task.owner.prefill_blocks_per_s
            patience_s = load_patience_s(task.plan.num_blocks, rate, self._longest_load_s)
            heapq.heappush(self._loads, (now + patience_s, task.task_id))

    def cancelled(self, task_id: TaskId) -> None:
        self._unlaunched.pop(task_id, None)

    def take_late_load(self, now: float) -> TaskId | None:
        """A get that has waited long enough for the remote store; it may have ended since."""
        if self._loads and self._loads[0][0] <= now:
            return heapq.heappop(self._loads)[1]
        return None

    def take_unlaunched(self, now: float) -> TaskId | None:
        """A match whose time to be launched is up."""
        if self._unlaunched and next(iter(self._unlaunched.values())) <= now:
            return self._unlaunched.popitem(last=False)[0]
        return None

    def next(self) -> float | None:
        """When one of these has something to return at the earliest."""
        times = [self._loads[0][0]] if self._loads else []
        if self._unlaunched:
            times.append(next(iter(self._unlaunched.values())))
        return min(times, default=None)

    def check(self, unlaunched: list[TaskId]) -> None:
        """Raise `InternalError` unless exactly these tasks, oldest first, await their launch."""
        if unlaunched != list(self._unlaunched):
            raise InternalError("tasks that wait for their launch and those watched disagree")
