"""Reports the results of a run, as tables and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.bench.results import Result
from flexcache.bench.suite import CaseReport, Outcome, Report

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
        for heading in (
            "figure",
            "p50",
            *_PERCENTS,
            "unit",
            "bound",
            "of",
            "ratio",
            "target",
            "reached",
        ):
            is_text = heading in ("figure", "unit", "of", "target", "reached")
            table.add_column(heading, justify="left" if is_text else "right",
                             overflow="fold", no_wrap=heading in ("p50", *_PERCENTS))  # fmt: skip
        for result in results:
            table.add_row(*_cells(result))
        console.print(table)
        _show_growth(results, console)
    for case in cases:
        name = escape(f"{section}, {case.title}")
        if case.outcome is Outcome.FAILED:
            console.print(f"[red]FAILED[/] {name}: {escape(case.reason)}", soft_wrap=True)
        elif case.outcome is Outcome.UNSUPPORTED:
            console.print(f"[yellow]unsupported[/] {name}: {escape(case.reason)}", soft_wrap=True)
    for note in dict.fromkeys(result.note for result in results if result.note):
        names = [result.name for result in results if result.note == note]
        who = names[0] if len(set(names)) == 1 else f"{names[0]}, ..."
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
    counts = {outcome: sum(case.outcome is outcome for case in report.cases) for outcome in Outcome}
    text = (
        f"{len(report.results)} figures in {report.took_s:.0f} s; targets reached: "
        f"{sum(judged)} of {len(judged)}; cases failed: {counts[Outcome.FAILED]}, "
        f"unsupported: {counts[Outcome.UNSUPPORTED]}"
    )
    return f"[red]interrupted[/] {text}" if report.was_interrupted else text


def _as_plain(report: Report) -> dict[str, Any]:
    settings = asdict(report.settings)
    settings["sections"] = list(report.settings.sections)
    settings["directory"] = report.machine["directory"]["path"]
    return {
        "started_at": report.started_at,
        "took_s": report.took_s,
        "was_interrupted": report.was_interrupted,
        "settings": settings,
        "machine": report.machine,
        "cases": [
            {
                "section": case.section,
                "title": case.title,
                "outcome": case.outcome.value,
                "reason": case.reason,
                "took_s": case.took_s,
                "results": [_plain_result(result) for result in case.results],
            }
            for case in report.cases
        ],
    }


def _plain_result(result: Result) -> dict[str, Any]:
    return asdict(result) | {
        "samples": [float(f"{value:.6g}") for value in result.samples],
        "p50": float(result.median),
        **{name: float(result.tail(percent)) for name, percent in _PERCENTS.items()},
        "ratio": result.ratio,
        "is_reached": result.is_reached,
    }
