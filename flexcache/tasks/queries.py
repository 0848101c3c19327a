"""What the shell around `KVTaskEngine` asks of it; changes nothing."""

from __future__ import annotations

from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import SessionId, TierName
from flexcache.tasks.accounts import Accounts
from flexcache.tasks.deadlines import TaskDeadlines
from flexcache.tasks.executors import Executors
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.report import cache_stats
from flexcache.tasks.routes import WORKERS
from flexcache.tasks.sessions import TaskSessions
from flexcache.tasks.stats import CacheIdentity, CacheStats, TotalsStats
from flexcache.transfer.breaker import CircuitBreaker


class TaskQueries:
    """A read-only view of the task engine's parts."""

    def __init__(
        self,
        cache: TieredCache,
        sessions: TaskSessions,
        executors: Executors,
        accounts: Accounts,
        deadlines: TaskDeadlines,
        lookups: RemoteLookUps | None,
        breaker: CircuitBreaker,
    ) -> None:
        self._cache = cache
        self._sessions = sessions
        self._executors = executors
        self._accounts = accounts
        self._deadlines = deadlines
        self._lookups = lookups
        self._breaker = breaker

    # -- sessions and tasks ----------------------------------------------------------------------

    @property
    def num_open_tasks(self) -> int:
        """Those of all sessions, and the cache's own."""
        return self._sessions.num_open

    def num_open_tasks_of(self, session: SessionId) -> int:
        return self._sessions.num_open_of(session)

    def totals_of(self, session: SessionId) -> TotalsStats:
        """What a session has had of the cache."""
        return self._sessions.totals_of(session).stats()

    def uses_gpu_of(self, engine: str) -> bool:
        """Whether tasks can still be copying from or to the slots of an engine of this name."""
        return self._sessions.uses_gpu_of(engine)

    def stats(self, identity: CacheIdentity, now: float) -> CacheStats:
        """Statistics of the tiers and tasks of the cache with this identity."""
        return cache_stats(
            identity, self._cache, self._accounts, self._sessions, self._executors.queues(),
            self._deadlines.num_unlaunched, self._lookups, self._breaker, now,
        )  # fmt: skip

    # -- executors and the remote store ----------------------------------------------------------

    def is_up(self, executor: str) -> bool:
        return self._executors.is_up(executor)

    def is_busy(self, executor: str) -> bool:
        """Whether ops are with it."""
        return self._executors.is_busy(executor)

    def next_op_deadline(self) -> float | None:
        """When the first op that runs misses its deadline, which a call may have set. O(1)."""
        return self._executors.next_deadline()

    def is_looking_up(self, lookup_id: int) -> bool:
        """Whether a question to the remote store is still open."""
        return self._lookups is not None and self._lookups.is_open(lookup_id)

    @property
    def store_outage(self) -> str | None:
        """Why the breaker of the remote store is open; None while it is closed."""
        return None if self._breaker.is_closed else self._breaker.last_reason

    def dirty_blocks(self) -> dict[TierName, int]:
        """Blocks that wait to be written back, by the tiers for which some do."""
        counts = {tier: self._cache.stores.num_dirty(tier) for tier in WORKERS}
        return {tier: count for tier, count in counts.items() if count}

    @property
    def num_held_up(self) -> int:
        """Dirty blocks that wait for the worker of their tier, for the end of its clearing, or for
        the limit of writes to it."""
        stores, tiers = self._cache.stores, self._cache.tiers
        return sum(
            stores.num_dirty(tier)
            for tier, worker in WORKERS.items()
            if not self.is_up(worker) or tiers.is_withheld(tier) or stores.throttled_until(tier)
        )
