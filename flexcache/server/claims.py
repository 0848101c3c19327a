"""Claims of two living clients to one place of an engine.

A place is one rank of an engine, or its scheduler. Two clients that claim the same one belong to
different engines of one name, and it is unknown which rank belongs to which scheduler. So the
engine's name is *disputed*: it moves no bytes until all but one claimant of each place are gone.

    free --a second client says Hello--> disputed --holder gone | claimants silent--> free
    free --an heir takes the place--> disputed --heir or all others replaced--> free

A claimant that takes the place of a holder that is gone (an *heir*) may be of another engine than
those that were there before: it stays disputed until another client has its place, or theirs.

No clock: time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

CLAIM_TTL_S = 3.0
"""A claimant silent for this long has given up. Living ones repeat Hello every 0.2 s."""
_MAX_CLAIMANTS = 8  # of one place; more change nothing


@dataclass(slots=True)
class Claim:
    """A client that asks for a place that another one has.

    Attributes:
        identity: Its identity in this conversation.
        client: Its name, the same in all of its conversations.
        is_repeated: Whether it has asked twice. A restarted worker may say Hello a moment before
            the death of its predecessor is noticed: only a repeated claim is a problem.
    """

    identity: bytes
    client: str
    pid: int
    heard_s: float
    is_repeated: bool = False


@dataclass(slots=True)
class _Dispute:
    """One place: the client that holds it, and those that claim it."""

    holder_pid: int
    claims: dict[str, Claim] = field(default_factory=dict)  # by client

    @property
    def processes(self) -> str:
        pids = [self.holder_pid, *(claim.pid for claim in self.claims.values())]
        return " and ".join(f"process {pid}" for pid in pids)


@dataclass(slots=True)
class _Inheritance:
    """A place that a claimant took over, and the clients that held the other places then."""

    heir: str
    pid: int
    others: dict[str, str]
    is_there: bool = True


class Claims:
    """Disputed places of one engine, while it has a peer."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._disputes: dict[str, _Dispute] = {}
        self._vacant: dict[str, set[str]] = {}
        """Places whose holder is gone, with the clients that had claimed them."""
        self._inherited: dict[str, _Inheritance] = {}

    def contest(self, place: str, holder_pid: int, claim: Claim) -> bool:
        """A second client asks for a place that is held; returns whether that is news."""
        dispute = self._disputes.setdefault(place, _Dispute(holder_pid))
        known = dispute.claims.get(claim.client)
        if known is None and len(dispute.claims) >= _MAX_CLAIMANTS:
            return False
        claim.is_repeated = known is not None
        dispute.claims[claim.client] = claim
        return known is None or not known.is_repeated

    def settle(self, place: str) -> bool:
        """The holder of a place is gone: its claimants may take it. Whether it was disputed."""
        # The heir may come back: until another client has the place, the doubt rests.
        inherited = self._inherited.get(place)
        if inherited is not None:
            inherited.is_there = False
        dispute = self._disputes.pop(place, None)
        if dispute is not None:
            self._vacant[place] = set(dispute.claims)
        return dispute is not None or inherited is not None

    def take(self, place: str, client: str, pid: int, others: dict[str, str]) -> bool:
        """A client takes a place; returns whether that begins or ends a dispute.

        Args:
            others: The client at every other place of the engine.
        """
        was_disputed = self.is_disputed
        claimants = self._vacant.pop(place, set())
        for inherited_place, inherited in list(self._inherited.items()):
            # The heir is back, or another client has its place, and the doubt is over.
            if inherited_place == place:
                inherited.is_there = inherited.heir == client
                is_over = not inherited.is_there
            else:
                # One client less that was there before the heir: without any it fits what is left.
                if inherited.others.get(place) != client:
                    inherited.others.pop(place, None)
                is_over = not inherited.others
            if is_over:
                del self._inherited[inherited_place]
        # It may be of another engine than the clients in the other places.
        if client in claimants and others:
            self._inherited[place] = _Inheritance(client, pid, dict(others))
        return was_disputed != self.is_disputed

    def withdraw(self, identity: bytes) -> bool:
        """Drop a claimant that leaves; returns whether that changes something."""
        return self._drop(lambda claim: claim.identity == identity)

    def expire(self, now: float) -> bool:
        """Drop silent claimants; returns whether that changes something."""
        return self._drop(lambda claim: now - claim.heard_s >= CLAIM_TTL_S)

    def _drop(self, is_over: Callable[[Claim], bool]) -> bool:
        has_changed = False
        for place, dispute in list(self._disputes.items()):
            left = {name: claim for name, claim in dispute.claims.items() if not is_over(claim)}
            has_changed |= len(left) < len(dispute.claims)
            dispute.claims = left
            if not left:
                del self._disputes[place]
        return has_changed

    @property
    def is_disputed(self) -> bool:
        return bool(self._disputes) or bool(self._heirs)

    @property
    def _heirs(self) -> dict[str, _Inheritance]:
        return {place: taken for place, taken in self._inherited.items() if taken.is_there}

    @property
    def places(self) -> list[tuple[str, str]]:
        """Disputed places, each with a text that names the processes that claim it."""
        claimed = [
            (place, f"{place} (claimed by {dispute.processes})")
            for place, dispute in self._disputes.items()
        ]
        return claimed + [
            (place, f"{place} (taken over by process {inheritance.pid})")
            for place, inheritance in self._heirs.items()
        ]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the engine's name, and how to fix it."""
        claimed = [
            self.explain(place)
            for place, dispute in self._disputes.items()
            if any(claim.is_repeated for claim in dispute.claims.values())
        ]
        return claimed + [
            f"{place} of engine {self._engine!r} was taken over by process {inheritance.pid}, which"
            " had claimed it while another process had it, and may be of another engine than the "
            "rest: nothing is cached under this name until one side is gone. Restart the engine, "
            "or end that process, and give each engine an engine_id of its own"
            for place, inheritance in self._heirs.items()
        ]

    def explain(self, place: str) -> str:
        """Both sides of one dispute, and the remedy."""
        return (
            f"{place} of engine {self._engine!r} is claimed by {self._disputes[place].processes}:"
            " nothing is cached under this name until one is left. End the others, or give each "
            "engine an engine_id of its own, to KVManager and its KVTPClients alike"
        )
