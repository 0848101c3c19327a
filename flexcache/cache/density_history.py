"""History of look-ups: which prompt continued which, after what time, and how often.

The history is a prefix index of its own, without bytes, that remembers far more prompts than a tier
holds. It has one key per *stretch* of 512 tokens. Each look-up of a prompt is a *visit*:

    prompt      |---------- seen before ----------|-------- new --------|
                 front: used by an earlier visit     rear

The visit that last used the end of the front is the predecessor. If the front ends in the rear of
the predecessor, the prompt continues it: a conversation's next turn, an agent's next step. Both
parts of a visit begin a spell, which ends with the first visit that reaches the end of the front,
or the middle of the rear.

Some sessions name themselves, and those may say that they are over. The open spells of their last
visits then count for nothing: what is evicted first needs no forecast. So those who name themselves
and are not over return all the more, if such sessions tend to tell.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexcache.cache.block_keys import BlockKeys, SampledKeys
from flexcache.cache.density_hazards import Spells
from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch
from flexcache.ids import BlockKey, RootId

STRETCH_TOKENS = 512
MAX_STRETCHES = 131_072
"""Stretches remembered: 67 million tokens of distinct prompts."""
MAX_VISITS = 65_536
NUM_SPELLS = 16_384
"""Visits from whose spells hazards are fitted."""
_RETRY_S = 30.0
"""A prompt that is looked up once more within this time, and was not stored, is the same visit."""
_TICK_S = 1e-6

_RETURN_LEVELS = 9
NUM_LEVELS = (2 * _RETURN_LEVELS, 15, 15, 21, 21, 8, 20, 21)
"""How many levels each feature of a visit has, in the order of `Visit.levels`."""
_NEVER = math.inf
_NO_SPELL = math.nan


_NO_KEY = BlockKey(b"")


@dataclass(slots=True, eq=False)
class Visit:
    """A look-up of a prompt. Lengths are in stretches, and times in seconds.

    Attributes:
        time: No two visits have the same.
        num_seen: Stretches seen before.
        num_returns: Visits before it in its line of prompts; each continues the one before.
        num_branches: Other prompts that diverge from this one where its new part begins.
        line: Number of the first visit in its line of prompts.
        is_named: Whether it is of a session that names itself.
        last_key: Key of the last stretch that was stored.
        is_shown: Whether the guards have seen it.
        noted_levels: `levels` of its look-up, or of when it was stored.
    """

    number: int
    time: float
    length: int
    num_seen: int
    line: int = 0
    num_returns: int = 0
    gap: float = 0.0
    mean_gap: float = 0.0
    num_branches: int = 0
    generated: float = 0.0
    is_named: bool = False
    is_stored: bool = False
    last_key: BlockKey = _NO_KEY
    is_shown: bool = False
    noted_levels: bytes = b""

    @property
    def num_new(self) -> int:
        return self.length - self.num_seen

    @property
    def middle_of_rear(self) -> int:
        return self.num_seen + (self.num_new + 1) // 2

    def levels(self) -> tuple[int, ...]:
        """Return the level of each feature, below its number in `NUM_LEVELS`."""
        returns = self.num_returns
        return (
            min(returns, _RETURN_LEVELS - 1) + _RETURN_LEVELS * self.is_named,
            1 + _octave(self.gap) if returns else 0,
            1 + _octave(self.mean_gap) if returns else 0,
            _half_octave(self.length),
            _half_octave(self.num_new),
            min(self.num_branches, 7),
            min(int(math.log2(self.generated * STRETCH_TOKENS + 1.0) * 1.5), 19),
            _half_octave(self.num_seen),
        )


def _octave(seconds: float) -> int:
    return min(max(int(math.log2(max(seconds, 1e-3)) + 2.0), 0), 13)


def _half_octave(count: int) -> int:
    return min(int(math.log2(count + 1) * 2.0), 20)


class VisitSpells(NamedTuple):
    """Spells of the last visits, oldest first: of their fronts and of their rears."""

    fronts: Spells
    rears: Spells


class History:
    """Visits, and the prefix tree of their prompts.

    Args:
        tokens_per_block: Tokens of a block.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.blocks_each = max(1, STRETCH_TOKENS // tokens_per_block)
        self._index = PrefixIndex()
        self._visits: OrderedDict[float, Visit] = OrderedDict()
        self._now = 0.0
        self.num_visits = 0
        self._levels = bytearray(NUM_SPELLS * len(NUM_LEVELS))
        self._times = array("d", bytes(8 * NUM_SPELLS))
        self._front_ends = array("d", [_NO_SPELL]) * NUM_SPELLS
        """By number modulo: when the front was used again, infinity while it was not."""
        self._rear_ends = array("d", [_NO_SPELL]) * NUM_SPELLS

    def look_up(self, keys: BlockKeys, now: float, near: int | None = None) -> Visit:
        """Record the look-up of a prompt. O(log n) probes, amortised O(1) besides.

        Args:
            near: About how many of its blocks earlier prompts had, if that is known.
        """
        stretches = self._stretches(keys, keys.num_blocks)
        match = self._match(stretches, near)
        before = self._last_visit(match)
        length, num_seen = stretches.num_blocks, match.num_blocks
        # A request that is preempted, or waits for the store, asks again. It is no return.
        if (
            before is not None and not before.is_stored and before.length == length
            and num_seen >= min(before.num_seen + 1, length) and now < before.time + _RETRY_S
        ):  # fmt: skip
            return before
        number = self.num_visits
        visit = Visit(number, self._tick(now), length, num_seen, line=number)
        self.num_visits += 1
        self._visits[visit.time] = visit
        if len(self._visits) > MAX_VISITS:
            self._visits.popitem(last=False)
        if match.run is not None:
            self._end_spells(match, visit.time)
            self._follow(visit, before, match)
            self._index.touch(match, visit.time)
        if num_seen < length:  # enough for the rest to be known as this visit's when it is stored
            self._insert(match, keys.root, stretches.slice(num_seen, num_seen + 1), visit.time)
        self._begin_spells(visit)
        return visit

    def store(
        self, keys: BlockKeys, stop: int, generated: float = 0.0
    ) -> tuple[Visit, list[BlockKey]] | None:
        """Record that a prompt was computed.

        Args:
            stop: Blocks of the prompt. Those beyond what was looked up were generated.
            generated: Stretches generated besides.

        Returns:
            Its visit, the last if there were several, and the keys of its stretches. None if it
            has no stretch, or its visit is forgotten.
        """
        stretches = self._stretches(keys, stop)
        match = self._index.match(stretches)
        visit = self._last_visit(match)
        if visit is None:
            return None
        generated += max(0, stretches.num_blocks - visit.length)
        if generated > visit.generated:
            visit.generated = generated
            self._note_levels(visit)
        # No use of its blocks: a request looks up and then stores, and to count both would teach
        # that everything returns after one prefill.
        visit.is_stored = True
        if match.num_blocks < stretches.num_blocks:
            new = stretches.slice(match.num_blocks, stretches.num_blocks)
            match = self._insert(match, keys.root, new, visit.time)
        path = self._index.path_keys(match)
        visit.last_key = path[-1]
        return visit, path

    def name(self, keys: BlockKeys, near: int | None = None) -> Visit | None:
        """Record that the last look-up of a prompt was that of a session that names itself."""
        visit = self.recall(keys, near)
        if visit is not None and not visit.is_named:
            visit.is_named = True
            self._note_levels(visit)
        return visit

    def end(self, visit: Visit) -> bool:
        """Forget the spells of a visit whose session is over; return whether there are any.

        The front is the session's own if the visit continues another.
        """
        slot = visit.number % NUM_SPELLS
        if visit.number < self.num_visits - NUM_SPELLS:
            return False
        is_open = False
        for ends, is_own in (
            (self._front_ends, visit.num_returns > 0), (self._rear_ends, True)
        ):  # fmt: skip
            if is_own and ends[slot] == _NEVER:
                ends[slot], is_open = _NO_SPELL, True
        return is_open

    def path(self, root: RootId, key: BlockKey) -> list[BlockKey]:
        """Return the keys of a prompt's stretches up to this one; none if it is forgotten."""
        return self._index.path_keys(self._index.locate(root, key))

    def recall(self, keys: BlockKeys, near: int | None = None) -> Visit | None:
        """Return the last visit of a prompt's longest known prefix; records nothing."""
        stretches = self._stretches(keys, keys.num_blocks)
        return self._last_visit(self._match(stretches, near))

    def snapshot(self) -> VisitSpells:
        """Copy the spells of the last visits. O(spells), at C speed."""
        count = min(self.num_visits, NUM_SPELLS)
        slots = (np.arange(count) + self.num_visits) % max(1, count)  # oldest first
        levels = np.frombuffer(bytes(self._levels), np.uint8).reshape(NUM_SPELLS, -1)[slots]
        times = np.array(self._times)[slots]
        spells = []
        for ends in (self._front_ends, self._rear_ends):
            end = np.array(ends)[slots]
            exists = ~np.isnan(end)
            # A spell that lasts still is evidence too: of no return up to now.
            lasted = np.minimum(end, self._now)[exists] - times[exists]
            returned = np.isfinite(end[exists])
            spells.append(Spells(levels[exists], np.maximum(lasted, 1e-3), returned))
        return VisitSpells(*spells)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(stretches)."""
        self._index.check()

    def _stretches(self, keys: BlockKeys, stop: int) -> SampledKeys:
        """Return a prompt as one of stretches: each has the key of its last block."""
        return SampledKeys(keys, range(self.blocks_each - 1, stop, self.blocks_each))

    def _match(self, stretches: SampledKeys, near: int | None) -> PrefixMatch:
        """Return the known prefix of a prompt, of which this many blocks may be known."""
        return self._index.match(stretches, None if near is None else near // self.blocks_each)

    def _tick(self, now: float) -> float:
        """Return the time of a visit: now, or a little later than the last."""
        self._now = max(self._now + _TICK_S, now)
        return self._now

    def _last_visit(self, match: PrefixMatch) -> Visit | None:
        """Return the visit that last used the end of a match."""
        return None if match.run is None else self._visits.get(self._index.due(match))

    def _follow(self, visit: Visit, before: Visit | None, match: PrefixMatch) -> None:
        """Note what a visit's predecessor and other branches say about it."""
        run = match.run
        assert run is not None
        num_behind = 0 if run.holds is None else run.holds.get(match.length, 0)
        visit.num_branches = num_behind + (match.length < run.length)
        if before is None:
            return
        is_rear = visit.num_seen > before.num_seen
        # A prompt that shares the predecessor's front only is another branch, no continuation.
        if is_rear or (not before.num_new and visit.num_seen >= before.length):
            visit.line = before.line
            visit.num_returns = before.num_returns + 1
            visit.gap = visit.time - before.time
            total = before.mean_gap * before.num_returns + visit.gap
            visit.mean_gap = total / visit.num_returns

    def _end_spells(self, match: PrefixMatch, now: float) -> None:
        """End the spells of all visits whose parts a match reaches. O(segments)."""
        oldest = self.num_visits - NUM_SPELLS
        for reach, time, _ in self._index.segments(match):
            earlier = self._visits.get(time)
            if earlier is None or earlier.number < oldest:
                continue
            slot = earlier.number % NUM_SPELLS
            if self._front_ends[slot] == _NEVER and reach >= earlier.num_seen:
                self._front_ends[slot] = now
            if self._rear_ends[slot] == _NEVER and reach >= earlier.middle_of_rear:
                self._rear_ends[slot] = now

    def _begin_spells(self, visit: Visit) -> None:
        slot = visit.number % NUM_SPELLS
        self._times[slot] = visit.time
        self._front_ends[slot] = _NEVER if visit.num_seen else _NO_SPELL
        self._rear_ends[slot] = _NEVER if visit.num_new else _NO_SPELL
        self._note_levels(visit)

    def _note_levels(self, visit: Visit) -> None:
        visit.noted_levels = bytes(visit.levels())
        if visit.number >= self.num_visits - NUM_SPELLS:
            first = visit.number % NUM_SPELLS * len(NUM_LEVELS)
            self._levels[first : first + len(NUM_LEVELS)] = visit.noted_levels

    def _insert(
        self, parent: PrefixMatch, root: RootId, keys: list[BlockKey], time: float
    ) -> PrefixMatch:
        count = self._index.num_insertable(root, keys)
        if not count:  # they are the engine's own keys and do not chain
            return parent
        no_ids = np.zeros(count, dtype=np.int64)
        match = self._index.insert(parent, root, keys[:count], no_ids, time)
        # Its own prompt must not go to make room for it.
        if self._index.num_blocks > MAX_STRETCHES:
            self._index.pin(match)
            self._index.evict(self._index.num_blocks - MAX_STRETCHES)
            self._index.unpin(match)
        return match
