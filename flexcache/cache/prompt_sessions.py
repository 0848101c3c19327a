"""PromptSessions: which blocks belong to the sessions of an engine's users, and what hints do.

A session (a conversation, an agent's loop) names itself with its prompts by a ``session_id``. Of
each prompt the *end* is kept: the key of the last block that was cached or stored. The ends tell
later which blocks the session has stored and no other one has used:

    |s0----------------s9|a10-----------------a40|      stored by session a
                       ^ end of session b: it shares s0..s9

When a session is over, its blocks are due first in every tier, except for those that another
session, or a prompt without one, has used, or that others build on. When it returns soon, its
blocks are kept until then, and those of its last prompt are fetched to DRAM shortly before. Both
are hints: nothing is lost by a wrong one.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.load_cost import LoadCost
from flexcache.cache.plan import LOAD_OP, Plan
from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch, Run
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import IndexedKeys, Tiers, find_prefix
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TaskKind
from flexcache.stats import SessionStats, UserSession

_SPARE_ENTRIES = 64


class SessionReturns:
    """Sessions by the time at which their blocks are to be fetched, one time each."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Entries of sessions that have returned, or said something else since, are stale."""

    def expect(self, session_id: str, fetch_at_s: float) -> None:
        """Fetch a session's blocks at this time, and at no other that was set before."""
        self._times[session_id] = fetch_at_s
        heapq.heappush(self._heap, (fetch_at_s, session_id))
        # A session may say so again and again, and each time leaves a stale entry.
        if len(self._heap) > 2 * len(self._times) + _SPARE_ENTRIES:
            self._heap = sorted((time, name) for name, time in self._times.items())

    def forget(self, session_id: str) -> None:
        """Fetch nothing for a session any more."""
        self._times.pop(session_id, None)

    def take_due(self, now: float) -> str | None:
        """Return a session whose blocks are to be fetched now; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            time, session_id = heapq.heappop(self._heap)
            if self._times.get(session_id) == time:
                del self._times[session_id]
                return session_id
        return None

    def next_deadline(self) -> float | None:
        """When `take_due` has something to return at the earliest."""
        return self._heap[0][0] if self._heap else None

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if not {(time, name) for name, time in self._times.items()} <= set(self._heap):
            raise InternalError("a session is expected to return and would not be fetched for")


_MAX_ENDS = 1 << 18
_MAX_ENDS_OF_ONE = 1 << 12
_MAX_ANONYMOUS_ENDS = 1 << 16
_LINES = 4  # of prompts that a session continues in turn
_FETCH_AHEAD_S = 3.0  # at least; a user who says "in 20 s" may be back a little earlier
_SPARE = 2.0  # times the estimated duration of the load
_NUM_LATELY, _NUM_SHOWN = 100, 20

End = tuple[RootId, BlockKey]


class _Reach(NamedTuple):
    """Blocks of a prompt up to an end, and those before the first that the session has stored."""

    stop: int
    floor: int


@dataclass(slots=True, eq=False)
class _PromptSession:
    ends: dict[End, _Reach] = field(default_factory=dict)
    """In the order in which they came last."""
    firsts: dict[End, _Reach] = field(default_factory=dict)
    """The first block that each of its puts has stored, as if a prompt ended there; it tells of all
    that the put has stored."""
    is_over: bool = False
    keep_until_s: float = 0.0
    """When it returns, if a hint said so."""

    def floor(self, keys: BlockKeys, start: int) -> int:
        """Return the first block that the session has stored of a prompt, now from ``start`` on.

        A prompt that continues one of the last ones was stored with that one.
        """
        for (root, key), reach in islice(reversed(self.ends.items()), _LINES):
            stop, has_stored = reach.stop, reach.floor < reach.stop
            if has_stored and root == keys.root and stop <= keys.num_blocks:
                start = min(start, reach.floor) if keys.key(stop - 1) == key else start
        return start


class PromptSessions:
    """The sessions that have named themselves lately; the least recently used are forgotten.

    Args:
        load_cost: Estimates how long before a session returns its blocks are to be fetched.
        max_ends: Ends to remember, of all sessions together.

    Attributes:
        returns: When what is to be fetched.
    """

    def __init__(
        self, tiers: Tiers, load_cost: LoadCost | None = None, max_ends: int = _MAX_ENDS
    ) -> None:
        self._tiers = tiers
        self._load_cost = load_cost
        self.returns = SessionReturns()
        self._max_ends = max_ends
        self._max_ends_of_one = min(max_ends, _MAX_ENDS_OF_ONE)
        self._sessions: OrderedDict[str, _PromptSession] = OrderedDict()
        self._anonymous: OrderedDict[End, None] = OrderedDict()
        self._users: dict[End, int] = {}
        """How many sessions have each end; prompts without a session count as one."""
        self._num_ends = 0
        self.counters = SessionStats()

    def __len__(self) -> int:
        return len(self._sessions)

    # -- prompts ---------------------------------------------------------------------------------

    def used(self, session_id: str | None, keys: BlockKeys, plan: Plan) -> None:
        """Note the plan of a match: its end is the last block that is cached or will be. O(1)."""
        stop = plan.stop
        if session_id is None:
            if self._sessions and stop and plan.kind is not TaskKind.PREFETCH:  # perhaps a router's
                self._add_anonymous((keys.root, keys.key(stop - 1)))
            return
        session = self._touch(session_id)
        if plan.kind is TaskKind.GET:
            self.counters.returned_sessions += session.is_over
            session.is_over, session.keep_until_s = False, 0.0
            self.returns.forget(session_id)
            self._tiers.name(keys, session_id)
        if stop:
            start = plan.start if plan.kind is TaskKind.PUT else stop
            floor = session.floor(keys, start)
            # The last block is evicted first, and what is left of the prompt is to be found all
            # the same: by the first one that it stores.
            if start < stop - 1:
                self._add_first(session, (keys.root, keys.key(start)), _Reach(stop, floor))
            self._add(session, (keys.root, keys.key(stop - 1)), stop, floor)

    def own_blocks(
        self, session_id: str, tier: Tier, num_pinned: Callable[[Run], int]
    ) -> list[tuple[RootId, BlockKey]]:
        """Return where the blocks begin in a tier that a session has stored, and neither another
        one nor a prompt without one has used, nor a pin holds. With a block goes what builds on
        it."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        floors = _floors(tier.index, [*session.ends.items(), *session.firsts.items()])
        is_shared = partial(self._is_shared, session)
        return [
            (match.run.root, match.run.keys[start - match.run.depth])
            for match, start in list(_unshared(floors, is_shared, num_pinned))
            if match.run is not None and start < match.run.depth + match.run.num_findable
        ]

    def forget(self, session_id: str, but_cached: bool = False) -> None:
        """Forget a session and the prompts that it has used, or only those that are not cached."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if not but_cached:
            del self._sessions[session_id]
            self._release_all(session_id, session)
            return
        self.returns.forget(session_id)
        indexes = [tier.index for tier in self._tiers]
        for ends in (session.ends, session.firsts):
            gone = [end for end in ends if not any(index.contains(*end) for index in indexes)]
            self._num_ends -= len(gone) if ends is session.ends else 0
            for end in gone:
                del ends[end]
                self._release(end)

    def put_ended(self, session_id: str | None) -> None:
        """Note that a put has ended: its session's hint may have come before it had stored all."""
        session = None if session_id is None else self._sessions.get(session_id)
        if session is None:
            return
        if session.is_over:
            self._retire(session)
        elif (rest_s := session.keep_until_s - self._tiers.now) > 0:
            self._keep(dict(islice(reversed(session.ends.items()), _LINES)), rest_s)

    def _touch(self, session_id: str) -> _PromptSession:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _PromptSession()
            if len(self._sessions) > self._max_ends:  # of most of them, nothing was stored
                self._forget_oldest()
        else:
            self._sessions.move_to_end(session_id)
        return session

    def _add(self, session: _PromptSession, end: End, stop: int, floor: int) -> None:
        # Taken out and put in again: the order is that of the last use.
        known = session.ends.pop(end, None)
        if known is not None:
            session.ends[end] = _Reach(stop, min(floor, known.floor))
            return
        session.ends[end] = _Reach(stop, floor)
        self._users[end] = self._users.get(end, 0) + 1
        self._num_ends += 1
        while self._num_ends > self._max_ends and len(self._sessions) > 1:
            self._forget_oldest()
        if len(session.ends) > self._max_ends_of_one:
            for oldest in list(islice(session.ends, 1 + self._max_ends_of_one // 8)):
                del session.ends[oldest]
                self._release(oldest)
                self._num_ends -= 1
        # No more of them than ends, or a session that goes on for ever would keep all.
        while len(session.firsts) > len(session.ends):
            first = next(iter(session.firsts))
            del session.firsts[first]
            self._release(first)

    def _add_first(self, session: _PromptSession, first: End, reach: _Reach) -> None:
        known = session.firsts.get(first)
        if known is None:
            self._users[first] = self._users.get(first, 0) + 1
        else:
            reach = _Reach(max(reach.stop, known.stop), min(reach.floor, known.floor))
        session.firsts[first] = reach

    def _add_anonymous(self, end: End) -> None:
        if end in self._anonymous:
            self._anonymous.move_to_end(end)
            return
        self._anonymous[end] = None
        self._users[end] = self._users.get(end, 0) + 1
        if len(self._anonymous) > _MAX_ANONYMOUS_ENDS:
            self._release(self._anonymous.popitem(last=False)[0])

    def _forget_oldest(self) -> None:
        self._release_all(*self._sessions.popitem(last=False))

    def _release_all(self, session_id: str, session: _PromptSession) -> None:
        self.returns.forget(session_id)
        for end in (*session.ends, *session.firsts):
            self._release(end)
        self._num_ends -= len(session.ends)

    def _release(self, end: End) -> None:
        self._users[end] -= 1
        if not self._users[end]:
            del self._users[end]

    # -- hints -----------------------------------------------------------------------------------

    def hint(self, session_id: str, over: bool, returns_in_s: float | None, now: float) -> bool:
        """Act on a hint; return whether the session is known.

        Args:
            over: What no other session shares is due first, in every tier.
            returns_in_s: Keep what the session has used for this many seconds, and fetch its last
                prompt shortly before.
        """
        self._tiers.advance(now)
        self.counters.over += over
        self.counters.returning += returns_in_s is not None
        session = self._sessions.get(session_id)
        if session is None:
            self.counters.unknown += 1
            return False
        if returns_in_s is not None and not over:
            session.keep_until_s = now + returns_in_s
            self.counters.kept_blocks += self._keep(session.ends, returns_in_s)
            ahead_s = self._fetch_ahead_s(session, now)
            self.returns.expect(session_id, session.keep_until_s - ahead_s)
        if over:
            session.is_over, session.keep_until_s = True, 0.0
            self.returns.forget(session_id)
            self._tiers.end(session_id)
            self._retire(session)
        return True

    def _keep(self, ends: Mapping[End, _Reach], for_s: float) -> int:
        """Keep what is cached up to these ends; return how many blocks of DRAM."""
        num_kept = 0
        for tier in self._tiers:
            for match in _longest_cached(tier.index, ends):
                tier.keep(match, for_s)
                num_kept += match.num_blocks if tier is self._tiers.host else 0
        return num_kept

    def take_returning(self, now: float) -> EngineBlockKeys | None:
        """Return the last prompt of a session that returns soon, as far as it is cached."""
        while (session_id := self.returns.take_due(now)) is not None:
            for root, key in reversed(self._sessions[session_id].ends):
                for tier in self._tiers:
                    match = tier.index.locate(root, key)
                    if match.run is not None:
                        return EngineBlockKeys(root, tier.index.path_keys(match), match.num_blocks)
        return None

    def prompts_of(self, session_id: str) -> list[IndexedKeys]:
        """Return the cached prompts of a session, the longest first, without those that another one
        of them begins with. It is no use of them. O(blocks)."""
        session = self._sessions.get(session_id)
        ends = {} if session is None else session.ends
        prompts: list[IndexedKeys] = []
        covered: set[End] = set()
        for end in sorted(ends, key=ends.__getitem__, reverse=True):
            keys = None if end in covered else find_prefix(*end, self._tiers)
            if keys is not None:
                prompts.append(keys)
                covered.update((end[0], key) for key in keys.slice(0, keys.num_blocks))
        return prompts

    def active_lately(self) -> list[UserSession]:
        """Return the sessions with the longest last prompts of those that were active last. A few
        hundred look-ups, however many sessions there are."""
        found = []
        for session_id, session in islice(reversed(self._sessions.items()), _NUM_LATELY):
            end = next(reversed(session.ends), None)
            has_all = (t.name for t in self._tiers if end is not None and t.index.contains(*end))
            rest_s = session.keep_until_s - self._tiers.now
            told = UserSession(
                session_id=session_id, prompts=len(session.ends), is_over=session.is_over,
                blocks=0 if end is None else session.ends[end].stop, tier=next(has_all, None),
                returns_in_s=rest_s if rest_s > 0 else None,
            )  # fmt: skip
            found.append(told)
        return sorted(found, key=lambda told: told.blocks, reverse=True)[:_NUM_SHOWN]

    def _fetch_ahead_s(self, session: _PromptSession, now: float) -> float:
        """Return how long before its return the blocks of a session's last prompt are fetched."""
        if self._load_cost is None or not session.ends:
            return _FETCH_AHEAD_S
        num_blocks = session.ends[next(reversed(session.ends))].stop
        kinds = [LOAD_OP[tier.name] for tier in self._tiers.lower]
        load_s = max(
            (self._load_cost.seconds(kind, num_blocks, now) or 0.0 for kind in kinds), default=0.0
        )
        return max(_FETCH_AHEAD_S, _SPARE * load_s)

    def _retire(self, session: _PromptSession) -> None:
        for tier in self._tiers:
            floors = _floors(tier.index, [*session.ends.items(), *session.firsts.items()])
            is_shared = partial(self._is_shared, session)
            for match, start in _unshared(floors, is_shared, lambda _: 0):
                self.counters.retired_blocks += tier.retire(match, start)

    def _is_shared(self, session: _PromptSession, end: End) -> bool:
        return self._users.get(end, 0) > (end in session.ends) + (end in session.firsts)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(ends)."""
        users: dict[End, int] = dict.fromkeys(self._anonymous, 1)
        for session in self._sessions.values():
            for end in (*session.ends, *session.firsts):
                users[end] = users.get(end, 0) + 1
        if users != self._users:
            raise InternalError("ends of prompts and their users disagree")
        if self._num_ends != sum(len(session.ends) for session in self._sessions.values()):
            raise InternalError("ends of sessions are miscounted")
        self.returns.check()


def _longest_cached(index: PrefixIndex, ends: Mapping[End, _Reach]) -> list[PrefixMatch]:
    """Return the longest cached prefix of each line of prompts."""
    matches: list[PrefixMatch] = []
    covered: set[int] = set()
    for root, key in sorted(ends, key=ends.__getitem__, reverse=True):
        match = index.locate(root, key)
        if match.run is None or match.run.run_id in covered:
            continue
        matches.append(match)
        covered.update(run.run_id for run in _path(match.run))
    return matches


def _floors(index: PrefixIndex, ends: Iterable[tuple[End, _Reach]]) -> list[tuple[Run, _Reach]]:
    """Return runs whose last blocks are a session's, those behind a run before it, and the depths
    from which on and up to which the session has stored them."""
    floors: dict[int, tuple[Run, _Reach]] = {}
    for (root, key), reach in ends:
        run = index.locate(root, key).run
        if reach.floor == reach.stop:
            continue  # it was looked up, nothing of it was stored
        while run is not None:
            known = floors.get(run.run_id, (run, reach))[1]
            both = _Reach(max(reach.stop, known.stop), min(reach.floor, known.floor))
            floors[run.run_id] = run, both
            is_last = run.parent is not None and run.parent_length == run.parent.length
            run = run.parent if is_last else None
    return [floors[run_id] for run_id in sorted(floors, reverse=True)]  # children are younger


def _path(run: Run | None) -> Iterator[Run]:
    while run is not None:
        yield run
        run = run.parent


def _unshared(
    floors: Iterable[tuple[Run, _Reach]], is_shared: Callable[[End], bool],
    num_pinned: Callable[[Run], int],
) -> Iterator[tuple[PrefixMatch, int]]:  # fmt: skip
    """Yield runs, and the depth from which on nothing else uses them.

    Args:
        num_pinned: Returns how many of a run's first blocks stay.
    """
    retired: set[int] = set()
    for run, (stop, floor) in floors:
        # What stands behind all that the session has stored is another one's, even if the end that
        # told so was evicted.
        if stop < run.depth + run.num_findable:
            continue
        # A task may still hold blocks of a deleted prompt: these continue nothing any more.
        children = [c for c in (run.children or {}).values() if c.num_findable]
        start = max((c.parent_length for c in children if c.run_id not in retired), default=0)
        start = max(start, floor - run.depth, num_pinned(run))
        for length in range(run.length, start, -1):
            if is_shared((run.root, run.keys[length - 1])):
                start = length
                break
        if start == 0:
            retired.add(run.run_id)
        if start < run.length:
            yield PrefixMatch(run, run.length, run.depth + run.length), run.depth + start
