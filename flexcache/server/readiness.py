"""What each engine still waits for, and why ranks were refused."""

from __future__ import annotations

from flexcache.errors import RegistrationError
from flexcache.protocol.messages import Readiness
from flexcache.server.cache_slot import CacheSlot
from flexcache.server.claims import Claims
from flexcache.server.outbox import Outbox
from flexcache.server.registry import Rank, Registry
from flexcache.tasks.instructions import DISK, device

_MAX_PROBLEMS = 256


class EngineReadiness:
    """Reports an engine's missing parts to its scheduler, and to callers in this process."""

    def __init__(self, registry: Registry, slot: CacheSlot, claims: Claims, outbox: Outbox) -> None:
        self._registry = registry
        self._slot = slot
        self._claims = claims
        self._outbox = outbox
        self._refused: dict[tuple[str, int], str] = {}  # by engine and rank
        self.num_changes = 0

    def missing(self, engine: str) -> list[str]:
        """Ranks and workers that an engine still waits for."""
        cache = self._slot.cache
        if cache is None:
            return self._slot.awaited
        names = [
            f"rank {rank}"
            for rank in range(cache.model.num_ranks)
            if not cache.tasks.queries.is_up(device(engine, rank))
        ]
        if cache.store.disk_pool is not None and not cache.tasks.queries.is_up(DISK):
            names.append("disk worker")
        return names + self._claims.places(engine)

    def problems(self, engine: str) -> list[str]:
        """Why ranks of an engine were refused, and which other clients claim its name."""
        refused = [text for (name, _), text in self._refused.items() if name == engine]
        return refused + self._claims.problems(engine)

    def is_settled(self, engine: str) -> bool:
        """Whether waiting for the engine's parts is over, for better or worse."""
        is_refused = self._slot.failure is not None or bool(self.problems(engine))
        return is_refused or not self.missing(engine)

    def require(self, engine: str, timeout: float | None) -> None:
        """Raise why the engine is not ready after ``timeout`` seconds, if so.

        Raises:
            TimeoutError: Names those that do not serve yet.
            RegistrationError: A rank was refused; says why.
            ConfigError: The cache could not be opened for the blocks of the engine's ranks.
        """
        if self._slot.failure is not None:
            raise self._slot.failure
        missing, problems = self.missing(engine), self.problems(engine)
        if problems and missing:
            raise RegistrationError("; ".join(problems))
        if missing:
            raise TimeoutError(f"not registered after {timeout} s: {', '.join(missing)}")

    def changed(self) -> None:
        """Report to every scheduler what its engine still waits for."""
        self.num_changes += 1
        for scheduler in self._registry.schedulers:
            engine = scheduler.engine
            readiness = Readiness(self.missing(engine), self.problems(engine))
            self._outbox.send(scheduler.identity, readiness)

    def refuse(self, rank: Rank, problem: str) -> None:
        """Remember why a rank was refused; the oldest of too many problems are dropped."""
        self._refused[rank.engine, rank.rank] = problem
        while len(self._refused) > _MAX_PROBLEMS:
            del self._refused[next(iter(self._refused))]

    def retry(self, rank: Rank) -> None:
        """The rank tries again: what was wrong with it may be over."""
        self._refused.pop((rank.engine, rank.rank), None)

    def forget(self, engine: str) -> None:
        """The engine's scheduler is gone, and with it the interest in its problems."""
        for place in [place for place in self._refused if place[0] == engine]:
            del self._refused[place]
