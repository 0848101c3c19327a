"""Draws how close the figures that have a target come to their bounds, on one page."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from flexcache.bench.report import figure, results_of
from flexcache.bench.results import Result
from flexcache.bench.suite import Report
from flexcache.errors import ConfigError, MissingDependencyError

_COLOURS = {True: "#2a9d5c", False: "#d1495b"}
_FORMATS = (".png", ".svg", ".pdf")
_NARROWEST = 0.25  # the axis shows at least this to its inverse


class Bar(NamedTuple):
    """A figure as a speed, whatever its unit: 1 is the bound's speed, and more is better."""

    label: str
    speed: float
    target: float
    is_reached: bool


def bars_of(report: Report) -> list[tuple[str, list[Bar]]]:
    """Return the figures that have a target, by section."""
    by_section = groupby(report.cases, key=lambda case: case.section)
    bars = {
        section: [bar for bar in map(_bar, results_of(list(cases))) if bar is not None]
        for section, cases in by_section
    }
    return [(section, some) for section, some in bars.items() if some]


def _bar(result: Result) -> Bar | None:
    bound, name = result.bound, result.bound_name
    if not bound:
        bound, name = result.limit, "the target"
    is_reached = result.is_reached
    if not bound or not result.median or is_reached is None:
        return None
    goals = [] if result.reach is None else [result.reach * bound]
    goals += [] if result.limit is None else [result.limit]
    strictest = (min if result.less_is_better else max)(goals)

    def speed(value: float) -> float:
        return bound / value if result.less_is_better else value / bound

    return Bar(
        f"{result.title}  |  {name}",
        speed(result.median),
        speed(strictest),
        is_reached,
    )


def check_plot_file(path: Path) -> None:
    """Check that a plot can be drawn to this file.

    Raises:
        ConfigError: The name does not end in a format that can be drawn.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: a plot's name must end in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("a plot needs matplotlib: pip install '.[bench]'")


def draw(report: Report, path: Path) -> None:
    """Write the picture, in the format that the file name's suffix selects."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullLocator

    sections = bars_of(report)
    rows = [len(bars) for _, bars in sections] or [1]
    height = 0.24 * sum(rows) + 0.75 * len(rows) + 1.2
    picture = Figure(figsize=(10, height), layout="constrained")
    all_axes = picture.subplots(len(rows), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    speeds = [v for _, bars in sections for bar in bars for v in (bar.speed, bar.target)]
    low, high = min([*speeds, _NARROWEST]) / 1.3, max([*speeds, 1 / _NARROWEST]) * 1.6
    for axes in all_axes:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    for axes, (section, bars) in zip(all_axes, sections):  # noqa: B905 - one empty axis without bars
        places = range(len(bars))
        axes.barh(
            places, [bar.speed - low for bar in bars], left=low, height=0.72,
            color=[_COLOURS[bar.is_reached] for bar in bars],
        )  # fmt: skip
        for place, bar in zip(places, bars, strict=True):
            end = max(bar.speed, bar.target)
            axes.text(end * 1.04, place, figure(bar.speed), va="center", fontsize=7)
            axes.plot([bar.target] * 2, [place - 0.45, place + 0.45], color="black", lw=2)
        axes.axvline(1, color="black", lw=0.8, ls=":")
        axes.set_yticks(places, [bar.label for bar in bars], fontsize=8)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_title(section, loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="x", which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    all_axes[-1].xaxis.set_major_formatter("{x:g}")
    all_axes[-1].xaxis.set_minor_locator(NullLocator())
    all_axes[-1].set_xlabel("speed, as a multiple of the bound's (1 = the bound; more is better)")
    picture.legend(
        handles=[
            Patch(color=_COLOURS[True], label="target reached"),
            Patch(color=_COLOURS[False], label="target missed"),
            Line2D([], [], color="black", lw=2, label="target"),
            Line2D([], [], color="black", lw=0.8, ls=":", label="bound"),
        ],
        loc="outside upper center", ncols=5, fontsize=8, frameon=False,
    )  # fmt: skip
    picture.savefig(path, dpi=130)
