"""What became findable in the tiers and what ceased to be, in order: the source of KV events.

To those who follow it there are two media. SSD and remote store are one: a block is stored there
when the first of the two has it, and removed when the last has lost it.

Pure: a list that somebody takes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flexcache.cache.prompt_content import PromptContent
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.request_info import NO_INFO, RequestInfo


class Medium(str, Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


MEDIUM_OF = {
    TierName.CPU: Medium.CPU,
    TierName.SSD: Medium.STORAGE,
    TierName.REMOTE: Medium.STORAGE,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of a prompt can be found behind the block ``parent`` (None: its start).

    Attributes:
        block_size: Tokens per block.
        token_ids: Of these blocks; empty where they are not known, as after a restart.
        extra_keys: One entry per block, or None.
    """

    medium: Medium
    root: RootId
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    block_size: int
    token_ids: Sequence[int] = ()
    info: RequestInfo = NO_INFO
    extra_keys: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks cannot be found any more."""

    medium: Medium
    root: RootId
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block can be found."""


Change = Stored | Removed | Cleared
