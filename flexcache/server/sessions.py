"""Sessions of engines at a server, and the notices that their ranks get of ended tasks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from flexcache.errors import InternalError
from flexcache.ids import PromptDetail, SessionId, TaskId, TaskIds, make_session
from flexcache.protocol.messages import Ended, SessionOver
from flexcache.server.cache import CacheSlot
from flexcache.server.outbox import Outbox
from flexcache.server.places import Rank, Registry
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """What the hub knows of its server.

    Attributes:
        epoch: Part of the server's task ids.
        server_pid: The server's process.
        pid_namespace: Where that id counts; 0: not known.
        client_timeout_s: A peer silent for this long is considered dead.
        owner: The engine in this process, if it shares the cache with no other.
        prompt_detail: How much of a prompt's metadata the observers need.
        first_session: Number of the first session.
    """

    epoch: int
    server_pid: int
    pid_namespace: int = 0
    client_timeout_s: float
    owner: str | None = None
    prompt_detail: PromptDetail = PromptDetail.NOTHING
    first_session: int = 1


class Answers(Protocol):
    """Receives what becomes of the tasks of a session in this process.

    Called under the server's lock: must neither wait nor call the server.
    """

    def answer(self, task_id: int, result: TaskResult) -> None:
        """A task has ended: its GPU side, or all of it."""

    def renamed(self, generation: int, version: str) -> None:
        """The engine's weights have another name from now on."""

    def close(self) -> None:
        """The server has failed: no answer will come any more."""


class ServerSessions:
    """Numbers sessions and opens them in the task engine."""

    def __init__(self, config: HubConfig, registry: Registry, slot: CacheSlot) -> None:
        self._config = config
        self._registry = registry
        self._slot = slot
        self._numbers = itertools.count(config.first_session)
        self._local: dict[SessionId, tuple[str, Answers | None]] = {}

    def open(self, name: str) -> SessionId:
        """Open a session for a scheduler that is being greeted."""
        return self._open(name)

    def open_local(self, name: str, answers: Answers | None = None) -> TaskIds:
        """Open a session for calls from this process.

        Args:
            answers: Receives the results of the session's tasks, if the caller needs them.

        Returns:
            What numbers its tasks.
        """
        session = self._open(name)
        self._local[session] = (name, answers)
        return TaskIds(session)

    def is_local(self, session: SessionId) -> bool:
        """Whether the session is held in this process."""
        return session in self._local

    def answer_local(self, session: SessionId, task_id: TaskId, result: TaskResult) -> None:
        """Pass a result on to a session in this process."""
        _, answers = self._local[session]
        if answers is not None:
            answers.answer(task_id, result)

    def rename_local(self, engine: str, generation: int, version: str) -> None:
        """Pass on to an engine in this process what its weights are called."""
        for name, answers in self._local.values():
            if name == engine and answers is not None:
                answers.renamed(generation, version)

    def close_local(self) -> None:
        """The server has failed: let calls from this process wait no longer."""
        for _, answers in self._local.values():
            if answers is not None:
                answers.close()

    def engines(self) -> Iterator[tuple[str, int, SessionId]]:
        """Name, process and session of every engine, the one in this process included."""
        for session, (name, _) in self._local.items():
            if name == self._config.owner:
                yield name, self._config.server_pid, session
        for scheduler in self._registry.schedulers:
            yield scheduler.engine, scheduler.pid, scheduler.session

    def _open(self, name: str) -> SessionId:
        while True:
            session = make_session(self._config.epoch, next(self._numbers))
            if self._registry.scheduler(session) is None and not self.is_local(session):
                break
        self._slot.add_session(session, name)
        return session


_NUM_REPLAYED = 1024


class Notices:
    """Notices by engine, kept while the engine has a peer.

    A rank that was away meanwhile hears the latest notices when it registers again.
    """

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
