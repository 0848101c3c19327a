"""Whether an engine takes requests: from regular probes, and from how its requests end.

A probe that is refused or answered with an error takes the engine out at once; one without an
answer counts only after several, because a busy engine answers late. Requests that fail open a
circuit breaker even while probes succeed; further probes are its trials. Pure: time is handed in.
"""

from __future__ import annotations

from enum import Enum

from flexcache.errors import InternalError
from flexcache.ids import BreakerState
from flexcache.router.chooser import Outcome
from flexcache.transfer.breaker import CircuitBreaker

_PATIENCE = 3
"""Probes without an answer, one after the other, that take an engine out."""


class Probe(Enum):
    """How a probe ended."""

    GOOD = "good"
    BAD = "bad"
    """Refused, or answered with an error."""
    LATE = "late"


class Health:
    """The health of one engine.

    Attributes:
        is_up: Whether the last probes found it serving; False before the first.
        circuit: Opened by failing requests.
        num_failures: Probes that failed since startup.
        was_probed: Whether a probe has ended.
    """

    def __init__(self) -> None:
        self.is_up = False
        self.circuit = CircuitBreaker()
        self.num_failures = 0
        self.was_probed = False
        self._num_late = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests end well there, as far as is known."""
        return self.circuit.state is BreakerState.CLOSED

    def probed(self, probe: Probe, now: float) -> None:
        """Take note of a probe."""
        self.was_probed = True
        if probe is Probe.GOOD:
            self._num_late = 0
            self.is_up = True
            if self.circuit.wants_trial(now):
                self.circuit.succeeded(now)
            return
        self.num_failures += 1
        self._num_late += 1
        if probe is Probe.BAD or self._num_late >= _PATIENCE:
            self.is_up = False
        if self.circuit.wants_trial(now):
            self.circuit.failed("probe", now)

    def ended(self, outcome: Outcome, now: float) -> bool:
        """Take note of the end of a request.

        Returns:
            Whether the engine should be probed at once.
        """
        if not self.is_trusted:  # only probes are trials: they cost no client anything
            return False
        if outcome in (Outcome.REFUSED, Outcome.BROKEN):
            self.circuit.failed(outcome.value, now)
            return True
        if outcome is Outcome.DONE:
            self._num_late = 0  # it answers, if not its probes
            self.circuit.succeeded(now)
        return False

    def check(self) -> None:
        """
        Raises:
            InternalError: It is up without a probe.
        """
        if self.is_up and not self.was_probed:
            raise InternalError("an engine is up that was never probed")
