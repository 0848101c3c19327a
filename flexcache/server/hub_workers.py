"""The hub as the owner of its workers."""

from __future__ import annotations

from collections import Counter

from flexcache.server import op_reports
from flexcache.server.hub import Hub
from flexcache.tasks.engine import KVTaskEngine
from flexcache.transfer.messages import Done, LookedUp


class HubWorkers:
    """Passes what happens to workers on to the hub's task engine. Implements `WorkerOwner`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    @property
    def counters(self) -> Counter[str]:
        return self._hub.counters

    @property
    def _tasks(self) -> KVTaskEngine:
        assert self._hub.cache is not None  # there are no workers before
        return self._hub.cache.tasks

    def worker_up(self, worker: str) -> None:
        self._tasks.executor_up(worker)
        self._hub.readiness.changed()

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        self._tasks.executor_down(worker, reason, now)
        self._hub.readiness.changed()

    def op_done(self, worker: str, done: Done, now: float) -> None:
        op_reports.pass_on(self._tasks, worker, done, now)

    def looked_up(self, answer: LookedUp, now: float) -> None:
        self._tasks.looked_up(answer.lookup_id, answer.num_present, answer.error, now, answer.tail)
