"""Draw the README's chart from the TTFT table of docs/benchmarks.md.

    python scripts/render_chart.py [docs/ttft.png]

The figures drawn are also in the PNG's text field `Description`, so that a test can compare them
with the table. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_TOKENS = 4000
SYSTEMS = ("FlexCache", "vLLM offloading", "LMCache")
_COLUMNS = dict(zip(SYSTEMS, (2, 4, 5), strict=True))  # of the table
_COLOURS = {"DRAM": "#2a7fb8", "SSD": "#9ecae1", "cold": "#8a8a8a"}
_AXIS_END_MS = 260.0

Figures = dict[str, dict[str, float]]


def read_figures(page: str) -> Figures:
    """Return milliseconds by run (cold, DRAM, SSD) and system."""
    figures: Figures = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == str(NUM_TOKENS):
            figures[cells[1]] = {
                system: float(re.sub(r"[^\d.]", "", cells[column]))
                for system, column in _COLUMNS.items()
            }
    return figures


def draw(figures: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3.1), layout="constrained")
    axes = picture.subplots()
    recompute_ms = min(figures["cold"].values())
    axes.barh(0, _AXIS_END_MS, height=0.5, color=_COLOURS["cold"])
    for x in (0.90, 0.915):  # the bar goes on beyond the axis
        axes.plot([x * _AXIS_END_MS, (x + 0.02) * _AXIS_END_MS], [0.34, -0.34], color="white", lw=3)
    axes.text(
        0.87 * _AXIS_END_MS, 0, f"{recompute_ms:,.0f} ms",
        va="center", ha="right", color="white", fontweight="bold",
    )  # fmt: skip
    rows = list(reversed(SYSTEMS))
    for row, system in enumerate(rows, start=1):
        for offset, run in ((-0.19, "DRAM"), (0.19, "SSD")):
            milliseconds = figures[run][system]
            axes.barh(
                row + offset, milliseconds, height=0.36, color=_COLOURS[run],
                label=f"cached in {run}" if row == 1 else None,
            )  # fmt: skip
            axes.text(milliseconds + 3, row + offset, f"{milliseconds:.0f} ms", va="center")
    axes.set_yticks(range(len(rows) + 1), ["no cache", *rows])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_xlim(0, _AXIS_END_MS)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="center right", frameon=False, bbox_to_anchor=(1.0, 0.35))
    axes.set_title(
        f"Time to first token of a {NUM_TOKENS:,}-token prompt (136 M model, 2 CPU cores)",
        loc="left", fontsize=11,
    )  # fmt: skip
    picture.savefig(path, dpi=160, metadata={"Description": json.dumps(figures)})


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "ttft.png"
    draw(read_figures((DOCS / "benchmarks.md").read_text()), target)
