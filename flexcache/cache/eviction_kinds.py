"""Kinds of blocks, by what they are worth at two ages, and what each kind is worth at any age.

There are 8 x 8 kinds: eight quantiles of the worth at 16 seconds, and eight of the worth at 512
seconds within each. Prompts are assigned to kinds one by one and fast, by tables: the levels of
their features add up to three logarithms, those of their hazard's factors in the ranges of age from
16 seconds on, and a grid over these says the kind.

Pure. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.eviction_returns import (
    HIGH,
    LOW,
    NUM_BINS,
    RANGE_STARTS,
    Floats,
    Hazards,
    Levels,
    worth_at,
    worth_by_age,
)  # fmt: skip

_QUANTILES = 8
NUM_KINDS = 2 * _QUANTILES * _QUANTILES
_EARLY_BIN, _LATE_BIN = (
    int(np.searchsorted(LOW, age)) for age in (RANGE_STARTS[1], RANGE_STARTS[3])
)
_GRID = (16, 16, 24)
"""Steps of the grid in the three ranges of age."""
_MIN_EXAMPLES = 3
"""Prompts of a kind, from which on its worth is its own and not that of the fit before."""
AGE_EDGES: list[float] = HIGH[:-1].tolist()
"""Where the bins of age end, in seconds; the last has no end."""


class _Axis(NamedTuple):
    """A range of logarithms in equal steps."""

    low: float
    per_step: float
    last: int

    def step(self, value: float) -> int:
        return min(max(int((value - self.low) / self.per_step), 0), self.last)


class Classifier:
    """Assigns kinds to one part of prompts, by levels of their features."""

    def __init__(
        self,
        hazards: Hazards,
        examples: Levels,
        early: Floats,
        late: Sequence[Floats],
        first_kind: int,
    ) -> None:
        """
        Args:
            examples: Levels of recent prompts: the grid spans them.
            early: Bounds of the quantiles of the worth at 16 seconds.
            late: For each of these, bounds of the quantiles at 512 seconds.
        """
        self._tables = [
            [tuple(row) for row in factors[:, 1:].tolist()] for factors in hazards.log_factors
        ]
        logs = hazards.log_multipliers(examples)[:, 1:]
        centers = []
        self._axes = []
        for values, steps in zip(logs.T, _GRID, strict=True):
            low, high = float(values.min()), float(values.max()) + 1e-6
            self._axes.append(_Axis(low, (high - low) / steps, steps - 1))
            centers.append(low + (np.arange(steps) + 0.5) * (high - low) / steps)
        mesh = np.stack([axis.ravel() for axis in np.meshgrid(*centers, indexing="ij")], axis=1)
        mesh = np.concatenate((np.zeros((len(mesh), 1)), mesh), axis=1)
        kinds = kinds_of(hazards.of(mesh), early, late)
        self._grid = bytes((first_kind + kinds).astype(np.uint8))

    def kind(self, levels: Sequence[int]) -> int:
        """Return the kind of a prompt. O(features)."""
        first = second = third = 0.0
        for table, level in zip(self._tables, levels, strict=True):
            a, b, c = table[level]
            first += a
            second += b
            third += c
        x, y, z = self._axes
        _, columns, depth = _GRID
        return self._grid[(x.step(first) * columns + y.step(second)) * depth + z.step(third)]

    def kinds(self, log_multipliers: Floats) -> npt.NDArray[np.uint8]:
        """Return the kinds of prompts, given by how much their hazards differ from the base."""
        cells = np.zeros(len(log_multipliers), dtype=np.int64)
        for axis, values in zip(self._axes, log_multipliers[:, 1:].T, strict=True):
            steps = ((values - axis.low) / axis.per_step).astype(np.int64).clip(0, axis.last)
            cells = cells * (axis.last + 1) + steps
        return np.frombuffer(self._grid, dtype=np.uint8)[cells]


def kinds_of(hazards: Floats, early: Floats, late: Sequence[Floats]) -> npt.NDArray[np.int64]:
    """Return the kinds of prompts with these hazards, prompts x bins of age."""
    outer = np.searchsorted(early, worth_at(hazards, _EARLY_BIN))
    at_late = worth_at(hazards, _LATE_BIN)
    inner = np.zeros(len(hazards), dtype=np.int64)
    for quantile, bounds in enumerate(late):
        of_quantile = outer == quantile
        inner[of_quantile] = np.searchsorted(bounds, at_late[of_quantile])
    kinds: npt.NDArray[np.int64] = outer * _QUANTILES + inner
    return kinds


class Kinds(NamedTuple):
    """What a fit has found.

    Attributes:
        front: Assigns kinds to what of a prompt was seen before, and ``rear`` to what is new.
        worths: Worth of each kind by bin of age.
    """

    front: Classifier
    rear: Classifier
    worths: list[list[float]]


def make_kinds(
    front: tuple[Hazards, Levels], rear: tuple[Hazards, Levels], before: Kinds | None
) -> Kinds:
    """Divide recent prompts into kinds.

    Args:
        front: The fit for fronts of prompts, and levels of recent ones; ``rear`` likewise.
        before: The kinds so far.
    """
    half = NUM_KINDS // 2
    parts = [
        _divide(*part, first, None if before is None else before.worths[first : first + half])
        for first, part in ((0, front), (half, rear))
    ]
    return Kinds(parts[0][0], parts[1][0], parts[0][1] + parts[1][1])


def _divide(
    fitted: Hazards, levels: Levels, first_kind: int, before: list[list[float]] | None
) -> tuple[Classifier, list[list[float]]]:
    """Divide prompts by one of their parts.

    Returns:
        What assigns kinds from ``first_kind`` on, and the worths of these kinds.
    """
    logs = fitted.log_multipliers(levels)
    hazards = fitted.of(logs)
    shares = np.arange(1, _QUANTILES) / _QUANTILES
    at_early, at_late = worth_at(hazards, _EARLY_BIN), worth_at(hazards, _LATE_BIN)
    early: Floats = np.quantile(at_early, shares).astype(np.float64)
    outer = np.searchsorted(early, at_early)
    late: list[Floats] = []
    for quantile in range(_QUANTILES):
        of_quantile = at_late[outer == quantile]
        late.append(
            np.quantile(of_quantile if len(of_quantile) else at_late, shares).astype(np.float64)
        )
    classifier = Classifier(fitted, levels, early, late, first_kind)
    kinds = classifier.kinds(logs) - first_kind
    counts = np.bincount(kinds, minlength=_QUANTILES * _QUANTILES)
    worths = before
    if worths is None:
        worths = worth_by_age(np.tile(hazards.mean(0), (len(counts), 1))).tolist()
    known = np.flatnonzero(counts >= _MIN_EXAMPLES).tolist()
    means = np.array([hazards[kinds == kind].mean(0) for kind in known]).reshape(-1, NUM_BINS)
    for kind, of_kind in zip(known, worth_by_age(means).tolist(), strict=True):
        worths[kind] = of_kind
    return classifier, worths
