"""Jobs that take too long for the pump: a thread of their own does one after the other.

A disk that hangs holds up this thread alone. What then piles up is refused by name, and the
server's end waits for it for a limited time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flexcache.logs import log_event

logger = logging.getLogger(__name__)

MAX_WAITING = 16
_CLOSE_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Aside:
    """``work`` is for another thread; ``end`` is to be called with its error, as an event."""

    work: Callable[[], None]
    end: Callable[[OSError | None], None]


class AsideThread:
    """Runs asides in order.

    Args:
        end: Ends an aside, with its error, as an event of the server; also on the caller's thread.
    """

    def __init__(self, end: Callable[[Aside, OSError | None], None]) -> None:
        self._end = end
        self._waiting: queue.Queue[Aside | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def begin(self, aside: Aside) -> None:
        """Have it done in its turn; or end it at once, undone, where too many wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flexcache-aside", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(aside)
        except queue.Full:
            error = OSError(f"the disk is behind: {MAX_WAITING} jobs of this kind wait for it")
            self._end(aside, error)

    def close(self) -> bool:
        """Do what waits, for a few seconds at most; whether all is done. Idempotent."""
        if self._thread is None:
            return True
        deadline = time.monotonic() + _CLOSE_PATIENCE_S
        try:
            self._waiting.put(None, timeout=_CLOSE_PATIENCE_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if not self._thread.is_alive():
            return True
        log_event(
            logger, logging.ERROR, "disk_hangs", patience_s=_CLOSE_PATIENCE_S,
            effect="the files of the SSD tier stay open until the process ends",
        )  # fmt: skip
        return False

    def _run(self) -> None:
        while (aside := self._waiting.get()) is not None:
            try:
                self._end(aside, error_of(aside.work))
            except Exception:  # the next one is to have its turn
                log_event(logger, logging.ERROR, "aside_failed", exc_info=True)


def error_of(work: Callable[[], None]) -> OSError | None:
    """Do it; what went wrong."""
    try:
        work()
    except OSError as error:
        return error
    return None
