"""Eviction policies that FlexCache does not have, simulated block by block.

Each is confined to leaves, so that what is cached stays whole prefixes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from bench_write_policies import Request

SMALL_QUEUE = 0.1
"""Share of S3-FIFO's queue for newcomers."""


class Tree:
    """Which block precedes which, and how many cached ones build on each."""

    def __init__(self) -> None:
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int | None, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    def __len__(self) -> int:
        return len(self._parent)

    def add(self, block: int, parent: int | None) -> None:
        self._parent[block] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, block: int) -> None:
        parent = self._parent.pop(block)
        self._num_children[parent] -= 1

    def is_leaf(self, block: int) -> bool:
        return not self._num_children.get(block)


class Simulation(Protocol):
    """A policy over the blocks of a `Tree`. It hears of a prompt's blocks from the last one on."""

    def hit(self, block: int) -> None:
        """A cached block is used."""

    def add(self, block: int) -> None:
        """A block is now cached."""

    def victim(self, spared: set[int]) -> int:
        """Give up a cached leaf that is not spared; it is removed from the tree by the caller."""


class LruList:
    """What was not used for longest."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._order: OrderedDict[int, None] = OrderedDict()

    def hit(self, block: int) -> None:
        self._order.move_to_end(block)

    def add(self, block: int) -> None:
        self._order[block] = None

    def victim(self, spared: set[int]) -> int:
        block = first_leaf(self._order, self._tree, spared)
        if block is None:
            raise ValueError("nothing can be evicted")
        del self._order[block]
        return block


class Lfu:
    """What was used least often since it is cached; of equals what was not used for longest."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._by_count: list[OrderedDict[int, None]] = [OrderedDict()]
        self._count: dict[int, int] = {}

    def hit(self, block: int) -> None:
        count = self._count[block] + 1
        del self._by_count[count - 1][block]
        if count == len(self._by_count):
            self._by_count.append(OrderedDict())
        self._by_count[count][block] = None
        self._count[block] = count

    def add(self, block: int) -> None:
        self._count[block] = 0
        self._by_count[0][block] = None

    def victim(self, spared: set[int]) -> int:
        for blocks in self._by_count:
            block = first_leaf(blocks, self._tree, spared)
            if block is not None:
                del blocks[block], self._count[block]
                return block
        raise ValueError("nothing can be evicted")


class Arc:
    """Seen once and seen again, in two lists whose sizes follow the hits among the evicted."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree, self._capacity, self._target = tree, capacity, 0.0
        self._lists: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())

    def hit(self, block: int) -> None:
        self._lists[0].pop(block, None)
        self._lists[1][block] = None
        self._lists[1].move_to_end(block)

    def add(self, block: int) -> None:
        once, again = self._ghosts
        if block in once:
            self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
        elif block in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
        came_back = block in once or block in again
        once.pop(block, None)
        again.pop(block, None)
        self._lists[came_back][block] = None

    def victim(self, spared: set[int]) -> int:
        first = 0 if len(self._lists[0]) > self._target else 1
        for which in (first, 1 - first):
            block = first_leaf(self._lists[which], self._tree, spared)
            if block is not None:
                del self._lists[which][block]
                self._ghosts[which][block] = None
                while len(self._ghosts[which]) > self._capacity:
                    self._ghosts[which].popitem(last=False)
                return block
        raise ValueError("nothing can be evicted")


class S3Fifo:
    """A small queue that newcomers must be used in twice, and a main one that gives chances."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree, self._capacity = tree, capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def hit(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)

    def add(self, block: int) -> None:
        self._uses[block] = 0
        known = block in self._ghosts
        self._ghosts.pop(block, None)
        (self._main if known else self._small).append(block)

    def victim(self, spared: set[int]) -> int:
        barren = 0  # looks in a row that found nothing in the small queue
        while True:
            is_full = len(self._small) > SMALL_QUEUE * self._capacity or not self._main
            if is_full and barren <= len(self._small):
                block = self._small.popleft()
                if self._uses[block] > 1:
                    self._uses[block] = 0
                    self._main.append(block)
                elif not self._tree.is_leaf(block) or block in spared:
                    self._small.append(block)
                    barren += 1
                else:
                    self._ghosts[block] = None
                    while len(self._ghosts) > self._capacity:
                        self._ghosts.popitem(last=False)
                    return block
            else:
                block = self._main.popleft()
                if self._uses[block] or not self._tree.is_leaf(block) or block in spared:
                    self._uses[block] = max(0, self._uses[block] - 1)
                    self._main.append(block)
                else:
                    return block


class Sieve:
    """One queue; a hand goes from old to new and takes the first that was not used meanwhile."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._oldest: int | None = None
        self._newest: int | None = None
        self._hand: int | None = None
        self._used: set[int] = set()

    def hit(self, block: int) -> None:
        self._used.add(block)

    def add(self, block: int) -> None:
        self._older[block], self._newer[block] = self._newest, None
        if self._newest is None:
            self._oldest = block
        else:
            self._newer[self._newest] = block
        self._newest = block

    def victim(self, spared: set[int]) -> int:
        while True:
            block = self._oldest if self._hand is None else self._hand
            assert block is not None
            self._hand = self._newer[block]
            if not self._tree.is_leaf(block) or block in spared:
                continue
            if block in self._used:
                self._used.discard(block)
                continue
            self._unlink(block)
            return block

    def _unlink(self, block: int) -> None:
        older, newer = self._older.pop(block), self._newer.pop(block)
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older


def first_leaf(blocks: OrderedDict[int, None], tree: Tree, spared: set[int]) -> int | None:
    return next((b for b in blocks if tree.is_leaf(b) and b not in spared), None)


SIMULATED: dict[str, Callable[[Tree, int], Simulation]] = {
    "LFU": Lfu, "ARC": Arc, "S3-FIFO": S3Fifo, "SIEVE": Sieve,
}  # fmt: skip


def simulated_hits(
    requests: list[Request], capacity: int, make: Callable[[Tree, int], Simulation]
) -> int:
    tree, hits = Tree(), 0
    policy = make(tree, capacity)
    for request in requests:
        prompt = request.hash_ids
        there = next((at for at, block in enumerate(prompt) if block not in tree), len(prompt))
        hits += there
        stop = min(len(prompt), capacity)
        spared = set(prompt[:there])
        while len(tree) + stop - there > capacity:
            tree.remove(policy.victim(spared))
        for at in range(stop - 1, -1, -1):  # its last block goes first
            if at < there:
                policy.hit(prompt[at])
            else:
                policy.add(prompt[at])
                tree.add(prompt[at], prompt[at - 1] if at else None)
    return hits
