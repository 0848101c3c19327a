"""Serves a catalog's metrics with prometheus-client. Nothing is counted here: a scrape reads the
statistics once, and between scrapes there is no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic

from flexcache.errors import MissingDependencyError
from flexcache.metrics.metric import Metric, MetricType, Tree
from flexcache.tasks.stats import HistogramStats

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


class StatsCollector(Generic[Tree]):
    """A collector of prometheus-client.

    Args:
        catalog: The metrics.
        read_stats: Returns the statistics as they are now.
    """

    def __init__(self, catalog: Sequence[Metric[Tree]], read_stats: Callable[[], Tree]) -> None:
        self._catalog = catalog
        self._read_stats = read_stats

    def collect(self) -> Iterator[Any]:
        stats = self._read_stats()
        return (_family(metric, stats) for metric in self._catalog)


class Exposition(Generic[Tree]):
    """The metrics as text.

    Args:
        catalog: The metrics.
        read_stats: Returns the statistics as they are now.
    """

    def __init__(self, catalog: Sequence[Metric[Tree]], read_stats: Callable[[], Tree]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(catalog, read_stats))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as they are now, and their content type, for an ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _family(metric: Metric[Tree], stats: Tree) -> Any:
    family = _FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.read(stats):
        if isinstance(value, HistogramStats):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(labels, buckets, value.sum)
        else:
            family.add_metric(labels, value)
    return family
