"""The share of blocks asked for that was found, over the last minute, ten minutes and hour."""

from __future__ import annotations

from collections import deque

from flexcache.tasks.stats import HitRateStats

WINDOWS = {"1m": 60.0, "10m": 600.0, "1h": 3600.0}
_SLICE_S = 10.0


class HitRates:
    """Counts per slice of ten seconds, so windows are right to within one. Time is handed in."""

    def __init__(self) -> None:
        self._slices: deque[list[float]] = deque()  # [end, blocks asked for, found]

    def add(self, now: float, num_asked: int, num_found: int) -> None:
        slices = self._slices
        if not slices or slices[-1][0] <= now:
            slices.append([(now // _SLICE_S + 1) * _SLICE_S, 0, 0])
            while slices[0][0] <= now - WINDOWS["1h"]:
                slices.popleft()
        slices[-1][1] += num_asked
        slices[-1][2] += num_found

    def stats(self, now: float) -> dict[str, HitRateStats]:
        """By window."""
        windows = {}
        for name, length in WINDOWS.items():
            recent = [s for s in self._slices if s[0] > now - length]
            asked, found = int(sum(s[1] for s in recent)), int(sum(s[2] for s in recent))
            rate = found / asked if asked else 0.0
            windows[name] = HitRateStats(asked_blocks=asked, hit_blocks=found, rate=rate)
        return windows
