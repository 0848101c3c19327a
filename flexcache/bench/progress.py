"""Says which case is running, without disturbing it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class CaseProgress:
    """A bar over the cases; where there is no terminal, a line for each.

    It is drawn only between cases: a thread that draws ten times a second would take the
    interpreter from what is being timed. While it is shown SIGTERM ends the run as Ctrl-C does.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, auto_refresh=False, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("preparing", total=None)
        self._previous: Any = None

    def announce(self, num_ended: int, total: int, title: str) -> None:
        self._progress.update(self._task, completed=num_ended, total=total, description=title)
        self._progress.refresh()
        if not self._console.is_terminal and num_ended < total:
            self._console.print(f"[{num_ended + 1}/{total}] {title}", markup=False, soft_wrap=True)

    def __enter__(self) -> CaseProgress:
        self._previous = signal.signal(signal.SIGTERM, _interrupt)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        signal.signal(signal.SIGTERM, self._previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
