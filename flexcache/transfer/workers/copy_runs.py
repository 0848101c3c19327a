"""Joins neighbours in a list of copies into fewer, larger ones, for all ways of copying.

An engine that keeps all layers of a block together has one copy per block, and blocks of one
prompt are often neighbours both in its pool and in ours. With a tensor per layer nothing can be
joined, since our blocks keep layers together; detecting that takes three comparisons per copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]

_NO_BREAKS = np.empty(0, np.int64)


def merge_runs(
    destinations: Addresses, sources: Addresses, sizes: Addresses, breaks: Addresses = _NO_BREAKS
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge copies into as few runs as their order allows: ``(destinations, sources, sizes)``.

    A copy joins the one before it in the list if it continues exactly where that one ends, on both
    sides. O(n), without a loop in Python.

    Args:
        breaks: Addresses, on either side, that no joined run may cross.
    """
    joined = sources[1:] == sources[:-1] + sizes[:-1]
    if joined.any():  # often not: an engine's layers are apart
        joined &= destinations[1:] == destinations[:-1] + sizes[:-1]
    if len(breaks) and joined.any():
        joined &= ~(np.isin(destinations[1:], breaks) | np.isin(sources[1:], breaks))
    if not joined.any():
        return destinations, sources, sizes
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return destinations[heads], sources[heads], np.add.reduceat(sizes, heads)
