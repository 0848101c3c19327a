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


class Headline(NamedTuple):
    """One bar of the targets chart: a row of the table and the position of a figure in it."""

    label: str
    row: str
    position: int = 0
    less_is_better: bool = True


HEADLINES = (
    Headline("get_match, all cached", "`get_match`, 131,072 tokens: all cached"),
    Headline("get_match, first 100,000 cached", "first 100,000 cached"),
    Headline("get_match, none cached", "none cached"),
    Headline("get_match with block_keys, all cached", "the same with `block_keys`"),
    Headline("server match with block_keys", "through the server, with `block_keys`"),
    Headline("server match from tokens", "through the server, from tokens"),
    Headline("allocate, full pool, lru", "allocate 4 blocks"),
    Headline("allocate, full pool, reuse", "allocate 4 blocks", 1),
    Headline("request cycles, 1 client", "request cycles", 0, False),
    Headline("request cycles, 4 clients", "request cycles", 1, False),
    Headline("memory of the index", "memory of the index"),
    Headline("DRAM store", "DRAM store / retrieve", 0, False),
    Headline("DRAM retrieve", "DRAM store / retrieve", 1, False),
    Headline("SSD write, ordinary pages", "SSD write / read", 0, False),
    Headline("SSD read, ordinary pages", "SSD write / read", 1, False),
    Headline("SSD write, huge pages", "SSD write / read", 2, False),
    Headline("SSD read, huge pages", "SSD write / read", 3, False),
    Headline("S3, lowest", "REMOTE", 1, False),  # the first number is S3's 3
    Headline("Mooncake, lowest", "REMOTE", 3, False),
    Headline("shared directory, lowest", "REMOTE", 5, False),
)


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


def read_targets(page: str) -> dict[str, float]:
    """Return how far each headline is above its target: 1 meets it, and more is better."""
    table = {cells[0]: cells for cells in rows(page) if len(cells) == 4}
    found = {}
    for headline in HEADLINES:
        (cells,) = (cells for row, cells in table.items() if row.startswith(headline.row))
        target = numbers(cells[2])[0]
        reached = numbers(cells[3].partition(" (")[0])[headline.position]
        ratio = target / reached if headline.less_is_better else reached / target
        found[headline.label] = round(ratio, 3)
    return found


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


def draw_targets(figures: dict[str, float], path: Path) -> None:
    picture, axes = new_picture(8, 5.4)
    for row, ratio in enumerate(figures.values()):
        axes.barh(row, ratio, height=0.72, color=_REACHED if ratio >= 1 else _MISSED)
        axes.text(max(ratio, 1) + 0.03, row, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", lw=1.5)
    axes.set_yticks(range(len(figures)), list(figures), fontsize=8)
    axes.set_xlabel("relative to the target (1 meets it; more is better)")
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
