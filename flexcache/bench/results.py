"""Results of a benchmark: a figure beside a bound that was measured in the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LESS_IS_BETTER = frozenset({"us", "ms", "s", "bytes"})


@dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
        name: What was measured, without the section.
        unit: "us", "ms" and "bytes" are better low; "GB/s", "1/s" and "" (a ratio) high.
        samples: All measured values, in the unit; the figure is their median.
        bound: Result of the machine or a peer for the same work in the same run, in the unit.
        bound_name: Name of the bound.
        reach: Target ratio to the bound: a minimum for rates, a maximum for times.
        limit: Absolute target, in the unit.
        note: Remark for the reader, such as what was left out and why.
        parameter: What was varied, in words ("tokens"). Results with the same name and different
            ``at`` show how the figure grows with it.
        at: Value of the parameter.
    """

    name: str
    unit: str
    samples: Sequence[float]
    bound: float | None = None
    bound_name: str = ""
    reach: float | None = None
    limit: float | None = None
    note: str = ""
    parameter: str = ""
    at: float | None = None

    @property
    def title(self) -> str:
        """The name, with the parameter's value."""
        if self.at is None:
            return self.name
        unit = self.parameter.removesuffix("s") if self.at == 1 else self.parameter
        return f"{self.name}, {self.at:,.10g} {unit}"

    def tail(self, percent: float) -> float:
        """Return the sample that ``percent`` of all samples are no worse than."""
        ordered = sorted(self.samples, reverse=not self.less_is_better)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def less_is_better(self) -> bool:
        return self.unit in _LESS_IS_BETTER

    @property
    def ratio(self) -> float | None:
        """The median divided by the bound."""
        return self.median / self.bound if self.bound else None

    @property
    def is_reached(self) -> bool | None:
        """Whether all targets are reached; None without a target."""
        checks = [(self.ratio, self.reach), (self.median, self.limit)]
        verdicts = [
            value <= goal if self.less_is_better else value >= goal
            for value, goal in checks
            if value is not None and goal is not None
        ]
        return all(verdicts) if verdicts else None


@dataclass(frozen=True)
class Case:
    """Figures that are measured together, on one setup.

    ``run`` checks that the measured code does the right thing, and raises if it does not.
    """

    title: str
    run: Callable[[], Iterable[Result]]


class Unsupported(Exception):
    """A case cannot run on this machine, for this reason. Reported, never skipped silently."""


def sample(
    call: Callable[[], T], undo: Callable[[T], object] = lambda _: None, rounds: int = 100,
    warm_up: int = 5, scale: float = 1e6,
) -> list[float]:  # fmt: skip
    """Return seconds times ``scale`` of each ``call``; ``undo`` gets its result, untimed."""
    return [_timed(call, undo) * scale for _ in range(warm_up + rounds)][warm_up:]


def sample_beside(
    call: Callable[[], T], bound: Callable[[], object],
    undo: Callable[[T], object] = lambda _: None,
    rounds: int = 100, warm_up: int = 5, scale: float = 1e6,
) -> tuple[list[float], float]:  # fmt: skip
    """Return the samples of a call, and the median of its bound.

    The two alternate, so that other load on the machine affects both alike.
    """
    times, bounds = [], []
    for _ in range(warm_up + rounds):
        times.append(_timed(call, undo) * scale)
        bounds.append(_timed(bound, lambda _: None) * scale)
    return times[warm_up:], statistics.median(bounds[warm_up:])


def _timed(call: Callable[[], T], undo: Callable[[T], object]) -> float:
    started = time.perf_counter()
    made = call()
    took = time.perf_counter() - started
    undo(made)
    return took
