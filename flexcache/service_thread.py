"""A daemon thread whose end can be waited for again and again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ServiceThread(threading.Thread):
    """Runs a function. `wait` holds where `join` does not: up to Python 3.12, an exception during a
    `join`, as that of Ctrl-C, may leave a thread that runs marked as ended (bpo-45274)."""

    def __init__(self, target: Callable[..., Any], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._over = threading.Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: There may be no more threads; its end has come.
        """
        try:
            super().start()
        except BaseException:
            self._over.set()
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether the function has come to its end.

        In a child of a fork there is no such thread.
        """
        return os.getpid() != self._pid or self._over.wait(timeout)
