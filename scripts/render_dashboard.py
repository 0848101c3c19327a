"""Draw the Grafana dashboard's panels from Prometheus data, without Grafana.

    python scripts/render_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 10 out.png

Reads docs/grafana/flexcache.json, or another dashboard, runs all its queries, and exits with 1 if
one has no data.
Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "flexcache.json"
COLUMNS = 24
_COLUMN_INCHES, _ROW_INCHES = 0.85, 0.36  # of Grafana's grid
_SUFFIXES = {"short": "", "s": "s", "bytes": "B", "Bps": "B/s"}


@dataclass(frozen=True)
class Span:
    """Part of the recorded time: seconds since the epoch, and between two points."""

    start: float
    end: float
    step: float

    @property
    def rate_interval(self) -> str:
        """As Grafana has it: four scrapes at least."""
        return f"{max(4 * self.step, 4):.0f}s"


@dataclass
class Series:
    name: str
    times: list[float]
    values: list[float]

    @property
    def has_data(self) -> bool:
        return any(map(math.isfinite, self.values))


class Prometheus:
    """The HTTP API of a Prometheus server."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def ask(self, path: str, **arguments: object) -> Any:
        """Raises `ValueError` with what Prometheus finds wrong with a query."""
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{arguments}: {error.read().decode()}") from None

    def over(self, query: str, span: Span) -> list[dict[str, Any]]:
        """Per series its labels (``metric``) and [time, value] pairs (``values``)."""
        times = {"start": span.start, "end": span.end, "step": span.step}
        found: list[dict[str, Any]] = self.ask("query_range", query=query, **times)["result"]
        return found

    def now(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found


def read_dashboard(dashboard: Path) -> list[dict[str, Any]]:
    """Its panels, rows included."""
    panels: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return panels


def fill_in(query: str, span: Span) -> str:
    """A query with Grafana's variables replaced, for all servers."""
    whole = f"{span.end - span.start:.0f}s"
    for name, value in (("$__rate_interval", span.rate_interval), ("$__range", whole),
                        ("$instance", ".*")):  # fmt: skip
        query = query.replace(name, value)
    return query


def read_series(prometheus: Prometheus, target: dict[str, Any], span: Span) -> list[Series]:
    """What a panel's query returns, named as its legend says."""
    found = []
    for result in prometheus.over(fill_in(target["expr"], span), span):
        labels = result["metric"]
        name = re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), target["legendFormat"])  # noqa: B023
        times, values = zip(*result["values"], strict=True)
        found.append(Series(name, list(times), [float(value) for value in values]))
    return found


def queries_without_data(
    prometheus: Prometheus, span: Span, dashboard: Path = DASHBOARD
) -> list[str]:
    """Return the queries of all panels that have no data."""
    return [
        target["expr"]
        for panel in read_dashboard(dashboard)
        for target in panel.get("targets", ())
        if not any(series.has_data for series in read_series(prometheus, target, span))
    ]


def draw(prometheus: Prometheus, span: Span, out: Path, dashboard: Path = DASHBOARD) -> list[str]:
    """Draw all panels into ``out``; returns the queries that had no data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = read_dashboard(dashboard)
    num_rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    size = (COLUMNS * _COLUMN_INCHES, num_rows * _ROW_INCHES)
    figure = plt.figure(figsize=size, facecolor="#f4f5f5")
    draw_one = {"stat": _draw_number, "timeseries": _draw_lines, "heatmap": _draw_heatmap}
    empty = []
    for panel in panels:
        axes = _place(figure, panel)
        if panel["type"] == "row":
            continue
        series = []
        for target in panel["targets"]:
            found = [s for s in read_series(prometheus, target, span) if s.has_data]
            if not found:
                empty.append(target["expr"])
            series += found
        draw_one[panel["type"]](axes, panel, series)
    figure.savefig(out, dpi=80)
    plt.close(figure)
    return empty


def _place(figure: Any, panel: dict[str, Any]) -> Any:
    """A box with the panel's title at its place of the grid; the axes in it."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    grid = panel["gridPos"]
    left, wide, high = (
        grid["x"] * _COLUMN_INCHES,
        grid["w"] * _COLUMN_INCHES,
        grid["h"] * _ROW_INCHES,
    )
    low = height - grid["y"] * _ROW_INCHES - high
    if panel["type"] == "row":
        figure.text(0.1 / width, (low + 0.1) / height, panel["title"], size=13, weight="bold")
        return None
    box = ((left + 0.05) / width, (low + 0.05) / height)
    box_size = ((wide - 0.1) / width, (high - 0.1) / height)
    figure.add_artist(Rectangle(box, *box_size, facecolor="white", edgecolor="#d8d9da", zorder=-1))
    title = (left + 0.15) / width, (low + high - 0.25) / height
    figure.text(*title, panel["title"], size=9, weight="bold")
    below = {"stat": 0.1, "timeseries": 0.7, "heatmap": 0.35}[panel["type"]]  # for ticks and legend
    corner = (left + 0.65) / width, (low + below) / height
    return figure.add_axes((*corner, (wide - 0.85) / width, (high - below - 0.35) / height))


