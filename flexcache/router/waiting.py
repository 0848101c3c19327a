"""Waits and turns of the loops that run beside the requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flexcache.logs import log_event

logger = logging.getLogger(__name__)


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set or the time is over; returns whether it is set.

    `asyncio.wait_for` loses a cancellation that comes together with the event, before Python 3.12.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiting,), timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()


class Turns:
    """Keeps a loop going when one of its turns fails.

    Args:
        loop: Its name, for the log.
        about: What it works on; may be empty.
    """

    def __init__(self, loop: str, about: str = "") -> None:
        self._loop = loop
        self._about = about
        self._failure = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run a turn. A failure is logged if the turn before did not fail in the same way."""
        try:
            yield
        except Exception as error:
            failure = repr(error)
            if failure != self._failure:  # a loop that fails ten times a second fills no disk
                log_event(
                    logger, logging.ERROR, "router_loop_failed", loop=self._loop,
                    about=self._about or None, error=failure, effect="it is tried again",
                    exc_info=True,
                )  # fmt: skip
            self._failure = failure
        else:
            self._failure = ""


class OnceAMinute:
    """Says when something that may happen very often is to be logged."""

    def __init__(self) -> None:
        self._due_s: dict[str, float] = {}

    def is_due(self, about: str = "") -> bool:
        """Return whether it was not logged within the last minute, and note that it is now."""
        now = time.monotonic()
        if now < self._due_s.get(about, now):
            return False
        self._due_s = {key: due for key, due in self._due_s.items() if due > now}
        self._due_s[about] = now + 60.0
        return True
