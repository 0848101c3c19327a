"""Return times of prompts: how likely each kind of block is to be used again, by its age.

A *spell* begins with a use of blocks and ends with their next use, the return, or lasts still. The
*hazard* of blocks of some age is the rate of their returns at that age. It is the hazard of all
blocks times a factor for each feature of the prompt that they were used by:

    hazard(age) = base(age) x factor[feature 1][its level] x factor[feature 2][its level] x ...

The factors are different for four ranges of age. They are fitted in turn, each so that the spells
with one level have as many returns as expected. Levels that were seen rarely stay near one.

The worth of a block is the most hits per time kept that its hazard promises: the maximum, over the
time until which it is kept, of the probability of a return by then over the expected time until
that return or the end (a Gittins index). It has no notion of the tier's size.

Pure: numpy on arrays of spells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Levels = npt.NDArray[np.uint8]
"""Spells x features."""

_OCTAVES = range(-2, 14)
BINS_PER_OCTAVE = 2
_FIRST_EDGE = _OCTAVES.start * BINS_PER_OCTAVE
HIGH = 2.0 ** (np.arange(_FIRST_EDGE, _OCTAVES.stop * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE)
"""Upper ends of the bins of age, in seconds: from a quarter to four and a half hours."""
LOW: Floats = np.concatenate(([0.0], HIGH[:-1]))
WIDTH = HIGH - LOW
NUM_BINS = len(HIGH)
RANGE_STARTS = (0.0, 16.0, 90.0, 512.0)
RANGE_OF_BIN = np.searchsorted(RANGE_STARTS, (LOW + HIGH) / 2, side="right") - 1
NUM_RANGES = len(RANGE_STARTS)
_FIRST_OF_RANGE = np.searchsorted(RANGE_OF_BIN, range(NUM_RANGES))
_PRIOR = 12.0
"""Returns that every level is assumed to have had, as expected, besides those seen."""
_NUM_ROUNDS = 4
_MIN_PEAK = 5
"""Returns in a bin of age, from which on it may be the peak."""
_SELDOM = 1e-9
"""Hazard where no return was seen; never zero, so that no worth is."""


@dataclass(frozen=True, slots=True)
class Spells:
    """Spells of one part of prompts.

    Attributes:
        levels: Levels of the features.
        lasted: Seconds until the return, or until now.
        returned: Whether there was a return.
    """

    levels: Levels
    lasted: Floats
    returned: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hazards:
    """Rates of return per second.

    Attributes:
        base: By bin of age.
        log_factors: For each feature, levels x ranges of age.
    """

    base: Floats
    log_factors: list[Floats]

    def log_multipliers(self, levels: Levels) -> Floats:
        """Return, spells x ranges, by how much spells differ from the base."""
        total = np.zeros((len(levels), NUM_RANGES))
        for feature, factors in enumerate(self.log_factors):
            total += factors[levels[:, feature]]
        return total

    def of(self, log_multipliers: Floats) -> Floats:
        """Return hazards, spells x bins of age."""
        hazards: Floats = self.base * np.exp(log_multipliers)[:, RANGE_OF_BIN]
        return hazards


def fit_hazards(spells: Spells, num_levels: Sequence[int]) -> Hazards:
    """Fit hazards to spells.

    Args:
        num_levels: Number of levels of each feature.
    """
    lived = np.clip(spells.lasted[:, None] - LOW, 0.0, WIDTH)
    bins_of_return = np.searchsorted(HIGH, spells.lasted[spells.returned]).clip(max=NUM_BINS - 1)
    returns = np.bincount(bins_of_return, minlength=NUM_BINS)
    seen = []
    for feature, count in enumerate(num_levels):
        seen.append(np.zeros((count, NUM_RANGES)))
        levels = spells.levels[spells.returned, feature]
        np.add.at(seen[-1], (levels, RANGE_OF_BIN[bins_of_return]), 1.0)
    factors = [np.ones((count, NUM_RANGES)) for count in num_levels]
    multipliers = np.ones((len(lived), NUM_RANGES))
    base = _falling_from_peak(returns, lived.sum(0))
    expected = np.add.reduceat(lived * base, _FIRST_OF_RANGE, axis=1)
    for _ in range(_NUM_ROUNDS):
        for feature, count in enumerate(num_levels):
            levels = spells.levels[:, feature]
            multipliers /= factors[feature][levels]
            due = np.stack(
                [np.bincount(levels, column, count) for column in (expected * multipliers).T], 1
            )
            # With the prior, a level that was seen rarely stays near one.
            factors[feature] = (seen[feature] + _PRIOR) / (due + _PRIOR)
            multipliers *= factors[feature][levels]
    return Hazards(base, [np.log(factor) for factor in factors])


def gains(spells: Spells, num_levels: Sequence[int]) -> Floats:
    """Return how much better features foretell spells than age alone does, per spell.

    Hazards are fitted to every other spell, and foretell the rest: logarithms of probabilities.
    """
    known, rest = (
        Spells(spells.levels[at::2], spells.lasted[at::2], spells.returned[at::2])
        for at in range(2)
    )
    fitted = fit_hazards(known, num_levels)
    logs = fitted.log_multipliers(rest.levels)
    expected = np.add.reduceat(
        np.clip(rest.lasted[:, None] - LOW, 0.0, WIDTH) * fitted.base, _FIRST_OF_RANGE, axis=1
    )
    gained: Floats = -(expected * np.expm1(logs)).sum(1)
    bins = np.searchsorted(HIGH, rest.lasted[rest.returned]).clip(max=NUM_BINS - 1)
    gained[rest.returned] += logs[rest.returned, RANGE_OF_BIN[bins]]
    return gained


def _falling_from_peak(returns: npt.NDArray[np.int64], lived: Floats) -> Floats:
    """Return hazards by bin of age, made to fall from their peak on.

    Args:
        lived: Time that spells lived in the bin, all together.
    """
    hazards = returns / np.maximum(lived, _SELDOM)
    # A bin of few returns may be the highest by chance.
    peak = int(np.argmax(np.where(returns >= _MIN_PEAK, hazards, 0.0)))
    pools: list[tuple[float, float, int]] = []  # returns, time, number of bins
    for count, time in zip(returns[peak:].tolist(), lived[peak:].tolist(), strict=True):
        pool = (count, time + _SELDOM, 1)
        while pools and pools[-1][0] * pool[1] < pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    hazards[peak:] = np.repeat(
        [count / time for count, time, _ in pools], [num_bins for *_, num_bins in pools]
    )
    fallen: Floats = np.maximum(hazards, _SELDOM)
    return fallen


def worth_at(hazards: Floats, first_bin: int) -> Floats:
    """Return the worth of blocks as old as the start of a bin, given hazards, blocks x bins."""
    returned, kept = _returned_and_kept(hazards[:, first_bin:], WIDTH[first_bin:])
    best: Floats = (returned.cumsum(1) / kept.cumsum(1)).max(1)
    return best


def worth_by_age(hazards: Floats) -> Floats:
    """Return the worth at the start of each bin, blocks x bins."""
    return np.stack([worth_at(hazards, first_bin) for first_bin in range(NUM_BINS)], axis=1)


def _returned_and_kept(hazards: Floats, width: Floats) -> tuple[Floats, Floats]:
    """Return the share of blocks that return in each bin, and the time that they spend in it."""
    return_by = np.cumsum(hazards * width, axis=1)
    alive = np.exp(-np.concatenate((np.zeros((len(hazards), 1)), return_by), axis=1))
    returned = alive[:, :-1] - alive[:, 1:]
    # Where hazards are so low that the difference is lost to rounding, all of the time is spent.
    is_low = hazards * width < 1e-9
    returned = np.where(is_low, alive[:, :-1] * hazards * width, returned)
    return returned, returned / hazards


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

    Kinds of blocks, by what they are worth at two ages, and what each kind is worth at any age.

    There are 8 x 8 kinds: eight quantiles of the worth at 16 seconds, and eight of the worth at 512
    seconds within each. Prompts are assigned to kinds one by one and fast, by tables: the levels of
    their features add up to three logarithms, those of their hazard's factors in the ranges of age
    from 16 seconds on, and a grid over these says the kind.

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
    # In common kinds the high rates of return of system prompts, within a second, made everything
    # new look worth storing: a third of the gain at 1,000 blocks was lost, writes rose fivefold.
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
    # Kinds with fewer keep the last fit's worth: the mean of two prompts says nothing.
    known = np.flatnonzero(counts >= _MIN_EXAMPLES).tolist()
    means = np.array([hazards[kinds == kind].mean(0) for kind in known]).reshape(-1, NUM_BINS)
    for kind, of_kind in zip(known, worth_by_age(means).tolist(), strict=True):
        worths[kind] = of_kind
    return classifier, worths
