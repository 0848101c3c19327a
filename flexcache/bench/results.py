"""What a benchmark finds: a figure beside the bound that was measured in the same run."""

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
        samples: Every value that was measured, in the unit; the figure is their median.
        bound: What the machine or a peer does with the same work in the same run, in the unit.
        bound_name: Who or what that is.
        reach: The ratio to the bound that is to be reached: at least so much of a rate, at most so
            much of a time.
        limit: An absolute number to stay within (or above), in the unit.
        note: Whatever a reader must know, such as what was left out and why.
        parameter: What was varied, in words ("tokens"); results of the same name that differ in
            ``at`` show how the figure grows with it.
        at: The parameter's value.
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
        """The name, and at which value of the parameter."""
        if self.at is None:
            return self.name
        unit = self.parameter.removesuffix("s") if self.at == 1 else self.parameter
        return f"{self.name}, {self.at:,.10g} {unit}"

    def tail(self, percent: float) -> float:
        """The sample that ``percent`` of them are no worse than."""
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
        """Of the median to the bound."""
        return self.median / self.bound if self.bound else None

    @property
    def is_reached(self) -> bool | None:
        """Whether all that is to be reached is; None where nothing is."""
        checks = [(self.ratio, self.reach), (self.median, self.limit)]
        verdicts = [
            value <= goal if self.less_is_better else value >= goal
            for value, goal in checks
            if value is not None and goal is not None
        ]
        return all(verdicts) if verdicts else None


@dataclass(frozen=True)
class Case:
    """Some figures that are measured together, on one set-up.

    ``run`` checks that the right thing is done before it times it, and raises if not.
    """

    title: str
    run: Callable[[], Iterable[Result]]


class Unsupported(Exception):
    """A case cannot run on this machine; says why. Reported, never skipped silently."""


def sample(
    call: Callable[[], T], undo: Callable[[T], object] = lambda _: None, rounds: int = 100,
    warm_up: int = 5, scale: float = 1e6,
) -> list[float]:  # fmt: skip
    """Seconds times ``scale`` that each ``call`` took; ``undo`` gets what it made, untimed."""
    return [_timed(call, undo) * scale for _ in range(warm_up + rounds)][warm_up:]


def sample_beside(
    call: Callable[[], T], bound: Callable[[], object],
    undo: Callable[[T], object] = lambda _: None,
    rounds: int = 100, warm_up: int = 5, scale: float = 1e6,
) -> tuple[list[float], float]:  # fmt: skip
    """`sample` of a call, and the median of its bound.

    The two take turns, so that whatever else the machine does meanwhile hits both alike.
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
