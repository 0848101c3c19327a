"""State of a server that its lock guards: cache, clients by engine, outbox and counters.

`ServerState` is the record; `server.hub` (frames in, instructions out), `server.greeter` (who is a
client) and `server.calls` (what schedulers ask for) read and change it. All under the lock.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import EngineKeys
from flexcache.errors import InternalError
from flexcache.ids import MAX_TASK_ID, SessionId, TaskId, TaskIds, make_session, new_epoch
from flexcache.protocol.fence import Fence, Scratch
from flexcache.protocol.messages import Ended, SessionOver
from flexcache.server.cache import CacheSlot, OpenCache, ServedCache
from flexcache.server.claims import Claims
from flexcache.server.observers import Observers
from flexcache.server.outbox import Outbox
from flexcache.server.reactor import Reactor
from flexcache.server.weights import EngineWeights
from flexcache.stats import ServerCounters
from flexcache.storage.shards import Shards
from flexcache.tasks.instructions import TaskResult, device

_NUM_REPLAYED = 1024
_MAX_NAMING_ENGINES = 64


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


@dataclass(slots=True, eq=False)
class Rank:
    """A rank that said Hello."""

    identity: bytes
    engine: str
    rank: int
    client: str
    pid: int
    heard_s: float
    serving: bool = False
    layout: str = ""
    """Its KV layout, once it serves."""
    weights: int = 0
    """Number of its last update, as far as is known."""
    has_missed: bool = False
    """Whether messages for it were dropped."""

    @property
    def executor(self) -> str:
        return device(self.engine, self.rank)

    @property
    def place(self) -> str:
        return f"rank {self.rank}"


@dataclass(slots=True, eq=False)
class Scheduler:
    """An engine's scheduler in session."""

    identity: bytes
    # Of a second socket: one belongs to one thread at a time, and handing each call to the client's
    # thread and back would cost two wake-ups, some 60 us each.
    calls: bytes
    engine: str
    client: str
    pid: int
    session: SessionId
    scratch: Scratch | None
    heard_s: float
    is_parked: bool = False
    """Whether a match of it waits for the remote store."""
    place: ClassVar[str] = "the scheduler"


@dataclass(slots=True, eq=False)
class LocalCaller:
    """A session held in this process: of its engine, or of the HTTP API."""

    engine: str
    answers: Answers | None


Peer = Rank | Scheduler


@dataclass(slots=True, eq=False)
class ServedEngine:
    """An engine while it has a peer. A place is one rank of it, or its scheduler.

    Attributes:
        notices: The latest ones, for ranks that were away meanwhile.
    """

    fence: Fence
    claims: Claims
    peers: dict[str, Peer] = field(default_factory=dict)  # by place
    notices: deque[Ended | SessionOver] = field(default_factory=lambda: deque(maxlen=_NUM_REPLAYED))

    @property
    def ranks(self) -> list[Rank]:
        return [peer for peer in self.peers.values() if isinstance(peer, Rank)]


