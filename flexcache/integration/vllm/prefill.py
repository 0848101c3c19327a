"""How fast the engine computes prompts, from the pace of its steps."""

from __future__ import annotations

from collections import deque

_MIN_TOKENS = 128  # below that a step is mostly decoding
_STEPS_TOGETHER = 8  # an engine that schedules ahead begins several at once
_NUM_RATES = 32
_NEWS = 0.05  # a change by less is none


class PrefillMeter:
    """Tokens per second over stretches of large steps, told when it changes.

    A single step says nothing: an engine that schedules ahead begins the next one before this one
    has been computed, and an idle one begins it much later. Over a stretch the first comes to
    little, and the quickest of the last stretches is one without a pause.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS_TOGETHER)
        self._told = 0.0

    def step(self, num_tokens: int, now: float) -> float | None:
        """A step of so many tokens begins. Returns the rate if it is news."""
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
