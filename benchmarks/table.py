"""All targets in one table, from one command: what is reached, beside which bound or peer.

    python benchmarks/table.py [ONLY]... --traces DIR --venvs DIR [--dir DIR] [--out DIR]
        [--before DIR]

Runs the benchmarks that have targets one after the other, each within a time limit; none stops the
others. It takes half an hour on an idle machine, and an hour and a half at most, on a slow one: a
busy one misses what is absolute. Ends with the table, which is also in OUT/table.md beside what
each benchmark wrote; exit status 1 if one of them left no figures. `ONLY` selects benchmarks by
their names.

`--before DIR` names what an earlier run left, of an older checkout say; its figures are shown too.

A row's figure is measured *alone* (its target is absolute) or beside a bound or peer in the *same
run*. What this command does not run is *quoted* from benchmarks/results/2026-11-figures.md. A row
without a figure says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import report_figures as read
import search_path  # noqa: F401
import typer
from bounded_steps import Outcome, Step, run_steps
from report_figures import Figures, Reader
from rich.console import Console
from table_goals import AGENTS_TRACE, CHAT_TRACE, GOALS, QUOTED_ROWS, SSD_RUNS
from table_rows import Findings, Row, markdown, rows_for

HERE = Path(__file__).resolve().parent
TOTAL_S = 5400.0
_UNREADABLE = (OSError, ValueError, LookupError, TypeError)


@dataclass(frozen=True)
class Benchmark:
    """A program, and what its report says.

    Attributes:
        limit_s: Of each run.
        runs: How often it runs; a figure is the median.
        needs: What has to be given for it to run: "traces", "venvs", or nothing.
    """

    title: str
    program: str
    arguments: Sequence[str]
    limit_s: float
    reader: Reader = read.of_cases
    runs: int = 1
    needs: str = ""

    def steps(self, out: Path) -> list[Step]:
        """Return a step per run, each with a report of its own in `out`."""
        is_cli = self.program == "bench"
        program = ("-m", "flexcache.cli", "bench") if is_cli else (str(HERE / self.program),)
        return [
            Step(title, (sys.executable, *program, *self.arguments, "--json", str(out / file)),
                 self.limit_s)
            for title, file in ((title, f"{title}.json") for title in self.titles)
        ]  # fmt: skip

    @property
    def titles(self) -> list[str]:
        """The names of the runs."""
        if self.runs == 1:
            return [self.title]
        return [f"{self.title} {number}" for number in range(1, self.runs + 1)]

    def findings(self, outcomes: Mapping[str, Outcome], out: Path) -> Findings:
        """Read the reports of those runs that took place."""
        reports, reasons = list[Figures](), []
        for title in self.titles:
            if title not in outcomes:
                continue
            try:
                figures, failures = self._read(out / f"{title}.json")
                reports.append(figures)
                reasons.append(failures)
            except _UNREADABLE as error:
                said = outcomes[title].result
                reasons.append(f"unreadable report: {error!r}" if said == "passed" else said)
        reason = "; ".join(dict.fromkeys(filter(None, reasons)))
        return Findings(reports, reason or ("" if reports else self.absence))

    def findings_before(self, directory: Path) -> Findings:
        """Read what an earlier run, perhaps of older code, left of this benchmark."""
        reports = []
        for title in self.titles:
            with suppress(*_UNREADABLE):
                figures, _ = self._read(directory / f"{title}.json")
                reports.append(figures)
        return Findings(reports)

    def _read(self, path: Path) -> tuple[Figures, str]:
        """Read a report: its figures, and which of its cases failed."""
        report = json.loads(path.read_text())
        return self.reader(report), read.failures_in_cases(report)

    @property
    def absence(self) -> str:
        """Why there is no figure of it although nothing failed."""
        return f"needs --{self.needs}" if self.needs else "not chosen"


def benchmarks(directory: Path, traces: Path | None, venvs: Path | None) -> list[Benchmark]:
    """Return all of them, those that need the quietest machine first.

    Args:
        directory: For the files of tiers and stores.
    """
    tmp = ("--dir", str(directory))
    peers = () if venvs is None else ("--venvs", str(venvs))
    proxies = () if venvs is None else ("--peers", str(venvs))
    chat, agents = ((str(traces / name) if traces else "") for name in (CHAT_TRACE, AGENTS_TRACE))

    def hit_rates(title: str, trace: str, sizes: Sequence[int], *more: str) -> Benchmark:
        chosen = [word for size in sizes for word in ("--size", str(size))]
        arguments = ("--trace", trace, *chosen, *more)
        return Benchmark(
            title, "bench_eviction.py", arguments, 600, read.of_hit_rates, needs="traces"
        )

    return [
        Benchmark("server", "run.py", ("server", *tmp), 180),
        Benchmark("match", "run.py", ("control", "--only", "get_match, 131,072"), 120),
        Benchmark("allocate", "run.py", ("index", "--only", "50,000 leaves"), 180),
        Benchmark("index memory", "run.py", ("index", "--only", "memory of the index"), 120),
        Benchmark("request cost", "bench_request_cost.py", (), 120),
        Benchmark("DRAM", "bench", ("dram", "--only", "64 requests", *tmp), 180),
        Benchmark("SSD", "run.py", ("disk", *tmp), 180, runs=SSD_RUNS),
        Benchmark("restart", "bench_restart.py", ("--slots", "1000000", *tmp), 300),
        Benchmark("remote", "bench_remote.py", ("--store", "mooncake", "--store", "file"), 300),
        Benchmark("overhead", "bench_overhead.py", ("--model", "tiny", *tmp), 900),
        Benchmark("overhead, a core left", "bench_overhead.py",
                  ("--model", "tiny", "--spare", "1", "--only", "FlexCache", *tmp), 900),
        Benchmark("TTFT", "bench_ttft.py", ("--tokens", "4000", "--system", "vLLM alone",
                  "--system", "FlexCache", *tmp), 400),
        Benchmark("hits beside", "bench_hits_beside.py", tmp, 400),
        Benchmark("LMCache", "bench_peers.py", ("--only", "server", *peers, *tmp), 300,
                  needs="venvs"),
        Benchmark("proxy", "router/bench_proxy.py",
                  ("--aborts", "0", *tmp, *proxies), 400),
        Benchmark("router tokens", "router/bench_tokens.py", (), 300, read.of_tokens),
        Benchmark("router index", "router/bench_router_index.py", ("--workers", "1000", *peers),
                  600, read.of_router_index),
        hit_rates("hit rate, chat", chat, (1000, 2000, 5000, 10000, 20000, 50000)),
        hit_rates("hit rate, chat, half of all ends known", chat, (1000, 5000, 10000, 20000),
                  "--hints", "0.5"),
        hit_rates("hit rate, agents", agents, (1000, 2000, 5000, 20000)),
        Benchmark("decisions", "router/bench_decisions.py",
                  ("--conversation", chat, "--claude-code", agents), 1200, read.of_decisions,
                  needs="traces"),
    ]  # fmt: skip


def describe(
    rows: Sequence[Row], outcomes: Sequence[Outcome], before: Mapping[str, Row] | None = None
) -> Iterator[str]:
    """Yield the table, how many targets are reached, how long each step took and which failed."""
    yield from markdown(rows, before)
    known = [row for row in rows if row.reached is not None]
    num_reached, num_open = sum(row.reached is True for row in known), len(rows) - len(known)
    yield f"\n{num_reached} of {len(known)} targets are reached, {num_open} are open.\n"
    for outcome in outcomes:  # some programs also fail if they miss a target
        more = "" if outcome.passed else f": {outcome.result}; see {outcome.errors}"
        yield f"* {outcome.step.title}, {outcome.took_s:.0f} s{more}"


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Names of benchmarks.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Directory with both traces; none: no hit rates.")
    ] = None,
    venvs: Annotated[Path | None, typer.Option(help="Of peers; made where missing.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="For SSD tiers.")] = Path("."),
    out: Annotated[Path, typer.Option(help="For the table and all that is written.")] = Path(
        "table"
    ),
    before: Annotated[
        Path | None, typer.Option(help="The OUT of an earlier run.", exists=True, file_okay=False)
    ] = None,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    everything = benchmarks(directory.resolve(), traces, venvs and venvs.resolve())
    unknown = set(only or ()) - {each.title for each in everything}
    if unknown:
        names = ", ".join(each.title for each in everything)
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {names}")
    given = {"": True, "traces": traces is not None, "venvs": venvs is not None}
    chosen = [each for each in everything if given[each.needs] and (not only or each.title in only)]
    steps = [step for each in chosen for step in each.steps(out)]
    for step in steps:
        (out / f"{step.title}.json").unlink(missing_ok=True)
    outcomes = list(run_steps(steps, out, TOTAL_S, Console(stderr=True)))
    by_title = {outcome.step.title: outcome for outcome in outcomes}
    findings = {each.title: each.findings(by_title, out) for each in everything}
    goals = [goal for goal in GOALS if not only or goal.step in only]
    rows = [*rows_for(goals, findings), *(() if only else QUOTED_ROWS)]
    earlier = None
    if before is not None:
        found = {each.title: each.findings_before(before) for each in everything}
        earlier = {row.what: row for row in rows_for(goals, found)}
    text = "\n".join(describe(rows, outcomes, earlier))
    (out / "table.md").write_text(text + "\n")
    print(text)
    raise typer.Exit(int(not all(findings[each.title].reports for each in chosen)))


if __name__ == "__main__":
    typer.run(main)
