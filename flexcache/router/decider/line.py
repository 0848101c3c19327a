"""Requests that wait because every worker is busy, in the order in which they arrived."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from flexcache.errors import InternalError
from flexcache.router.chooser import NotRouted

T = TypeVar("T")

_SHORTEST_RETRY_S = 1.0


@dataclass(eq=False, slots=True)
class _Turn:
    kind: Hashable
    since: float
    event: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """A bounded queue. Whenever `wake` is called, the first of each kind tries, in the order of
    arrival; those behind it wait for it. Requests of other kinds do not, since other workers than
    the busy ones may serve them.

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
        self._turns: dict[Hashable, OrderedDict[_Turn, None]] = {}
        """By kind."""

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    async def place(self, attempt: Callable[[], T | None], kind: Hashable = None) -> T:
        """Wait for the turn and for an attempt that succeeds.

        Args:
            attempt: Returns None while every worker is busy.
            kind: Of two requests of one kind, the attempts of both succeed, or of neither.

        Returns:
            What the attempt returned.

        Raises:
            NotRouted: With 429: too many wait, or the wait was too long. What the attempt raises.
        """
        if kind not in self._turns and (result := attempt()) is not None:
            return result
        loop = asyncio.get_running_loop()
        if len(self) >= self.size:
            self.refused["full"] += 1
            raise NotRouted(429, "too many requests wait for a worker", self._retry_after_s(kind))
        turn = _Turn(kind, loop.time())
        turns = self._turns.setdefault(kind, OrderedDict())
        turns[turn] = None
        deadline = loop.call_later(self._timeout_s, turn.event.set)
        try:
            while True:
                await turn.event.wait()
                turn.event.clear()
                if next(iter(turns)) is turn and (result := attempt()) is not None:
                    return result
                if loop.time() >= deadline.when():
                    self.refused["expired"] += 1
                    message = f"every worker was busy for {self._timeout_s:g} s"
                    raise NotRouted(429, message, self._retry_after_s(kind))
        finally:
            deadline.cancel()
            del turns[turn]
            if not turns:
                del self._turns[kind]
            self.wake()

    def wake(self) -> None:
        """Let the first of each kind try: a worker may have room."""
        heads = [next(iter(turns)) for turns in self._turns.values()]
        for turn in sorted(heads, key=lambda turn: turn.since):
            turn.event.set()

    def _retry_after_s(self, kind: Hashable) -> float:
        """Return how long the first of its kind has waited: what a new request would wait."""
        head = next(iter(self._turns.get(kind, ())), None)
        waited_s = 0.0 if head is None else asyncio.get_running_loop().time() - head.since
        return max(_SHORTEST_RETRY_S, waited_s)

    def check(self) -> None:
        """
        Raises:
            InternalError: More wait than may, or not in the order of arrival.
        """
        for kind, turns in self._turns.items():
            since = [turn.since for turn in turns]
            if not since or since != sorted(since):
                raise InternalError(f"line of {kind}: {since}")
        if len(self) > self.size:
            raise InternalError(f"line of {len(self)} of {self.size}")
