"""EarlyTasks: loads that begin before, or instead of waiting for, a get.

    prefetch --its request comes--> what has not begun is left to the get
    a session said when it returns --shortly before--> its last prompt is loaded

A state machine without I/O.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.early_loads import EarlyLoad
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import SessionId, TierName
from flexcache.tasks.matching import Matcher
from flexcache.tasks.runner import TaskRunner
from flexcache.tasks.sessions import TaskSessions

_FETCHES_A_TURN = 8  # other tasks go on between turns


class EarlyTasks:
    """Follows the cache's `EarlyLoads` and `SessionReturns` with tasks."""

    def __init__(
        self, cache: TieredCache, sessions: TaskSessions, matcher: Matcher, runner: TaskRunner
    ) -> None:
        self._cache = cache
        self._sessions = sessions
        self._matcher = matcher
        self._runner = runner

    def awaits(self, session: SessionId, keys: PromptKeys, stop: int, now: float) -> bool:
        """Whether a get that can wait should ask again a little later.

        What has not begun to move is left to the get, which moves blocks on as they come.
        """
        owner = self._sessions.get(session)
        if owner is None or not self._cache.early.num_open:
            return False
        for load in self._matcher.awaited(owner, keys, stop, now):
            self._end_unstarted(load, "its request has come, and loads the rest", now)
        return bool(self._matcher.awaited(owner, keys, stop, now))

    def tick(self, now: float) -> None:
        """Let go of what was loaded, or waits, in vain, and load for sessions that return."""
        self._cache.early.expire(now)
        while (load := self._cache.early.take_overdue(now)) is not None:
            self._end_unstarted(load, "it had no turn in time", now)
        sessions = self._cache.sessions
        returning = iter(partial(sessions.take_returning, now), None)
        for keys in islice(returning, _FETCHES_A_TURN):
            plan = self._matcher.plan_return(keys, now)
            num_below = plan.num_blocks - plan.sources.get(TierName.CPU, 0)
            sessions.counters.fetched_blocks += num_below
            self._runner.load_early(plan, keys, now)

    def _end_unstarted(self, load: EarlyLoad, reason: str, now: float) -> None:
        """Read nothing more for an early load than what is being read."""
        task = self._sessions.tasks.get(load.task_id)
        if task is None or not task.waiting:
            return
        task.errors.append(reason)
        if not (task.running or task.moved or TierName.CPU in task.plan.sources):
            task.cancel()  # it has brought nothing, and nothing has failed
        self._runner.end_unstarted(task, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        sessions = self._cache.sessions
        times = (self._cache.early.next_deadline(), sessions.returns.next_deadline())
        return min((time for time in times if time is not None), default=None)
