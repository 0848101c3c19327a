"""Journal of blocks that tiers stored and lost, in order: the source of KV events.

Written by the index, not by ops: whatever the reason for which a block goes, the index sees it, so
no path can be left out.

Readers see two media. SSD and remote store are one: a block is stored there when the first of the
two has it, and removed when the last has lost it. With locality, each tier is a place of
its own.

Pure: a list that its reader takes and empties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from flexcache.cache.block_keys import PromptContent
from flexcache.ids import NO_INFO, BlockKey, RequestInfo, RootId, TierName


class Medium(Enum):
    """Places that readers tell apart: names of medium and, where asked for, locality."""

    CPU = ("CPU", None)
    STORAGE = ("STORAGE", None)
    LOCAL_CPU = ("CPU", "LOCAL")
    LOCAL_STORAGE = ("STORAGE", "LOCAL")
    REMOTE_STORAGE = ("STORAGE", "REMOTE")


# One medium for two tiers: vLLM's wire format knows three, and consumers track blocks by medium.
# With two tiers of the same name the first removal would hide what the second still holds.
MEDIUM_OF = {
    TierName.CPU: Medium.CPU,
    TierName.SSD: Medium.STORAGE,
    TierName.REMOTE: Medium.STORAGE,
}
WITH_LOCALITY = {
    TierName.CPU: Medium.LOCAL_CPU,
    TierName.SSD: Medium.LOCAL_STORAGE,
    TierName.REMOTE: Medium.REMOTE_STORAGE,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of a prompt are findable after the block ``parent`` (None: its start).

    Attributes:
        block_size: Tokens per block.
        token_ids: Tokens of these blocks; empty if unknown, as after a restart.
        extra_keys: One entry per block, or None.
        run_blocks: Blocks that each key stands for, of which it is the last one's.
    """

    medium: Medium
    root: RootId
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    block_size: int
    token_ids: Sequence[int] = ()
    info: RequestInfo = NO_INFO
    extra_keys: list[Any] | None = None
    run_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks can no longer be found."""

    medium: Medium
    root: RootId
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block can be found. ``removed`` lists the blocks, for a stream shared with other
    sources."""

    removed: Sequence[Change] = field(default=(), compare=False, repr=False)


Change = Stored | Removed | Cleared


class Journal:
    """Changes of all tiers, until they are taken.

    Args:
        medium_of: Where readers see the blocks of each tier: `MEDIUM_OF` or `WITH_LOCALITY`.
    """

    def __init__(
        self, tokens_per_block: int, medium_of: Mapping[TierName, Medium] = MEDIUM_OF
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.medium_of = medium_of
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Change) -> None:
        self._changes.append(change)

    def cleared_since(self, mark: int) -> None:
        """Replace the changes after the first ``mark`` with one `Cleared`: no block is left."""
        self._changes[mark:] = [Cleared(self._changes[mark:])]

    def take(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes


class TierJournal:
    """Records the changes of one tier.

    Args:
        has_elsewhere: Whether another tier of the same medium has a block.
    """

    def __init__(
        self,
        journal: Journal,
        tier: TierName,
        has_elsewhere: Sequence[Callable[[RootId, BlockKey], bool]],
    ) -> None:
        self._journal = journal
        self._medium = journal.medium_of[tier]
        self._has_elsewhere = has_elsewhere

    def stored(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        content: PromptContent | None = None,
        first: int = 0,
    ) -> None:
        """Record that blocks were indexed, the first at position ``first`` of its prompt."""
        # Readers know media, not tiers: of SSD and remote store only the first copy is news.
        start, stop = self._only_here(root, keys)
        if start == stop:
            return
        size = self._journal.tokens_per_block
        tokens: Sequence[int] = ()
        info, extra_keys = NO_INFO, None
        if content is not None:
            tokens = content.tokens_of(first + start, first + stop, size)
            info, extra_keys = content.info, content.extra_keys_of(first + start, first + stop)
        parent = keys[start - 1] if start else parent
        self._journal.add(
            Stored(self._medium, root, parent, keys[start:stop], size, tokens, info, extra_keys)
        )

    def removed(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        start, stop = self._only_here(root, keys)
        if start < stop:
            self._journal.add(Removed(self._medium, root, keys[start:stop]))

    def _only_here(self, root: RootId, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Return the range of blocks that the medium's other tiers lack.

        These are the last ones, because a tier that has a block has all before it.
        """
        start = 0
        for has in self._has_elsewhere:
            while start < len(keys) and has(root, keys[start]):
                start += 1
        return start, len(keys)
