"""Catalog of a server's metrics: name, meaning, and where the statistics have the value.

The collector serves them, `docs/metrics.md` is generated from them, and a test changes each of
them. Names begin with ``flexcache_``, units are bytes, seconds, tokens and blocks, and the names of
counters end in ``_total``. Labels have few values, known in advance, except for engine names:
nothing from a request becomes a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexcache.metrics.metric import Metric
from flexcache.metrics.server import EVENTS_AND_TRACES, PROCESSES, SERVER
from flexcache.metrics.tasks import OPS, REMOTE, SESSIONS, TASKS
from flexcache.metrics.tiers import HITS_AND_MISSES, QUOTAS, REMOTE_COST, TIERS
from flexcache.tasks.stats import Stats

SECTIONS: Mapping[str, Sequence[Metric[Stats]]] = {
    "Hits and misses": HITS_AND_MISSES,
    "Tiers": TIERS,
    "Quotas": QUOTAS,
    "Ops": OPS,
    "Tasks": TASKS,
    "Sessions and early loads": SESSIONS,
    "Remote store and slow tiers": (*REMOTE, *REMOTE_COST),
    "Processes and messages": PROCESSES,
    "Events and traces": EVENTS_AND_TRACES,
    "Server": SERVER,
}
CATALOG: Sequence[Metric[Stats]] = [metric for section in SECTIONS.values() for metric in section]


def describe_metrics(sections: Mapping[str, Sequence[Metric[Any]]]) -> list[dict[str, str]]:
    """Return section, name, type, labels and meaning of each metric, for the documentation."""
    return [
        {
            "section": title,
            "name": metric.name,
            "type": metric.type.value,
            "labels": ", ".join(metric.labels),
            "meaning": metric.help,
        }
        for title, section in sections.items()
        for metric in section
    ]
