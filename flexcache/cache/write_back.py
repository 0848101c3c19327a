"""Prompts in DRAM that a tier with the policy `write_back` has not been given yet.

The set of dirty blocks is bounded: beyond ``high`` the oldest prompts are to be written until no
more than ``low`` remain. DRAM evicts what was not used for longest, which is on the whole what was
put first, so with a bound well below DRAM's size blocks are written before they are evicted.

Pure: holds keys and counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flexcache.ids import BlockKey, RootId


@dataclass(frozen=True, slots=True)
class DirtyPrompt:
    """The last ``num_blocks`` blocks of a prefix that ends with the block ``key``."""

    root: RootId
    key: BlockKey
    num_blocks: int


class DirtyQueue:
    """First in, first out."""

    def __init__(self, high: int) -> None:
        self._high = max(1, high)
        self._low = self._high * 3 // 4
        self._prompts: deque[DirtyPrompt] = deque()
        self._is_draining = False
        self.num_blocks = 0

    def add(self, prompt: DirtyPrompt) -> None:
        self._prompts.append(prompt)
        self.num_blocks += prompt.num_blocks
        self._is_draining |= self.num_blocks > self._high

    def next(self) -> DirtyPrompt | None:
        """Take out what is to be written now, if anything is."""
        if not self._prompts or not self._is_draining:
            return None
        prompt = self._prompts.popleft()
        self.num_blocks -= prompt.num_blocks
        self._is_draining = self.num_blocks > self._low
        return prompt

    def drain(self) -> None:
        """Have everything written: the cache is about to close."""
        self._high = self._low = 0
        self._is_draining = bool(self._prompts)
