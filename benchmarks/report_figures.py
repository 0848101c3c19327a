"""Figures in the reports of benchmarks, by name, whatever each of them writes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexcache.bench.report import figure


@dataclass(frozen=True)
class Figure:
    """A value, and what it was measured beside.

    Attributes:
        unit: Of those in `LESS_IS_BETTER` less is better; of all others more.
        bound: A bound or a peer, measured in the same run, in the unit.
        beside: What that was; of a figure without a bound, what else it is relative to.
        limit: A target that the report has itself.
    """

    value: float
    unit: str
    bound: float | None = None
    beside: str = ""
    limit: float | None = None


LESS_IS_BETTER = frozenset({"us", "ms", "s", "bytes", "x"})
Figures = Mapping[str, Figure]
Reader = Callable[[Any], Figures]


def of_cases(report: Mapping[str, Any]) -> Figures:
    """Read what `flexcache bench` and most benchmarks write: medians."""
    return {
        _title(result): Figure(
            result["p50"], result["unit"], result["bound"], result["bound_name"]
        )
        for case in report["cases"]
        for result in case["results"]
    }  # fmt: skip


def _title(result: Mapping[str, Any]) -> str:
    if result["at"] is None:
        return str(result["name"])
    return f"{result['name']}, {result['at']:,.10g} {result['parameter']}"


def failures_in_cases(report: Any) -> str:
    """Return why cases of such a report have no results."""
    if not isinstance(report, dict):
        return ""
    reasons = [case["reason"].partition("\n")[0] for case in report.get("cases", ())]
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def of_hit_rates(rates: Mapping[str, Mapping[str, float]]) -> Figures:
    """Read what `bench_eviction.py` writes: the way from LRU to the optimum, in %, by size."""
    figures, leads = {}, []
    for size, ours in rates["default"].items():
        lru, best = rates["lru"][size], rates["optimum"][size]
        way = (ours - lru) / (best - lru) if best > lru else 1.0
        beside = f"LRU {lru:.2%}, optimum {best:.2%}"
        figures[f"{size} blocks"] = Figure(round(100 * way, 1), "%", beside=beside)
        leads.append(100 * (ours - lru))
    figures["least lead"] = Figure(round(min(leads), 3), "points", beside="LRU")
    return figures


def of_decisions(report: Mapping[str, Any]) -> Figures:
    """Read what `bench_decisions.py` writes: what has a bound."""
    return {
        target["name"]: Figure(target["value"], "x", limit=target["bound"], beside="simulated")
        for target in report["targets"]
        if target["bound"] is not None
    }


def of_router_index(report: Mapping[str, Any]) -> Figures:
    """Read what `bench_router_index.py` writes: of the most workers and the most blocks."""
    *_, measured = report["by_workers"].values()
    decide = {name: _decide(each) for name, each in measured.items()}
    from_bytes = ", ".join(
        f"{name} {text_of(each['apply']['stored, from bytes'], '')}"
        for name, each in measured.items()
    )
    decoded = measured["FlexCache"]["apply"]["stored"]
    memory = {
        name: sizes[-1]["num_bytes"] / sizes[-1]["num_blocks"]
        for name, sizes in report["memory"].items()
    }
    return {
        "decide, p50": _beside_dynamo({n: times["p50"] for n, times in decide.items()}, "us"),
        "decide, p99": _beside_dynamo({n: times["p99"] for n, times in decide.items()}, "us"),
        "events": Figure(decoded, "million blocks/s", beside=f"decoded; from bytes: {from_bytes}"),
        "memory": _beside_dynamo(memory, "bytes"),
    }


def _decide(measured: Mapping[str, Any]) -> Mapping[str, float]:
    name = next(name for name in measured["lookups"] if name.startswith("8,192"))
    times: Mapping[str, float] = measured["lookups"][name]["decide"]
    return times


def _beside_dynamo(by_system: Mapping[str, float], unit: str) -> Figure:
    bound = by_system.get("RadixTree")
    return Figure(by_system["FlexCache"], unit, bound, "Dynamo's tree" if bound else "")


def of_tokens(rows: Any) -> Figures:
    """Read what `bench_tokens.py` writes: each decision, and how long the loop stood still."""
    figures = {}
    for row in rows:
        if row["name"].startswith("decision"):
            figures[row["name"]] = Figure(statistics.median(row["wall_ms"]), "ms")
            figures[f"{row['name']}, stall"] = Figure(max(row["stall_ms"]), "ms")
    return figures


def text_of(value: float, unit: str) -> str:
    """Return a value with its unit."""
    return f"{figure(value)} {'' if unit == 'x' else unit}".rstrip()
