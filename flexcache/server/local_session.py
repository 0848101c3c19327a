"""A session held in the server's own process: by its engine, or by the HTTP API."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexcache.cache.prompt import Prompt
from flexcache.errors import ClosedError
from flexcache.ids import TaskId, TaskIds, TaskKind
from flexcache.server.server import KVServer
from flexcache.tasks.instructions import MatchedTask, PromisedLoad


class LocalSession:
    """Its calls go straight to the task engine, under the server's lock.

    Attributes:
        ids: Number the tasks; to be set before the first call, once the session is open.
    """

    ids: TaskIds

    def __init__(self, server: KVServer) -> None:
        self.server = server
        self._has_store = server.config.remote_url is not None

    def match(
        self, kind: TaskKind, prompt: Prompt, look_up: bool = True, may_wait: bool = True,
        awaits_loads: bool = False,
    ) -> MatchedTask | None:  # fmt: skip
        """None if the caller may not wait, and the remote store has yet to answer, or what a get
        needs is being loaded early."""
        keys, start, stop, num_tokens, retain_s, tail_at, session_id, weights, adapter = prompt
        if not self.server.is_open:
            return MatchedTask(self.server.next_id(self.ids), start, 0, {}, 0)
        if look_up and self._has_store and not self._look_up(kind, prompt, may_wait):
            return None
        with self.server.lock, self.server.session() as tasks:
            now = time.monotonic()
            if awaits_loads and tasks.awaits_load(self.ids.session, keys, stop, now):
                return None
            task_id = self.ids.next()
            plan = tasks.match(
                task_id, kind, keys, start, stop, num_tokens, now, retain_s, tail_at,
                session_id, weights, adapter,
            )  # fmt: skip
        return MatchedTask(
            task_id, plan.offset, plan.num_blocks, plan.sources, plan.num_gpu_blocks, plan.tail_at
        )

    def look_up(self, prompt: Prompt) -> None:
        """Begin to ask the remote store about a prompt; no task is made."""
        if self._has_store and self.server.is_open:
            self._look_up(TaskKind.GET, prompt, may_wait=False)

    def _look_up(self, kind: TaskKind, prompt: Prompt, may_wait: bool) -> bool:
        """Ask the remote store; whether the match can be made now."""
        with self.server.lock, self.server.session() as tasks:
            lookup = tasks.look_up(
                kind, prompt.keys, prompt.stop, time.monotonic(), self.ids.session, prompt.weights
            )
        if lookup is None or not may_wait:
            return lookup is None
        with self.server.lock, self.server.session() as tasks:
            while tasks.queries.is_looking_up(lookup):
                self.server.wait_for_change(None)  # it has a deadline
                if self.server.stopping:
                    raise ClosedError("the cache was shut down")
        return True

    def launch(
        self, task_ids: Sequence[int], gpu_blocks: Sequence[npt.NDArray[np.int64]], gated: bool
    ) -> None:
        with self.server.lock, self.server.session() as tasks:
            tasks.launch([TaskId(t) for t in task_ids], gpu_blocks, time.monotonic(), gated)

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a get that the engine has its ranks carry out, if that can be promised."""
        with self.server.lock, self.server.session() as tasks:
            return tasks.promise(TaskId(task_id), time.monotonic())

    def cancel(self, task_ids: Sequence[int]) -> None:
        with self.server.lock, self.server.session() as tasks:
            tasks.cancel([TaskId(t) for t in task_ids], time.monotonic())

    def report_prefill(self, blocks_per_s: float) -> None:
        if not self.server.is_open:
            return
        with self.server.lock, self.server.session() as tasks:
            tasks.report_prefill(self.ids.session, blocks_per_s)

    def session_hint(self, session_id: str, over: bool, returns_in_s: float | None) -> bool:
        """Act on what a user says of its session; whether the session is known."""
        if not self.server.is_open:
            return False
        with self.server.lock, self.server.session() as tasks:
            return tasks.session_hint(session_id, over, returns_in_s, time.monotonic())
