"""Catalog of a router's metrics: name, meaning, and where the statistics have the value.

Names begin with ``flexcache_router_``. Labels are reasons and states known in advance, and the
names of workers, sources, caches and peers, which come from the router's configuration or
discovery: nothing from a request becomes a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexcache.metrics.metric import CatalogMetric
from flexcache.router.metrics.caches import CACHES
from flexcache.router.metrics.feed import INDEX, SOURCES
from flexcache.router.metrics.requests import PROCESSES, REQUESTS
from flexcache.router.metrics.routing import DECISIONS, WORKERS
from flexcache.router.stats import RouterStats

SECTIONS: Mapping[str, Sequence[CatalogMetric[RouterStats]]] = {
    "Router: decisions": DECISIONS,
    "Router: workers": WORKERS,
    "Router: index": INDEX,
    "Router: sources of events": SOURCES,
    "Router: early loads": CACHES,
    "Router: requests": REQUESTS,
    "Router: processes and peers": PROCESSES,
}
CATALOG: Sequence[CatalogMetric[RouterStats]] = [
    metric for section in SECTIONS.values() for metric in section
]
