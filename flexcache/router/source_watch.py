"""Judges by the answers of engines whether a publisher of KV events is misconfigured.

A router that hears nothing, or hears of blocks under other tokens than it sees in requests, still
routes, by load: nothing fails, only the gain is gone. Hence two rules:

* *silent*: workers computed many prompts since the publisher's last event, although each new block
  is an event.
* *unmatched*: the engine reports cached tokens time after time, and the index predicted none.

Pure.
"""

from __future__ import annotations

from enum import Enum

SILENT_REQUESTS = 50
SILENT_TOKENS = 20_000
"""Computed by that many requests at least: prompts shorter than a block store nothing."""
UNMATCHED_REQUESTS = 20
UNMATCHED_TOKENS = 64
"""Cached tokens from which a report counts."""


class Alarm(str, Enum):
    """What is wrong with a source."""

    SILENT = "silent"
    UNMATCHED = "unmatched"


class SourceWatch:
    """Watches one source.

    Attributes:
        alarms: What is wrong now.
    """

    def __init__(self) -> None:
        self.alarms: set[Alarm] = set()
        self._num_requests = 0
        self._num_tokens = 0
        self._num_unmatched = 0

    def event(self) -> None:
        """Note that the publisher said something."""
        self._num_requests = self._num_tokens = 0
        self.alarms.discard(Alarm.SILENT)

    def answered(
        self, num_tokens: int, predicted_tokens: int, cached_tokens: int | None
    ) -> Alarm | None:
        """Note that a worker of this source answered a prompt; return an alarm that is new.

        Args:
            num_tokens: Length of the prompt.
            predicted_tokens: What the index said was cached.
            cached_tokens: What the engine said was cached; None if it did not say.
        """
        self._note_computed(num_tokens - max(predicted_tokens, cached_tokens or 0))
        if predicted_tokens > 0:
            self._num_unmatched = 0
            self.alarms.discard(Alarm.UNMATCHED)
        elif cached_tokens is not None and cached_tokens >= UNMATCHED_TOKENS:
            self._num_unmatched += 1
        if self._num_requests >= SILENT_REQUESTS and self._num_tokens >= SILENT_TOKENS:
            return self._raise(Alarm.SILENT)
        if self._num_unmatched >= UNMATCHED_REQUESTS:
            return self._raise(Alarm.UNMATCHED)
        return None

    def _note_computed(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._num_requests += 1
            self._num_tokens += num_tokens

    def _raise(self, alarm: Alarm) -> Alarm | None:
        is_new = alarm not in self.alarms
        self.alarms.add(alarm)
        return alarm if is_new else None
