"""Live view of a server that continues after the server restarts."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flexcache.errors import ServerLostError
from flexcache.status.rates import rates_between
from flexcache.status.view import render
from flexcache.tasks.stats import Stats


def watch(
    read: Callable[[], Stats], console: Console, interval_s: float, *, rounds: int | None = None
) -> None:
    """Show what ``read`` returns until interrupted.

    Args:
        read: Returns statistics. May raise `ServerLostError`; it is then called again.
        rounds: Stop after this many readings.
    """
    before: tuple[float, Stats] | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while rounds is None or rounds > 0:
            try:
                stats = read()
            except ServerLostError as lost:
                before = None
                live.update(Text(f"waiting for a server: {lost}", "yellow"), refresh=True)
            else:
                now = time.monotonic()
                rates = before and rates_between(before[1], stats, now - before[0])
                before = now, stats
                live.update(render(stats, rates, console.width), refresh=True)
            if rounds is not None:
                rounds -= 1
            time.sleep(interval_s)
