"""Continuations: prompts of which an engine names only the blocks after a cached one.

    parent_key:          a3
    block_keys:              b4 b5 b6
    chain:    a0 a1 a2 a3 b4 b5 b6          the first four from the index of a tier

Some engines keep prompts in a tree and hand over one node at a time. Everything behind the match
works on whole chains, so the keys before a continuation are taken from a tier that has its parent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from flexcache.cache.block_keys import EngineBlockKeys, PromptKeys
from flexcache.cache.tier import Tier
from flexcache.ids import BlockKey, RootId


class ChainKeys:
    """Keys of a whole chain: those up to a continuation's parent, and the continuation's own."""

    __slots__ = (
        "_before", "_keys", "content", "num_before", "num_blocks", "parent_key", "prompt_root",
        "root",
    )  # fmt: skip

    def __init__(self, before: Sequence[BlockKey], keys: PromptKeys) -> None:
        self._before = before
        self._keys = keys
        self.prompt_root, self.root = keys.prompt_root, keys.root
        self.parent_key = None
        self.num_before = len(before)
        self.num_blocks = self.num_before + keys.num_blocks
        self.content = keys.content
        if keys.content is not None:
            first = keys.content.first + self.num_before
            self.content = dataclasses.replace(keys.content, first=first)

    def key(self, index: int) -> BlockKey:
        own = index - self.num_before
        return self._before[index] if own < 0 else self._keys.key(own)

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        own = [max(0, index - self.num_before) for index in (start, stop)]
        return [*self._before[start:stop], *self._keys.slice(*own)]

    def packed(self, stop: int) -> tuple[int, bytes | memoryview]:
        return EngineBlockKeys(self.root, self.slice(0, stop), stop).packed(stop)


class IndexedKeys(EngineBlockKeys):
    """Keys that come from a tier's index, so their root has its place under a layout already."""

    __slots__ = ()

    @property
    def root(self) -> RootId:
        return self.prompt_root

    @root.setter
    def root(self, _: RootId) -> None:
        """Leave the root where it is."""


def find_chain(keys: PromptKeys, tiers: Iterable[Tier]) -> ChainKeys | None:
    """Complete a continuation, whose root must be placed, from the first tier with its parent.

    None if no tier has it, indexed or in flight. O(blocks before it), at C speed.
    """
    assert keys.parent_key is not None
    for tier in tiers:
        before = tier.chain_to(keys.root, keys.parent_key)
        if before:
            return ChainKeys(before, keys)
    return None


def find_prefix(root: RootId, key: BlockKey, tiers: Iterable[Tier]) -> IndexedKeys | None:
    """Return the prefix that ends with a block, from the first tier that has it, indexed or in
    flight; None if there is none. O(blocks), at C speed."""
    for tier in tiers:
        keys = tier.chain_to(root, key)
        if keys:
            return IndexedKeys(root, keys, len(keys))
    return None
