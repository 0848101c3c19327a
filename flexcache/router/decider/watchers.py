"""Decisions as they are made, for those that watch a router live."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from flexcache.router.decisions import RouterEvent, Skipped
from flexcache.router.waiting import is_set_within

_KEPT = 1000
_QUIET_S = 10.0


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[RouterEvent] = deque()
        self.num_skipped = 0
        self.has_events = asyncio.Event()


class Watchers:
    """Hands every event to all that watch; one that reads too slowly is skipped over events.

    Args:
        kept: Events kept for one that is slow.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._watchers: set[_Watcher] = set()

    def __len__(self) -> int:
        return len(self._watchers)

    def publish(self, event: RouterEvent) -> None:
        for watcher in self._watchers:
            if len(watcher.events) >= self._kept:
                watcher.num_skipped += 1
                continue
            watcher.events.append(event)
            watcher.has_events.set()

    async def watch(self) -> AsyncGenerator[RouterEvent | None, None]:
        """Yield the events from now on, until the caller stops; None if it was quiet for long."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while True:
                await is_set_within(watcher.has_events, _QUIET_S)
                watcher.has_events.clear()
                if not watcher.events:
                    yield None
                while watcher.events:
                    event = watcher.events.popleft()
                    yield event
                    if watcher.num_skipped and not watcher.events:
                        count, watcher.num_skipped = watcher.num_skipped, 0
                        yield Skipped(time=event.time, count=count)
        finally:
            self._watchers.discard(watcher)
