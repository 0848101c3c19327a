"""Rows of the table of targets: a goal beside what was found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from report_figures import LESS_IS_BETTER, Figure, Figures, text_of

SAME_RUN, ALONE, QUOTED = "same run", "alone", "quoted"
"""Where the bound or the peer was measured: in the same run, nowhere (the target is absolute), or
elsewhere."""
NO_FIGURE = "no figure"


@dataclass(frozen=True)
class Goal:
    """What a figure is to reach.

    Attributes:
        what: The row's name.
        step: The benchmark that measures it.
        figure: Its name in the report; None for all that have a limit of their own.
        limit: In the figure's unit.
        reach: Of the bound.
        peer: Name of another figure of that report, to be shown beside it.
        quoted: Peers that were measured elsewhere.
    """

    what: str
    step: str
    figure: str | None
    limit: float | None = None
    reach: float | None = None
    peer: str = ""
    quoted: str = ""


@dataclass(frozen=True)
class Row:
    """A figure and its target.

    Attributes:
        beside: The bound or peer, with its figure.
        ratio: The figure over it; None without one.
        reached: None if it is not known.
        source: `SAME_RUN`, `ALONE` or `QUOTED`; "" without a figure.
    """

    what: str
    found: str
    beside: str
    ratio: float | None
    target: str
    reached: bool | None
    source: str


@dataclass(frozen=True)
class Findings:
    """What the runs of a benchmark left.

    Attributes:
        reports: Figures of each run.
        reason: Why there are none, or not all.
    """

    reports: Sequence[Figures]
    reason: str = ""


def rows_for(goals: Sequence[Goal], findings: Mapping[str, Findings]) -> Iterator[Row]:
    """Yield the rows of all goals, also of those whose benchmark left no figure."""
    for goal in goals:
        found = findings[goal.step]
        if goal.figure is not None:
            yield _row(goal, goal.figure, found)
            continue
        names = [name for name, each in _first(found).items() if each.limit is not None]
        for name in names:
            yield _row(goal, name, found)
        if not names:
            yield _row_without(goal, found.reason)


def _first(found: Findings) -> Figures:
    return found.reports[0] if found.reports else {}


def _row(goal: Goal, name: str, found: Findings) -> Row:
    runs = [report[name] for report in found.reports if name in report]
    if not runs:
        return _row_without(goal, found.reason or f"its report has no {name!r}")
    value, unit = statistics.median(run.value for run in runs), runs[0].unit
    ratios = [run.value / run.bound for run in runs if run.bound]
    ratio = statistics.median(ratios) if ratios else None
    limit = runs[0].limit if goal.limit is None else goal.limit
    peer = _first(found).get(goal.peer)
    beside = (
        _bound_of(runs),
        "" if peer is None else f"{goal.peer}: {text_of(peer.value, peer.unit)}",
        f"{goal.quoted} (quoted)" if goal.quoted else "",
    )
    return Row(
        goal.what if goal.figure else f"{goal.what}: {name}",
        text_of(value, unit) + (f" (median of {len(runs)} runs)" if len(runs) > 1 else ""),
        "; ".join(filter(None, beside)),
        ratio,
        _target(goal, limit, unit),
        _is_reached([(value, limit), (ratio, goal.reach)], unit),
        SAME_RUN if any(beside[:2]) else ALONE,
    )


def _bound_of(runs: Sequence[Figure]) -> str:
    if runs[0].bound is None:
        return runs[0].beside
    bound = statistics.median(run.bound for run in runs if run.bound is not None)
    return f"{runs[0].beside}: {text_of(bound, runs[0].unit)}"


def _target(goal: Goal, limit: float | None, unit: str) -> str:
    sign = "<=" if unit in LESS_IS_BETTER else ">="
    targets = []
    if limit is not None:
        targets.append(f"{sign} {text_of(limit, unit)}")
    if goal.reach is not None:
        targets.append(f"{sign} {goal.reach:.2f}x")
    return ", ".join(targets)


def _is_reached(
    pairs: Sequence[tuple[float | None, float | None]], unit: str
) -> bool | None:  # fmt: skip
    verdicts = []
    for value, goal in pairs:
        if goal is not None:
            if value is None:
                return None
            verdicts.append(value <= goal if unit in LESS_IS_BETTER else value >= goal)
    return all(verdicts) if verdicts else None


def _row_without(goal: Goal, reason: str) -> Row:
    return Row(goal.what, f"{NO_FIGURE}: {reason}", goal.quoted, None, "", None, "")


def markdown(rows: Sequence[Row], before: Mapping[str, Row] | None = None) -> Iterator[str]:
    """Yield the lines of a table to paste.

    Args:
        before: Rows of an earlier run by their names, for a column of their own.
    """
    headings = ["what", "found", "beside", "ratio", "to reach", "reached", "measured"]
    marks = ["---", "---:", "---", "---:", "---:", "---", "---"]
    if before is not None:
        headings.insert(1, "before")
        marks.insert(1, "---:")
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join(marks)} |"
    for row in rows:
        reached = {True: "yes", False: "**missed**", None: ""}[row.reached]
        cells = [row.what, row.found, row.beside, _times(row), row.target, reached, row.source]
        if before is not None:
            cells.insert(1, _figure_and_ratio(before.get(row.what)))
        yield f"| {' | '.join(cells)} |"


def _figure_and_ratio(row: Row | None) -> str:
    if row is None or row.found.startswith(NO_FIGURE):
        return ""
    return row.found if row.ratio is None else f"{row.found}, {_times(row)}"


def _times(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f}x"
