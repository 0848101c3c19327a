"""Live view of a server or a router that continues after its process restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flexcache.errors import ServerLostError

Tree = TypeVar("Tree")
Rates = TypeVar("Rates")


class View(Generic[Tree, Rates]):
    """Reads statistics and renders them, with their rates since the last reading.

    Args:
        read: Returns statistics. May raise `ServerLostError`.
        rates_between: Returns the rates between two readings, this many seconds apart.
        render: Renders a reading for a width in characters.
    """

    def __init__(
        self,
        read: Callable[[], Tree],
        rates_between: Callable[[Tree, Tree, float], Rates | None],
        render: Callable[[Tree, Rates | None, int], RenderableType],
    ) -> None:
        self._read = read
        self._rates_between = rates_between
        self._render = render
        self._before: tuple[float, Tree] | None = None

    def look(self, width: int) -> RenderableType:
        """Return what there is to see now.

        Raises:
            ServerLostError: There is no answer. The next look has no rates.
        """
        before, self._before = self._before, None
        stats, now = self._read(), time.monotonic()
        self._before = now, stats
        rates = before and self._rates_between(before[1], stats, now - before[0])
        return self._render(stats, rates, width)


def watch(
    view: View[Tree, Rates], console: Console, interval_s: float, *, rounds: int | None = None
) -> None:
    """Show a view until interrupted.

    Args:
        rounds: Stop after this many readings.
    """
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while rounds is None or rounds > 0:
            try:
                live.update(view.look(console.width), refresh=True)
            except ServerLostError as lost:
                live.update(Text(f"waiting for a server: {lost}", "yellow"), refresh=True)
            if rounds is not None:
                rounds -= 1
            time.sleep(interval_s)
