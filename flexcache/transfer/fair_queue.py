"""Queue of ops for an executor that several engines share.

Loads go before stores, but a store gets every fourth turn; within a class the engines take turns,
and each engine's ops are served first come, first served. Everything is O(1) per op.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from flexcache.ids import OpId

Item = TypeVar("Item")
_EAGER_LOADS = 3


class FairQueue(Generic[Item]):
    """Waiting ops by class and by owner."""

    def __init__(self) -> None:
        self._loads: OrderedDict[int, deque[OpId]] = OrderedDict()
        self._stores: OrderedDict[int, deque[OpId]] = OrderedDict()
        self._items: dict[OpId, Item] = {}
        self._loads_since_store = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, op_id: OpId, item: Item, *, owner: int, is_load: bool) -> None:
        self._items[op_id] = item
        (self._loads if is_load else self._stores).setdefault(owner, deque()).append(op_id)

    def discard(self, op_id: OpId) -> None:
        """Remove an op that should no longer run."""
        self._items.pop(op_id, None)

    def next(self) -> Item | None:
        """Remove and return the op whose turn it is."""
        store_first = self._loads_since_store >= _EAGER_LOADS
        first, second = self._loads, self._stores
        for queue in (second, first) if store_first else (first, second):
            item = self._take(queue)
            if item is not None:
                is_load = queue is self._loads
                self._loads_since_store = self._loads_since_store + 1 if is_load else 0
                return item
        return None

    def _take(self, queue: OrderedDict[int, deque[OpId]]) -> Item | None:
        while queue:
            owner, waiting = next(iter(queue.items()))
            item = None
            while waiting and item is None:
                item = self._items.pop(waiting.popleft(), None)
            del queue[owner]
            if waiting:  # the owner's next turn comes after those of all others
                queue[owner] = waiting
            if item is not None:
                return item
        return None
