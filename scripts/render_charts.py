"""Draw the charts of README.md and docs/benchmarks.md from the tables of docs/benchmarks.md.

    python scripts/render_charts.py [DIRECTORY]      (default: docs)

The figures drawn are also in the text field `Description` of each PNG, so that a test can compare
them with the tables. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_TOKENS = 4000
SYSTEMS = {"LMCache": 5, "vLLM offloading": 4, "FlexCache": 2}  # columns of the table
_COLOURS = {"DRAM": "#2a7fb8", "SSD": "#9ecae1", "cold": "#8a8a8a"}
_REACHED, _MISSED = "#2a9d5c", "#d1495b"
_AXIS_END_MS = 260.0


class Standing(NamedTuple):
    """How far a row of the table of targets is above its target: 1 meets it, and more is better."""

    best: float
    before: float
    now: float


def rows(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def read_ttft(page: str) -> dict[str, dict[str, float]]:
    """Return milliseconds by run (cold, DRAM, SSD) and system."""
    return {
        cells[1]: {system: numbers(cells[column])[0] for system, column in SYSTEMS.items()}
        for cells in rows(page)
        if cells[0] == str(NUM_TOKENS)
    }


def read_targets(page: str) -> dict[str, Standing]:
    """Return where each row of the table of targets stands that has all three figures."""
    found = {}
    for cells in rows(page):
        if len(cells) == 6 and re.match("[<>]=", cells[1]) and all(cells[2:4]) and cells[5]:
            what, target, before, now, _, best = cells
            found[what] = Standing(*(above(target, cell) for cell in (best, before, now)))
    return found


def above(target: str, cell: str) -> float:
    """Return how far a figure is above its target, which is a ratio if it ends with an x."""
    if target.endswith("x"):
        cell = cell.rpartition(", ")[2]
    (goal, *_), (reached, *_) = numbers(target), numbers(cell)
    return round(goal / reached if target.startswith("<=") else reached / goal, 3)


def draw_ttft(figures: dict[str, dict[str, float]], path: Path) -> None:
    picture, axes = new_picture(8, 3.1)
    recompute_ms = min(figures["cold"].values())
    axes.barh(0, _AXIS_END_MS, height=0.5, color=_COLOURS["cold"])
    for x in (0.90, 0.915):  # the bar goes on beyond the axis
        axes.plot([x * _AXIS_END_MS, (x + 0.02) * _AXIS_END_MS], [0.34, -0.34], color="white", lw=3)
    axes.text(
        0.87 * _AXIS_END_MS, 0, f"{recompute_ms:,.0f} ms",
        va="center", ha="right", color="white", fontweight="bold",
    )  # fmt: skip
    for row, system in enumerate(SYSTEMS, start=1):
        for offset, run in ((-0.19, "DRAM"), (0.19, "SSD")):
            milliseconds = figures[run][system]
            axes.barh(
                row + offset, milliseconds, height=0.36, color=_COLOURS[run],
                label=f"cached in {run}" if row == 1 else None,
            )  # fmt: skip
            axes.text(milliseconds + 3, row + offset, f"{milliseconds:.0f} ms", va="center")
    axes.set_yticks(range(len(SYSTEMS) + 1), ["no cache", *SYSTEMS])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.set_xlim(0, _AXIS_END_MS)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.legend(loc="center right", frameon=False, bbox_to_anchor=(1.0, 0.35))
    axes.set_title(
        f"Time to first token of a {NUM_TOKENS:,}-token prompt (136 M model, 2 CPU cores)",
        loc="left", fontsize=11,
    )  # fmt: skip
    save(picture, path, figures)


def draw_targets(figures: dict[str, Standing], path: Path) -> None:
    picture, axes = new_picture(9, 0.19 * len(figures) + 0.8)
    for row, (best, before, now) in enumerate(figures.values()):
        color, ends = _MISSED, (min(best, 0.98), 1.0)
        if best >= 1:
            color, ends = _REACHED, (1.0, max(best, 1.02))
        axes.plot(ends, [row, row], color=color, lw=7, solid_capstyle="butt")
        axes.plot([before, now], [row, row], color="#b0b0b0", lw=1, zorder=3)
        axes.plot(before, row, "o", ms=4, mfc="white", mec="black", mew=0.8, zorder=4,
                  label="before, slow machine" if not row else None)  # fmt: skip
        axes.plot(now, row, "o", ms=4, color="black", zorder=5,
                  label="now, slow machine" if not row else None)  # fmt: skip
    axes.plot([], [], color=_REACHED, lw=7, label="best seen, target reached")
    axes.plot([], [], color=_MISSED, lw=7, label="best seen, missed")
    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
    axes.set_yticks(range(len(figures)), list(figures), fontsize=7)
    axes.set_xlabel("relative to the target (1 meets it; more is better)", fontsize=8)
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(len(figures) - 0.4, -0.6)
    axes.legend(loc="center left", fontsize=7, frameon=False)
    save(picture, path, figures)


def new_picture(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    axes = picture.subplots()
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    return picture, axes


def save(picture: Any, path: Path, figures: object) -> None:
    picture.savefig(path, dpi=160, metadata={"Description": json.dumps(figures)})


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    content = (DOCS / "benchmarks.md").read_text()
    draw_ttft(read_ttft(content), directory / "ttft.png")
    draw_targets(read_targets(content), directory / "targets.png")
