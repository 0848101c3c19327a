"""Requests of a simulation, and where they come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
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

    def first(self) -> Iterable[SimRequest]:
        """Return the requests that depend on no other, by time."""
        ...

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        """Return the request that follows when one has ended, at ``now`` or later."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests at the times of a trace.

    Attributes:
        load: How many times faster than recorded they come.
    """

    requests: Sequence[SimRequest]
    block_tokens: int

    def first(self) -> Iterable[SimRequest]:
        return self.requests

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        return None
