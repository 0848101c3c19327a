"""Queue of ops for an executor that several engines share.

Loads that requests wait for go first, then those that are early, then stores; but a store gets
every fourth turn. Within a class the engines take turns, and each engine's ops are served first
come, first served. Everything is O(1) per op.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from flexcache.errors import InternalError
from flexcache.ids import OpId

Item = TypeVar("Item")
_EAGER_LOADS = 3


class Urgency(Enum):
    """Class of an op.

    Attributes:
        NEEDED: A load that a request waits for.
        EARLY: A load ahead of its request.
        STORE: A write.
    """

    NEEDED = auto()
    EARLY = auto()
    STORE = auto()


_LOADS_FIRST = (Urgency.NEEDED, Urgency.EARLY, Urgency.STORE)
_STORES_FIRST = (Urgency.STORE, Urgency.NEEDED, Urgency.EARLY)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item]):
    item: Item
    owner: int
    urgency: Urgency
    num_blocks: int


class FairQueue(Generic[Item]):
    """Waiting ops by class and by owner."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, OrderedDict[int, OrderedDict[OpId, None]]] = {
            urgency: OrderedDict() for urgency in Urgency
        }
        self._waiting: dict[OpId, _Waiting[Item]] = {}
        self._num_blocks = dict.fromkeys(Urgency, 0)
        self._loads_since_store = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def num_blocks(self, urgency: Urgency) -> int:
        """Return how many blocks the waiting ops of a class have together."""
        return self._num_blocks[urgency]

    def add(
        self, op_id: OpId, item: Item, *, owner: int, urgency: Urgency, num_blocks: int = 1
    ) -> None:
        self._waiting[op_id] = _Waiting(item, owner, urgency, num_blocks)
        self._num_blocks[urgency] += num_blocks
        self._queues[urgency].setdefault(owner, OrderedDict())[op_id] = None

    def discard(self, op_id: OpId) -> None:
        """Remove an op that should no longer run, if it waits."""
        if op_id in self._waiting:
            self._remove(op_id)

    def next(self) -> Item | None:
        """Remove and return the op whose turn it is."""
        is_stores_turn = self._loads_since_store >= _EAGER_LOADS
        for urgency in _STORES_FIRST if is_stores_turn else _LOADS_FIRST:
            item = self._take(urgency)
            if item is not None:
                is_load = urgency is not Urgency.STORE
                self._loads_since_store = self._loads_since_store + 1 if is_load else 0
                return item
        return None

    def check(self) -> None:
        """Raise `InternalError` if ops or their blocks are miscounted. O(ops)."""
        counted = dict.fromkeys(Urgency, 0)
        for waiting in self._waiting.values():
            counted[waiting.urgency] += waiting.num_blocks
        if counted != self._num_blocks:
            raise InternalError(f"blocks that wait for a worker are miscounted: {counted}")
        lines = [ops for queue in self._queues.values() for ops in queue.values()]
        if sum(map(len, lines)) != len(self._waiting) or not all(lines):
            raise InternalError("an op is queued that does not wait, or an owner without ops")

    def _remove(self, op_id: OpId) -> _Waiting[Item]:
        waiting = self._waiting.pop(op_id)
        self._num_blocks[waiting.urgency] -= waiting.num_blocks
        queue = self._queues[waiting.urgency]
        ops = queue[waiting.owner]
        del ops[op_id]
        if not ops:
            del queue[waiting.owner]
        return waiting

    def _take(self, urgency: Urgency) -> Item | None:
        queue = self._queues[urgency]
        if not queue:
            return None
        owner = next(iter(queue))
        item = self._remove(next(iter(queue[owner]))).item
        if owner in queue:  # its next turn comes after those of all others
            queue.move_to_end(owner)
        return item
