"""Prompts in DRAM that a tier with the policy `write_back` has not been given yet.

The set of dirty blocks is bounded: beyond ``high`` the oldest prompts are to be written until no
more than three quarters of that remain. DRAM evicts what was not used for longest, which is on the
whole what was put first, so with a bound well below DRAM's size blocks are written before they are
evicted.

Pure: holds keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from flexcache.cache.prompt_content import PromptContent
from flexcache.ids import BlockKey, RootId


@dataclass(frozen=True, slots=True)
class DirtyPrompt:
    """Consecutive blocks of a prompt, of which DRAM may have lost the last ones meanwhile."""

    root: RootId
    keys: Sequence[BlockKey]
    content: PromptContent | None = None


class DirtyQueue:
    """First in, first out; each prompt once.

    Args:
        high: Dirty blocks beyond which some are to be written.
        limit: Beyond it, while nothing can be written, the oldest are forgotten.
    """

    def __init__(self, high: int, limit: int) -> None:
        self._high = max(1, high)
        self._low = self._high * 3 // 4
        self._limit = limit
        self._prompts: OrderedDict[tuple[RootId, BlockKey], DirtyPrompt] = OrderedDict()
        self._is_draining = False
        self.num_blocks = 0

    def add(self, prompt: DirtyPrompt) -> None:
        name = (prompt.root, prompt.keys[-1])
        if name in self._prompts:
            return
        self._prompts[name] = prompt
        self.num_blocks += len(prompt.keys)
        self._is_draining |= self.num_blocks > self._high
        while self.num_blocks > self._limit and len(self._prompts) > 1:
            self.pop()

    def peek(self) -> DirtyPrompt | None:
        """What is to be written now, if anything is."""
        if not self._prompts or not self._is_draining:
            return None
        return next(iter(self._prompts.values()))

    def pop(self) -> DirtyPrompt:
        """Take out the oldest."""
        _, prompt = self._prompts.popitem(last=False)
        self.num_blocks -= len(prompt.keys)
        self._is_draining = self.num_blocks > self._low
        return prompt

    def drain(self) -> None:
        """Have everything written: the cache is about to close."""
        self._high = self._low = 0
        self._is_draining = bool(self._prompts)
