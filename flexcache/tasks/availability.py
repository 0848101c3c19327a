"""Availability: which of the lower tiers take part, by one rule for SSD and the remote store.

A tier takes part while its worker is up and its breaker, if it has one, is closed. One that does
not is neither read nor written: gets plan what the other tiers have, write-throughs skip it, and
what is dirty stays dirty.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from flexcache.ids import TierName
from flexcache.tasks.routes import WORKERS
from flexcache.transfer.breaker import CircuitBreaker


class Availability:
    """Applies the rule to the tiers below DRAM.

    Args:
        tiers: Names of these tiers. None takes part before the first `sync`.
        breakers: Breakers of tiers that can be given up while their worker is up.
        unavailable: Receives the names of tiers that do not take part: the set that plans are
            made by.
    """

    def __init__(
        self,
        tiers: Iterable[TierName],
        breakers: Mapping[TierName, CircuitBreaker],
        unavailable: set[TierName],
    ) -> None:
        self._tiers = tuple(tiers)
        self._breakers = breakers
        self._unavailable = unavailable
        unavailable.update(self._tiers)

    def takes_part(self, tier: TierName, up: Container[str]) -> bool:
        """Apply the rule to one tier. ``up`` has the names of the workers that are up."""
        breaker = self._breakers.get(tier)
        return WORKERS[tier] in up and (breaker is None or breaker.is_closed)

    def sync(self, up: Container[str]) -> list[TierName]:
        """Apply the rule to every tier; returns those that have just become unavailable."""
        lost = []
        for tier in self._tiers:
            if self.takes_part(tier, up):
                self._unavailable.discard(tier)
            elif tier not in self._unavailable:
                self._unavailable.add(tier)
                lost.append(tier)
        return lost

    def check(self, up: Container[str]) -> bool:
        """Whether the set of unavailable tiers agrees with the rule."""
        return all(self.takes_part(t, up) is (t not in self._unavailable) for t in self._tiers)
