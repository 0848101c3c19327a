"""KV groups: layers whose KV lives and dies together in the engine, and what a prompt needs.

A *position* is a multiple of ``CacheConfig.tokens_per_block``, which is a multiple of the block
size of every group. To resume a prompt at a position, an engine needs of

    full       every block before it: the dense part, a block of the cache per position
    window     the blocks that the next token's window reaches into
    chunked    the blocks of the chunk that the next token is in
    state      the one block with the state at the position

All but the first are the position's *tail*. The engine keeps the blocks of all groups in one pool,
so its *physical blocks* have the same size whichever group they belong to:

    two groups, full attention (128 tokens per block) and a window of 200 (256 per block)

    position of 256 tokens          |       1       |       2       |       3       |
    full, 2 blocks per position     |   0   |   1   |   2   |   3   |   4   |   5   |    a unit each
    tail of position 3, window                                      ^ block 2       |    half a unit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import xxhash

from flexcache.config.values import reject

GroupKind = Literal["full", "window", "chunked", "state"]


@dataclass(frozen=True)
class KVGroup:
    """Layers that share the blocks of one table in the engine.

    Args:
        kind: What of the past its layers read: all of it, a sliding window, the current chunk, or a
            state that sums it up (Mamba, linear attention).
        tokens_per_block: Tokens of one of its blocks.
        window: Tokens that a token reads, itself included (window), or tokens of a chunk (chunked).
        layers: Names of its layers, which engines that share KV must have in the same groups.
        blocks_per_state: Blocks that make up one state (state). A state may be far larger than a
            block of another group, for which the cache's units would otherwise be too large.
    """

    kind: GroupKind
    tokens_per_block: int
    window: int = 0
    layers: tuple[str, ...] = ()
    blocks_per_state: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(GroupKind):
            raise reject("kind", self.kind, f"must be one of {', '.join(get_args(GroupKind))}")
        if not isinstance(self.tokens_per_block, int) or self.tokens_per_block < 1:
            raise reject("tokens_per_block", self.tokens_per_block, "must be at least 1")
        has_window = self.kind in ("window", "chunked")
        if not isinstance(self.window, int) or (self.window > 0) != has_window:
            allowed = "must be at least 1" if has_window else f"a group of {self.kind} has none"
            raise reject("window", self.window, allowed)
        is_count = isinstance(self.blocks_per_state, int) and self.blocks_per_state >= 1
        if not is_count or (self.blocks_per_state > 1 and self.kind != "state"):
            raise reject("blocks_per_state", self.blocks_per_state, "must be at least 1; of states")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> KVGroup:
        """Read a table of a settings file. Raises `TypeError` for a field that is not one."""
        return cls(**{**table, "layers": tuple(table.get("layers", ()))})

    @property
    def is_dense(self) -> bool:
        return self.kind == "full"

    def first_needed(self, num_tokens: int) -> int:
        """Return the first of the blocks that a prompt needs to resume after ``num_tokens``.

        They reach up to block ``num_tokens // tokens_per_block``, which is not one of them.
        """
        stop = num_tokens // self.tokens_per_block
        if self.kind == "state":
            return max(0, stop - 1)
        if self.kind == "window":
            return max(0, num_tokens - self.window + 1) // self.tokens_per_block
        if self.kind == "chunked":
            return num_tokens // self.window * self.window // self.tokens_per_block
        return 0

    def num_needed(self, num_tokens: int) -> int:
        """Return how many blocks a prompt needs to resume after ``num_tokens``."""
        count = num_tokens // self.tokens_per_block - self.first_needed(num_tokens)
        return count * self.blocks_per_state

    def describe(self) -> str:
        """Name, in readable form, all that must agree for its blocks to be interchangeable."""
        names = "\n".join(self.layers).encode()
        layers = xxhash.xxh3_64_hexdigest(names) if names else ""
        blocks = self.blocks_per_state if self.blocks_per_state > 1 else ""
        parts = (self.kind, self.tokens_per_block, self.window or "", layers, blocks)
        return ":".join(map(str, parts)).rstrip(":")


class UnitShape:
    """How the blocks of several groups fill the cache's units.

    Args:
        groups: In the engine's order.
        tokens_per_position: The cache's block size.

    Attributes:
        dense: Groups whose blocks make up the dense part; may be none.
        sparse: Those whose blocks make up tails; may be none.
        blocks_per_unit: Physical blocks in one unit of the cache.
        dense_blocks: Physical blocks of a position's dense part: as many, or none.

    Raises:
        ConfigError: A position is not whole blocks of every group.
    """

    def __init__(self, groups: Sequence[KVGroup], tokens_per_position: int) -> None:
        for group in groups:
            if tokens_per_position % group.tokens_per_block:
                raise reject(
                    "tokens_per_block", tokens_per_position,
                    f"must be a multiple of {group.tokens_per_block}, the block size of a group",
                )  # fmt: skip
        self.dense = [group for group in groups if group.is_dense]
        self.sparse = [group for group in groups if not group.is_dense]
        self._tokens = tokens_per_position
        self._tail_units: dict[int, int] = {}
        """Results of `tail_units`, by position."""
        sizes = (tokens_per_position // group.tokens_per_block for group in self.dense)
        self.dense_blocks = sum(sizes) if groups else 1
        self.blocks_per_unit = max(1, self.dense_blocks)

    def tail_blocks(self, position: int) -> int:
        """Return the physical blocks in the tail of a position (1, 2, ...)."""
        return sum(group.num_needed(position * self._tokens) for group in self.sparse)

    def tail_units(self, position: int) -> int:
        """Return the units of a position's tail: at least one, so that there is one to find."""
        count = self._tail_units.get(position)
        if count is None:  # a look-up at a remote store asks for a thousand at once
            count = max(1, -(-self.tail_blocks(position) // self.blocks_per_unit))
            self._tail_units[position] = count
        return count

    @property
    def largest_tail_units(self) -> int:
        """Return the units of the largest tail; 0 for a model without tails."""
        if not self.sparse:
            return 0
        longest = max(group.window for group in self.sparse)
        return max(self.tail_units(p) for p in range(1, longest // self._tokens + 2))
