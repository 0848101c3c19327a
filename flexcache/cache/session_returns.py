"""SessionReturns: when to fetch what sessions need that have said when they return.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import heapq

from flexcache.errors import InternalError

_SPARE_ENTRIES = 64


class SessionReturns:
    """Sessions by the time at which their blocks are to be fetched, one time each."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Entries of sessions that have returned, or said something else since, are stale."""

    def expect(self, session_id: str, fetch_at_s: float) -> None:
        """Fetch a session's blocks at this time, and at no other that was set before."""
        self._times[session_id] = fetch_at_s
        heapq.heappush(self._heap, (fetch_at_s, session_id))
        if len(self._heap) > 2 * len(self._times) + _SPARE_ENTRIES:
            self._heap = sorted((time, name) for name, time in self._times.items())

    def forget(self, session_id: str) -> None:
        """Fetch nothing for a session any more."""
        self._times.pop(session_id, None)

    def take_due(self, now: float) -> str | None:
        """Return a session whose blocks are to be fetched now; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            time, session_id = heapq.heappop(self._heap)
            if self._times.get(session_id) == time:
                del self._times[session_id]
                return session_id
        return None

    def next_deadline(self) -> float | None:
        """When `take_due` has something to return at the earliest."""
        return self._heap[0][0] if self._heap else None

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if not {(time, name) for name, time in self._times.items()} <= set(self._heap):
            raise InternalError("a session is expected to return and would not be fetched for")
