"""The peers of a server: which client holds which place, and each engine's fence.

A place is one rank of an engine, or its scheduler. Tables only: greetings, disputes and messages
are `server.peers`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Protocol

from flexcache.errors import InternalError
from flexcache.ids import MAX_TASK_ID, SessionId, TaskId
from flexcache.protocol.fence import Fence
from flexcache.protocol.scratch import Scratch
from flexcache.tasks.instructions import device


class Host(Protocol):
    """What the hub needs of the machine that it runs on."""

    def watch(self, identity: bytes, pid: int) -> None:
        """Report the end of a process as the death of the peer."""

    def unwatch(self, identity: bytes) -> None:
        """Stop watching the peer's process; it may live on."""

    def make_fence(self) -> Fence:
        """Make the fence of an engine."""

    def map_scratch(self, pid: int, fd: int) -> Scratch | None:
        """Map a scheduler's scratch memory for reading; None if that is not possible."""


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


Peer = Rank | Scheduler


class Registry:
    """Peers by identity, place and session. Watches their processes while they are connected."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._peers: dict[bytes, Peer] = {}
        self._callers: dict[bytes, Scheduler] = {}
        self._ranks: dict[str, Rank] = {}  # by executor
        self._schedulers: dict[SessionId, Scheduler] = {}
        self._num_of: Counter[str] = Counter()  # peers, by engine
        self._fences: dict[str, Fence] = {}  # by engine

    def __len__(self) -> int:
        return len(self._peers)

    def is_known(self, identity: bytes) -> bool:
        """Whether a peer has this identity, for events or for calls."""
        return identity in self._peers or identity in self._callers

    def peer(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def caller(self, identity: bytes) -> Scheduler | None:
        """The scheduler whose calls come from this identity."""
        return self._callers.get(identity)

    def is_connected(self, caller: Scheduler) -> bool:
        """Whether this very session is still there."""
        return self._callers.get(caller.calls) is caller

    def rank(self, executor: str) -> Rank | None:
        return self._ranks.get(executor)

    def scheduler(self, session: SessionId) -> Scheduler | None:
        return self._schedulers.get(session)

    def scheduler_of(self, engine: str) -> Scheduler | None:
        return next((s for s in self._schedulers.values() if s.engine == engine), None)

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    @property
    def ranks(self) -> list[Rank]:
        return list(self._ranks.values())

    @property
    def schedulers(self) -> list[Scheduler]:
        return list(self._schedulers.values())

    def has_engine(self, engine: str) -> bool:
        """Whether any peer of the engine is connected."""
        return self._num_of[engine] > 0

    def add(self, peer: Peer) -> None:
        """Give the peer its place, which must be free."""
        self._peers[peer.identity] = peer
        self._num_of[peer.engine] += 1
        if isinstance(peer, Rank):
            self._ranks[peer.executor] = peer
        else:
            self._callers[peer.calls] = self._schedulers[peer.session] = peer
        self._host.watch(peer.identity, peer.pid)

    def remove(self, peer: Peer) -> None:
        """Free the peer's place. The fence of an engine goes with its last peer."""
        del self._peers[peer.identity]
        self._host.unwatch(peer.identity)
        if isinstance(peer, Rank):
            del self._ranks[peer.executor]
        else:
            del self._callers[peer.calls], self._schedulers[peer.session]
            if peer.scratch is not None:
                peer.scratch.close()
        self._num_of[peer.engine] -= 1
        if not self.has_engine(peer.engine):
            del self._num_of[peer.engine]
            fence = self._fences.pop(peer.engine, None)
            if fence is not None:
                fence.close()

    # -- fences ----------------------------------------------------------------------------------

    def fence(self, engine: str) -> Fence:
        """The fence of an engine one of whose peers is being added."""
        fence = self._fences.get(engine)
        if fence is None:
            fence = self._fences[engine] = self._host.make_fence()
        return fence

    def fence_path(self, engine: str) -> str | None:
        """Where others find the fence of an engine, if it has a peer."""
        fence = self._fences.get(engine)
        return None if fence is None else fence.path

    def is_counted_on(self, engine: str) -> bool:
        """Whether a step of the engine counts on its ranks."""
        fence = self._fences.get(engine)
        return fence is not None and fence.is_counted_on

    def revoke(self, engine: str, task_id: TaskId) -> None:
        """Let no rank of the engine begin another copy for this task or an earlier one."""
        fence = self._fences.get(engine)
        if fence is not None:  # else the engine has no rank
            fence.revoke(task_id)

    def revoke_all(self) -> None:
        """The server ends: let no rank begin another copy on its behalf."""
        for fence in self._fences.values():
            fence.revoke(MAX_TASK_ID)

    def check(self) -> None:
        """Raise `InternalError` if the tables disagree."""
        ranks = {peer.identity for peer in self._ranks.values()}
        schedulers = {peer.identity for peer in self._schedulers.values()}
        if ranks | schedulers != set(self._peers) or ranks & schedulers:
            raise InternalError("peers and their places disagree")
        if {s.calls for s in self._schedulers.values()} != set(self._callers):
            raise InternalError("schedulers and their identities for calls disagree")
        if Counter(peer.engine for peer in self._peers.values()) != self._num_of:
            raise InternalError("peers of engines are miscounted")
        for engine in self._fences:
            if not self.has_engine(engine):
                raise InternalError(f"engine {engine!r} has a fence and no peer")
