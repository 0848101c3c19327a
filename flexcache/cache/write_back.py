"""Dirty blocks: those in DRAM that a tier with the policy `write_back` lacks.

    indexed in DRAM --> dirty --> in a lease of the tier --> indexed there
                        ^    \\                 |    \\
                        |     \\--> evicted     |     \\--> a write failed: given up
                        +----------------------+ the lease ends without them

A block leaves the dirty set only by one of these arrows, so none is forgotten while DRAM holds it.
The set is bounded: beyond ``high`` the oldest prompts are written until at most three quarters of
that remain. DRAM mostly evicts the oldest blocks, so with a bound well below DRAM's size blocks
are written before they are evicted.

Pure: holds only keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexcache.cache.prompt_content import PromptContent
from flexcache.cache.tier import Lease, Tier
from flexcache.ids import BlockKey, RootId


@dataclass(slots=True, eq=False)
class DirtyPrompt:
    """Blocks of a prompt, in order. DRAM has them and all blocks before them."""

    root: RootId
    keys: dict[BlockKey, None]
    content: PromptContent | None = None


class DirtyQueue:
    """Queue of dirty blocks, first in, first out; each block once.

    Args:
        high: Number of dirty blocks beyond which some are written.
    """

    def __init__(self, high: int) -> None:
        self._high = max(1, high)
        self._low = self._high * 3 // 4
        self._prompts: OrderedDict[DirtyPrompt, None] = OrderedDict()
        self._by_key: dict[RootId, dict[BlockKey, DirtyPrompt]] = {}
        self._is_draining = False
        self.num_blocks = 0

    def contains(self, root: RootId, key: BlockKey) -> bool:
        return key in self._by_key.get(root, ())

    def add(
        self,
        root: RootId,
        keys: Iterable[BlockKey],
        content: PromptContent | None = None,
        is_old: bool = False,
    ) -> None:
        """Add the blocks that are not dirty yet; ``is_old`` ones are written first."""
        known = self._by_key.get(root, {})
        prompt = DirtyPrompt(root, {key: None for key in keys if key not in known}, content)
        if not prompt.keys:
            return
        self._by_key.setdefault(root, known).update(dict.fromkeys(prompt.keys, prompt))
        self._prompts[prompt] = None
        if is_old:
            self._prompts.move_to_end(prompt, last=False)
        self.num_blocks += len(prompt.keys)
        self._is_draining |= self.num_blocks > self._high

    def discard(self, root: RootId, keys: Sequence[BlockKey]) -> int:
        """Remove keys; return how many of them were dirty."""
        known, count = self._by_key.get(root), 0
        if known is None:
            return 0
        for key in keys:
            prompt = known.pop(key, None)
            if prompt is None:
                continue
            count += 1
            del prompt.keys[key]
            if not prompt.keys:
                del self._prompts[prompt]
        if not known:
            del self._by_key[root]
        self.num_blocks -= count
        self._is_draining &= self.num_blocks > self._low
        return count

    def peek(self) -> DirtyPrompt | None:
        """Return the prompt to write now, if there is one."""
        return next(iter(self._prompts)) if self._is_draining else None

    def pop(self) -> DirtyPrompt:
        """Remove and return the oldest prompt."""
        prompt = next(iter(self._prompts))
        popped = DirtyPrompt(prompt.root, prompt.keys.copy(), prompt.content)
        self.discard(prompt.root, list(popped.keys))
        return popped

    def drain(self) -> None:
        """Make everything due: the cache is about to close."""
        self._high = self._low = 0
        self._is_draining = bool(self._prompts)


class WriteBack:
    """Observes DRAM and a tier below it, to track which blocks are dirty.

    Args:
        lose: Called for blocks that left DRAM before the tier received them.
    """

    def __init__(
        self, host: Tier, tier: Tier, dirty: DirtyQueue, lose: Callable[[Tier, int], None]
    ) -> None:
        self._host = host
        self._tier = tier
        self._lose = lose
        self.dirty = dirty
        self.tokens_per_block = 0
        """Block size if a journal records the content of blocks; else 0."""
        host.on_stored.append(self._arrived)
        host.index.on_removed.append(self._evicted)
        tier.on_stored.append(self._written)
        tier.on_unpublished = self._unwritten

    def mark(
        self,
        root: RootId,
        keys: Sequence[BlockKey],
        content: PromptContent | None,
        first: int,
        is_old: bool = False,
    ) -> None:
        """Mark the blocks that the tier lacks; the first key is at ``first`` of its prompt."""
        lacking = [key for key in keys if not self._tier.index.contains(root, key)]
        if content is not None:  # only of these blocks: they may stay dirty for long
            stop, size = first + len(keys), self.tokens_per_block
            content = content.part(first, stop, size) if size else None
        self.dirty.add(root, lacking, content, is_old)

    def _arrived(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        content: PromptContent | None,
        first: int,
    ) -> None:
        self.mark(root, keys, content, first)

    def _evicted(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        if count := self.dirty.discard(root, keys):
            self._lose(self._tier, count)

    def _written(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        content: PromptContent | None,
        first: int,
    ) -> None:
        self.dirty.discard(root, keys)

    def _unwritten(self, lease: Lease) -> None:
        """Handle a lease on the tier that ended without some of its blocks."""
        if lease.is_given_up:
            return
        root, at_tier, on_host = lease.root, self._tier.index, self._host.index
        lacking = [key for key in lease.keys if not at_tier.contains(root, key)]
        held = [key for key in lacking if on_host.contains(root, key)]
        if len(held) < len(lacking):
            self._lose(self._tier, len(lacking) - len(held))
        self.dirty.add(root, held, lease.content, is_old=True)
