"""Density: the eviction policy by hit density, and the guard that lets it follow LRU instead.

A `Forecaster` serves all tiers of a cache. It follows every look-up in its `History`, tells the
kinds of a prompt's blocks (`density_hazards.Kinds`), and ranks the blocks of each tier by them, or
by LRU as long as the tier's `Guard` says so. What it learns takes milliseconds and is done by a
`Study`:

    look_up, name, store, end --> what was seen --> begin_study --> Study.run --> adopt --> worths

Pure: no I/O, no clock, no thread: `Study.run` may be called on one. Not thread-safe otherwise.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.density_hazards import (
    AGE_EDGES,
    LOW,
    NUM_KINDS,
    Hazards,
    Kinds,
    Levels,
    Spells,
    fit_hazards,
    gains,
    make_kinds,
)
from flexcache.cache.density_history import NUM_LEVELS, NUM_SPELLS, History, Snapshot, Visit
from flexcache.cache.eviction_queue import LruRanking, Outlook, Ranking
from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch, Run
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

    Past returns may mislead, and where all prompts return alike nothing beats LRU. Two *shadows* of
    the tier, prefix indexes without bytes, see the same prompts, one in the order of each. The
    density is followed from the time at which its shadow hits clearly more, until that lead is
    gone.

    The shadows of a large tier are smaller than it, and see a sample: all prompts of some lines.

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


VISITS_PER_FIT = 500
_VISITS_PER_STUDY = 64
_MAX_UNSTUDIED = 1_024
"""Prompts that wait for a study; the oldest are forgotten beyond it."""
_MAX_SESSIONS = NUM_SPELLS
_VISITS_OF_SESSION = 4
"""Last visits of a session, which are over with it."""
_MIN_RETURNS = 20
"""Returns of fronts, and of rears, before the first fit."""
_NUM_EXAMPLES = 6_000
_CLEAR_GAIN = 3.0
"""Times the gain that chance produces, from which on features are taken to foretell returns."""

_NO_OUTLOOK = Outlook(0, 0, 0)


class DensityRanking:
    """Ranks by hit density, unless ``is_lru``."""

    num_kinds = NUM_KINDS
    edges: Sequence[float] = AGE_EDGES

    def __init__(self, is_lru: bool) -> None:
        self.is_lru = is_lru
        self.version = 0
        as_lru: list[float] = (1.0 / (1.0 + LOW)).tolist()
        self.worths: Sequence[Sequence[float]] = [as_lru] * NUM_KINDS

    def set_worths(self, worths: list[list[float]]) -> None:
        self.worths = worths
        self.version += 1

    def set_lru(self, is_lru: bool) -> None:
        self.version += is_lru != self.is_lru
        self.is_lru = is_lru

    def bar(self, outlook: Outlook) -> float:
        if self.is_lru:
            return math.inf
        return min(self.worths[outlook.front][0], self.worths[outlook.rear][0])


class Study:
    """What a forecaster is to learn next. Not to be run twice.

    Args:
        seen: Prompts that the guards have not seen yet.
        spells: Spells to fit hazards to, if they are due, and levels of recent visits.
    """

    def __init__(
        self, guards: Sequence[Guard], seen: Sequence[Seen], spells: Snapshot | None,
        kinds: Kinds | None,
    ) -> None:  # fmt: skip
        self._guards = guards
        self._seen = seen
        self._spells = spells
        self.kinds = kinds
        self.is_telling: bool | None = None
        """Whether features foretell returns better than age alone; None if that was not judged."""

    def run(self) -> None:
        """Learn. Milliseconds; touches nothing that the forecaster uses meanwhile."""
        for guard in self._guards:
            for seen in self._seen:
                guard.see(seen)
        if self._spells is not None:
            front, rear = self._spells
            if front.returned.sum() >= _MIN_RETURNS and rear.returned.sum() >= _MIN_RETURNS:
                self.kinds = make_kinds(_fit(front), _fit(rear), self.kinds)
                gained = np.concatenate([gains(part, NUM_LEVELS) for part in self._spells])
                chance = float(np.sqrt((gained**2).sum()))
                self.is_telling = bool(gained.sum() > _CLEAR_GAIN * chance)


def _fit(spells: Spells) -> tuple[Hazards, Levels]:
    return fit_hazards(spells, NUM_LEVELS), spells.levels[-_NUM_EXAMPLES:]


class Forecaster:
    """Tells which blocks of a cache will be used again; see the module.

    Args:
        tokens_per_block: Tokens of a block.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.history = History(tokens_per_block)
        self._kinds: Kinds | None = None
        self._rankings: list[DensityRanking] = []
        self._guards: list[Guard] = []
        self._shadow_ranking = DensityRanking(is_lru=False)
        self._seen: deque[Seen] = deque(maxlen=_MAX_UNSTUDIED)
        self._sessions: OrderedDict[str, tuple[tuple[RootId, Visit], ...]] = OrderedDict()
        """The last visits of sessions that name themselves."""
        self._next_fit = VISITS_PER_FIT
        self._is_studying = False
        self._is_telling = False

    def ranking(self, capacity: int) -> Ranking:
        """Make the ranking of a tier of ``capacity`` blocks."""
        ranking = DensityRanking(is_lru=True)
        stretches = max(1, capacity // self.history.blocks_each)
        self._rankings.append(ranking)
        self._guards.append(Guard(stretches, self._shadow_ranking))
        return ranking

    def look_up(self, keys: BlockKeys, now: float, near: int | None = None) -> None:
        """Record the look-up of a prompt.

        Args:
            near: About how many of its blocks earlier prompts had, if that is known.
        """
        self.history.look_up(keys, now, near)

    def name(self, keys: BlockKeys, session_id: str, near: int | None = None) -> None:
        """Record which session the last look-up of a prompt belongs to."""
        visit = self.history.name(keys, near)
        if visit is None:
            return
        visits = self._sessions.pop(session_id, ())
        if not visits or visits[-1][1] is not visit:
            visits = (*visits[1 - _VISITS_OF_SESSION :], (keys.root, visit))
        self._sessions[session_id] = visits
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def end(self, session_id: str) -> None:
        """Record that a session is over: of it there is nothing to foretell."""
        for root, visit in self._sessions.pop(session_id, ()):
            if self.history.end(visit) and (path := self.history.path(root, visit.last_key)):
                self._seen.append(
                    Seen(root, path, _NO_OUTLOOK, visit.time, visit.line, 0, is_over=True)
                )

    def store(self, keys: BlockKeys, stop: int, generated: float = 0.0) -> Outlook | None:
        """Record that the first ``stop`` blocks of a prompt were computed; return their kinds.

        Args:
            generated: Tokens generated besides these blocks, as a number of stretches.
        """
        stored = self.history.store(keys, stop, generated)
        if stored is None:
            return None
        visit, stretches = stored
        outlook = self._outlook(visit)
        in_stretches = Outlook(outlook.front, outlook.rear, visit.num_seen)
        num_compared = 0 if visit.is_shown else visit.length
        self._seen.append(
            Seen(keys.root, stretches, in_stretches, visit.time, visit.line, num_compared)
        )
        visit.is_shown = True
        return outlook

    def recall(self, keys: BlockKeys, near: int | None = None) -> Outlook | None:
        """Return the kinds of a prompt's blocks by its last look-up; None if there was none."""
        visit = self.history.recall(keys, near)
        return None if visit is None else self._outlook(visit)

    @property
    def wants_study(self) -> bool:
        """Whether there is something to learn that is worth it."""
        is_fit_due = self.history.num_visits >= self._next_fit
        return not self._is_studying and (is_fit_due or len(self._seen) >= _VISITS_PER_STUDY)

    def begin_study(self) -> Study | None:
        """Return what there is to learn, if it is worth it. The study must be run and adopted."""
        if not self.wants_study:
            return None
        self._is_studying = True
        is_fit_due = self.history.num_visits >= self._next_fit
        if is_fit_due:
            self._next_fit = self.history.num_visits + VISITS_PER_FIT
        spells = self.history.snapshot() if is_fit_due else None
        study = Study(self._guards, list(self._seen), spells, self._kinds)
        self._seen.clear()
        return study

    def adopt(self, study: Study) -> None:
        """Follow what a study has found."""
        self._is_studying = False
        if study.is_telling is not None:
            self._is_telling = study.is_telling
        is_new = study.kinds is not None and study.kinds is not self._kinds
        self._kinds = study.kinds
        for ranking, guard in zip(self._rankings, self._guards, strict=True):
            if study.kinds is not None and is_new:
                ranking.set_worths(study.kinds.worths)
            ranking.set_lru(guard.is_lru or not self._is_telling)
        if study.kinds is not None and is_new:
            self._shadow_ranking.set_worths(study.kinds.worths)

    def _outlook(self, visit: Visit) -> Outlook:
        num_seen = visit.num_seen * self.history.blocks_each
        if self._kinds is None:
            return Outlook(0, 0, num_seen)
        levels = visit.noted_levels
        return Outlook(self._kinds.front.kind(levels), self._kinds.rear.kind(levels), num_seen)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(stretches remembered)."""
        self.history.check()
        for guard in () if self._is_studying else self._guards:  # a study changes them meanwhile
            guard.check()


def make_forecaster(policy: str, tokens_per_block: int) -> Forecaster | None:
    """Make what ranks the blocks of a cache; None for LRU.

    Raises:
        ValueError: There is no such policy.
    """
    match policy:
        case "lru":
            return None
        case "density":
            return Forecaster(tokens_per_block)
    raise ValueError(f"no eviction policy {policy!r}: lru or density")
