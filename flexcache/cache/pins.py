"""Pinned blocks of one tier: up to where pins hold each run, and how many blocks that are.

    run A   |0------------------9|       pins of 4 and 7 blocks of A, and one of B: B hangs off A
                     7                   after 6 blocks, so A is held up to 7, B up to 3
    run B              |--3------|       pinned: 7 + 3 blocks, each counted once

Every pin keeps its blocks in place by a hold of its own (`PrefixIndex.pin`). What is known here
beside that is which blocks are held by pins, and not just by a task that reads them.

Without pins nothing here is asked for: an eviction goes by the holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch, Run
from flexcache.cache.tail_index import Tail
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

# A count per run and length, as of holds, and not one per block: to pin a prompt of 8,192 blocks
# costs its runs. The holds themselves do not tell: a task that reads a block holds it too, and
# neither counts against the bound nor keeps it from `Retention` or from a delete.


class PinnedBlocks:
    """The blocks and tails of a tier that pins hold.

    Args:
        tenant_of: Returns the number of a root's tenant.

    Attributes:
        tails: How many pins hold each tail.
    """

    def __init__(self, tenant_of: Callable[[RootId], int]) -> None:
        self._tenant_of = tenant_of
        self._marks: dict[int, dict[int, int]] = {}
        """For each run, how many pins end at a length of it, or runs that are pinned hang off."""
        self.tails: Counter[Tail] = Counter()
        self._used: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks and units of tails, each once."""
        return self._used.total()

    def num_of(self, root: RootId) -> int:
        """Return how many of them belong to a root's tenant."""
        return self._used[self._tenant_of(root)]

    def length(self, number: int) -> int:
        """Return how many of the first blocks of the run of this number are pinned."""
        marks = self._marks.get(number)
        return max(marks) if marks else 0

    def keys(self, root: RootId, index: PrefixIndex) -> set[BlockKey]:
        """Return the keys of a root's pinned blocks. O(pinned runs and blocks)."""
        runs = [(index.run(number), max(marks)) for number, marks in self._marks.items()]
        found = (run.keys[:length] for run, length in runs if run is not None and run.root == root)
        return set(chain.from_iterable(found))

    def add(self, match: PrefixMatch) -> None:
        """Count the blocks of another pin. O(runs up to one that is pinned)."""
        run, length = match.run, match.length
        while run is not None:
            before = self.length(run.run_id)
            marks = self._marks.setdefault(run.run_id, {})
            marks[length] = marks.get(length, 0) + 1
            self._count(run, max(0, length - before))
            # It has a mark at the run before it already: more of them would count nothing.
            if before:
                return
            length, run = run.parent_length, run.parent

    def remove(self, match: PrefixMatch) -> None:
        """Undo `add`."""
        run, length = match.run, match.length
        while run is not None:
            before, marks = self.length(run.run_id), self._marks[run.run_id]
            marks[length] -= 1
            if not marks[length]:
                del marks[length]
            self._count(run, self.length(run.run_id) - before)
            if marks:
                return
            del self._marks[run.run_id]
            length, run = run.parent_length, run.parent

    def add_tail(self, tail: Tail) -> None:
        """Count a tail that another pin holds."""
        if not self.tails[tail]:
            self._used[self._tenant_of(tail.root)] += len(tail.units)
        self.tails[tail] += 1

    def remove_tail(self, tail: Tail) -> None:
        """Undo `add_tail`."""
        self.tails[tail] -= 1
        if not self.tails[tail]:
            del self.tails[tail]
            self._used[self._tenant_of(tail.root)] -= len(tail.units)

    def _count(self, run: Run, change: int) -> None:
        self._used[self._tenant_of(run.root)] += change

    def check(self, run_of: Callable[[int], Run | None]) -> None:
        """Raise `InternalError` if an invariant does not hold. O(pinned runs).

        Args:
            run_of: Returns the run of a number.
        """
        total = sum(len(tail.units) for tail in self.tails)
        for number, marks in self._marks.items():
            run = run_of(number)
            if run is None or not max(marks, default=0) <= run.held_length:
                raise InternalError(f"run {number} is pinned and could be evicted")
            if run.parent is not None and run.parent_length not in self._marks[run.parent.run_id]:
                raise InternalError(f"run {number} is pinned, and the run before it is not")
            total += max(marks)
        if total != self.num_blocks:
            raise InternalError(f"{total} blocks are pinned, {self.num_blocks} counted")
        if any(not tail.num_pins for tail in self.tails):
            raise InternalError("a tail is pinned and could be evicted")
