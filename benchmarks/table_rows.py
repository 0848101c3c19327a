"""Rows of the table of targets: read from the reports of benchmarks, or quoted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexcache.bench.report import figure

SAME_RUN, ALONE, QUOTED = "same run", "alone", "quoted"
"""Where the bound or the peer was measured: in the same run, nowhere (the target is absolute), or
elsewhere."""
_LESS_IS_BETTER = ("us", "ms", "s", "bytes")


@dataclass(frozen=True)
class Row:
    """A figure and its target.

    Attributes:
        beside: The bound or peer, with its figure.
        ratio: The figure over it; None without one.
        reached: None if it is not known.
        source: `SAME_RUN`, `ALONE` or `QUOTED`.
    """

    what: str
    found: str
    beside: str
    ratio: float | None
    target: str
    reached: bool | None
    source: str


def rows_of_cases(report: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the results that have a target, from a report that `flexcache bench` writes."""
    for case in report["cases"]:
        for result in case["results"]:
            if result["reach"] is None and result["limit"] is None:
                continue
            yield _row_of(result, case["section"])


def _row_of(result: Mapping[str, Any], section: str) -> Row:
    unit, bound = result["unit"], result["bound"]
    sign = "<=" if unit in _LESS_IS_BETTER else ">="
    targets = []
    if result["reach"] is not None:
        targets.append(f"{sign} {figure(result['reach'])}x")
    if result["limit"] is not None:
        targets.append(f"{sign} {figure(result['limit'])} {unit}".rstrip())
    at = "" if result["at"] is None else f", {figure(result['at'])} {result['parameter']}"
    return Row(
        f"{section}: {result['name']}{at}",
        f"{figure(result['p50'])} {unit}".rstrip(),
        "" if bound is None else f"{result['bound_name']}: {figure(bound)} {unit}".rstrip(),
        result["ratio"],
        ", ".join(targets),
        result["is_reached"],
        ALONE if bound is None else SAME_RUN,
    )


def rows_of_hit_rates(
    rates: Mapping[str, Mapping[str, float]], trace: str, goals: Mapping[str, float]
) -> Iterator[Row]:
    """Yield how far the default policy is from LRU towards the optimum.

    Args:
        rates: What `bench_eviction.py` writes: hit rates by policy and size.
        goals: The shares of the way to reach, by size.
    """
    for size, goal in goals.items():
        if size not in rates["default"]:
            continue
        lru, ours, best = (rates[name][size] for name in ("lru", "default", "optimum"))
        way = (ours - lru) / (best - lru) if best > lru else 1.0
        yield Row(
            f"hit rate, {trace}, {size} blocks: way from LRU to the optimum", f"{way:.0%}",
            f"LRU {lru:.2%}, optimum {best:.2%}", None, f">= {goal:.0%}", round(way, 2) >= goal,
            SAME_RUN,
        )  # fmt: skip


def rows_of_decisions(report: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the targets in what `bench_decisions.py` writes."""
    for target in report["targets"]:
        value, bound = target["value"], target["bound"]
        if bound is not None:
            found, limit = figure(value), f"<= {figure(bound)}"
            yield Row(f"router: {target['name']}", found, "", None, limit, value <= bound, SAME_RUN)


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table to paste."""
    yield "| what | found | beside | ratio | to reach | reached | measured |"
    yield "| --- | ---: | --- | ---: | ---: | --- | --- |"
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        reached = {True: "yes", False: "**missed**", None: ""}[row.reached]
        cells = (row.what, row.found, row.beside, ratio, row.target, reached, row.source)
        yield f"| {' | '.join(cells)} |"
