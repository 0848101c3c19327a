"""The KV layouts of an engine's shards, which together are the layout of a block.

Shards may be laid out differently: a pipeline stage has other layers than the next. What is stored
belongs to all of their layouts, in order, so that each rank reads what a rank of the same place and
layout has stored.
"""

from __future__ import annotations

import json


class ShardLayouts:
    """Signatures of `BlockLayout`, one for each shard, as ranks register."""

    def __init__(self, num_shards: int) -> None:
        self._signatures: list[str | None] = [None] * num_shards

    def of_shard(self, shard: int) -> str | None:
        """The signature of a shard; None if no rank has told it."""
        return self._signatures[shard]

    def set(self, shard: int, signature: str, is_first: bool) -> None:
        """A rank of the shard registers.

        Args:
            is_first: No other rank serves: what ranks that have left had told may be over.
        """
        if is_first and self._signatures[shard] != signature:
            self._signatures = [None] * len(self._signatures)
        self._signatures[shard] = signature

    def forget(self, shard: int) -> None:
        """The rank that told it was refused."""
        self._signatures[shard] = None

    @property
    def whole(self) -> str | None:
        """The layout of a block: that of all shards if it is the same, or else the list of them.

        None until it is known of every shard.
        """
        signatures = [s for s in self._signatures if s is not None]
        if len(signatures) < len(self._signatures):
            return None
        return signatures[0] if len(set(signatures)) == 1 else json.dumps(signatures)
