"""A histogram with fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from flexcache.tasks.stats import HistogramStats

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
           2.5, 5.0, 10.0, 30.0)  # fmt: skip
BYTES = tuple(float(4**k) for k in range(6, 17))  # 4 KiB to 4 GiB


class Histogram:
    """Counts observations by the first bound that they do not exceed, as Prometheus does."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def stats(self) -> HistogramStats:
        bounds, counts = list(self._bounds), list(self._counts)
        return HistogramStats(bounds=bounds, counts=counts, sum=self._sum)
