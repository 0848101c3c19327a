"""Run cases that need peers or a vLLM engine, and show their results as `flexcache bench` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexcache.bench.report import show_report, write_json
from flexcache.bench.suite import Case, Report, Settings, describe_machine, run_case

Say = Callable[[str], None]
"""Told what a long case is at."""


def run_and_show(
    make_cases: Callable[[Say], Mapping[str, Sequence[Case]]],
    directory: Path,
    json_file: Path | None,
) -> int:
    """Run cases by section, print tables, keep every sample; returns the exit status.

    Args:
        directory: Where files are written; it is described with the machine.
    """
    started = time.monotonic()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = Report(Settings(directory=directory), describe_machine(directory), now)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("{task.fields[at]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("cases", at="")
        sections = make_cases(lambda at: progress.update(task, at=at))
        progress.update(task, total=sum(map(len, sections.values())))
        try:
            for section, cases in sections.items():
                for case in cases:
                    progress.update(task, at=f"{section}: {case.title}")
                    report.cases.append(run_case(section, case))
                    progress.advance(task)
        except KeyboardInterrupt:
            report.was_interrupted = True
    report.took_s = time.monotonic() - started
    show_report(report, Console(width=150))
    if json_file is not None:
        write_json(report, json_file)
    return int(report.has_failed or report.was_interrupted)


def computing_threads(spare: int) -> int:
    """Return how many threads a model computes with that leaves so many processors.

    Raises:
        BadParameter: That leaves it none.
    """
    num_threads = len(os.sched_getaffinity(0)) - spare
    if num_threads < 1:
        raise typer.BadParameter(f"--spare {spare} leaves the model no processor")
    return num_threads
