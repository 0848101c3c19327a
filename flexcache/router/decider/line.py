"""Requests that wait because every worker is busy, in the order in which they arrived."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from flexcache.errors import InternalError
from flexcache.router.chooser import NotRouted

T = TypeVar("T")

_SHORTEST_RETRY_S = 1.0


@dataclass(eq=False, slots=True)
class _Turn:
    since: float
    event: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """A bounded queue. The first in line tries whenever `wake` is called; the others wait for it.

    A request that leaves, because its client did or its time is over, holds nothing: whatever an
    attempt reserves is returned at once.

    Args:
        size: Requests that may wait.
        timeout_s: How long each may wait.

    Attributes:
        refused: Number of requests refused, by reason: ``full`` or ``expired``.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.refused = {"full": 0, "expired": 0}
        self._timeout_s = timeout_s
        self._turns: OrderedDict[_Turn, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    async def place(self, attempt: Callable[[], T | None]) -> T:
        """Wait for the turn and for an attempt that succeeds.

        Args:
            attempt: Returns None while every worker is busy.

        Returns:
            What the attempt returned.

        Raises:
            NotRouted: With 429: too many wait, or the wait was too long. What the attempt raises.
        """
        if not self._turns and (result := attempt()) is not None:
            return result
        loop = asyncio.get_running_loop()
        if len(self._turns) >= self.size:
            self.refused["full"] += 1
            raise NotRouted(429, "too many requests wait for a worker", self._retry_after_s())
        turn = _Turn(loop.time())
        self._turns[turn] = None
        deadline = loop.call_later(self._timeout_s, turn.event.set)
        try:
            while True:
                await turn.event.wait()
                turn.event.clear()
                if self._head() is turn and (result := attempt()) is not None:
                    return result
                if loop.time() >= deadline.when():
                    self.refused["expired"] += 1
                    message = f"every worker was busy for {self._timeout_s:g} s"
                    raise NotRouted(429, message, self._retry_after_s())
        finally:
            deadline.cancel()
            del self._turns[turn]
            self.wake()

    def wake(self) -> None:
        """Let the first in line try: a worker may have room."""
        head = self._head()
        if head is not None:
            head.event.set()

    def _head(self) -> _Turn | None:
        return next(iter(self._turns), None)

    def _retry_after_s(self) -> float:
        """Return how long the first in line has waited: what a new request would wait."""
        head = self._head()
        waited_s = 0.0 if head is None else asyncio.get_running_loop().time() - head.since
        return max(_SHORTEST_RETRY_S, waited_s)

    def check(self) -> None:
        """
        Raises:
            InternalError: More wait than may, or not in the order of arrival.
        """
        since = [turn.since for turn in self._turns]
        if len(since) > self.size or since != sorted(since):
            raise InternalError(f"line of {len(since)} of {self.size}: {since}")
