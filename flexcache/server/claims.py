"""Places at a server that two living clients claim at once.

A place is one rank of an engine, or its scheduler. Two clients that claim the same one belong to
different engines of one name, and nothing tells which rank goes with which scheduler. So the
engine's name is *disputed*: it moves no bytes until all but one claimant of each place are gone.

    free --a second client says Hello--> disputed --holder gone | claimants silent--> free

A restarted worker may say Hello a moment before the death of its predecessor is noticed, so a
dispute counts as a `problems` entry only once a claimant has repeated its claim.

No clock: time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CLAIM_TTL_S = 3.0
"""A claimant that is silent this long has given up. Living ones repeat Hello every 0.2 s."""
_MAX_CLAIMANTS = 8  # of one place; more change nothing


@dataclass(frozen=True, slots=True)
class Claimant:
    """A client that asks for a place that another one has.

    Args:
        identity: Of its conversation.
        client: The same in all of its conversations.
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
    """One place: the client that has it, and those that want it."""

    holder_pid: int
    claims: dict[str, _Claim]

    @property
    def processes(self) -> str:
        pids = [self.holder_pid, *(claim.claimant.pid for claim in self.claims.values())]
        return " and ".join(f"process {pid}" for pid in pids)


class Claims:
    """Every disputed place of a server, by engine."""

    def __init__(self) -> None:
        self._disputes: dict[str, dict[str, _Dispute]] = {}

    def contest(
        self, engine: str, place: str, holder_pid: int, claimant: Claimant, now: float
    ) -> bool:
        """A second client asks for a place that is held; whether that is news."""
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
        """The holder of a place is gone: its claimants may have it; whether there was a dispute."""
        disputes = self._disputes.get(engine, {})
        if disputes.pop(place, None) is None:
            return False
        if not disputes:
            del self._disputes[engine]
        return True

    def withdraw(self, identity: bytes) -> list[str]:
        """A claimant leaves; the engines for which that changes something."""
        return self._drop(lambda claim: claim.claimant.identity == identity)

    def expire(self, now: float) -> list[str]:
        """Forget claimants that are silent; the engines for which that changes something."""
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
                    self.settle(engine, place)
        return list(changed)

    def is_disputed(self, engine: str) -> bool:
        return engine in self._disputes

    def places(self, engine: str) -> list[str]:
        """The disputed places of an engine, with the processes that claim them."""
        disputes = self._disputes.get(engine, {})
        return [f"{place} (claimed by {d.processes})" for place, d in disputes.items()]

    def problems(self, engine: str) -> list[str]:
        """What is wrong with an engine's name, and what to do."""
        return [
            self.explain(engine, place)
            for place, dispute in self._disputes.get(engine, {}).items()
            if any(claim.is_repeated for claim in dispute.claims.values())
        ]

    def explain(self, engine: str, place: str) -> str:
        """Both sides of one dispute, and the remedy."""
        return (
            f"{place} of engine {engine!r} is claimed by {self._disputes[engine][place].processes}:"
            " nothing is cached under this name until one is left. End the others, or give each "
            "engine an engine_id of its own, to KVManager and its KVTPClients alike"
        )
