"""Names of the weights that each engine has now, as its ranks and its scheduler tell them.

    rank       weights changed, its update number 3 --+
    scheduler  new_weights("step-17"), reset        --+--> generation 8, "step-17" --> scheduler

A rank numbers its own updates, and every op that it is given carries the number that the server
knows of: one that was planned before an update is refused by the rank itself, whenever the news of
that update arrive here. Numbers of different ranks are compared only to tell whether two of them
speak of one update: a wrong guess costs hits, never wrong bytes, and nothing is refused for ever.

The scheduler names prompts by the version, and says with each match which generation that was.
Nothing is matched for another one than the engine's present one.

No I/O. Used under the server's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexcache.cache.prompt import random_version
from flexcache.protocol.messages import UNKNOWN_WEIGHTS, Weights

NO_GENERATION = -1
"""The generation of an engine whose weights are unknown: no match is of it."""
_MAX_ABSENT = 1024


@dataclass(slots=True)
class _Rank:
    """What a rank has told: the number of its last update, and the version, if it knows that."""

    client: str
    number: int
    version: str = ""
    is_gone: bool = False


@dataclass(slots=True)
class _Engine:
    generation: int = 0
    version: str = ""
    scheduler: str = ""
    """Client of the scheduler that was greeted last."""
    ranks: dict[int, _Rank] = field(default_factory=dict)

    @property
    def is_unknown(self) -> bool:
        return any(r.number == UNKNOWN_WEIGHTS and not r.is_gone for r in self.ranks.values())

    def updated(self) -> dict[int, tuple[str, int]]:
        """Return the ranks whose weights are not those that they started with."""
        return {p: (r.client, r.number) for p, r in self.ranks.items() if r.number}


class EngineWeights:
    """The weights of all engines of a server.

    Args:
        changed: Called with an engine, its new generation, whether its earlier names are no
            longer its own, and the time.
    """

    def __init__(self, changed: Callable[[str, int, bool, float], None]) -> None:
        self._changed = changed
        self._engines: dict[str, _Engine] = {}
        self._absent: dict[str, None] = {}
        """Those of them that have no peers, the first to have left first."""

    def of(self, engine: str) -> Weights:
        """Return what an engine's weights are called."""
        state = self._engines.get(engine, _Engine())
        return Weights(state.generation, state.version, state.updated())

    def generations(self) -> list[tuple[str, int]]:
        """Return the engines whose weights have had another name, with their generations."""
        return [
            (engine, NO_GENERATION if state.is_unknown else state.generation)
            for engine, state in self._engines.items()
            if state.generation or state.is_unknown
        ]

    def begin(self, engine: str, version: str) -> None:
        """Name the weights that the engine in this process starts with."""
        self._engines[engine] = _Engine(version=version)

    def rename(self, engine: str, version: str, now: float) -> Weights:
        """Give an engine's weights another name. Returns it with its generation.

        The name that they have already changes nothing: a trainer that says it again, to be sure,
        would else have all requests refused that run, and those that hit blocks of before in the
        engine's own cache.
        """
        state = self._state_of(engine)
        if version != state.version:
            self._name(engine, state, version, now)
        return self.of(engine)

    def told(
        self, engine: str, place: int, client: str, number: int, version: str, now: float
    ) -> None:
        """A rank registers, or its weights have changed: this is its update of that number."""
        state = self._state_of(engine)
        known = state.ranks.get(place, _Rank("", 0))
        # It tells this by its line and by its socket, or has registered again.
        if (known.client, known.number) == (client, number):
            was_gone, known.is_gone = known.is_gone, False
            if was_gone and number == UNKNOWN_WEIGHTS:  # the engine may have got a name meanwhile
                self._advance(engine, state, state.generation, False, now)
            return
        state.ranks[place] = _Rank(client, number, version)
        if not number and not known.number:
            return  # it has the weights that it started with, as the one before it had
        if not version and number > 0:  # another rank may know the name of the same update
            named = (r.version for r in state.ranks.values() if r.number == number and r.version)
            version = next(named, "")
        self._name(engine, state, version or random_version(), now)

    def rank_gone(self, engine: str, place: int) -> None:
        """A rank has left. The same client may come back, with the weights that it had."""
        state = self._engines.get(engine)
        if state is not None and place in state.ranks:
            state.ranks[place].is_gone = True

    def greeted(self, engine: str, client: str, told: Weights, heard: int, now: float) -> Weights:
        """A scheduler begins a session, and tells what it names prompts by.

        Args:
            heard: The last generation that a server gave it. It has renamed its weights itself if
                it tells of a later one.

        Returns:
            What it has to name them by from now on.
        """
        state = self._state_of(engine)
        knows_all = heard >= state.generation
        if client != state.scheduler and state.scheduler:  # of an engine that was started again
            state.ranks = {place: r for place, r in state.ranks.items() if not r.is_gone}
            knows_all = True  # the name was its predecessor's
        state.scheduler = client
        knows_all &= all(told.ranks.get(p) == each for p, each in state.updated().items())
        # Another client is in the place of an updated rank, maybe with the weights of its start.
        is_doubtful = any(p in state.ranks and not state.ranks[p].number for p in told.ranks)
        for place, (rank_client, number) in told.ranks.items():
            state.ranks.setdefault(place, _Rank(rank_client, number))
        version, generation = told.version, told.generation
        if is_doubtful or not knows_all:  # which of the two came later may not be known
            is_unclear = is_doubtful or told.generation > heard
            version, knows_all = random_version() if is_unclear else state.version, False
        is_same = knows_all and (generation, version) == (state.generation, state.version)
        if not is_same and not (knows_all and not state.generation):
            generation = max(generation, state.generation) + 1
        is_other, state.version = version != state.version, version
        self._advance(engine, state, generation, is_other, now)
        return self.of(engine)

    def forget(self, engine: str) -> None:
        """No peer of the engine is left. Its scheduler may come back, and may not have heard of
        its last name: that is kept, of so many engines."""
        state = self._engines.get(engine)
        if state is None:
            return
        for rank in state.ranks.values():
            rank.is_gone = True
        if not state.scheduler:
            del self._engines[engine]
            return
        self._absent[engine] = None
        if len(self._absent) > _MAX_ABSENT:
            first = next(iter(self._absent))
            del self._absent[first], self._engines[first]

    def _state_of(self, engine: str) -> _Engine:
        self._absent.pop(engine, None)
        return self._engines.setdefault(engine, _Engine())

    def _name(self, engine: str, state: _Engine, version: str, now: float) -> None:
        is_other, state.version = state.version != version, version
        self._advance(engine, state, state.generation + 1, is_other, now)

    def _advance(
        self, engine: str, state: _Engine, generation: int, is_other: bool, now: float
    ) -> None:
        state.generation = generation
        self._changed(engine, NO_GENERATION if state.is_unknown else generation, is_other, now)
