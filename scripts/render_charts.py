"""Draw the charts of README.md and docs/benchmarks.md from the tables of measurements.

    python scripts/render_charts.py [DIRECTORY]      (default: docs)

The figures drawn are also in the text field `Description` of each PNG, so that a test can compare
them with the tables. Needs matplotlib (the extra `bench`).

From the raw figures of `benchmarks/external/run.py` it makes a chart, `external.png`, the table in
docs/benchmarks.md and longer ones, `benchmarks/results/external.md`.
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
GPU_LINES = {"computed": 1, "from SSD": 4, "from DRAM": 3, "in the GPU": 2}
_COLOURS = {"DRAM": "#2a7fb8", "SSD": "#9ecae1", "cold": "#8a8a8a"}
RESULTS = ROOT / "benchmarks" / "results"
IN_TIME_MS = 2000.0
"""Time to the first token of a request that counts as answered in time."""
EXTERNAL = {
    "prefix-repetition": "vllm bench serve, prefix repetition",
    "timed-trace": "vllm bench serve, Mooncake's conversations",
    "aiperf-agents": "AIPerf, coding agents",
    "aiperf-mooncake": "AIPerf, Mooncake's conversations",
}
"""Benchmarks whose samples are times to the first token, and their names for readers."""
BEGIN, END = "<!-- written by scripts/render_charts.py -->\n", "<!-- end -->"


def rows(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def read_gpu(page: str) -> dict[str, list[list[float]]]:
    """Return tokens and milliseconds of each line of the chart."""
    table = page[page.index("| prompt | computed") :].split("\n\n")[0]
    figures = [[numbers(cell)[0] for cell in cells] for cells in list(rows(table))[2:]]
    return {
        name: [[cells[0], cells[column]] for cells in figures] for name, column in GPU_LINES.items()
    }


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
    failed: int
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
        by_load = sorted(places.items(), key=lambda item: item[0][0])
        cells += [_cell(runs, phase) for (_, _, phase), runs in by_load]
    return cells


def _cell(runs: Sequence[Mapping[str, Any]], phase: str) -> Cell:
    def over_rounds(values: Sequence[float]) -> tuple[float, float, float]:
        return statistics.median(values), min(values), max(values)

    first, sums = runs[0], {
        source: sum(run["tokens"][source] for run in runs) for source in runs[0]["tokens"]
    }  # fmt: skip
    prompts = sum(sums[source] for source in ("GPU", "cache", "computed")) or 1
    if below := sums["DRAM"] + sums["SSD"]:  # the cache says which; the engine, how many in all
        for name in ("DRAM", "SSD"):
            sums[name] *= sums["cache"] / below
        sums["cache"] = 0
    in_time = [sum(ms <= IN_TIME_MS for ms in run["ttft_ms"]) / run["duration_s"] for run in runs]
    tokens, arm, working_set = first["sizes"], first["arm"], first["working_set_tokens"]
    sizes = [tokens["gpu"], *([tokens["dram"]] if arm != "no cache" else [])]
    sizes += [tokens["ssd"]] if arm.endswith("SSD") else []
    return Cell(
        first["benchmark"], f"{first['load']:g} {first['unit']}",
        arm + (", after a restart" if phase == "restart" else ""), len(runs),
        over_rounds([_quantile(run["ttft_ms"], 0.5) for run in runs]),
        over_rounds([_quantile(run["ttft_ms"], 0.9) for run in runs]), over_rounds(in_time),
        sum(run["failed"] for run in runs),
        {name: sums[name] / prompts for name in ("GPU", "DRAM", "SSD", "cache")},
        " / ".join(f"{working_set / size:.1f}" for size in sizes if working_set),
    )  # fmt: skip


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def page_table(cells: Sequence[Cell]) -> str:
    """Return the table of docs/benchmarks.md: medians of the rounds, an arm a row."""
    places = list(dict.fromkeys((cell.benchmark, cell.load) for cell in cells))
    found = {(cell.benchmark, cell.load, cell.arm): cell for cell in cells}
    rounds = {
        place: min(cell.rounds for cell in cells if (cell.benchmark, cell.load) == place)
        for place in places
    }
    names = [f"{EXTERNAL[place[0]]}, {place[1]}; rounds: {rounds[place]}" for place in places]
    lines = ["| TTFT p50 / p90, ms (computed) | " + " | ".join(names) + " |",
             "| --- |" + " ---: |" * len(places)]  # fmt: skip
    for arm in dict.fromkeys(cell.arm for cell in cells):
        row = [_brief(found.get((*place, arm))) for place in places]
        lines.append(f"| {arm} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _brief(cell: Cell | None) -> str:
    if cell is None:
        return ""
    computed = 1 - sum(cell.shares.values())
    return f"{cell.p50_ms[0]:,.0f} / {cell.p90_ms[0]:,.0f} ({computed:.0%})"


def write_page(page: str, cells: Sequence[Cell]) -> str:
    """Return the page with its table of external benchmarks replaced."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + page_table(cells) + "\n" + END + rest.partition(END)[2]


