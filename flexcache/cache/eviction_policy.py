"""What an eviction policy is asked, and the simplest one.

A prefix index keeps its blocks in the order in which they are *due* to go. A policy says how long
after its last use a block is due, its *patience*. With LRU all have the same. So whatever the
policy, what is cached stays closed under prefixes, an eviction costs one step of a heap, and a hint
that asks for a later time means the same.

Pure: no I/O, no clock; `now` is any number that does not fall. Not thread-safe.
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
        """How many blocks precede it, of other lineages."""
        self.num_blocks = 0
        self.is_shared = False
        """Prompts part behind it, so what comes next there continues none of them."""
        self.kind = 0
        self.num_returns = 0
        self.used_at = 0.0


class EvictionPolicy(Protocol):
    """How long after its last use a block is due to go. Every call is O(log n) amortised."""

    def begin(
        self, parent: Lineage | None, root: RootId, key: BlockKey, start: int, now: float
    ) -> Lineage:
        """Of blocks to be inserted behind ``start`` others, that continue no lineage here.

        Args:
            parent: Of the block before them.
            key: Of the first of them.
        """

    def extend(self, lineage: Lineage, end: int) -> None:
        """Blocks of a lineage were inserted, up to depth ``end`` of the prompt."""

    def part(self, lineage: Lineage, depth: int) -> None:
        """A second prompt goes on in its own way behind ``depth`` blocks. Makes it shared, or not:
        where a policy does not tell lineages apart.
        """

    def use(self, lineage: Lineage, now: float) -> None:
        """A prompt was looked up, and what is cached of it ends in this lineage."""

    def patience(self, lineage: Lineage) -> float:
        """How long after a use of now the lineage's blocks are due."""

    def forget(self, root: RootId, key: BlockKey, lineage: Lineage) -> None:
        """The first block of a lineage was evicted, and all of the lineage behind it; its key."""

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(lineages)."""


class Lru:
    """What was not used for longest goes first."""

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
