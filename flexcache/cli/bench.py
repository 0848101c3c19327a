"""`flexcache bench`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexcache.errors import ConfigError
from flexcache.terminal import user_errors, wide_console

if TYPE_CHECKING:
    from flexcache.bench.suite import Settings

Only = Annotated[str, typer.Option(help="Run only cases whose title contains this.")]
Thorough = Annotated[
    bool, typer.Option("--thorough", help="Larger and longer runs: many minutes instead of two.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with status 1 also if a target is missed.")
]
Directory = Annotated[
    Path | None, typer.Option("--dir", help="Directory for the files of the SSD tier and stores.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Plot the ratios to this file (.png, .svg, .pdf).")
]
Seed = Annotated[int, typer.Option(help="Seed of all random data.")]


def bench(
    sections: Annotated[
        list[str] | None, typer.Argument(help="Sections to run. Default: all.", show_default=False)
    ] = None,
    only: Only = "",
    thorough: Thorough = False,
    strict: Strict = False,
    directory: Directory = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    remote_url: Annotated[
        str | None, typer.Option(help="URL of a remote store to measure as well.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Measure what this machine can do, and how close FlexCache comes.

    Sections: dram, ssd, remote, gpu. Each figure is shown beside a bound measured in the same run.
    Exits with status 1 if a case failed.
    """
    from flexcache.bench.suite import SECTIONS, Settings, choose_sections

    with user_errors():
        chosen = choose_sections(sections or (), SECTIONS)
        settings = Settings(chosen, only, thorough, directory, seed, remote_url)
    run_and_report(settings, strict=strict, json_file=json_file, plot_file=plot_file)


def run_and_report(
    settings: Settings, *, strict: bool, json_file: Path | None, plot_file: Path | None
) -> None:
    """Run cases, show the results, write the requested files, and set the exit status."""
    from flexcache.bench.report import check_plot_file, draw, show_report, write_json
    from flexcache.bench.suite import run_suite

    console = Console()
    with user_errors(console):
        for path in filter(None, (json_file, plot_file)):
            _check_writable(path)
        if plot_file is not None:
            check_plot_file(plot_file)
        with CaseProgress(Console(stderr=True)) as progress:
            report = run_suite(settings, progress.announce)
        show_report(report, wide_console(console))
        if json_file is not None:
            write_json(report, json_file)
        if plot_file is not None:
            draw(report, plot_file)
    if report.was_interrupted:
        raise typer.Exit(130)
    if report.has_failed or (strict and report.misses_targets):
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Raise `ConfigError` before minutes are spent on results that cannot be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written")


class CaseProgress:
    """A progress bar over the cases; without a terminal, a line per case.

    It is drawn only between cases: a thread that draws ten times a second would compete for the
    interpreter with what is being timed.

    Meanwhile SIGTERM ends the run like Ctrl-C. If the signal arrives during a finalizer, where
    Python drops exceptions, the run ends before the next case.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, auto_refresh=False, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("preparing", total=None)
        self._was_interrupted = False
        self._previous: dict[int, Any] = {}

    def announce(self, num_ended: int, total: int, title: str) -> None:
        if self._was_interrupted:
            raise KeyboardInterrupt
        self._progress.update(self._task, completed=num_ended, total=total, description=title)
        self._progress.refresh()
        if not self._console.is_terminal and num_ended < total:
            self._console.print(f"[{num_ended + 1}/{total}] {title}", markup=False, soft_wrap=True)

    def __enter__(self) -> CaseProgress:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # background jobs ignore it
                self._previous[number] = signal.signal(number, self._interrupt)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._was_interrupted = True
        raise KeyboardInterrupt
