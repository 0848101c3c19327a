"""Look-ups at the remote store that begin when a request arrives.

vLLM asks its connectors about a request when it has room to run it; the store can have answered by
then. A burst of requests must not flood the store, so only some look-ups are under way at a time:

    arrived --room--> asked --vLLM asks, the request ends, or it takes too long--> forgotten
       |
       +--vLLM asks, or the request ends--> forgotten, never asked

Pure: the time is handed in.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from flexcache.errors import InternalError

_MAX_UNDER_WAY = 8
_MAX_WAITING = 1024


class EarlyLookUps:
    """Requests to look up ahead of vLLM.

    Args:
        timeout_s: How long the store may take to answer.

    Attributes:
        num_begun: Look-ups that have begun.
        num_cancelled: Requests that went away before vLLM asked about them.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[str, Any] = OrderedDict()
        self._under_way: OrderedDict[str, float] = OrderedDict()
        """Request ids and deadlines, the earliest first."""
        self.num_begun = 0
        self.num_cancelled = 0

    def arrived(self, request: Any) -> None:
        """Look this request up when there is room. Beyond a limit it is left to vLLM."""
        if len(self._waiting) < _MAX_WAITING and request.request_id not in self._under_way:
            self._waiting[request.request_id] = request

    def take_due(self, now: float) -> list[Any]:
        """Return the requests to look up now."""
        while self._under_way and next(iter(self._under_way.values())) <= now:
            self._under_way.popitem(last=False)
        due = []
        while self._waiting and len(self._under_way) < _MAX_UNDER_WAY:
            request_id, request = self._waiting.popitem(last=False)
            self._under_way[request_id] = now + self._timeout_s
            due.append(request)
        self.num_begun += len(due)
        return due

    def asked(self, request_id: str) -> None:
        """Forget a request: vLLM asks about it itself."""
        self._waiting.pop(request_id, None)
        self._under_way.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Forget a request that has ended; whether or not vLLM has asked about it."""
        was_waiting = self._waiting.pop(request_id, None) is not None
        was_under_way = self._under_way.pop(request_id, None) is not None
        self.num_cancelled += was_waiting or was_under_way

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if not self._waiting.keys().isdisjoint(self._under_way):
            raise InternalError("a request waits to be looked up that is being looked up")
        if len(self._waiting) > _MAX_WAITING or len(self._under_way) > _MAX_UNDER_WAY:
            raise InternalError("more look-ups than allowed")
        deadlines = list(self._under_way.values())
        if deadlines != sorted(deadlines):
            raise InternalError("deadlines out of order")
