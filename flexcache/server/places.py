"""Places of clients at a server: which client holds which, and which are claimed by two.

A place is one rank of an engine, or its scheduler. Tables only: greetings and messages are
`server.greeter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from flexcache.errors import InternalError
from flexcache.ids import MAX_TASK_ID, SessionId, TaskId
from flexcache.protocol.fence import Fence, Scratch
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


CLAIM_TTL_S = 3.0
"""A claimant silent for this long has given up. Living ones repeat Hello every 0.2 s."""
_MAX_CLAIMANTS = 8  # of one place; more change nothing


@dataclass(frozen=True, slots=True)
class Claimant:
    """A client that asks for a place that another one has.

    Attributes:
        identity: Its identity in this conversation.
        client: Its name, the same in all of its conversations.
    """

    identity: bytes
    client: str
    pid: int


@dataclass(slots=True)
class _Claim:
    claimant: Claimant
    heard_s: float
    is_repeated: bool = False


@dataclass(slots=True)
class _Dispute:
    """One place: the client that holds it, and those that claim it."""

    holder_pid: int
    claims: dict[str, _Claim]

    @property
    def processes(self) -> str:
        pids = [self.holder_pid, *(claim.claimant.pid for claim in self.claims.values())]
        return " and ".join(f"process {pid}" for pid in pids)


@dataclass(slots=True)
class _Inheritance:
    """A place that a claimant took over, and the clients that held the other places then."""

    heir: str
    pid: int
    others: dict[str, str]
    is_there: bool = True


class Claims:
    """Every disputed place of a server, by engine.

    A place is one rank of an engine, or its scheduler. Two clients that claim the same one belong
    to different engines of one name, and it is unknown which rank belongs to which scheduler. So
    the engine's name is *disputed*: it moves no bytes until all but one claimant of each place are
    gone.

        free --a second client says Hello--> disputed --holder gone | claimants silent--> free
        free --an heir takes the place--> disputed --heir or all others replaced--> free

    A claimant that takes the place of a holder that is gone (an *heir*) may be of another engine
    than those that were there before: it stays disputed until another client has its place, or
    theirs.

    A restarted worker may say Hello a moment before the death of its predecessor is noticed, so a
    dispute counts as a `problems` entry only once a claimant has repeated its claim.

    No clock: time is handed in.
    """

    def __init__(self) -> None:
        self._disputes: dict[str, dict[str, _Dispute]] = {}
        self._vacant: dict[str, dict[str, set[str]]] = {}
        """Places whose holder is gone, with the clients that had claimed them."""
        self._inherited: dict[str, dict[str, _Inheritance]] = {}

    def contest(
        self, engine: str, place: str, holder_pid: int, claimant: Claimant, now: float
    ) -> bool:
        """A second client asks for a place that is held; returns whether that is news."""
        dispute = self._disputes.setdefault(engine, {}).setdefault(place, _Dispute(holder_pid, {}))
        claim = dispute.claims.get(claimant.client)
        if claim is None:
            if len(dispute.claims) >= _MAX_CLAIMANTS:
                return False
            dispute.claims[claimant.client] = _Claim(claimant, now)
            return True
        claim.claimant = claimant
        claim.heard_s = now
        is_news = not claim.is_repeated
        claim.is_repeated = True
        return is_news

    def settle(self, engine: str, place: str) -> bool:
        """The holder of a place is gone: its claimants may take it. Whether it was disputed."""
        inherited = self._inherited.get(engine, {}).get(place)
        if inherited is not None:
            inherited.is_there = False
        dispute = self._end(engine, place)
        if dispute is not None:
            self._vacant.setdefault(engine, {})[place] = set(dispute.claims)
        return dispute is not None or inherited is not None

    def take(self, engine: str, place: str, client: str, pid: int, others: dict[str, str]) -> bool:
        """A client takes a place; returns whether that begins or ends a dispute.

        Args:
            others: The client at every other place of the engine.
        """
        was_disputed = self.is_disputed(engine)
        claimants = self._vacant.get(engine, {}).pop(place, set())
        known = self._inherited.setdefault(engine, {})
        for inherited_place, inherited in list(known.items()):
            if inherited_place == place:
                inherited.is_there = inherited.heir == client
                is_over = not inherited.is_there
            else:
                if inherited.others.get(place) != client:
                    inherited.others.pop(place, None)
                is_over = not inherited.others
            if is_over:
                del known[inherited_place]
        if client in claimants and others:
            known[place] = _Inheritance(client, pid, dict(others))
        return was_disputed != self.is_disputed(engine)

    def forget(self, engine: str) -> None:
        """No client holds a place of the engine any more."""
        self._vacant.pop(engine, None)
        self._inherited.pop(engine, None)

    def _end(self, engine: str, place: str) -> _Dispute | None:
        disputes = self._disputes.get(engine, {})
        dispute = disputes.pop(place, None)
        if dispute is not None and not disputes:
            del self._disputes[engine]
        return dispute

    def withdraw(self, identity: bytes) -> list[str]:
        """Drop a claimant that leaves; returns the engines for which that changes something."""
        return self._drop(lambda claim: claim.claimant.identity == identity)

    def expire(self, now: float) -> list[str]:
        """Drop silent claimants; returns the engines for which that changes something."""
        return self._drop(lambda claim: now - claim.heard_s >= CLAIM_TTL_S)

    def _drop(self, is_over: Callable[[_Claim], bool]) -> list[str]:
        changed: dict[str, None] = {}
        for engine, disputes in list(self._disputes.items()):
            for place, dispute in list(disputes.items()):
                for client, claim in list(dispute.claims.items()):
                    if is_over(claim):
                        del dispute.claims[client]
                        changed[engine] = None
                if not dispute.claims:
                    self._end(engine, place)
        return list(changed)

    def is_disputed(self, engine: str) -> bool:
        return engine in self._disputes or bool(self._heirs(engine))

    def _heirs(self, engine: str) -> dict[str, _Inheritance]:
        inherited = self._inherited.get(engine, {})
        return {place: taken for place, taken in inherited.items() if taken.is_there}

    def places(self, engine: str) -> list[str]:
        """Disputed places of an engine, with the processes that claim them."""
        disputes = self._disputes.get(engine, {})
        claimed = [f"{place} (claimed by {d.processes})" for place, d in disputes.items()]
        return claimed + [
            f"{place} (taken over by process {inheritance.pid})"
            for place, inheritance in self._heirs(engine).items()
        ]

    def problems(self, engine: str) -> list[str]:
        """What is wrong with an engine's name, and how to fix it."""
        claimed = [
            self.explain(engine, place)
            for place, dispute in self._disputes.get(engine, {}).items()
            if any(claim.is_repeated for claim in dispute.claims.values())
        ]
        return claimed + [
            f"{place} of engine {engine!r} was taken over by process {inheritance.pid}, which had "
            "claimed it while another process had it, and may be of another engine than the rest: "
            "nothing is cached under this name until one side is gone. Restart the engine, or end "
            "that process, and give each engine an engine_id of its own"
            for place, inheritance in self._heirs(engine).items()
        ]

    def explain(self, engine: str, place: str) -> str:
        """Both sides of one dispute, and the remedy."""
        return (
            f"{place} of engine {engine!r} is claimed by {self._disputes[engine][place].processes}:"
            " nothing is cached under this name until one is left. End the others, or give each "
            "engine an engine_id of its own, to KVManager and its KVTPClients alike"
        )
