"""The sessions of a server: those of connected schedulers, and those held in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

from flexcache.ids import SessionId, TaskId, TaskIds, make_session
from flexcache.server.cache_slot import CacheSlot
from flexcache.server.hub_config import HubConfig
from flexcache.server.registry import Registry
from flexcache.tasks.instructions import TaskResult


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
