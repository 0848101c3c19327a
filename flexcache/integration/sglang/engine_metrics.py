"""FlexCache's counters among SGLang's own metrics (``--enable-metrics``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from flexcache.integration.adapter import COUNTERS, increases, read_counters, safely
from flexcache.manager import KVManager

_INTERVAL_S = 1.0


class EngineMetrics:
    """The counters of one rank's cache, ``sglang:flexcache_..._total``."""

    def __init__(self, manager: KVManager, page_size: int) -> None:
        self._manager = manager
        self._page_size = page_size
        self._reported: Mapping[str, float] = {}
        self._due_s = 0.0

    def report(self, labels: Mapping[str, str]) -> None:
        """Add what has happened since the last report, once a second at most.

        Args:
            labels: Those of SGLang's scheduler.
        """
        now = time.monotonic()
        if now < self._due_s:
            return
        self._due_s = now + _INTERVAL_S
        stats = safely(self._manager.stats)
        if stats is None:
            return
        counters = read_counters(stats, self._page_size)
        for name, gain in increases(self._reported, counters).items():
            _counter(name, tuple(labels)).labels(**labels).inc(gain)
        self._reported = counters


@cache
def _counter(name: str, labels: tuple[str, ...]) -> Any:
    import prometheus_client  # SGLang sets its directory before the first import

    return prometheus_client.Counter(f"sglang:flexcache_{name}", COUNTERS[name], labels)
