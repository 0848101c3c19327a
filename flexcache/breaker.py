"""Circuit breaker: stops calls to a store or an engine that is down or slow, and retries later.

    closed --too many of the last calls failed--> open --back-off--> half open
       ^                                           ^                    |
       |                                           +---- a trial fails -+
       +------------------ several trials in a row succeed -------------+

While the breaker is half open, it gets only trials, which no caller waits for. The back-off
doubles with each opening, and starts over once the breaker has stayed closed for a while.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import deque

from flexcache.ids import BreakerState
from flexcache.stats import BreakerStats

_WINDOW = 32
# Fewer say too little: a single failure is no outage.
_MIN_CALLS = 4
_MAX_FAILED_SHARE = 0.25
_TRIALS_TO_CLOSE = 3
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_STABLE_AFTER_S = 60.0


class CircuitBreaker:
    """Records how calls ended and decides whether more may be made."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.num_openings = 0
        self.last_reason = ""
        self._calls: deque[bool] = deque(maxlen=_WINDOW)
        self._backoff_s = _FIRST_BACKOFF_S
        self._retry_at_s = 0.0
        self._closed_at_s = 0.0
        self._num_good_trials = 0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def succeeded(self, now: float) -> None:
        """Record that a call succeeded in time."""
        self._calls.append(True)
        if self.state is not BreakerState.HALF_OPEN:
            return
        self._num_good_trials += 1
        if self._num_good_trials >= _TRIALS_TO_CLOSE:
            self.state = BreakerState.CLOSED
            self._closed_at_s = now
            # Its failures of before say nothing of how it is now.
            self._calls.clear()

    def failed(self, reason: str, now: float) -> None:
        """Record that a call failed or took too long."""
        self._calls.append(False)
        num_failed = self._calls.count(False)
        num_calls = len(self._calls)
        is_bad = num_calls >= _MIN_CALLS and num_failed > _MAX_FAILED_SHARE * num_calls
        if is_bad or self.state is BreakerState.HALF_OPEN:
            self.trip(reason, now)

    def trip(self, reason: str, now: float) -> None:
        """Open at once, for example because the store's worker is gone."""
        if self.state is BreakerState.OPEN:
            return
        # One that fails again soon is retried less and less often.
        if self.state is BreakerState.CLOSED and now - self._closed_at_s > _STABLE_AFTER_S:
            self._backoff_s = _FIRST_BACKOFF_S
        self.state = BreakerState.OPEN
        self.num_openings += 1
        self.last_reason = reason
        self._retry_at_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    def wants_trial(self, now: float) -> bool:
        """Whether a trial call should be made; half-opens the breaker when its back-off ends."""
        if self.state is BreakerState.OPEN and now >= self._retry_at_s:
            self.state = BreakerState.HALF_OPEN
            self._num_good_trials = 0
        return self.state is BreakerState.HALF_OPEN

    def next_deadline(self) -> float | None:
        """Return when the answer of `wants_trial` changes by itself."""
        return self._retry_at_s if self.state is BreakerState.OPEN else None

    def stats(self) -> BreakerStats:
        return BreakerStats(
            state=self.state, openings=self.num_openings, last_reason=self.last_reason
        )
