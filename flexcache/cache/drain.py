"""Drain: the blocks of DRAM that a host hands to another one before it goes, hottest first.

    pieces, by last use   |A0---A5|   |A0---A5|B6---B9|   |A0---A5|A6--A8|
    portions              |=======|   |.......|==|====|   |.......|======|

A *piece* is what was last used at once, with all blocks before it, since no tier keeps a block
without those. A *portion* of it has the keys from the prompt's start on, and names as its own those
that no portion before had. In a model with tails a piece ends at a tail, and is handed over whole.

`HotBlocks` is the side that goes. `plan_takeover` is the side that stays: it reads what it lacks,
and evicts for that only what is worth less to it, by its own policy: under LRU, what was used
earlier.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from flexcache.cache.eviction_policy import RETIRED
from flexcache.cache.plan import EarlyTerms, Plan
from flexcache.cache.prefix_index import PrefixMatch, Run
from flexcache.cache.prompt import Prompt
from flexcache.cache.tail_index import Tail
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import IndexedKeys
from flexcache.ids import BlockKey, RootId, TaskKind

MAX_KEYS = 1 << 16
"""Most keys of a portion, from the prompt's start on."""
LONGEST_AGE_S = 1e9


class Portion(msgspec.Struct, frozen=True):
    """Blocks that are handed over, with the keys of all before them.

    Attributes:
        age_s: How long ago they were last used.
        num_units: Of the tail behind the last of them, which belongs to it; 0 for none.
        num_before: How many of the keys are those of blocks that earlier portions had.
    """

    root: RootId
    keys: Sequence[BlockKey]
    age_s: float
    num_units: int = 0
    num_before: int = 0

    @property
    def num_own(self) -> int:
        """Blocks and units of a tail that it hands over."""
        return len(self.keys) - self.num_before + self.num_units

    def num_there(self, num_blocks: int, has_tail: bool) -> int:
        """Return how many of its own a peer has that has so many of its blocks."""
        if self.num_units and not has_tail:
            return 0  # blocks are of no use without it
        return max(0, min(num_blocks, len(self.keys)) - self.num_before) + self.num_units


@dataclass(slots=True)
class _Piece:
    used_s: float
    number: int
    """The run that it ends in; ``length`` of its blocks belong to the piece."""
    length: int
    tail: Tail | None = None


