"""PinnedPages: what look-ups have found in DRAM, pinned until SGLang loads it or needs it no more.

one group       1 2 3 4 5 .. n    every length up to the longest can be loaded: one task
with tails        2     5    n    only up to a tail: a task for each, if other ranks may have
                                  less; the ranks then agree on the longest that all have
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flexcache.integration.sglang.page_calls import PageCalls, Pages

_MAX_PLACES = 16
"""Tails offered to the other ranks for one prompt, the last ones."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    pages: Pages
    matched_s: float
    tasks: dict[int, int]
    """Tasks by how many pages they load, the longest first."""


class PinnedPages:
    """The pinned pages of one rank's requests.

    Args:
        has_tails: Whether only some lengths can be loaded.
        has_peers: Whether other ranks may have less.
        pin_s: How long pages stay pinned; an older look-up is repeated.
    """

    def __init__(self, calls: PageCalls, has_tails: bool, has_peers: bool, pin_s: float) -> None:
        self._calls = calls
        self._has_tails = has_tails
        self._max_places = _MAX_PLACES if has_tails and has_peers else 1
        self._pin_s = pin_s
        self._pinned: dict[str, _Pinned] = {}

    def find(self, rid: str, pages: Pages) -> list[int]:
        """Pin what DRAM has of a request's pages; return how many can be loaded: all that apply."""
        now = time.monotonic()
        pinned = self._pinned.get(rid)
        if pinned is not None and (pinned.pages != pages or now - pinned.matched_s > self._pin_s):
            self.release(rid)
            pinned = None
        if pinned is None:
            tasks = self._pin(pages)
            if not tasks:
                return []
            pinned = self._pinned[rid] = _Pinned(pages, now, tasks)
        if self._has_tails:
            return sorted(pinned.tasks)
        return list(range(1, next(iter(pinned.tasks)) + 1))

    def longest(self, rid: str) -> int:
        """Return how many pages are pinned for a request."""
        pinned = self._pinned.get(rid)
        return 0 if pinned is None else next(iter(pinned.tasks))

    def take(self, rid: str, num_pages: int) -> tuple[int, Pages] | None:
        """Return the task that loads so many pages, which is now the caller's, and the pages."""
        pinned = self._pinned.pop(rid, None)
        if pinned is None:
            return None
        task_id = pinned.tasks.pop(num_pages, None)
        if task_id is None:  # another rank has fewer
            found = self._calls.pin(pinned.pages.first(num_pages))
            if found is not None and found.num_pages == num_pages:
                task_id = found.task_id
            elif found is not None:
                self._calls.cancel(found.task_id)
        self._cancel(pinned)
        return None if task_id is None else (task_id, pinned.pages)

    def release(self, rid: str) -> None:
        """Unpin what was found for a request."""
        pinned = self._pinned.pop(rid, None)
        if pinned is not None:
            self._cancel(pinned)

    def reset(self) -> None:
        for rid in list(self._pinned):
            self.release(rid)

    def _pin(self, pages: Pages) -> dict[int, int]:
        tasks: dict[int, int] = {}
        while len(tasks) < self._max_places:
            found = self._calls.pin(pages)
            if found is None:
                break
            tasks[found.num_pages] = found.task_id
            pages = pages.first(found.num_pages - 1)
        return tasks

    def _cancel(self, pinned: _Pinned) -> None:
        for task_id in pinned.tasks.values():
            self._calls.cancel(task_id)
