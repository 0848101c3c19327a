"""Slow jobs, run one after another on a thread of their own.

A disk that hangs blocks this thread alone. Jobs beyond a bound are refused with the reason, and the
end of the server waits for the thread for a limited time.
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
class BackgroundJob:
    """``work`` runs on another thread; ``end`` is called with its error, as an event."""

    work: Callable[[], None]
    end: Callable[[Exception | None], None]


class BackgroundThread:
    """Runs jobs in order.

    Args:
        end: Ends a job, with its error, as an event of the server. Called on this thread and, for a
            refused job, on the caller's.
    """

    def __init__(self, end: Callable[[BackgroundJob, Exception | None], None]) -> None:
        self._end = end
        self._waiting: queue.Queue[BackgroundJob | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def begin(self, job: BackgroundJob) -> None:
        """Queue a job; or end it at once with an error, if too many are waiting."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="flexcache-background", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            error = OSError(f"the disk is behind: {MAX_WAITING} jobs of this kind wait for it")
            self._end(job, error)

    def close(self) -> bool:
        """Finish the queued jobs, for a few seconds at most; whether all are done. Idempotent."""
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
        while (job := self._waiting.get()) is not None:
            try:
                self._end(job, error_of(job.work))
            except Exception:  # the next job must still run
                log_event(logger, logging.ERROR, "aside_failed", exc_info=True)


def error_of(work: Callable[[], None]) -> Exception | None:
    """Run a piece of work; return its error, if any, and log one that is not the disk's."""
    try:
        work()
    except OSError as error:
        return error
    except Exception as error:  # who waits for its end must still hear of it
        log_event(logger, logging.ERROR, "aside_failed", exc_info=True)
        return error
    return None
