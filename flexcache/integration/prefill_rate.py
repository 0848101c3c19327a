"""Measures how fast an engine computes prompts, from the times of its batches."""

from __future__ import annotations

from collections import deque

_MIN_TOKENS = 128  # a smaller batch says little
_NUM_BATCHES = 32
_NEWS = 0.05  # smaller changes are not reported


class PrefillRate:
    """Computes tokens per second of the recent prefills.

    A batch that is launched while another one runs begins when that one ends. The rate is that of
    the batch in which the median token was computed: a mean would remember a first batch that
    compiled kernels for seconds, and count small batches, which use a GPU badly, like large ones.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, int]] = deque(maxlen=_NUM_BATCHES)
        self._last_end_s = 0.0
        self._reported = 0.0

    def batch_ended(self, num_tokens: int, launched_s: float, now: float) -> float | None:
        """Record a batch; return the rate if it has changed.

        Args:
            num_tokens: Tokens of prompts that it computed; 0 if it did other things, too.
        """
        begin_s = max(launched_s, self._last_end_s)
        self._last_end_s = now
        if num_tokens < _MIN_TOKENS or now <= begin_s:
            return None
        self._batches.append((num_tokens / (now - begin_s), num_tokens))
        rate = self._median()
        if abs(rate - self._reported) < _NEWS * self._reported:
            return None
        self._reported = rate
        return rate

    def _median(self) -> float:
        left = sum(num_tokens for _, num_tokens in self._batches) / 2
        for rate, num_tokens in sorted(self._batches, reverse=True):
            left -= num_tokens
            if left <= 0:
                return rate
        return 0.0
