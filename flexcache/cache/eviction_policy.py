"""The interface of eviction policies, and the simplest one.

A prefix index keeps its blocks in the order in which they are *due* for eviction. A policy decides
how long after its last use a block is due, its *patience*. With LRU it is the same for all. So
under any policy the cached blocks stay closed under prefixes, an eviction costs one heap step, and
a hint that asks for a later time has the same meaning.

Pure: no I/O, no clock; `now` is any number that does not decrease. Not thread-safe.
"""

from __future__ import annotations

from typing import Protocol

from flexcache.ids import BlockKey, RootId


class Lineage:
    """A line of prompts each of which continued the one before: a conversation, an agent's loop."""

    __slots__ = ("is_shared", "kind", "num_blocks", "num_returns", "parent", "start", "used_at")

    def __init__(self, parent: Lineage | None, start: int) -> None:
        self.parent = parent
        self.start = start
        """Number of blocks of other lineages before it."""
        self.num_blocks = 0
        self.is_shared = False
        """Whether prompts diverge behind it, so that what follows continues none of them."""
        self.kind = 0
        self.num_returns = 0
        self.used_at = 0.0


class EvictionPolicy(Protocol):
    """Decides how long after its last use a block is due. Every call is amortised O(log n)."""

    def begin(
        self, parent: Lineage | None, root: RootId, key: BlockKey, start: int, now: float
    ) -> Lineage:
        """Begin a lineage of blocks to be inserted behind ``start`` others.

        Args:
            parent: Lineage of the block before them.
            key: Key of the first of them.
        """

    def extend(self, lineage: Lineage, end: int) -> None:
        """Note that blocks of a lineage were inserted, up to depth ``end`` of the prompt."""

    def part(self, lineage: Lineage, depth: int) -> None:
        """Note that a second prompt diverges behind ``depth`` blocks.

        Makes the lineage shared, unless the policy has only one.
        """

    def use(self, lineage: Lineage, now: float) -> None:
        """Note a look-up of a prompt whose cached part ends in this lineage."""

    def patience(self, lineage: Lineage) -> float:
        """Return how long after a use now the lineage's blocks are due."""

    def forget(self, root: RootId, key: BlockKey, lineage: Lineage) -> None:
        """Note that a lineage was evicted as a whole; ``key`` is its first block's."""

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(lineages)."""


class Lru:
    """Evicts the least recently used blocks."""

    def __init__(self) -> None:
        self._everything = Lineage(None, 0)

    def begin(
        self, parent: Lineage | None, root: RootId, key: BlockKey, start: int, now: float
    ) -> Lineage:
        return self._everything

    def extend(self, lineage: Lineage, end: int) -> None:
        pass

    def part(self, lineage: Lineage, depth: int) -> None:
        pass

    def use(self, lineage: Lineage, now: float) -> None:
        pass

    def patience(self, lineage: Lineage) -> float:
        return 0.0

    def forget(self, root: RootId, key: BlockKey, lineage: Lineage) -> None:
        pass

    def check(self) -> None:
        pass
