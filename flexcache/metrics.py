"""Prometheus exposition of counters: a scrape reads the statistics once, and nothing is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from flexcache.counters import Counters, Family, Histogram, MetricType, Sample, families, samples
from flexcache.errors import MissingDependencyError

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise MissingDependencyError(
        "metrics need the package prometheus-client: pip install '.[http]', "
        "or '.[router]' for a router",
        name=error.name,
    ) from None

_FAMILIES = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}


class Exposition:
    """The metrics of a tree of counters, as text.

    Args:
        kind: What ``read_stats`` returns.
        read_stats: Returns the statistics as they are now.
    """

    def __init__(self, kind: type[Counters], read_stats: Callable[[], Counters]) -> None:
        self._families = families(kind)
        self._read_stats = read_stats
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield what prometheus-client encodes."""
        found = samples(self._read_stats())
        for each in self._families:
            yield _family(each, found.get(each.name, ()))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as they are now, and their content type, for an ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _family(metric: Family, rows: Iterable[Sample]) -> Any:
    family = _FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
    for labels, value in rows:
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(labels, buckets, value.sum)
        else:
            family.add_metric(labels, value)
    return family
