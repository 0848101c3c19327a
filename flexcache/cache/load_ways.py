"""Chooses the way of loads from SSD: through DRAM, or past it straight into the GPU's memory.

Both ways are timed, from the launch of a get to the end of its GPU side. A load past DRAM leaves
nothing there for the next one, so it must be clearly faster. One that fails makes the next ones go
through DRAM, until it is tried again.

Pure: the caller passes the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from flexcache.errors import InternalError

_KEEP = 0.9  # weight of the past, per load
_MIN_LOADS = 4
_GAIN = 1.25
_RETRY_EVERY = 32  # loads: the other way may have become faster

WayRule = Literal["auto", "always", "never"]


class Way(Enum):
    """A way from SSD to the GPU."""

    STAGED = "through DRAM"
    DIRECT = "past DRAM"


@dataclass(slots=True)
class _Timed:
    loads: int = 0
    blocks: float = 0.0
    seconds: float = 0.0


class LoadWays:
    """How fast loads from SSD were lately, by their way.

    Args:
        rule: ``auto`` chooses by the times.
    """

    def __init__(self, rule: WayRule = "auto") -> None:
        self._rule = rule
        self._timed = {way: _Timed() for way in Way}
        self._num_chosen = 0
        self._is_failing = False
        """Whether the last load past DRAM failed."""

    def choose(self) -> list[Way]:
        """Return the way of the next load, if its engine's ranks can take either, then the other
        one if it may be taken instead.

        Until both were timed it is the one that was timed less.
        """
        if self._rule != "auto":
            return [Way.DIRECT if self._rule == "always" else Way.STAGED]
        self._num_chosen += 1
        is_retry = self._num_chosen % _RETRY_EVERY == 0
        if self._is_failing:
            return [Way.DIRECT, Way.STAGED] if is_retry else [Way.STAGED]
        is_direct = self._is_direct_next(is_retry)
        return [Way.DIRECT, Way.STAGED] if is_direct else [Way.STAGED, Way.DIRECT]

    def _is_direct_next(self, is_retry: bool) -> bool:
        for way, timed in self._timed.items():
            if timed.loads < _MIN_LOADS:
                return way is Way.DIRECT
        speed = self.blocks_per_s(Way.DIRECT)
        return (speed > _GAIN * self.blocks_per_s(Way.STAGED)) is not is_retry

    def ended(self, way: Way, num_blocks: int, seconds: float) -> None:
        """Record a load of so many blocks from SSD, all of which arrived."""
        timed = self._timed[way]
        self._is_failing &= way is not Way.DIRECT
        timed.loads += 1
        timed.blocks = _KEEP * timed.blocks + num_blocks
        timed.seconds = _KEEP * timed.seconds + seconds

    def failed(self) -> None:
        """Record that a load past DRAM failed, or that it hangs."""
        self._is_failing, self._num_chosen = True, 0

    def blocks_per_s(self, way: Way) -> float:
        """Return the speed of a way; 0 if it was never timed."""
        timed = self._timed[way]
        return timed.blocks / timed.seconds if timed.seconds > 0 else 0.0

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        for way, timed in self._timed.items():
            if timed.blocks < 0 or timed.seconds < 0 or bool(timed.loads) != bool(timed.blocks):
                raise InternalError(f"{way.value}: {timed}")
