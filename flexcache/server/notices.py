"""Tells the ranks of each engine which gated tasks and which sessions are over.

A rank that was away meanwhile hears the latest notices when it registers again.
"""

from __future__ import annotations

from collections import deque

from flexcache.errors import InternalError
from flexcache.ids import SessionId
from flexcache.protocol.messages import Ended, SessionOver
from flexcache.server.outbox import Outbox
from flexcache.server.registry import Rank, Registry
from flexcache.tasks.engine import KVTaskEngine

_NUM_REPLAYED = 1024


class Notices:
    """Notices by engine, kept while the engine has a peer."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry = registry
        self._outbox = outbox
        self._sent: dict[str, deque[Ended | SessionOver]] = {}
        self.ending_sessions: dict[SessionId, str] = {}
        """Sessions that are over except for copies under way, with their engines."""

    def task_ended(self, engine: str, task_id: int, num_ok: int) -> None:
        """The GPU side of a gated task is done."""
        self._tell(engine, Ended(task_id, num_ok))

    def session_lost(self, session: SessionId, engine: str) -> None:
        """A scheduler is gone; its ranks are notified once nothing of the session moves."""
        self.ending_sessions[session] = engine

    def end_sessions(self, tasks: KVTaskEngine) -> None:
        """Notify the ranks of sessions for which nothing moves any more.

        Must be called after every batch of events, once its other notices were sent.
        """
        for session, engine in list(self.ending_sessions.items()):
            if not tasks.queries.uses_gpu_of(engine):
                del self.ending_sessions[session]
                self._tell(engine, SessionOver(session))

    def replay(self, rank: Rank) -> None:
        """Repeat the latest notices to a rank that may have missed some."""
        for notice in self._sent.get(rank.engine, ()):
            self._outbox.give(rank.identity, notice)

    def forget(self, engine: str) -> None:
        """No peer of the engine is left."""
        self._sent.pop(engine, None)

    def _tell(self, engine: str, notice: Ended | SessionOver) -> None:
        if not self._registry.has_engine(engine):
            return
        self._sent.setdefault(engine, deque(maxlen=_NUM_REPLAYED)).append(notice)
        for rank in self._registry.ranks:
            if rank.engine == engine:
                self._outbox.give(rank.identity, notice)

    def check(self) -> None:
        """Raise `InternalError` if notices are kept for an engine that is gone."""
        for engine in self._sent:
            if not self._registry.has_engine(engine):
                raise InternalError(f"engine {engine!r} has notices and no peer")
