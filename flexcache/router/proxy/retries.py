"""Limits retries: when all engines fail, retries would multiply the load."""

from __future__ import annotations

from flexcache.errors import InternalError


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    Args:
        ratio: What a request adds; a retry takes 1.
        burst: What the bucket holds, and starts with.
    """

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = burst
        self._tokens = float(burst)

    def add_request(self) -> None:
        self._tokens = min(self._tokens + self._ratio, self._burst)

    def take_retry(self) -> bool:
        """Return whether a retry is allowed, and count it."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def check(self) -> None:
        """Check invariants.

        Raises:
            InternalError: One does not hold.
        """
        if not 0.0 <= self._tokens <= self._burst:
            raise InternalError(f"{self._tokens} tokens in a bucket of {self._burst}")