def external_tables(results: Path) -> Iterator[str]:
    """Yield the lines of the tables, with the extremes of the rounds in parentheses."""

    def spread(figures: tuple[float, float, float], form: str) -> str:
        middle, least, most = (format(figure, form) for figure in figures)
        return f"{middle} ({least} to {most})"

    yield f"In time: a first token within {IN_TIME_MS / 1000:g} s. Shares are of prompt tokens."
    yield "DRAM and SSD share what was loaded in the proportion of the look-ups in them."
    yield "Working set: tokens of all prompts, shared ones once, over those of GPU / DRAM / SSD."
    yield ""
    yield (
        "| benchmark | load | system | rounds | TTFT p50, ms | TTFT p90, ms | in time, 1/s |"
        " failed | from GPU | DRAM | SSD | cache | working set |"
    )
    yield "| --- | --- | --- |" + " ---: |" * 10
    for cell in external_cells(results):
        shares = " | ".join(f"{share:.0%}" for share in cell.shares.values())
        yield (
            f"| {cell.benchmark} | {cell.load} | {cell.arm} | {cell.rounds} | "
            f"{spread(cell.p50_ms, ',.0f')} | {spread(cell.p90_ms, ',.0f')} | "
            f"{spread(cell.in_time_per_s, '.2f')} | {cell.failed} | {shares} | {cell.sizes} |"
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
        " needle answers as a large GPU's, cold / again | aborts reused | finals reused |"
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
    """Draw p50 and p90 of each arm with the extremes of p50, a panel per benchmark and load."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        panels.setdefault((cell.benchmark, cell.load), []).append(cell)
    picture = Figure(figsize=(8, 1.7 * len(panels) + 0.3), layout="constrained")
    for axes, ((benchmark, load), shown) in zip(
        picture.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True
    ):
        for row, cell in enumerate(shown):
            colour = _COLOURS["DRAM"] if "FlexCache" in cell.arm else _COLOURS["cold"]
            middle, least, most = cell.p50_ms
            axes.barh(row, cell.p90_ms[0], height=0.7, color=colour, alpha=0.35)
            axes.barh(row, middle, height=0.7, color=colour)
            axes.plot([least, most], [row, row], color="black", lw=1)
            axes.text(
                max(cell.p90_ms[0], most), row, f"  {middle:,.0f} / {cell.p90_ms[0]:,.0f} ms",
                va="center", fontsize=8,
            )  # fmt: skip
        axes.set_yticks(range(len(shown)), [cell.arm for cell in shown], fontsize=8)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_visible(False)
        axes.set_xlim(0, 1.25 * max(max(cell.p90_ms[0], cell.p50_ms[2]) for cell in shown))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(f"{EXTERNAL[benchmark]}, {load}", loc="left", fontsize=9)
    picture.suptitle(
        "Time to first token, p50 (dark) and p90; SmolLM2-135M, two CPU cores", fontsize=10
    )
    save(picture, path, {f"{c.benchmark}, {c.load}, {c.arm}": [c.p50_ms[0], c.p90_ms[0]]
                         for c in cells})  # fmt: skip


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
    page = DOCS / "benchmarks.md"
    draw_gpu(read_gpu(page.read_text()), directory / "gpu.png")
    external = external_cells(RESULTS)
    if directory == DOCS:
        (RESULTS / "external.md").write_text("\n".join(external_tables(RESULTS)) + "\n")
        page.write_text(write_page(page.read_text(), external))
    draw_external(external, directory / "external.png")
