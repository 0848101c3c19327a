"""Hit density: the eviction policy by it, and the guard that lets it follow LRU instead.

A `DensityPolicy` serves all tiers of a cache. It follows every look-up in its `History`, tells the
kinds of a prompt's blocks (`density_hazards.Kinds`), and ranks the blocks of each tier by them, or
by LRU as long as the tier's `Guard` says so. What it learns takes milliseconds and is done by a
`DensityStudy`:

    look_up, name, store, end --> what was seen --> begin_study --> run --> adopt --> worths

Pure: no I/O, no clock, no thread; `DensityStudy.run` may be called on one.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

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
from flexcache.cache.density_history import NUM_LEVELS, NUM_SPELLS, History, Visit, VisitSpells
from flexcache.cache.eviction_policy import (
    Entry,
    EvictionPolicy,
    EvictionQueue,
    Leaves,
    LruQueue,
    MakeQueue,
    Outlook,
    SortedTails,
    Study,
)
from flexcache.cache.prefix_index import PrefixMatch, Run, Shadow
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

_REFRESH_S = 1.0
"""Worths change with age: those that are compared are at most this old."""
_TURNS = 16
"""Parts of the ends that are seen to in turn, so that seldom an eviction weighs them all."""
_SPARE_ENTRIES = 64
_GROWTH = 3
"""Times the number of ends, at which their order is sorted again without what is outdated."""
_RETAINED = 1e12
"""Worth above that of any tail that is not to be retained."""
_SHORTEST_HOLD_S = 1e-6


class DensityRanking:
    """What the blocks of a tier are worth, by hit density; by age alone while ``is_lru``.

    Attributes:
        version: Rises whenever anything else changes.
        edges: Ages at which the worth of a kind may change; they rise.
        worths: What blocks are worth, by kind and by the number of edges that their age has passed.
    """

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


# What is left to decide is the worst of 256 ends, whatever the number of blocks, and recency keeps
# its meaning: closure under prefixes, hints and discards are as under LRU. LFU, ARC, S3-FIFO and
# SIEVE were each far below LRU on some traffic.


class DensityQueue(EvictionQueue):
    """Tails by what a ranking says that they are worth.

    Each kind has a queue by last use. What a tail is worth depends on its kind and on its age, the
    time since its last use. With age the worth of a kind first rises, if at all, and then falls. So
    the worst tail of a kind stands at one of the two ends of its queue, and at the old one if it
    never rises:

        kind 0   oldest |------------------------| youngest
        kind 1   oldest |----------| youngest               the worst of all these ends goes next
        ...

    The ends themselves are in a heap by what their tails are worth, so that the worst of them is at
    hand. A tail has one entry, at which both ends arrive, and which goes with it: there are no
    stale ones to clean up. A tail that may not go leaves the queue when it hides what is behind it.
    """

    has_kinds = True

    def __init__(self, ranking: DensityRanking, leaves: Leaves) -> None:
        super().__init__(leaves)
        self.ranking = ranking
        self._num_kinds = ranking.num_kinds
        self._tails = [SortedTails() for _ in range(self._num_kinds)]
        num_ends = 2 * self._num_kinds
        self._worths = [math.inf] * num_ends
        """Worth of the oldest tail of each kind, then of the youngest of each."""
        self._changes_at = [math.inf] * num_ends
        """When each of them changes at the earliest, if the tail stays."""
        self._alike_until = [-math.inf] * self._num_kinds
        """Last use up to which the tails of a kind are worth as much as its oldest."""
        self._rises = [False] * self._num_kinds
        """Whether the worth of a kind rises with age: else its youngest is never the worst."""
        self._order: list[tuple[float, int]] = []
        """A heap of worths and ends; outdated unless it is the end's present worth."""
        self._version = -1
        self._turn = 0
        self._refresh_at = math.inf if ranking.is_lru else 0.0

    def __iter__(self) -> Iterator[Entry]:
        return chain(*self._tails)

    def bar(self, outlook: Outlook) -> float:
        return self.ranking.bar(outlook)

    def worth_of_hold(self, hold_s: float, now: float) -> float:
        return now - hold_s if self.ranking.is_lru else 1.0 / max(hold_s, _SHORTEST_HOLD_S)

    def worth_at(self, age_s: float, now: float) -> float:
        if self.ranking.is_lru:
            return now - age_s
        # Of the kind that blocks have of which no prompt is known.
        return self.ranking.worths[0][bisect_right(self.ranking.edges, age_s)]

    def add(self, entry: Entry) -> None:
        """Add a tail that is not in the queue. O(log n)."""
        kind = entry[2]
        tails = self._tails[kind]
        tails.add(entry)
        if tails.oldest is entry:
            self._weigh(kind)
        if self._rises[kind] and tails.youngest is entry:
            self._weigh(self._num_kinds + kind)

    def remove(self, entry: Entry) -> None:
        """Take out a tail that was added with this entry. O(log n)."""
        self._tails[entry[2]].remove(entry)
        self._weigh_both(entry[2])

    def pop(self, below: float = math.inf) -> Entry | None:
        """Take out the tail that is worth least.

        None if all are worth ``below`` or more. Amortised O(log ends). Most evictions call it, and
        calls are most of what it costs, so it is one function.
        """
        order, worths = self._order, self._worths
        if self.now >= self._refresh_at or self._version != self.ranking.version:
            self._refresh()
        while order:
            worth, end = order[0]
            if worth == worths[end]:
                break
            heapq.heappop(order)
        else:
            return None
        if worth >= below:
            return None
        kind = end % self._num_kinds
        tails = self._tails[kind]
        entry = tails.pop_oldest() if end == kind else tails.pop_youngest()
        following = tails.oldest
        if following is None:
            self._weigh_both(kind)
        elif end != kind or following[0] > self._alike_until[kind]:
            self._weigh(end)
        return entry

    def _refresh(self) -> None:
        """Weigh the ends whose turn it is and whose worth changes; all, if the ranking has."""
        begin, self._turn = self._turn, int(self.now / _REFRESH_S * _TURNS)
        due = self.now
        if self._version != self.ranking.version:
            due, ranking = math.inf, self.ranking
            for kind, worths in enumerate(ranking.worths):
                rises = any(one < other for one, other in pairwise(worths))
                self._rises[kind] = rises and not ranking.is_lru
        if due == math.inf or begin < self._turn - _TURNS:
            begin = self._turn - _TURNS
        changes_at = self._changes_at
        for turn in range(begin, self._turn):
            for end in range(turn % _TURNS, len(changes_at), _TURNS):
                if changes_at[end] > due:
                    continue
                tails = self._tails[end % self._num_kinds]
                while entry := tails.oldest if end < self._num_kinds else tails.youngest:
                    # What may not go must not hide the worst that may.
                    if self.leaves.is_evictable(entry[1]):
                        break
                    tails.remove(entry)
                self._weigh(end)
                if not tails:
                    self._weigh_both(end % self._num_kinds)
        self._version = self.ranking.version
        self._refresh_at = (
            math.inf if self.ranking.is_lru else (self._turn + 1) * _REFRESH_S / _TURNS
        )

    def _weigh_both(self, kind: int) -> None:
        """Weigh both ends of a kind."""
        self._weigh(kind)
        if self._rises[kind]:
            self._weigh(self._num_kinds + kind)

    def _weigh(self, end: int) -> None:
        """Note what the tail at an end is worth; infinity if there is none, or at a young end that
        cannot be the worst."""
        ranking, kind = self.ranking, end % self._num_kinds
        if end == kind:
            entry = self._tails[kind].oldest
        else:
            entry = self._tails[kind].youngest if self._rises[kind] else None
        worth = changes_at = math.inf
        alike_until = -math.inf
        if entry is not None:
            time = entry[0]
            if ranking.is_lru:
                worth = time
            elif time > self.now:
                worth, changes_at = _RETAINED + time, time
            else:
                edges = ranking.edges
                passed = bisect_right(edges, self.now - time)
                worth = ranking.worths[kind][passed]
                alike_until = self.now - (edges[passed - 1] if passed else 0.0)
                if passed < len(edges):
                    changes_at = time + edges[passed]
        self._changes_at[end] = changes_at
        if end == kind:
            self._alike_until[kind] = alike_until
        outdated = self._worths[end]
        if worth == outdated:
            return
        order = self._order
        self._worths[end] = worth
        if order and order[0] == (outdated, end):  # as after each eviction
            heapq.heapreplace(order, (worth, end))
            return
        heapq.heappush(order, (worth, end))
        if len(order) > _GROWTH * len(self._worths) + _SPARE_ENTRIES:
            order[:] = sorted(zip(self._worths, range(len(self._worths)), strict=True))

    def check(self, queued: set[Entry]) -> None:
        """Likewise if an end that has a tail would not be found."""
        super().check(queued)
        order = set(self._order)
        for end, worth in enumerate(self._worths):
            if worth < math.inf and (worth, end) not in order:
                raise InternalError(f"end {end} of the eviction queue is not in order")
        for kind, tails in enumerate(self._tails):
            tails.check()
            if any(of_kind != kind for _, _, of_kind in tails):
                raise InternalError(f"a tail of another kind is among those of kind {kind}")
            if bool(tails) == (self._worths[kind] == math.inf):
                raise InternalError(f"end {kind} of the eviction queue has no worth, or no tail")
            if not tails and self._worths[-self._num_kinds + kind] < math.inf:
                raise InternalError(f"the other end of kind {kind} has a worth and no tail")


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

    def __init__(self, capacity: int, density: DensityRanking) -> None:
        self._share = -(-capacity // MAX_SHADOW)
        self._size = max(1, capacity // self._share)
        self._lru = Shadow(self._size, LruQueue)
        self._density = Shadow(self._size, partial(DensityQueue, density))
        self._lead = 0.0  # stretches that the density's shadow had above the other's, decayed
        self._compared = 0.0  # stretches that both saw, decayed
        self._squares = 0.0  # squares of the leads of single prompts, decayed
        self.is_lru = True

    def see(self, seen: Seen) -> None:
        """Show both shadows a prompt. O(its stretches), at C speed mostly."""
        # Whole lines: in a sample of prompts no turn would be seen to return.
        if seen.line % self._share:
            return
        keys = EngineBlockKeys(seen.root, seen.keys, len(seen.keys))
        if seen.is_over:  # what only this prompt uses goes first
            for index in (self._density.index, self._lru.index):
                for run, start in unshared(index.match(keys)):
                    index.retire(run, start)
            return
        density, lru = (
            shadow.see(keys, keys.num_blocks, seen.time, seen.outlook)
            for shadow in (self._density, self._lru)
        )
        lead = density - lru
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
            # Capped, so that the order is dropped soon after traffic changes.
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


class DensityStudy(Study):
    """What the policy is to learn next.

    Args:
        seen: Prompts that the guards have not seen yet.
        spells: Spells to fit hazards to, if they are due, and levels of recent visits.
    """

    def __init__(
        self, guards: Sequence[Guard], seen: Sequence[Seen], spells: VisitSpells | None,
        kinds: Kinds | None,
    ) -> None:  # fmt: skip
        self._guards = guards
        self._seen = seen
        self._spells = spells
        self.kinds = kinds
        self.is_telling: bool | None = None
        """Whether features foretell returns better than age alone; None if that was not judged."""

    def run(self) -> None:
        """Learn. Takes milliseconds."""
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


class DensityPolicy(EvictionPolicy):
    """``density``: what promises the fewest hits per time kept goes first; see the module."""

    follows_prompts = True

    def __init__(self, tokens_per_block: int) -> None:
        super().__init__(tokens_per_block)
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

    def for_tier(self, capacity: int) -> MakeQueue:
        return partial(DensityQueue, self.ranking(capacity))

    def ranking(self, capacity: int) -> DensityRanking:
        """Make the ranking of a tier of ``capacity`` blocks."""
        ranking = DensityRanking(is_lru=True)
        stretches = max(1, capacity // self.history.blocks_each)
        self._rankings.append(ranking)
        self._guards.append(Guard(stretches, self._shadow_ranking))
        return ranking

    def look_up(self, keys: BlockKeys, now: float, near: int | None = None) -> None:
        self.history.look_up(keys, now, near)

    def name(self, keys: BlockKeys, session_id: str, near: int | None = None) -> None:
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
        # A request may store in parts; it was looked up once.
        num_compared = 0 if visit.is_shown else visit.length
        self._seen.append(
            Seen(keys.root, stretches, in_stretches, visit.time, visit.line, num_compared)
        )
        visit.is_shown = True
        return outlook

    def recall(self, keys: BlockKeys, near: int | None = None) -> Outlook | None:
        visit = self.history.recall(keys, near)
        return None if visit is None else self._outlook(visit)

    @property
    def wants_study(self) -> bool:
        is_fit_due = self.history.num_visits >= self._next_fit
        return not self._is_studying and (is_fit_due or len(self._seen) >= _VISITS_PER_STUDY)

    def begin_study(self) -> DensityStudy | None:
        if not self.wants_study:
            return None
        # One at a time: it changes the guards on another thread until it is adopted.
        self._is_studying = True
        is_fit_due = self.history.num_visits >= self._next_fit
        if is_fit_due:
            self._next_fit = self.history.num_visits + VISITS_PER_FIT
        spells = self.history.snapshot() if is_fit_due else None
        study = DensityStudy(self._guards, list(self._seen), spells, self._kinds)
        self._seen.clear()
        return study

    def adopt(self, study: Study) -> None:
        assert isinstance(study, DensityStudy)
        self._is_studying = False
        if study.is_telling is not None:
            self._is_telling = study.is_telling
        is_new = study.kinds is not None and study.kinds is not self._kinds
        self._kinds = study.kinds
        for ranking, guard in zip(self._rankings, self._guards, strict=True):
            if study.kinds is not None and is_new:
                ranking.set_worths(study.kinds.worths)
            # Shadows alone follow chance: where all prompts return alike, they lost half a point.
            # Features that foretell nothing on visits they were not fitted to keep LRU.
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
