"""The calls of a session that is held in the server's own process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import PromptKeys
from flexcache.client.backend import MatchedTask
from flexcache.errors import ClosedError
from flexcache.ids import TaskId, TaskKind
from flexcache.server.server import KVServer
from flexcache.tasks.ids import TaskIds
from flexcache.tasks.instructions import TaskResult


class SessionCalls:
    """They go straight to the task engine, under the server's lock."""

    def __init__(self, server: KVServer) -> None:
        self.server = server
        self.ids: TaskIds | None = None
        """Numbers the tasks, once the session is open."""

    def match(
        self,
        kind: TaskKind,
        keys: PromptKeys,
        start: int,
        stop: int,
        num_tokens: int,
        retain_s: float = 0.0,
        look_up: bool = True,
        may_wait: bool = True,
    ) -> MatchedTask | None:
        assert self.ids is not None
        if look_up and not self._look_up(kind, keys, stop, may_wait):
            return None
        with self.server.session() as tasks:
            task_id = self.ids.next()
            plan = tasks.match(
                task_id, kind, keys, start, stop, num_tokens, time.monotonic(), retain_s
            )
        return MatchedTask(task_id, plan.start, plan.num_blocks, plan.sources)

    def _look_up(self, kind: TaskKind, keys: PromptKeys, stop: int, may_wait: bool) -> bool:
        """Have the remote store asked, if there is one; whether the match can be made now."""
        if self.server.config.remote_url is None:
            return True
        with self.server.session() as tasks:
            lookup = tasks.look_up(kind, keys, stop, time.monotonic())
        if lookup is None or not may_wait:
            return lookup is None
        with self.server.session() as tasks:
            while tasks.lookups is not None and tasks.lookups.is_open(lookup):
                self.server.wait_for_change(None)  # it has a deadline
                if self.server.stopping:
                    raise ClosedError("the cache was shut down")
        return True

    def launch(
        self, task_ids: Sequence[int], gpu_blocks: Sequence[npt.NDArray[np.int64]], gated: bool
    ) -> None:
        with self.server.session() as tasks:
            tasks.launch([TaskId(t) for t in task_ids], gpu_blocks, time.monotonic(), gated)

    def cancel(self, task_ids: Iterable[int]) -> None:
        with self.server.session() as tasks:
            tasks.cancel([TaskId(t) for t in task_ids], time.monotonic())

    def results(
        self, task_ids: Iterable[int], timeout: float | None, completely: bool
    ) -> dict[int, TaskResult]:
        wanted = [TaskId(t) for t in task_ids]
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.server.session() as tasks:
            while True:
                over = {}
                for task_id in wanted:
                    result = tasks.sessions.result(task_id, completely)
                    if result is not None:
                        over[int(task_id)] = result
                left = None if deadline is None else deadline - time.monotonic()
                if len(over) == len(set(wanted)) or (left is not None and left <= 0):
                    break
                self.server.wait_for_change(left)
                if self.server.stopping:
                    raise ClosedError("the cache was shut down")
            for number, result in over.items():
                if result.is_final:
                    tasks.sessions.collected(TaskId(number))
            return over

    def clear(self, tier: str | None) -> int:
        return self.server.clear(tier)
