"""Draw the charts of README.md and docs/benchmarks.md from the tables of measurements.

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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECORD = ROOT / "benchmarks" / "results" / "2026-11-figures.md"
NUM_TOKENS = 4000
SYSTEMS = {"LMCache": 5, "vLLM offloading": 4, "FlexCache": 2}  # columns of the table
GPU_LINES = {"computed": 1, "from SSD": 4, "from DRAM": 3, "in the GPU": 2}
_COLOURS = {"DRAM": "#2a7fb8", "SSD": "#9ecae1", "cold": "#8a8a8a"}
_AXIS_END_MS = 260.0


def rows(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def read_ttft(page: str) -> dict[str, dict[str, float]]:
    """Return milliseconds by run (cold, DRAM, SSD) and system."""
    table = page[page.index("| tokens | run | FlexCache") :].split("\n\n")[0]
    return {
        cells[1]: {system: numbers(cells[column])[0] for system, column in SYSTEMS.items()}
        for cells in rows(table)
        if cells[0] == str(NUM_TOKENS)
    }


def read_gpu(page: str) -> dict[str, list[list[float]]]:
    """Return tokens and milliseconds of each line of the chart."""
    table = page[page.index("| prompt | computed") :].split("\n\n")[0]
    figures = [[numbers(cell)[0] for cell in cells] for cells in list(rows(table))[2:]]
    return {
        name: [[cells[0], cells[column]] for cells in figures] for name, column in GPU_LINES.items()
    }


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


def draw_gpu(figures: dict[str, list[list[float]]], path: Path) -> None:
    picture, axes = new_picture(8, 3.4)
    colours = (_COLOURS["cold"], _COLOURS["SSD"], _COLOURS["DRAM"], "#2a9d5c")
    for (name, points), colour in zip(figures.items(), colours, strict=True):
        tokens, milliseconds = zip(*points, strict=True)
        axes.plot(tokens, milliseconds, "o-", color=colour, ms=4, label=name)
        axes.annotate(
            f"{name}, {milliseconds[-1]:,.0f} ms", (tokens[-1], milliseconds[-1]),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1000, 4040, 16040, 32040], ["1,000", "4,040", "16,040", "32,040"])
    axes.set_yticks([50, 100, 200, 500, 1000, 2000], ["50", "100", "200", "500", "1,000", "2,000"])
    axes.minorticks_off()
    axes.set_xlim(900, 70_000)
    axes.invert_yaxis()  # `new_picture` is for bars, which run from the top
    axes.set_xlabel("tokens of the prompt", fontsize=8)
    axes.set_title(
        "Time to first token, ms (H200, 7.2 billion parameters)", loc="left", fontsize=11
    )
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
    draw_ttft(read_ttft(RECORD.read_text()), directory / "ttft.png")
    draw_gpu(read_gpu((DOCS / "benchmarks.md").read_text()), directory / "gpu.png")