class ServerState:
    """What a server knows, while it runs.

    Attributes:
        epoch: Part of the server's task ids.
        owner: The engine in this process, if it shares the cache with no other.
        lock: Held by each thread that uses anything here, or the task engine.
        changed: Its waiters are notified when a look-up ends or an engine's readiness changes.
        slot: Has the cache, once that is known.
        observers: Take the changes of the tiers.
        peers: By identity. Their processes are watched.
        callers: Schedulers by the identity that their calls come from.
        ranks: By executor.
        sessions: Their callers: connected schedulers, and those in this process.
        ending: Sessions that are over except for copies under way, with their engines.
        engine_keys: How the engines that have been here make keys; the last ones to come.
    """

    def __init__(
        self, config: CacheConfig, reactor: Reactor, observers: Observers, open_cache: OpenCache,
        owner: str | None = None,
    ) -> None:  # fmt: skip
        # Everything but config and lock is used under the lock, and sockets outside it: a test with
        # instrumented classes watches that (`tests/system/test_server_lock.py`).
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.config = config
        self.epoch = new_epoch()
        self.owner = owner
        self.reactor = reactor
        self.observers = observers
        self.counters = ServerCounters()
        self.outbox = Outbox()
        self._open_cache = open_cache
        self.slot = CacheSlot(self._open, self.outbox)
        self.weights = EngineWeights(self._weights_changed)
        self.engines: dict[str, ServedEngine] = {}
        self.peers: dict[bytes, Peer] = {}
        self.callers: dict[bytes, Scheduler] = {}
        self.ranks: dict[str, Rank] = {}
        self.sessions: dict[SessionId, Scheduler | LocalCaller] = {}
        self.ending: dict[SessionId, str] = {}
        self.engine_keys: dict[str, EngineKeys | None] = {}
        self.session_numbers = itertools.count(1)

    # -- clients ---------------------------------------------------------------------------------

    def engine(self, name: str) -> ServedEngine:
        """An engine one of whose peers is being added."""
        engine = self.engines.get(name)
        if engine is None:
            engine = self.engines[name] = ServedEngine(Fence.create(), Claims(name))
        return engine

    def add(self, peer: Peer) -> None:
        """Give the peer its place, which must be free."""
        self.engine(peer.engine).peers[peer.place] = peer
        self.peers[peer.identity] = peer
        if isinstance(peer, Rank):
            self.ranks[peer.executor] = peer
        else:
            self.callers[peer.calls] = self.sessions[peer.session] = peer

    def remove(self, peer: Peer) -> None:
        """Free the peer's place. Fence, notices and disputes of an engine go with its last peer."""
        del self.peers[peer.identity]
        self.reactor.unwatch_process(peer.identity)
        self.outbox.lines.pop(peer.identity, None)
        if isinstance(peer, Rank):
            del self.ranks[peer.executor]
        else:
            del self.callers[peer.calls], self.sessions[peer.session]
            if peer.scratch is not None:
                peer.scratch.close()
        engine = self.engines[peer.engine]
        del engine.peers[peer.place]
        if not engine.peers:
            del self.engines[peer.engine]
            engine.fence.close()
            # The engine in this process goes on without ranks, under the names that it has.
            if peer.engine != self.owner:
                self.weights.forget(peer.engine)

    def holder(self, engine: str, place: str) -> Peer | None:
        """The client that has a place."""
        found = self.engines.get(engine)
        return None if found is None else found.peers.get(place)

    @property
    def schedulers(self) -> list[Scheduler]:
        return list(self.callers.values())

    def is_connected(self, caller: Scheduler) -> bool:
        """Whether this very session is still there."""
        return self.callers.get(caller.calls) is caller

    # -- sessions --------------------------------------------------------------------------------

    def open_session(self, engine: str) -> SessionId:
        """Number a session, and let it make tasks as soon as there is a cache."""
        while True:
            session = make_session(self.epoch, next(self.session_numbers))
            if session not in self.sessions:  # numbers recur
                break
        # Without a cache yet, `_open` adds it.
        if self.slot.cache is not None:
            self.slot.tasks.add_session(session, engine)
        return session

    def open_local(self, engine: str, answers: Answers | None = None) -> TaskIds:
        """Open a session for calls from this process; return what numbers its tasks.

        Args:
            answers: Receives the results of the session's tasks, if the caller needs them.
        """
        session = self.open_session(engine)
        self.sessions[session] = LocalCaller(engine, answers)
        return TaskIds(session)

    def names_keys_by(self, engine: str, how: EngineKeys | None) -> None:
        """Note how an engine makes keys. It is remembered when that has left: what it has stored
        can still be looked up, or deleted."""
        self.engine_keys.pop(engine, None)
        self.engine_keys[engine] = how
        if len(self.engine_keys) > _MAX_NAMING_ENGINES:
            here = {engine, *(name for name, _, _ in self.engines_in_session())}
            gone = next((name for name in self.engine_keys if name not in here), None)
            if gone is not None:
                del self.engine_keys[gone]

    def engines_in_session(self) -> Iterator[tuple[str, int, SessionId]]:
        """Name, process and session of every engine, the one in this process included."""
        for session, caller in self.sessions.items():
            if isinstance(caller, Scheduler):
                yield caller.engine, caller.pid, session
            elif caller.engine == self.owner:
                yield caller.engine, os.getpid(), session

    def _open(self, model: ModelConfig, tokens_per_block: int, shards: Shards) -> ServedCache:
        """Open the cache, and let it know what came before it."""
        cache = self._open_cache(model, tokens_per_block, shards)
        for session, caller in self.sessions.items():
            cache.tasks.add_session(session, caller.engine)
        for engine, generation in self.weights.generations():
            cache.tasks.set_weights(engine, generation, False, 0.0)
        return cache

    def _weights_changed(self, engine: str, generation: int, is_other: bool, now: float) -> None:
        """Go on with an engine's new names; its scheduler hears of it first."""
        weights = self.weights.of(engine)
        for caller in self.sessions.values():
            if caller.engine != engine:
                continue
            if isinstance(caller, Scheduler):
                self.outbox.send(caller.identity, weights)
            elif caller.answers is not None:
                caller.answers.renamed(weights.generation, weights.version)
        if self.slot.cache is not None:
            self.slot.tasks.set_weights(engine, generation, is_other, now)

    # -- what ranks are told ---------------------------------------------------------------------

    def tell(self, engine: str, notice: Ended | SessionOver) -> None:
        """Tell the ranks of an engine that a gated task or a session is over."""
        found = self.engines.get(engine)
        if found is not None:
            found.notices.append(notice)
            for rank in found.ranks:
                self.outbox.give(rank.identity, notice)

    def revoke(self, engine: str, task_id: TaskId) -> None:
        """Let no rank of the engine begin another copy for this task or an earlier one."""
        found = self.engines.get(engine)
        if found is not None:  # else the engine has no rank
            found.fence.revoke(task_id)

    def revoke_all(self) -> None:
        """The server ends: let no rank begin another copy on its behalf."""
        for engine in self.engines.values():
            engine.fence.revoke(MAX_TASK_ID)

    def check(self) -> None:
        """Raise `InternalError` if the tables disagree."""
        peers = {peer.identity: peer for e in self.engines.values() for peer in e.peers.values()}
        if peers != self.peers or not all(e.peers for e in self.engines.values()):
            raise InternalError("engines and their peers disagree")
        ranks = {peer.executor: peer for peer in peers.values() if isinstance(peer, Rank)}
        if ranks != self.ranks:
            raise InternalError("ranks and their executors disagree")
        schedulers = [peer for peer in peers.values() if isinstance(peer, Scheduler)]
        if {s.calls: s for s in schedulers} != self.callers:
            raise InternalError("schedulers and their identities for calls disagree")
        in_session = {n: s for n, s in self.sessions.items() if isinstance(s, Scheduler)}
        if {s.session: s for s in schedulers} != in_session:
            raise InternalError("schedulers and their sessions disagree")
        if not self.outbox.lines.keys() <= self.peers.keys():
            raise InternalError("a rank that is gone has a line")