def _unit(panel: dict[str, Any]) -> str:
    options = panel.get("options", {})
    unit = panel["fieldConfig"]["defaults"].get("unit")
    return str(unit or options.get("yAxis", {}).get("unit", "short"))


def shown(value: float, unit: str) -> str:
    """A number with its unit."""
    from matplotlib.ticker import EngFormatter

    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "short" and abs(value) < 1000:
        return f"{value:.3g}"
    return str(EngFormatter(_SUFFIXES[unit])(float(f"{value:.3g}")))


def _draw_number(axes: Any, panel: dict[str, Any], series: Sequence[Series]) -> None:
    axes.axis("off")
    text = shown(series[0].values[-1], _unit(panel)) if series else "no data"
    axes.text(0.42, 0.5, text, size=20, ha="center", va="center", color="#1f60c4")


def _draw_lines(axes: Any, panel: dict[str, Any], series: Sequence[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    _dress(axes, panel)
    if not series:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)
        return
    if custom["stacking"]["mode"] == "normal":
        times = sorted({time for each in series for time in each.times})
        rows = [_at(each, times) for each in series]
        axes.stackplot(
            [_moment(t) for t in times], rows, labels=[s.name for s in series], alpha=0.7
        )
    else:
        style = "steps-post" if custom.get("lineInterpolation") == "stepAfter" else "default"
        for each in series:
            moments = [_moment(time) for time in each.times]
            axes.plot(moments, each.values, label=each.name, linewidth=1.2, drawstyle=style)
    if "min" in defaults:
        axes.set_ylim(bottom=defaults["min"])
    if "max" in defaults:
        axes.set_ylim(top=1.02 * defaults["max"])
    lively = [each for each in series if any(each.values)] or series  # the others lie on the axis
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = list(dict.fromkeys(each.name for each in lively if each.name))
    if names:
        axes.legend([handles[n] for n in names], names, fontsize=6.5, loc="upper left", ncols=4,
                    bbox_to_anchor=(-0.05, -0.08), frameon=False, handlelength=1)  # fmt: skip


def _draw_heatmap(axes: Any, panel: dict[str, Any], series: Sequence[Series]) -> None:
    """Draw a heatmap of cumulative buckets, after separating them."""
    _dress(axes, panel)
    buckets = sorted(series, key=lambda each: float(each.name))
    if not buckets:
        return
    times = sorted({time for each in buckets for time in each.times})
    rows = [_at(each, times) for each in buckets]
    counts = [rows[0]] + [
        [max(0.0, upper - lower) for lower, upper in zip(*pair, strict=True)]
        for pair in pairwise(rows)
    ]
    used = [i for i, row in enumerate(counts) if any(row)]
    first, last = (used[0], used[-1] + 1) if used else (0, len(counts))
    picture = axes.pcolormesh(
        [_moment(t) for t in times], range(last - first), counts[first:last],
        cmap="Blues", shading="nearest",
    )  # fmt: skip
    axes.set_yticks(range(last - first))
    labels = [float(each.name) for each in buckets[first:last]]
    axes.set_yticklabels([shown(le, "s") if math.isfinite(le) else "more" for le in labels])
    axes.figure.colorbar(picture, ax=axes, pad=0.01).ax.tick_params(labelsize=6)


def _dress(axes: Any, panel: dict[str, Any]) -> None:
    from matplotlib.dates import AutoDateLocator, DateFormatter
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.xaxis.set_major_locator(AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    if panel["type"] == "timeseries":
        unit = _unit(panel)
        if "scaleDistribution" in panel["fieldConfig"]["defaults"]["custom"]:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
        axes.grid(alpha=0.3)
    axes.tick_params(labelsize=6.5)


def _at(series: Series, times: Sequence[float]) -> list[float]:
    """Its values at given times; 0 where it has none."""
    values = dict(zip(series.times, series.values, strict=True))
    return [value if math.isfinite(value := values.get(time, 0.0)) else 0.0 for time in times]


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="file to draw")
    parser.add_argument("--minutes", type=float, default=60, help="how far to look back")
    parser.add_argument("--step", type=float, default=0, help="seconds; by default 120 points")
    arguments = parser.parse_args()
    end, length = time.time(), 60 * arguments.minutes
    span = Span(end - length, end, arguments.step or max(1.0, length / 120))
    prometheus = Prometheus(arguments.prometheus)
    empty = draw(prometheus, span, arguments.out, arguments.dashboard)
    for query in empty:
        print(f"no data: {query}")
    return int(bool(empty))


if __name__ == "__main__":
    sys.exit(main())
