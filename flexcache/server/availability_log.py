"""Log lines for tiers that begin or cease to take part, and for the remote store's breaker."""

from __future__ import annotations

import logging

from flexcache.ids import TierName
from flexcache.logs import log_event
from flexcache.tasks.engine import KVTaskEngine

logger = logging.getLogger(__name__)


class AvailabilityLog:
    """Logs changes, each once. A trial of the store that fails is no change."""

    def __init__(self, engine: KVTaskEngine) -> None:
        self._engine = engine
        self._breaker_was_closed = True
        self._unavailable = {tier.name for tier in engine.cache.tiers.lower}

    def update(self) -> None:
        """Log what has changed since the last call."""
        breaker = self._engine.breaker
        if breaker.is_closed is not self._breaker_was_closed:
            self._breaker_was_closed = breaker.is_closed
            if breaker.is_closed:
                log_event(logger, logging.INFO, "breaker_closed")
            else:
                log_event(logger, logging.WARNING, "breaker_opened", reason=breaker.last_reason)
        unavailable = self._engine.cache.tiers.unavailable
        if unavailable == self._unavailable:
            return
        for tier in TierName:
            if (tier in unavailable) is not (tier in self._unavailable):
                is_gone = tier in unavailable
                level = logging.WARNING if is_gone else logging.INFO
                event = "tier_unavailable" if is_gone else "tier_available"
                log_event(logger, level, event, tier=tier.value)
        self._unavailable = set(unavailable)
