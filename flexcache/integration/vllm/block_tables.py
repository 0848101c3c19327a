"""Which of a request's GPU blocks a load fills and a put copies, for each group of the model.

vLLM keeps a table of block ids per group. Where a group no longer needs a block (it slid out of the
window, its state was replaced) the table has the null block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexcache.config.model import KVGroup

NULL_BLOCK = 0
NOT_WANTED = -1
Tables = Sequence[Sequence[int]]
"""Block ids of one request, per group that vLLM has or, where it says so, that is cached."""


class BlockTables:
    """Reads the tables of one engine.

    Args:
        groups: The cached groups; empty for a single one of full attention.
        group_ids: Their numbers in vLLM.
        tokens_per_position: Tokens between the positions where prefixes can end.

    Attributes:
        has_tails: Whether a prompt can be resumed only where its tail was stored.
        has_states: Whether tails hold states, which only vLLM's hand-off locates.
    """

    def __init__(
        self, groups: Sequence[KVGroup], group_ids: Sequence[int], tokens_per_position: int
    ) -> None:
        self._groups = groups or (KVGroup("full", tokens_per_position),)
        self._ids = group_ids
        self.has_tails = any(not group.is_dense for group in groups)
        self.has_states = any(group.kind == "state" for group in groups)
        self.has_groups = bool(groups)

    def select(self, tables: Tables) -> Tables:
        """Return the tables of the cached groups."""
        return [tables[number] for number in self._ids]

    def num_tokens(self, tables: Tables) -> int:
        """Return how many tokens the tables have room for."""
        pairs = zip(self._groups, tables, strict=True)
        return min(len(table) * group.tokens_per_block for group, table in pairs)

    def to_load(self, tables: Tables, start: int, stop: int) -> list[list[int]] | None:
        """Return the blocks for a load of tokens ``[start, stop)``, -1 for those that the engine
        has; None if vLLM has not allocated one that is needed. Here and below, the tables are those
        of the cached groups."""
        wanted = []
        for group, table in zip(self._groups, tables, strict=True):
            size = group.tokens_per_block
            if group.is_dense:
                wanted.append(list(table[start // size : stop // size]))
                continue
            first = group.first_needed(stop)
            blocks = list(table[first : stop // size])
            num_own = min(max(0, start // size - first), len(blocks))
            blocks[:num_own] = [NOT_WANTED] * num_own
            if len(blocks) != group.num_needed(stop) or NULL_BLOCK in blocks:
                return None
            wanted.append(blocks)
        return wanted

    def tail(
        self, tables: Tables, num_tokens: int, states: Mapping[int, int]
    ) -> list[list[int]] | None:
        """Return the blocks of the tail behind ``num_tokens``, none for groups of full attention;
        None if one is gone.

        Args:
            states: Blocks with the states behind so many tokens, by vLLM's number of the group.
        """
        tail: list[list[int]] = []
        for number, group, table in zip(self._ids, self._groups, tables, strict=True):
            if group.is_dense:
                tail.append([])
                continue
            blocks = [states.get(number, NULL_BLOCK)]
            if group.kind != "state":
                size = group.tokens_per_block
                blocks = list(table[group.first_needed(num_tokens) : num_tokens // size])
            if len(blocks) != group.num_needed(num_tokens) or NULL_BLOCK in blocks:
                return None
            tail.append(blocks)
        return tail

    def dense(self, tables: Tables, start: int, stop: int) -> list[list[int]]:
        """Return the blocks of tokens ``[start, stop)``, none for groups with tails."""
        return [
            list(table[start // group.tokens_per_block : stop // group.tokens_per_block])
            if group.is_dense
            else []
            for group, table in zip(self._groups, tables, strict=True)
        ]
