"""Guard: decides whether a tier follows the ranking by hit density or LRU.

Past returns may mislead, and where all prompts return alike nothing beats LRU. Two *shadows* of the
tier, prefix indexes without bytes, see the same prompts, one in the order of each. The density is
followed from the time at which its shadow hits clearly more, until that lead is gone.

The shadows of a large tier are smaller than it, and see a sample: all prompts of some lines.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.eviction_queue import LruRanking, Outlook, Ranking
from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch
from flexcache.cache.run import Run
from flexcache.ids import BlockKey, RootId

MAX_SHADOW = 65_536
"""Stretches of a shadow; a larger tier is judged by a sample."""
_HALF_LIFE = 16.0
"""Times a shadow's size, in stretches seen, after which a hit counts half in the comparison."""
_CLEAR_LEAD = 0.005
"""Share of all stretches seen that the density must hit more to be followed."""
_MAX_LEAD = 0.01
"""Cap on the lead: the larger it is, the later a change of traffic is noticed."""
_MAX_CHANCES = 2.0
"""The cap is at least this many times the lead that chance produces between equals; to be followed,
the lead must be above it once."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt as it was stored, in stretches.

    Attributes:
        line: Number of its line of prompts.
        num_compared: How many of its stretches count as looked up; 0 if they did already.
        is_over: Whether this is no prompt but the end of its session.
    """

    root: RootId
    keys: Sequence[BlockKey]
    outlook: Outlook
    time: float
    line: int
    num_compared: int
    is_over: bool = False


def unshared(match: PrefixMatch) -> Iterator[tuple[PrefixMatch, int]]:
    """Yield the runs of a match, last first, and the depth from which on nothing else uses them.

    Another use shows by the runs behind one, or by what a run has beyond the match.
    """
    run, length = match.run, match.length
    behind: Run | None = None
    while run is not None and length == run.length:
        others = (c.parent_length for c in (run.children or {}).values() if c is not behind)
        start = max(others, default=0)
        if start < length:
            yield PrefixMatch(run, length, run.depth + length), run.depth + start
        if start:
            return
        behind, length = run, run.parent_length
        run = run.parent


class Shadow:
    """What a tier of ``capacity`` stretches would hold in the order of a ranking."""

    def __init__(self, capacity: int, ranking: Ranking) -> None:
        self._capacity = capacity
        self.index = PrefixIndex(ranking)

    def see(self, seen: Seen) -> int:
        """Return how many stretches of a prompt are there, and store the others."""
        index, keys = self.index, EngineBlockKeys(seen.root, seen.keys, len(seen.keys))
        match = index.match(keys)
        index.touch(match, seen.time, outlook=seen.outlook)
        missing = min(len(seen.keys), self._capacity) - match.num_blocks
        if missing > 0:
            index.pin(match)
            room = self._capacity - index.num_blocks
            if room < missing:
                bar = index.ranking.bar(seen.outlook)
                room += len(index.evict(missing - room, below=bar))
            index.unpin(match)
            new = seen.keys[match.num_blocks : match.num_blocks + min(room, missing)]
            count = index.num_insertable(seen.root, new)
            if count:
                no_ids = np.zeros(count, dtype=np.int64)
                index.insert(match, seen.root, new[:count], no_ids, seen.time, outlook=seen.outlook)
        return match.num_blocks

    def retire(self, seen: Seen) -> None:
        """Have what only this prompt uses go first."""
        match = self.index.match(EngineBlockKeys(seen.root, seen.keys, len(seen.keys)))
        for run, start in unshared(match):
            self.index.retire(run, start)


class Guard:
    """Compares the shadows of one tier.

    Args:
        capacity: Stretches of the tier.
        density: The ranking to judge.
    """

    def __init__(self, capacity: int, density: Ranking) -> None:
        self._share = -(-capacity // MAX_SHADOW)
        self._size = max(1, capacity // self._share)
        self._lru = Shadow(self._size, LruRanking())
        self._density = Shadow(self._size, density)
        self._lead = 0.0  # stretches that the density's shadow had above the other's, decayed
        self._compared = 0.0  # stretches that both saw, decayed
        self._squares = 0.0  # squares of the leads of single prompts, decayed
        self.is_lru = True

    def see(self, seen: Seen) -> None:
        """Show both shadows a prompt. O(its stretches), at C speed mostly."""
        if seen.line % self._share:
            return
        if seen.is_over:
            self._density.retire(seen)
            self._lru.retire(seen)
            return
        lead = self._density.see(seen) - self._lru.see(seen)
        if not seen.num_compared:
            return
        remaining = 0.5 ** (seen.num_compared / (_HALF_LIFE * self._size))
        self._compared = self._compared * remaining + seen.num_compared
        self._squares = self._squares * remaining + lead * lead
        self._lead = self._lead * remaining + lead
        chance = math.sqrt(self._squares)
        if self.is_lru:
            self.is_lru = self._lead <= max(_CLEAR_LEAD * self._compared, chance)
        else:
            self._lead = min(self._lead, max(_MAX_LEAD * self._compared, _MAX_CHANCES * chance))
            self.is_lru = self._lead <= 0.0

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(stretches)."""
        self._lru.index.check()
        self._density.index.check()
