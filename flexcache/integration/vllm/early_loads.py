"""Look-ups and loads that begin before vLLM asks about a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flexcache.errors import InternalError
from flexcache.integration.vllm.calls import CacheCalls

_MAX_UNDER_WAY = 8
_MAX_WAITING = 1024


class EarlyLookUps:
    """Requests to look up ahead of vLLM.

    vLLM asks its connectors about a request when it has room to run it; the store can have answered
    by then. A burst of requests must not flood the store, so only some look-ups are under way at a
    time:

        arrived --room--> asked --vLLM asks, the request ends, or it takes too long--> forgotten
           |
           +--vLLM asks, or the request ends--> forgotten, never asked

    Pure: the time is handed in.

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


WINDOW = 8
"""Requests that are loaded for before vLLM has asked about them."""


class EarlyLoads:
    """Requests to load for ahead of vLLM's question.

        arrived --vLLM has room at once--> forgotten: its get loads it, chunk by chunk
           |
           +--a step later, window free--> begun --vLLM asks--> asked --its load is launched--> gone
                                             |                   |
                                             +----- it ends -----+--> cancelled

    Without room, a request that vLLM has asked about has a get with blocks below DRAM: it is
    withdrawn.

    Only the first requests in line are loaded for at a time. What vLLM's own cache has is not
    loaded.

    Args:
        is_on: Whether there may be tiers below DRAM; in a shared cache, not known before the first
            hit there.
        reads_pool: Whether vLLM hashes blocks as the cache does, so that its own cached ones are
            known.
        withdraw: Cancels a request's own get, whose blocks are not to be read twice.

    Attributes:
        block_pool: vLLM's blocks on the GPU, once bound.
        num_begun: Loads that have begun.
    """

    def __init__(
        self, cache: CacheCalls, is_on: bool, reads_pool: bool, withdraw: Callable[[str], None]
    ) -> None:
        self._cache = cache
        self._withdraw = withdraw
        self.is_on = is_on
        self._reads_pool = reads_pool
        self.block_pool: Any = None
        self.num_begun = 0
        self._waiting: OrderedDict[str, Any] = OrderedDict()
        self._begun: dict[str, None] = {}
        """Requests whose load has begun, and that vLLM has not asked about."""
        self._tasks: dict[str, int] = {}
        """Prefetches of requests that have not loaded yet."""

    @property
    def num_open(self) -> int:
        """Loads whose requests have not loaded yet."""
        return len(self._tasks)

    def arrived(self, request: Any) -> None:
        """Load for this request when there is room. Beyond a limit it is left to its get."""
        if self.is_on and len(self._waiting) < _MAX_WAITING:
            self._waiting[request.request_id] = request

    def begin(self) -> None:
        """Begin loads, after a step was scheduled: requests that it took need none."""
        pending: dict[str, Any] = {}
        while self._waiting and len(self._begun) + len(pending) < WINDOW:
            request_id, request = self._waiting.popitem(last=False)
            self._withdraw(request_id)
            task_id = self._cache.prefetch(request, self._num_on_gpu(request))
            if task_id is None:  # the remote store has yet to answer
                pending[request_id] = request
                continue
            self.num_begun += 1
            self._begun[request_id] = None
            self._tasks[request_id] = task_id
        for request_id in reversed(pending):
            self._waiting[request_id] = pending[request_id]
            self._waiting.move_to_end(request_id, last=False)

    def asked(self, request_id: str) -> None:
        """Note that vLLM asks about a request: the next one in line is loaded for."""
        self._waiting.pop(request_id, None)
        self._begun.pop(request_id, None)

    def found_below(self, request: Any) -> None:
        """Note that a get found blocks below DRAM. If vLLM has no room for them in this step, they
        are loaded to DRAM meanwhile."""
        if self.is_on and request.request_id not in self._tasks:
            self._waiting[request.request_id] = request
            self._waiting.move_to_end(request.request_id, last=False)

    def loaded(self, request_id: str) -> None:
        """Note that a request's own load begins."""
        self.asked(request_id)
        self._tasks.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Cancel what is loaded for a request that has ended."""
        self.asked(request_id)
        task_id = self._tasks.pop(request_id, None)
        if task_id is not None:
            self._cache.cancel(task_id)

    def cancel(self) -> None:
        """Cancel all loads: the cache is to be reset."""
        for request_id in list(self._tasks):
            self.ended(request_id)

    def _num_on_gpu(self, request: Any) -> int:
        """Return how many of a prompt's first blocks vLLM has itself, found by bisection."""
        if self.block_pool is None or not self._reads_pool:
            return 0
        keys = request.block_hashes
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            is_there = self.block_pool.get_cached_block(keys[middle], [0]) is not None
            low, high = (middle + 1, high) if is_there else (low, middle)
        return low

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if len(self._begun) > WINDOW or len(self._waiting) > _MAX_WAITING:
            raise InternalError("more early loads than allowed")
        if not self._begun.keys() <= self._tasks.keys():
            raise InternalError("a load has begun and has no task")
