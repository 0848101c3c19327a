"""How fast the engine computes prompts, from the pace of its steps."""

from __future__ import annotations

from collections import deque

_MIN_TOKENS = 128  # below that a step is mostly decoding
_NUM_STEPS = 32
_NEWS = 0.05  # a change by less is none


class PrefillMeter:
    """Tokens per second of the quickest of the last large steps, told when it changes.

    A step lasts until the next one is scheduled, so an idle engine seems slow; the quickest step
    is the one that was followed at once.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_tokens = 0
        self._begun_s = 0.0
        self._told = 0.0

    def step(self, num_tokens: int, now: float) -> float | None:
        """A step of so many tokens begins. Returns the rate if it is news."""
        last, began = self._num_tokens, self._begun_s
        self._num_tokens, self._begun_s = num_tokens, now
        if last < _MIN_TOKENS or now <= began:
            return None
        self._rates.append(last / (now - began))
        rate = max(self._rates)
        if abs(rate - self._told) < _NEWS * self._told:
            return None
        self._told = rate
        return rate
