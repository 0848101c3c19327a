"""Return times of lineages by kind, and how long each kind is therefore worth keeping.

For each kind: the share of it that had returned by a given age, and the time that its blocks had to
be kept for that. Keeping blocks pays where the first rises steeply over the second:

    share that                     hits                            the steepest stretches of all
    has come     ___-----          gained    __.-----------        kinds are taken first, until
    back       _/                         _.'  '                   what they keep fills the tier;
            __/                         .'     '                   that point is the patience
           |____________ age           |_______'_______ blocks x time            of each kind

This assigns a patience to each kind so that the hits in the given space are the most possible (a
fractional knapsack over concave hulls), if kinds continue as before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS_PER_OCTAVE = 2
_NUM_BINS = 96
_FIRST_EXPONENT = -20 * BINS_PER_OCTAVE  # from a microsecond to nine years, if time is in seconds
_BEYOND = 4  # bins above the longest time seen that count too
_PRIOR_SPELLS = 16.0
"""Weight of the average: each kind counts as if this many more of its spells had been average."""
_UNSEEN = 1e-3
"""Share of any kind assumed to return within a bin even if none did."""


class ReturnTimes:
    """Counts spells of each kind. A *spell* begins with a use, and ends with a return or never."""

    def __init__(self) -> None:
        self._returns: list[list[float]] = []
        self._spells: list[float] = []
        self._blocks: list[float] = []
        self._since = math.nan
        self.num_spells = 0.0

    def add_kind(self) -> int:
        self._returns.append([0.0] * _NUM_BINS)
        self._spells.append(0.0)
        self._blocks.append(0.0)
        return len(self._spells) - 1

    def begin(self, kind: int, num_blocks: int, now: float) -> None:
        """Count the start of a spell of this many blocks."""
        if math.isnan(self._since):
            self._since = now
        self._spells[kind] += 1
        self._blocks[kind] += num_blocks
        self.num_spells += 1

    def grow(self, kind: int, num_blocks: int) -> None:
        """Count blocks that joined a spell after its start."""
        self._blocks[kind] += num_blocks

    def end(self, kind: int, gap_bin: int) -> None:
        """Count a return."""
        self._returns[kind][gap_bin] += 1

    def halve(self, now: float) -> None:
        """Halve the weight of everything counted so far, as if it had taken half as long."""
        self._returns = [[count / 2 for count in row] for row in self._returns]
        self._spells = [count / 2 for count in self._spells]
        self._blocks = [count / 2 for count in self._blocks]
        self.num_spells /= 2
        self._since += (now - self._since) / 2

    def best_patience(self, capacity: int, now: float) -> list[float]:
        """Return how long to keep each kind; all equal if nothing is known. O(kinds)."""
        returns = np.array(self._returns)
        seen = np.flatnonzero(returns.sum(0))
        elapsed = now - self._since
        if not len(seen) or not elapsed > 0:
            return [0.0] * len(self._spells)
        bins = slice(int(seen[0]), min(int(seen[-1]) + 1 + _BEYOND, _NUM_BINS))
        ages = 2.0 ** ((np.arange(bins.start, bins.stop) + 1 + _FIRST_EXPONENT) / BINS_PER_OCTAVE)
        returns, spells = returns[:, bins], np.array(self._spells)[:, None]
        average = returns.sum(0) / spells.sum()
        share = (returns + _PRIOR_SPELLS * average) / (spells + _PRIOR_SPELLS) + _UNSEEN
        back = np.minimum(share.cumsum(1), 1.0)
        waiting = np.maximum(1.0 - (back - share / 2), 0.0)
        kept_for = (waiting * np.diff(ages, prepend=0.0)).cumsum(1)
        stretches = [
            (hits / time, time * num_blocks, kind, age)
            for kind, num_blocks in enumerate(self._blocks)
            for hits, time, age in _hull(back[kind], kept_for[kind], ages)
        ]
        stretches.sort(key=lambda stretch: -stretch[0])
        patience, room = [0.0] * len(self._spells), capacity * elapsed
        for _, cost, kind, age in stretches:
            room -= cost
            if room < 0:
                break
            patience[kind] = age
        return patience


def bin_of(gap: float) -> int:
    """Return the bin of a time between two uses."""
    if gap <= 0.0:
        return 0
    exponent = math.floor(math.log2(gap) * BINS_PER_OCTAVE)
    return min(max(exponent - _FIRST_EXPONENT, 0), _NUM_BINS - 1)


def _hull(hits: Floats, time: Floats, ages: Floats) -> Iterator[tuple[float, float, float]]:
    """Yield stretches of the concave hull, ever flatter: hits and time added, age at the end."""
    corners = [(0.0, 0.0, 0.0)]
    for y, x, age in zip(hits.tolist(), time.tolist(), ages.tolist(), strict=True):
        while len(corners) > 1:
            (y0, x0, _), (y1, x1, _) = corners[-2:]
            if (y1 - y0) * (x - x1) > (y - y1) * (x1 - x0):
                break
            corners.pop()
        corners.append((y, x, age))
    for (y0, x0, _), (y1, x1, age) in itertools.pairwise(corners):
        if x1 > x0 and y1 > y0:
            yield y1 - y0, x1 - x0, age
