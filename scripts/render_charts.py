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
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_TOKENS = 4000
SYSTEMS = {"LMCache": 5, "vLLM offloading": 4, "FlexCache": 2}  # columns of the table
_COLOURS = {"DRAM": "#2a7fb8", "SSD": "#9ecae1", "cold": "#8a8a8a"}
_REACHED, _MISSED = "#2a9d5c", "#d1495b"
_AXIS_END_MS = 260.0


HEADLINES = {
    # The chart's label, and the row of the table of targets.
    "look-up from tokens, all cached": "get_match, 131,072 tokens: all cached",
    "look-up from tokens, none cached": "get_match, 131,072 tokens: none cached",
    "look-up by keys, all cached": "get_match, 131,072 tokens, with block_keys: all cached",
    "through the server, by keys": "through the server, with block_keys",
    "through the server, from tokens": "through the server, from tokens",
    "requests/s at a server, 1 client": "request cycles at 128k tokens, one server, by 1",
    "requests/s at a server, 4 clients": "request cycles at 128k tokens, one server, by 4",
    "allocate, full pool, lru": "allocate 4 of a full pool, 50,000 leaves, lru",
    "allocate, full pool, density": "allocate 4 of a full pool, 50,000 leaves, density",
    "DRAM, 64 requests, store": "DRAM, 64 requests of 8 MiB at once, store",
    "DRAM, 64 requests, retrieve": "DRAM, 64 requests of 8 MiB at once, retrieve",
    "SSD write": "SSD, disk worker alone, write",
    "SSD read": "SSD, disk worker alone, read",
    "Mooncake write": "Mooncake, blocks of 2,048 KiB, write",
    "Mooncake read": "Mooncake, blocks of 2,048 KiB, read",
    "shared directory write": "shared directory, blocks of 2,048 KiB, write",
    "shared directory read": "shared directory, blocks of 2,048 KiB, read",
    "throughput with nothing hit, DRAM": (
        "throughput with nothing hit, 2.6 M model, DRAM, of vLLM alone"
    ),
    "throughput with nothing hit, SSD": "the same, DRAM and SSD",
    "engine's time for look-up and put": ("look-up and put, processor time of the engine's thread"),
    "TTFT of a hit, DRAM": "TTFT of a hit, 4,000 tokens, 136 M model: DRAM",
    "TTFT of a hit, SSD": "the same: SSD",
    "gaps beside loads, DRAM": "gap between tokens while others' hits are loaded, p99: DRAM, one",
    "TTFT of hits beside others, DRAM": "TTFT of those hits: DRAM, one",
    "TTFT of hits beside others, SSD": "TTFT of those hits: SSD, one",
    "restart with 10^6 slots": "restart with 10^6 slots on SSD, from start() to the first hit",
    "memory of the index": "memory of the index, a block",
}


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
    lines = rows(page)
    headings = next(cells for cells in lines if {"what", "to reach", "reached"} <= set(cells))
    table = {}
    for cells in lines:
        if len(cells) == len(headings):
            table[cells[0]] = dict(zip(headings, cells, strict=True))
    return {label: round(_share(table[row]), 3) for label, row in HEADLINES.items()}


def _share(row: dict[str, str]) -> float:
    target = row["to reach"]
    goal = numbers(target)[0]
    found = numbers(row["ratio" if target.endswith("x") else "found"])[0]
    return goal / found if target.startswith("<=") else found / goal


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
    picture, axes = new_picture(8, 6.4)
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
