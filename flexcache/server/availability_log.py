"""Logs tiers that become available or unavailable, and the breaker of the remote store."""

from __future__ import annotations

import logging

from flexcache.ids import TierName
from flexcache.logs import log_event
from flexcache.tasks.engine import KVTaskEngine

logger = logging.getLogger(__name__)


class AvailabilityLog:
    """Logs each change once. A failed trial of the store is no change."""

    def __init__(self) -> None:
        self._breaker_was_closed = True
        self._unavailable: set[TierName] | None = None

    def update(self, tasks: KVTaskEngine) -> None:
        """Log what has changed since the last call. No tier is available before the first one."""
        outage = tasks.queries.store_outage
        if (outage is None) is not self._breaker_was_closed:
            self._breaker_was_closed = outage is None
            if outage is None:
                log_event(logger, logging.INFO, "breaker_closed")
            else:
                log_event(logger, logging.WARNING, "breaker_opened", reason=outage)
        if self._unavailable is None:
            self._unavailable = {tier.name for tier in tasks.cache.tiers.lower}
        unavailable = tasks.cache.tiers.unavailable
        if unavailable == self._unavailable:
            return
        for tier in TierName:
            if (tier in unavailable) is not (tier in self._unavailable):
                is_gone = tier in unavailable
                level = logging.WARNING if is_gone else logging.INFO
                event = "tier_unavailable" if is_gone else "tier_available"
                log_event(logger, level, event, tier=tier.value)
        self._unavailable = set(unavailable)
