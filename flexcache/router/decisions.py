"""Decisions and what became of them, one event each, for those that watch a router live.

``GET /decisions`` of the control port streams them as server-sent events.
"""

from __future__ import annotations

import msgspec


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="decided"):
    """A request was sent to a worker. Nothing in it comes from the prompt.

    Attributes:
        time: UNIX time in seconds, as in the others.
        matched: Predicted cached tokens by tier; None if the tokens are unknown.
        ttft_s: Predicted; None before the service time is known.
        queued_s: How long it waited for a worker.
        attempt: 0, or how often it was sent to others before.
    """

    time: float
    request_id: str
    worker: str
    reason: str
    num_tokens: int
    matched: dict[str, int] | None
    ttft_s: float | None
    queued_s: float
    attempt: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """A request ended at its worker.

    Attributes:
        outcome: An `Outcome`.
        predicted_tokens: Predicted cached tokens; None if they were unknown.
        cached_tokens: Reported by the engine; None if it did not.
        ttft_s: Measured; None if no token came. ``predicted_ttft_s`` likewise predicted.
        total_s: From the choice to the end.
    """

    time: float
    request_id: str
    worker: str
    outcome: str
    predicted_tokens: int | None
    cached_tokens: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    predicted_ttft_s: float | None
    ttft_s: float | None
    total_s: float


class Skipped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="skipped"):
    """Events that a watcher did not read in time, and that it does not get."""

    time: float
    count: int


RouterEvent = Decided | Ended | Skipped


def to_server_sent(event: RouterEvent) -> bytes:
    """Encode for ``GET /decisions``, ``text/event-stream``: an unnamed event with JSON as data."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
