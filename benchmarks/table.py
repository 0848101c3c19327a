"""All targets in one table, from one command: what is reached, beside which bound or peer.

    python benchmarks/table.py [ONLY]... [--traces DIR] [--venvs DIR] [--out DIR]

Runs the benchmarks that have targets one after the other, each within a time limit; none stops the
others. It takes about an hour on an idle machine: a busy one misses what is absolute. Ends with
the table, which is also in OUT/table.md beside what each benchmark wrote; exit status 1 if one of
them left no figures. `ONLY` selects benchmarks by their names.

A row's figure is measured *alone* (its target is absolute) or beside a bound or peer in the *same
run*. What this command does not run is *quoted* from docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from bounded_steps import Outcome, Step, run_steps
from rich.console import Console
from table_rows import QUOTED, Row, markdown, rows_of_cases, rows_of_decisions, rows_of_hit_rates

HERE = Path(__file__).resolve().parent
TOTAL_S = 2 * 3600.0
TRACES = {
    # The shares of the way from LRU to the optimum to reach, by the tier's size in blocks.
    "conversation_trace.jsonl": {
        "1000": 0.18, "2000": 0.22, "5000": 0.21, "10000": 0.10, "20000": 0.10,
    },
    "claude_code_a.jsonl.gz": {"1000": 0.50, "2000": 0.50, "5000": 0.24},
}  # fmt: skip
QUOTED_ROWS = (
    Row("REMOTE, Mooncake and shared directory", "0.88 to 1.53x, 0.54 to 1.0x",
        "the store's own calls, in processor time", None, ">= 0.9x", False, QUOTED),
    Row("gap between tokens while others' hits are loaded, p99", "0.98 to 1.03x",
        "the same hits from vLLM's own cache", None, "<= 1.03x", True, QUOTED),
    Row("TTFT of those hits, DRAM / SSD", "1.27x / 1.35x", "the same", None,
        "<= 1.10x / 1.20x", False, QUOTED),
    Row("request cycles at 128k tokens of LMCache's server", "35/s", "", None, "", None, QUOTED),
)  # fmt: skip


def steps_for(directory: Path, traces: Path | None, venvs: Path | None) -> list[Step]:
    """Return the benchmarks, those that need the quietest machine first."""
    tmp = ("--dir", str(directory))
    peers = () if venvs is None else ("--venvs", str(venvs))

    def step(title: str, program: str, limit_s: float, *arguments: str, reads: str) -> Step:
        file = report_of(directory, title)
        command = (sys.executable, str(HERE / program), *arguments, "--json", str(file))
        return Step(title, command, limit_s, reads=reads)

    file = report_of(directory, "machine")
    machine = (sys.executable, "-m", "flexcache.cli", "bench", *tmp, "--json", str(file))
    steps = [
        step("control", "run.py", 600, *tmp, reads="cases"),
        Step("machine", machine, 900, reads="cases"),
        step("overhead", "bench_overhead.py", 1200, "--model", "tiny", *tmp, reads="cases"),
        step("TTFT", "bench_ttft.py", 1200, *tmp, *peers, reads="cases"),
        step("growth", "bench_growth.py", 1800, "--requests", "200000", reads="cases"),
        step("proxy", "router/bench_proxy.py", 600, reads="cases"),
    ]
    if traces is not None:
        for trace in TRACES:
            more = ("--trace", str(traces / trace))
            steps.append(step(trace, "bench_eviction.py", 900, *more, reads="rates"))
        chat = ("--conversation", str(traces / "conversation_trace.jsonl"))
        steps.append(step("decisions", "router/bench_decisions.py", 1800, *chat, reads="decisions"))
    return steps


def report_of(directory: Path, title: str) -> Path:
    """Return the file that a benchmark writes."""
    return directory / f"{title}.json"


def rows_of(outcome: Outcome) -> list[Row]:
    """Return the rows that a benchmark has written; none if it wrote nothing that can be read."""
    title = outcome.step.title
    try:
        report = json.loads(report_of(outcome.output.parent, title).read_text())
        match outcome.step.reads:
            case "cases":
                return list(rows_of_cases(report))
            case "rates":
                return list(rows_of_hit_rates(report, title, TRACES[title]))
            case _:
                return list(rows_of_decisions(report))
    except (OSError, ValueError, KeyError):
        return []


def describe(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table, how many targets are reached, and which benchmarks failed."""
    yield from markdown(rows)
    known = [row for row in rows if row.reached is not None]
    yield f"\n{sum(row.reached is True for row in known)} of {len(known)} targets are reached."
    for outcome in outcomes:
        if not outcome.passed:  # or it says that a target is missed
            yield f"* {outcome.step.title}: {outcome.result}; see {outcome.errors}"


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Names of benchmarks.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Directory with both traces; none: no hit rates.")
    ] = None,
    venvs: Annotated[Path | None, typer.Option(help="Of peers; made where missing.")] = None,
    out: Annotated[Path, typer.Option(help="For the table and all that is written.")] = Path(
        "table"
    ),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    directory = out.resolve()
    steps = steps_for(directory, traces, venvs)
    unknown = set(only or ()) - {step.title for step in steps}
    if unknown:
        names = ", ".join(step.title for step in steps)
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {names}")
    chosen = [step for step in steps if not only or step.title in only]
    outcomes = list(run_steps(chosen, directory, TOTAL_S, Console(stderr=True)))
    found = [rows_of(outcome) for outcome in outcomes]
    rows = [row for rows in found for row in rows]
    text = "\n".join(describe(outcomes, [*rows, *(() if only else QUOTED_ROWS)]))
    (directory / "table.md").write_text(text + "\n")
    print(text)
    raise typer.Exit(int(not all(found)))


if __name__ == "__main__":
    typer.run(main)
