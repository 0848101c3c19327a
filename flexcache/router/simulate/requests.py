"""Requests of a simulation, and where they come from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request to be simulated.

    Attributes:
        request_id: Unique in the simulation.
        time_s: When it arrives.
        num_tokens: Length of the prompt.
        output_tokens: Length of the answer, at least 1.
        keys: Keys of the prompt's blocks; the last block may be partial.
        session: Conversation it belongs to; None if unknown.
    """

    request_id: str
    time_s: float
    num_tokens: int
    output_tokens: int
    keys: Sequence[Hashable]
    session: Hashable | None = None


class Workload(Protocol):
    """Requests that come at given times, or when others have ended."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a key."""
        ...

    @property
    def num_requests(self) -> int | None:
        """Return how many requests there are; None if it depends on the engines."""
        ...

    def first(self) -> Sequence[SimRequest]:
        """Return the requests that depend on no other; starts over."""
        ...

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        """Return the request that follows one that has ended; it comes at ``now`` or later."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests at given times."""

    requests: Sequence[SimRequest]
    block_tokens: int

    @property
    def num_requests(self) -> int | None:
        return len(self.requests)

    def first(self) -> Sequence[SimRequest]:
        return self.requests

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        return None
