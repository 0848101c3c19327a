"""Compares what was predicted of requests with what happened. Pure."""

from __future__ import annotations

from flexcache.counters import Histogram
from flexcache.router.stats import CachedTokensStats, TTFTStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class CachedTokensAccuracy:
    """Counts requests by whether as many of their tokens were cached as predicted."""

    def __init__(self) -> None:
        self._exact = self._over = self._under = 0
        self._unreported = self._unpredicted = 0
        self._predicted_tokens = self._actual_tokens = self._prompt_tokens = 0

    def add(self, predicted: int | None, actual: int | None, num_tokens: int) -> None:
        """Count an answered request.

        Args:
            predicted: Cached tokens; None if the prompt's tokens were unknown.
            actual: Cached tokens that the engine reported; None if it did not.
            num_tokens: Length of the prompt.
        """
        if actual is None:
            self._unreported += predicted is not None
            return
        if predicted is None:
            self._unpredicted += 1
            return
        self._exact += predicted == actual
        self._over += predicted > actual
        self._under += predicted < actual
        self._predicted_tokens += predicted
        self._actual_tokens += actual
        self._prompt_tokens += num_tokens

    def stats(self) -> CachedTokensStats:
        return CachedTokensStats(
            exact=self._exact,
            over=self._over,
            under=self._under,
            unreported=self._unreported,
            unpredicted=self._unpredicted,
            predicted_tokens=self._predicted_tokens,
            actual_tokens=self._actual_tokens,
            prompt_tokens=self._prompt_tokens,
        )


class TTFTAccuracy:
    """Distributions of predicted and actual times to the first token, and of their difference."""

    def __init__(self) -> None:
        self._predicted, self._actual, self._error = (Histogram(_SECONDS) for _ in range(3))

    def add(self, predicted_s: float, actual_s: float) -> None:
        self._predicted.observe(predicted_s)
        self._actual.observe(actual_s)
        self._error.observe(abs(predicted_s - actual_s))

    def stats(self) -> TTFTStats:
        return TTFTStats(
            predicted_s=self._predicted.snapshot(),
            actual_s=self._actual.snapshot(),
            error_s=self._error.snapshot(),
        )
