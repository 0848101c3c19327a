"""Free block ids of one tier. Knows only ids, neither keys nor bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexcache.errors import InternalError

BlockIds = npt.NDArray[np.int64]


class BlockPool:
    """A stack of free block ids. Not thread-safe.

    Invariant: an id is either on the stack once, or was taken and not given back.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack: BlockIds = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._num_free = capacity
        self._is_free = np.ones(capacity, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> BlockIds:
        """Take ``count`` free ids. O(count), vectorised. The caller has checked `num_free`."""
        if count > self._num_free:
            raise InternalError(f"{count} blocks wanted, {self._num_free} free")
        if count == 0:
            return np.empty(0, dtype=np.int64)
        start = self._num_free - count
        ids: BlockIds = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._is_free[ids] = False
        return ids

    def take_exactly(self, ids: BlockIds) -> None:
        """Take these ids, which must be free. O(capacity), vectorised."""
        self._is_free[ids] = False
        still_free = self._stack[: self._num_free]
        still_free = still_free[self._is_free[still_free]]
        if len(still_free) + len(ids) != self._num_free:
            raise InternalError("block ids to be taken are not free, or occur twice")
        self._num_free = len(still_free)
        self._stack[: self._num_free] = still_free

    def give_back(self, ids: BlockIds) -> None:
        """Give back ids that were taken. O(len(ids)), vectorised."""
        if len(ids) == 0:
            return
        if self._is_free[ids].any():
            raise InternalError(f"blocks freed twice: {ids[self._is_free[ids]].tolist()}")
        self._is_free[ids] = True
        end = self._num_free + len(ids)
        self._stack[self._num_free : end] = ids[::-1]
        self._num_free = end

    def free_ids(self) -> BlockIds:
        """Return all free ids, in order. O(capacity), vectorised."""
        return np.flatnonzero(self._is_free).astype(np.int64, copy=False)

    def is_free(self, block: int) -> bool:
        return bool(self._is_free[block])

    def check(self) -> None:
        """Raise `InternalError` if the invariant does not hold. O(capacity)."""
        free = self._stack[: self._num_free]
        if len(np.unique(free)) != len(free):
            raise InternalError("an id is on the free stack twice")
        if int(self._is_free.sum()) != self._num_free or not self._is_free[free].all():
            raise InternalError("free stack and free flags disagree")
