"""The sessions of a server: those of connected schedulers, and those held in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flexcache.ids import SessionId
from flexcache.server.hub_config import HubConfig
from flexcache.server.registry import Registry
from flexcache.server.store_slot import StoreSlot
from flexcache.tasks.ids import make_session


class Sessions:
    """Numbers sessions and opens them in the task engine."""

    def __init__(self, config: HubConfig, registry: Registry, slot: StoreSlot) -> None:
        self._config = config
        self._registry = registry
        self._slot = slot
        self._numbers = itertools.count(config.first_session)
        self._local: dict[SessionId, str] = {}

    def open(self, name: str) -> SessionId:
        """Open a session for a scheduler that is being greeted."""
        return self._open(name, num_remembered=0)  # its client remembers what was answered

    def open_local(self, name: str, num_remembered: int) -> SessionId:
        """Open a session for calls from this process; there must be a store."""
        session = self._open(name, num_remembered)
        self._local[session] = name
        return session

    def is_local(self, session: SessionId) -> bool:
        """Whether the session is held in this process."""
        return session in self._local

    def engines(self) -> Iterator[tuple[str, int, SessionId]]:
        """Name, process and session of every engine, the one in this process included."""
        for session, name in self._local.items():
            if name == self._config.owner:
                yield name, self._config.server_pid, session
        for scheduler in self._registry.schedulers:
            yield scheduler.engine, scheduler.pid, scheduler.session

    def _open(self, name: str, num_remembered: int) -> SessionId:
        while True:
            session = make_session(self._config.epoch, next(self._numbers))
            if self._registry.scheduler(session) is None and not self.is_local(session):
                break
        self._slot.tasks.add_session(session, name, num_remembered)
        return session