class HotBlocks:
    """What a cache has in DRAM, hottest first.

    Args:
        is_shared: Whether peers mean the same by a root.
    """

    def __init__(self, cache: TieredCache, is_shared: Callable[[RootId], bool]) -> None:
        self._host = cache.tiers.host
        self._is_shared = is_shared
        tails, index = cache.loads.tails, self._host.index
        self._has_blocks = tails is None or tails.has_blocks
        self._pieces: list[_Piece] = []
        self._covered: dict[int, int] = {}
        """By run: how many of its blocks portions have had."""
        self._rest: list[Portion] = []
        self.total = self._host.num_indexed
        of_tails = map(self._of_tail, self._host.tails.all_tails())
        of_runs = map(self._of_run, index.run_numbers())
        self._sources: Iterator[list[_Piece]] = of_runs if tails is None else of_tails

    def gather(self, count: int) -> bool:
        """Look at so many runs more; whether there may be others. Then `sort`."""
        found = list(islice(self._sources, count))
        self._pieces += [piece for pieces in found for piece in pieces]
        return len(found) == count

    def sort(self) -> None:
        """Order what was gathered. Touches no tier, so it needs no lock."""
        # Of what was used at once the longest first: it has the others before it.
        self._pieces.sort(key=lambda piece: (piece.used_s, piece.number, piece.length))

    def take(self, most: int, now: float) -> Portion | None:
        """Return the next portion, with ``most`` blocks of its own, unless it ends with a tail;
        None if there is no more."""
        while not self._rest and self._pieces:
            self.put_back(self._whole(self._pieces.pop(), now))
        portion = self._rest.pop() if self._rest else None
        if portion is None or portion.num_units or portion.num_own <= most:
            return portion
        stop = portion.num_before + max(1, most)
        self.put_back(msgspec.structs.replace(portion, num_before=stop))
        return msgspec.structs.replace(portion, keys=portion.keys[:stop])

    def put_back(self, portion: Portion | None) -> None:
        """Let a portion, if there is one, be taken once more, before all others."""
        if portion is not None:
            self._rest.append(portion)

    def _of_run(self, number: int) -> list[_Piece]:
        run = self._host.index.run(number)
        segments = () if run is None else run.segments
        # Discarded blocks cannot be found, and retired ones are of no use.
        return [_Piece(time, number, end) for end, time, _ in segments if time > RETIRED]

    def _of_tail(self, tail: Tail) -> list[_Piece]:
        return [_Piece(tail.due, 0, 0, tail)] if tail.due > RETIRED else []

    def _whole(self, piece: _Piece, now: float) -> Portion | None:
        """Return all of a piece that is still here, if anything of it is new."""
        index, tail, length = self._host.index, piece.tail, piece.length
        age_s = min(max(0.0, now - piece.used_s), LONGEST_AGE_S)
        if tail is None:
            run = index.run(piece.number)
        else:
            if not tail.is_indexed or not self._is_shared(tail.root):
                return None
            if not self._has_blocks:
                return Portion(tail.root, [tail.key], age_s, len(tail.units), 1)
            run, length, _ = index.locate(tail.root, tail.key)
        if run is None or not self._is_shared(run.root):
            return None
        length = min(length, run.num_findable)
        keys = index.path_keys(PrefixMatch(run, length, run.depth + length))
        num_before = self._cover(run, length)
        if tail is not None and len(keys) <= MAX_KEYS:
            return Portion(run.root, keys, age_s, len(tail.units), num_before)
        if tail is not None or num_before >= min(len(keys), MAX_KEYS):
            return None
        return Portion(run.root, keys[:MAX_KEYS], age_s, num_before=num_before)

    def _cover(self, last: Run, length: int) -> int:
        """Note that blocks are handed over with all before them; return how many of these were."""
        run: Run | None = last
        while run is not None:
            had = self._covered.get(run.run_id, 0)
            self._covered[run.run_id] = max(had, length)
            if had:  # and with them all that is before
                return run.depth + min(had, length)
            length, run = run.parent_length, run.parent
        return 0


def plan_takeover(cache: TieredCache, portion: Portion, peer: str, most: int) -> Plan:
    """Plan to read from a peer what DRAM lacks of what the peer hands over.

    Args:
        most: Blocks that it may take, unless it ends with a tail.
    """
    tiers, keys = cache.tiers, IndexedKeys(portion.root, portion.keys, len(portion.keys))
    host, tier, num_units = tiers.host, tiers.peer, portion.num_units
    assert tier is not None
    # First, since what is here of it must not make room for the rest.
    host.keep(host.index.match(keys), -portion.age_s)
    num_missing = 0
    if cache.loads.tails is None or cache.loads.tails.has_blocks:
        have = host.index.match(keys).num_blocks
        num_missing = len(portion.keys) - have - host.num_in_flight(keys, have, len(portion.keys))
    if not num_units:
        num_missing = min(num_missing, most)
    host.make_room(portion.root, num_missing + num_units, portion.age_s)
    room = host.pool.num_free - num_units
    if room < (num_missing if num_units else 1):
        return cache.plan_nothing(TaskKind.PREFETCH, keys, 0, 0, "")
    tier.learn(portion.root, None, portion.keys, peer=peer)
    if num_units:
        tier.learn_tail(portion.root, portion.keys[-1], num_units, peer)
        most = len(portion.keys)
    # As an early load, but for its pins: no request is on its way.
    terms = EarlyTerms(min(room, most) if not num_units else most, 0.0, 0.0, portion.age_s)
    prompt = Prompt(TaskKind.PREFETCH, keys, 0, len(portion.keys), 0)
    return cache.loads.plan_prefetch(prompt, terms=terms)
