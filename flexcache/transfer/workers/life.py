"""Signs of life during slow work, such as compilation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_INTERVAL_S = 0.2


def show_life_during(work: Callable[[], T], show_life: Callable[[], None]) -> T:
    """Run work on another thread and show life, since it may outlast the server's patience."""
    with ThreadPoolExecutor(1, "flexcache-setup") as threads:
        done = threads.submit(work)
        while not wait([done], _INTERVAL_S).done:
            show_life()
        return done.result()
