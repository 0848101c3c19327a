"""Connector statistics in vLLM's own log line and on its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from flexcache.integration.counters import COUNTERS, increases

_COUNTERS = {
    **COUNTERS,
    "early_look_ups": "Look-ups at the remote store that began when a request arrived.",
    "early_loads": "Loads to DRAM that began before vLLM asked about their request.",
    "cancelled_look_ups": "Requests that went away before vLLM asked about them.",
}


@dataclass
class FlexCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Increases since the last report, by counter name."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> FlexCacheStats:
        return cls(increases(before, after))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        data = self.data
        hits = sum(data.get(f"{tier}_hit_tokens", 0) for tier in ("dram", "ssd", "remote"))
        looked_up = hits + data.get("missed_tokens", 0)
        shown = {k: round(v, 4) for k, v in data.items() if not k.endswith(("_bytes", "_seconds"))}
        shown["external_hit_rate"] = round(hits / looked_up, 4) if looked_up else 0.0
        for way, seconds in (("loaded", "load_seconds"), ("stored", "store_seconds")):
            if data.get(seconds):  # failed ops take time but may move nothing
                moved = data.get(f"{way}_bytes", 0)
                shown[f"{way}_GB_per_s"] = round(moved / data[seconds] / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class FlexCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter per statistic, labelled like vLLM's own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:flexcache_{name}", text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if value > 0:
                self._counters[name][engine_idx].inc(value)
