"""Offloads: copies off the GPU, in the order in which SGLang collects them."""

from __future__ import annotations

from collections import deque

from flexcache.ids import KVStatus
from flexcache.integration.adapter import safely
from flexcache.integration.sglang.rank_cache import RankCache

_FLUSH_PATIENCE_S = 5.0


class Offloads:
    """The offloads of one rank that SGLang has not collected."""

    def __init__(self, cache: RankCache) -> None:
        self._manager = cache.manager
        self._client = cache.client
        self._tasks: deque[int | None] = deque()
        """None where nothing was copied."""
        self._ended: dict[int, bool] = {}
        self._gated: set[int] = set()
        """Tasks whose end the client keeps, with an open gate, until it is taken."""

    def add(self, task_id: int | None) -> None:
        self._tasks.append(task_id)
        if task_id is not None:
            self._gated.add(task_id)

    def num_completed(self) -> int:
        """Return how many have ended of those that were added first."""
        running = [t for t in self._tasks if t is not None and t not in self._ended]
        if running:
            ended = safely(self._manager.try_wait, running)
            if ended is None:  # the cache was closed: it has let go of the GPU
                self._ended.update(dict.fromkeys(running, False))
            else:
                self._ended.update({t: r.status is KVStatus.SUCCESS for t, r in ended.items()})
        self._gated.difference_update(self._client.take_ended(self._gated))
        count = 0
        for task_id in self._tasks:
            if task_id is not None and task_id not in self._ended:
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Collect the first one; return whether it succeeded."""
        task_id = self._tasks.popleft()
        return True if task_id is None else self._ended.pop(task_id)

    def reset(self) -> None:
        """End all of them."""
        running = [task_id for task_id in self._tasks if task_id is not None]
        safely(self._manager.wait, running, _FLUSH_PATIENCE_S)
        safely(self._manager.cancel, running)
        safely(self._manager.wait, running)
        self._tasks.clear()
        self._ended.clear()
