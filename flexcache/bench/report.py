"""Reports of a run: tables, JSON and a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.bench.suite import CaseOutcome, CaseReport, Report, Result
from flexcache.errors import ConfigError, MissingDependencyError

_PERCENTS = {"p90": 90, "p99": 99, "worst": 100}


def show_report(report: Report, console: Console) -> None:
    """Print a table per section, how figures grow, and a summary."""
    console.print(escape(_machine_line(report.machine)), highlight=False, soft_wrap=True)
    for section, cases in groupby(report.cases, key=lambda case: case.section):
        _show_section(section, list(cases), console)
    console.print(_summary(report), soft_wrap=True, highlight=False)


def write_json(report: Report, path: Path) -> None:
    """Write everything, with every sample."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_as_plain(report)), indent=1))


def _show_section(section: str, cases: Sequence[CaseReport], console: Console) -> None:
    results = results_of(cases)
    if results:
        table = Table(title=section, title_justify="left", title_style="bold")
        columns = ("figure", "p50", *_PERCENTS, "unit", "bound", "of", "ratio", "target", "reached")
        for heading in columns:
            is_text = heading in ("figure", "unit", "of", "target", "reached")
            table.add_column(heading, justify="left" if is_text else "right",
                             overflow="fold", no_wrap=heading in ("p50", *_PERCENTS))  # fmt: skip
        for result in results:
            table.add_row(*_cells(result))
        console.print(table)
        _show_growth(results, console)
    words = {
        CaseOutcome.FAILED: "[red]FAILED[/]",
        CaseOutcome.UNSUPPORTED: "[yellow]unsupported[/]",
    }
    for case in cases:
        if case.outcome in words:
            name = escape(f"{section}, {case.title}: {case.reason}")
            console.print(f"{words[case.outcome]} {name}", soft_wrap=True)
    notes: dict[str, dict[str, None]] = {}
    for result in results:
        notes.setdefault(result.note, {})[result.name] = None
    notes.pop("", None)
    for note, names in notes.items():
        who = next(iter(names)) + (", ..." if len(names) > 1 else "")
        console.print(f"  {escape(who)}: {escape(note)}", style="dim", soft_wrap=True)


def _cells(result: Result) -> tuple[str, ...]:
    percentiles = [result.median, *(result.tail(percent) for percent in _PERCENTS.values())]
    reached = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[result.is_reached]
    return (
        escape(result.title),
        *map(figure, percentiles),
        result.unit,
        "" if result.bound is None else figure(result.bound),
        escape(result.bound_name),
        "" if result.ratio is None else f"{figure(result.ratio)}x",
        target(result),
        reached,
    )


def target(result: Result) -> str:
    """Describe the targets in words."""
    sign = "<=" if result.less_is_better else ">="
    goals = []
    if result.reach is not None:
        goals.append(f"{sign} {figure(result.reach)}x")
    if result.limit is not None:
        goals.append(f"{sign} {figure(result.limit)} {result.unit}".rstrip())
    return ", ".join(goals)


def _show_growth(results: Sequence[Result], console: Console) -> None:
    for parameter, series in _series_by_parameter(results).items():
        values = sorted({point.at for points in series.values() for point in points if point.at})
        table = Table(
            "figure", *(figure(value) for value in values), "10x of it costs",
            title=f"medians, as {escape(parameter)} grow", title_justify="left", title_style="dim",
        )  # fmt: skip
        for name, points in series.items():
            by_value = {point.at: figure(point.median) for point in points}
            unit = points[0].unit
            cells = (by_value.get(value, "") for value in values)
            table.add_row(escape(f"{name} ({unit})" if unit else name), *cells,
                          f"{growth(points):.2f}x")  # fmt: skip
        console.print(table)


def _series_by_parameter(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    found: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        if result.at:  # growth from 0 is undefined
            found.setdefault(result.parameter, {}).setdefault(result.name, []).append(result)
    several = {
        parameter: {
            name: points for name, points in series.items() if len({p.at for p in points}) > 1
        }
        for parameter, series in found.items()
    }
    return {parameter: series for parameter, series in several.items() if series}


def growth(points: Sequence[Result]) -> float:
    """Return the factor of the median per tenfold parameter.

    Computed from the smallest and the largest value, assuming that the median is a power of it.
    """
    ordered = sorted(points, key=lambda point: point.at or 0.0)
    first, last = ordered[0], ordered[-1]
    assert first.at and last.at
    if not first.median:
        return math.nan
    return float((last.median / first.median) ** (1 / math.log10(last.at / first.at)))


def results_of(cases: Sequence[CaseReport]) -> list[Result]:
    """Order a section's results by name, and add the case to titles that are not unique."""
    titles = Counter(result.title for case in cases for result in case.results)
    named = [
        replace(result, name=f"{case.title}: {result.name}") if titles[result.title] > 1 else result
        for case in cases
        for result in case.results
    ]
    places = {key: i for i, key in enumerate(dict.fromkeys((r.name, r.parameter) for r in named))}
    return sorted(named, key=lambda result: places[result.name, result.parameter])


def figure(value: float) -> str:
    """Format with three significant digits and thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _machine_line(machine: dict[str, Any]) -> str:
    directory, huge = machine["directory"], machine["huge_pages"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['numa_nodes']} NUMA nodes, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, huge pages {huge['transparent'] or 'unknown'} "
        f"(shared: {huge['transparent_shared'] or 'unknown'}), {gpus}\n"
        f"Linux {machine['kernel']}, Python {machine['python']}; {directory['path']} on "
        f"{directory.get('file_system', '?')}, {directory.get('device', '?')} "
        f"{directory['device_model']}; load {machine['load_before']:.1f} at startup"
    )


def _summary(report: Report) -> str:
    judged = [result.is_reached for result in report.results if result.is_reached is not None]
    counts = Counter(case.outcome for case in report.cases)
    text = (
        f"{len(report.results)} figures in {report.took_s:.0f} s; targets reached: "
        f"{sum(judged)} of {len(judged)}; cases failed: {counts[CaseOutcome.FAILED]}, "
        f"unsupported: {counts[CaseOutcome.UNSUPPORTED]}"
    )
    return f"[red]interrupted[/] {text}" if report.was_interrupted else text


def _as_plain(report: Report) -> dict[str, Any]:
    plain = asdict(report)
    plain["settings"]["sections"] = list(report.settings.sections)
    plain["settings"]["directory"] = report.machine["directory"]["path"]
    for case, of_case in zip(report.cases, plain["cases"], strict=True):
        of_case["outcome"] = case.outcome.value
        of_case["results"] = [_plain_result(result) for result in case.results]
    return plain


def _plain_result(result: Result) -> dict[str, Any]:
    return asdict(result) | {
        "samples": [float(f"{value:.6g}") for value in result.samples],
        "p50": float(result.median),
        **{name: float(result.tail(percent)) for name, percent in _PERCENTS.items()},
        "ratio": result.ratio,
        "is_reached": result.is_reached,
    }


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

    label = f"{result.title}  |  {name}"
    return Bar(label, speed(result.median), speed(strictest), is_reached)


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
