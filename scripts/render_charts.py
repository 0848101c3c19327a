"""Draw the charts of README.md and docs/benchmarks.md from the tables of measurements.

    python scripts/render_charts.py [DIRECTORY]      (default: docs)

The figures drawn are also in the text field `Description` of each PNG, so that a test can compare
them with the tables. Needs matplotlib (the extra `bench`).

From the raw figures of `benchmarks/external/run.py` it makes a chart, `external.png`, and tables,
`benchmarks/results/external.md`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
RESULTS = ROOT / "benchmarks" / "results"
IN_TIME_MS = 2000.0
"""Time to the first token of a request that counts as answered in time."""
EXTERNAL = ("prefix-repetition", "timed-trace", "aiperf-agents", "aiperf-mooncake")
"""Benchmarks whose samples are times to the first token."""


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


@dataclass(frozen=True)
class Cell:
    """An arm of an external benchmark at one load: medians over its rounds, and their extremes."""

    benchmark: str
    load: str
    arm: str
    rounds: int
    p50_ms: tuple[float, float, float]
    p90_ms: tuple[float, float, float]
    in_time_per_s: tuple[float, float, float]
    shares: Mapping[str, float]
    """Parts of prompt tokens from GPU blocks, DRAM, SSD, or a cache that does not say which."""
    sizes: str


def external_runs(results: Path, benchmark: str) -> list[dict[str, Any]]:
    """Return the runs of a benchmark that ended well, the last of each place."""
    path, runs = results / f"external-{benchmark}.jsonl", dict[object, dict[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        run = json.loads(line) if line.endswith("}") else {"error": "torn"}
        if "error" not in run:
            runs[run["round"], run["load"], run["arm"], run["phase"], run["seed"]] = run
    return list(runs.values())


def external_cells(results: Path) -> list[Cell]:
    cells = []
    for benchmark in EXTERNAL:
        places: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
        for run in external_runs(results, benchmark):
            places.setdefault((run["load"], run["arm"], run["phase"]), []).append(run)
        cells += [_cell(runs, phase) for (_, _, phase), runs in places.items()]
    return cells


def _cell(runs: Sequence[Mapping[str, Any]], phase: str) -> Cell:
    def over_rounds(values: Sequence[float]) -> tuple[float, float, float]:
        return statistics.median(values), min(values), max(values)

    first, sums = runs[0], {
        source: sum(run["tokens"][source] for run in runs) for source in runs[0]["tokens"]
    }  # fmt: skip
    prompts = sum(sums[source] for source in ("GPU", "cache", "computed")) or 1
    if sums["DRAM"] + sums["SSD"]:
        sums["cache"] = 0  # it says which
    in_time = [sum(ms <= IN_TIME_MS for ms in run["ttft_ms"]) / run["duration_s"] for run in runs]
    tokens, arm = first["sizes"], first["arm"]
    sizes = [tokens["gpu"], *([tokens["dram"]] if arm != "no cache" else [])]
    sizes += [tokens["ssd"]] if arm.endswith("SSD") else []
    return Cell(
        first["benchmark"], f"{first['load']:g} {first['unit']}",
        arm + (", after a restart" if phase == "restart" else ""), len(runs),
        over_rounds([_quantile(run["ttft_ms"], 0.5) for run in runs]),
        over_rounds([_quantile(run["ttft_ms"], 0.9) for run in runs]), over_rounds(in_time),
        {name: sums[name] / prompts for name in ("GPU", "DRAM", "SSD", "cache")},
        " / ".join(f"{first['working_set_tokens'] / size:.1f}" for size in sizes),
    )  # fmt: skip


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def external_tables(results: Path) -> Iterator[str]:
    """Yield the lines of the tables, with the extremes of the rounds in parentheses."""

    def spread(figures: tuple[float, float, float], form: str) -> str:
        middle, least, most = (format(figure, form) for figure in figures)
        return f"{middle} ({least} to {most})"

    yield f"In time: a first token within {IN_TIME_MS / 1000:g} s. Shares are of prompt tokens."
    yield "Working set: tokens of all prompts, shared ones once, over those of GPU / DRAM / SSD."
    yield ""
    yield (
        "| benchmark | load | system | rounds | TTFT p50, ms | TTFT p90, ms | in time, 1/s |"
        " from GPU | DRAM | SSD | cache | working set |"
    )
    yield "| --- | --- | --- |" + " ---: |" * 9
    for cell in external_cells(results):
        shares = " | ".join(f"{share:.0%}" for share in cell.shares.values())
        yield (
            f"| {cell.benchmark} | {cell.load} | {cell.arm} | {cell.rounds} | "
            f"{spread(cell.p50_ms, ',.0f')} | {spread(cell.p90_ms, ',.0f')} | "
            f"{spread(cell.in_time_per_s, '.2f')} | {shares} | {cell.sizes} |"
        )
    yield from _pressure_table(external_runs(results, "cache-pressure"))
    yield from _simulator_table(results / "external-simulator.json")


def _pressure_table(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not runs:
        return
    right = {run["round"]: run["needle_answers"] for run in runs if "large GPU" in run["arm"]}
    yield ""
    yield (
        "| cache-pressure: system | round | retained tokens | of its largest tier |"
        " needle answers as a large GPU's, cold / again | aborts reused | main contexts kept |"
    )
    yield "| --- |" + " ---: |" * 6
    for run in runs:
        wanted = right.get(run["round"])
        same = [
            sum(mine == theirs for mine, theirs in zip(run[name], wanted or (), strict=False))
            for name in ("needle_answers", "needle_answers_again")
        ]
        of = len(run["needle_answers"])
        aborts = f"{run['abort_ok']} of {len(run['abort_reuse'])}" if "abort_ok" in run else "-"
        kept = f"{run['agent_finals_kept']} of {run['agent_finals']}" if "abort_ok" in run else "-"
        yield (
            f"| {run['arm']} | {run['round'] + 1} | {run['retained_tokens']:,} | "
            f"{run['retained_tokens'] / run['capacity']:.0%} | {same[0]} / {same[1]} of {of} | "
            f"{aborts} | {kept} |"
        )


def _simulator_table(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    yield ""
    yield "| trace | blocks | policy | kvcache-simulator, hit tokens | FlexCache | hit rate |"
    yield "| --- | ---: | --- | ---: | ---: | ---: |"
    for row in json.loads(path.read_text()):
        yield (
            f"| {row['trace']} | {row['blocks']:,} | {row['policy']} | "
            f"{row['simulator_hit_tokens']:,} | {row['hit_tokens']:,} | "
            f"{row['hit_tokens'] / row['of_tokens']:.2%} |"
        )


def draw_external(cells: Sequence[Cell], path: Path) -> None:
    """Draw p50 and p90 of each arm, a panel per benchmark at its first load."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        panels.setdefault((cell.benchmark, cell.load), []).append(cell)
    chosen = [next(key for key in panels if key[0] == name) for name in EXTERNAL
              if any(key[0] == name for key in panels)]  # fmt: skip
    picture = Figure(figsize=(8, 1.9 * len(chosen) + 0.4), layout="constrained")
    for axes, (benchmark, load) in zip(
        picture.subplots(len(chosen), squeeze=False)[:, 0], chosen, strict=True
    ):
        shown = panels[benchmark, load]
        for row, cell in enumerate(shown):
            colour = _COLOURS["DRAM"] if "FlexCache" in cell.arm else _COLOURS["cold"]
            axes.barh(row, cell.p90_ms[0], height=0.7, color=colour, alpha=0.35)
            axes.barh(row, cell.p50_ms[0], height=0.7, color=colour)
            axes.text(
                cell.p90_ms[0], row, f"  {cell.p50_ms[0]:,.0f} / {cell.p90_ms[0]:,.0f} ms",
                va="center", fontsize=8,
            )  # fmt: skip
        axes.set_yticks(range(len(shown)), [cell.arm for cell in shown], fontsize=8)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_visible(False)
        axes.set_xlim(0, 1.25 * max(cell.p90_ms[0] for cell in shown))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(f"{benchmark}, {load}: TTFT, p50 / p90", loc="left", fontsize=10)
    save(picture, path, {f"{c.benchmark}, {c.load}, {c.arm}": [c.p50_ms[0], c.p90_ms[0]]
                         for key in chosen for c in panels[key]})  # fmt: skip


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
    if directory == DOCS:
        (RESULTS / "external.md").write_text("\n".join(external_tables(RESULTS)) + "\n")
    if external := external_cells(RESULTS):
        draw_external(external, directory / "external.png")
