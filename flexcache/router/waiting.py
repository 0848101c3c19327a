"""Waits for an event of asyncio, for some time at most."""

from __future__ import annotations

import asyncio


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
