"""WriteBudget: limits what is written to a tier per second.

A budget grows at the rate that the operator sets, up to what `BURST_S` bring, and what is planned
to be written is taken off. Writes beyond it are not planned. Reads never wait for it, nor do writes
that have been planned.

Pure: no clock.
"""

from __future__ import annotations

import math

from flexcache.errors import InternalError

BURST_S = 10.0
"""A tier that was left alone may receive what it could have received in this time, at once."""
_SHORTEST_WAIT_S = 1e-3


class WriteBudget:
    """A token bucket, spent in blocks.

    Args:
        bytes_per_s: The rate.
        block_bytes: Bytes that a block takes in the tier.
    """

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._blocks_per_s = bytes_per_s / block_bytes
        self._most = max(1.0, self._blocks_per_s * BURST_S)
        self._blocks = self._most
        self._now = -math.inf

    def room(self, now: float) -> int:
        """Return how many blocks may be written now."""
        if now > self._now:
            self._blocks = min(self._most, self._blocks + (now - self._now) * self._blocks_per_s)
            self._now = now
        return max(0, int(self._blocks))

    def allows(self, count: int, now: float) -> bool:
        """Whether ``count`` blocks that belong together may be written now.

        If they are more than it ever holds, they may be once it is full: later writes pay for them.
        """
        return self.room(now) >= min(count, int(self._most))

    def next_room(self, count: int, now: float) -> float:
        """Return when it will allow this many blocks, if no others are written. Not now."""
        missing = min(count, int(self._most)) - self._blocks
        return now + max(_SHORTEST_WAIT_S, missing / self._blocks_per_s)

    def spend(self, count: int) -> None:
        """Take off the blocks of a plan."""
        self._blocks -= count

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self._blocks > self._most:
            raise InternalError(f"{self._blocks} blocks in a budget of {self._most}")
