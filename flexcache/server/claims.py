"""Places at a server that two living clients claim at once.

A place is one rank of an engine, or its scheduler. Two clients that claim the same one belong to
different engines of one name, and it is unknown which rank belongs to which scheduler. So the
engine's name is *disputed*: it moves no bytes until all but one claimant of each place are gone.

    free --a second client says Hello--> disputed --holder gone | claimants silent--> free
    free --an heir takes the place--> disputed --heir or all others replaced--> free

A claimant that takes the place of a holder that is gone (an *heir*) may be of another engine than
those that were there before: it stays disputed until another client has its place, or theirs.

A restarted worker may say Hello a moment before the death of its predecessor is noticed, so a
dispute counts as a `problems` entry only once a claimant has repeated its claim.

No clock: time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """Every disputed place of a server, by engine."""

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
