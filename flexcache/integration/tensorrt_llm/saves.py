"""Requests that have ended and whose GPU blocks are still in use, by the tasks that use them."""

from __future__ import annotations

from collections.abc import Iterable

from flexcache.integration.adapter import TaskCalls

_OF_SCHEDULERS: dict[str, Saves] = {}
"""Those of the schedulers in this process, by the endpoint of their cache."""


class Saves:
    """Known to the scheduler's process alone. TensorRT-LLM frees a request's blocks once all ranks
    say that they are saved, so it is enough that this process's rank waits."""

    def __init__(self, cache: TaskCalls, endpoint: str) -> None:
        self._cache = cache
        self._endpoint = endpoint
        self._tasks: dict[int, set[int]] = {}
        _OF_SCHEDULERS[endpoint] = self

    def add(self, request_id: int, task_ids: Iterable[int]) -> None:
        """Keep a request's blocks until these tasks have ended on every rank."""
        self._tasks[request_id] = set(task_ids)

    def take_ended(self, request_ids: Iterable[int]) -> list[int]:
        """Return those of the requests whose blocks are no longer in use."""
        ended = []
        for request_id in request_ids:
            tasks = self._tasks.get(request_id, set())
            tasks.difference_update(self._cache.ended(tasks) if tasks else ())
            if not tasks:
                self._tasks.pop(request_id, None)
                ended.append(request_id)
        return ended

    def is_empty(self) -> bool:
        return not self._tasks

    def close(self) -> None:
        _OF_SCHEDULERS.pop(self._endpoint, None)


def saves_of(endpoint: str) -> Saves | None:
    """Return what the scheduler of this cache waits for, if it is in this process."""
    return _OF_SCHEDULERS.get(endpoint)
