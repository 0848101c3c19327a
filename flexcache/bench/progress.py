"""Shows which case is running, without disturbing it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
