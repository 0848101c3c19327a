"""Runs programs one after the other, each within a time limit; none stops the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_LOOK_S = 0.1
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """A program to run.

    Attributes:
        title: What it is called; also the name of its files.
        limit_s: Seconds after which it is killed, with all processes that it has started.
        reads: How its output is to be shown.
    """

    title: str
    command: Sequence[str]
    limit_s: float
    reads: str = "all"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step went.

    Attributes:
        result: "passed", or how it failed.
        output, errors: Files with what it printed.
    """

    step: Step
    result: str
    took_s: float
    output: Path
    errors: Path

    @property
    def passed(self) -> bool:
        return self.result == "passed"


def run_steps(
    steps: Sequence[Step], directory: Path, total_s: float, console: Console
) -> Iterator[Outcome]:
    """Run the steps and yield their outcomes. Those that no time is left for are left out.

    Args:
        directory: For the files of the steps' output.
        total_s: Seconds for all of them.
    """
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console,
        transient=True,
    ) as progress:  # fmt: skip
        for number, step in enumerate(steps, 1):
            left_s = total_s - (time.monotonic() - began)
            limit_s = min(step.limit_s, left_s)
            heading = f"[{number}/{len(steps)}] {step.title}"
            if limit_s <= 0:
                outcome = _outcome(step, directory, "left out: no time", 0.0)
            else:
                console.print(f"{heading}, at most {limit_s:.0f} s", markup=False)
                task = progress.add_task(step.title, total=limit_s)
                outcome = _run(step, directory, limit_s, progress, task)
                progress.remove_task(task)
            took = f" after {outcome.took_s:.0f} s" if outcome.took_s else ""
            console.print(f"{heading}: {outcome.result}{took}", markup=False)
            yield outcome


def _outcome(step: Step, directory: Path, result: str, took_s: float) -> Outcome:
    base = directory / step.title.replace(" ", "-")
    return Outcome(step, result, took_s, base.with_suffix(".txt"), base.with_suffix(".err.txt"))


def _run(step: Step, directory: Path, limit_s: float, progress: Progress, task: object) -> Outcome:
    files = _outcome(step, directory, "", 0.0)
    began = time.monotonic()
    with files.output.open("wb") as output, files.errors.open("wb") as errors:
        try:
            process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as failure:
            return _outcome(step, directory, f"not started: {failure.strerror}", 0.0)
        result = "interrupted"
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                progress.update(task, completed=time.monotonic() - began)  # type: ignore[arg-type]
            result = _result(process.poll(), limit_s)
        finally:
            _end(process)
    return _outcome(step, directory, result, time.monotonic() - began)


def _result(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"killed after {limit_s:.0f} s"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return "passed" if code == 0 else f"failed ({code})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a step. A process that hangs in the kernel is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
