"""Measures how fast the engine computes prompts, from the pace of its steps."""

from __future__ import annotations

from collections import deque

_MIN_TOKENS = 128  # below that a step is mostly decoding
_STEPS_TOGETHER = 8  # an engine that schedules ahead starts several at once
_NUM_RATES = 32
_NEWS = 0.05  # smaller changes are not reported


class PrefillMeter:
    """Measures tokens per second over sequences of large steps.

    A single step shows nothing: an engine that schedules ahead starts the next step before this one
    was computed, and an idle engine starts it much later. Over several steps the first effect is
    small, and the fastest of the recent sequences had no pause.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS_TOGETHER)
        self._told = 0.0

    def step(self, num_tokens: int, now: float) -> float | None:
        """Record the start of a step of ``num_tokens``; return the rate if it has changed."""
        if len(self._steps) == _STEPS_TOGETHER and now > self._steps[0][1]:
            total = sum(tokens for tokens, _ in self._steps)
            self._rates.append(total / (now - self._steps[0][1]))
        if num_tokens < _MIN_TOKENS:
            self._steps.clear()
        else:
            self._steps.append((num_tokens, now))
        rate = max(self._rates, default=0.0)
        if rate == 0 or abs(rate - self._told) < _NEWS * self._told:
            return None
        self._told = rate
        return rate
