"""A daemon thread whose end can be waited for again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ServiceThread(threading.Thread):
    """Runs a function. `wait` holds where `join` does not: up to Python 3.12, an exception during a
    `join`, as that of Ctrl-C, may leave a thread that runs marked as ended (bpo-45274)."""

    def __init__(self, target: Callable[..., Any], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._over = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether the function has come to its end."""
        return self._over.wait(timeout)
