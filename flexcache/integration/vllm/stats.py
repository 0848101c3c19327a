"""Connector statistics in vLLM's own log line and on its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from flexcache.tasks.stats import TotalsStats

_COUNTERS = {
    "dram_hit_tokens": "Prompt tokens whose KV came from DRAM.",
    "ssd_hit_tokens": "Prompt tokens whose KV came from SSD.",
    "remote_hit_tokens": "Prompt tokens whose KV came from the remote store.",
    "missed_tokens": "Prompt tokens that were looked up and not found.",
    "stored_tokens": "Tokens whose KV was copied off the GPU.",
    "loaded_bytes": "Bytes copied to the GPU.",
    "load_seconds": "Time that copies to the GPU took, summed over copies.",
    "stored_bytes": "Bytes copied off the GPU.",
    "store_seconds": "Time that copies off the GPU took, summed over copies.",
    "ssd_read_bytes": "Bytes read from SSD.",
    "ssd_written_bytes": "Bytes written to SSD.",
    "remote_read_bytes": "Bytes read from the remote store.",
    "remote_written_bytes": "Bytes written to the remote store.",
    "early_look_ups": "Look-ups at the remote store that began when a request arrived.",
    "cancelled_look_ups": "Requests that went away before vLLM asked about them.",
    "skipped_blocks": "Blocks that were cached but not loaded, because computing them is faster.",
    "failed_loads": "Loads that did not load all of their blocks.",
    "dropped_blocks": "Blocks that could not be stored, for any reason.",
}


@dataclass
class FlexCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Increases since the last report, by counter name."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> FlexCacheStats:
        """Return the increases. A counter that fell belongs to a new server and started at zero."""
        gains = {k: v - before.get(k, 0) for k, v in after.items()}
        return cls({k: gain if gain > 0 else after[k] for k, gain in gains.items() if gain})

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


def read_counters(stats: Mapping[str, Any], tokens_per_block: int) -> dict[str, float]:
    """Read this engine's current counters from `KVManager.stats`."""
    mine = msgspec.convert(stats["engine"], TotalsStats)
    hits, ops = mine.hit_blocks, mine.ops
    return {
        "dram_hit_tokens": hits.get("CPU", 0) * tokens_per_block,
        "ssd_hit_tokens": hits.get("SSD", 0) * tokens_per_block,
        "remote_hit_tokens": hits.get("REMOTE", 0) * tokens_per_block,
        "missed_tokens": mine.missed_blocks * tokens_per_block,
        "stored_tokens": ops["D2H"].blocks * tokens_per_block,
        "loaded_bytes": ops["H2D"].bytes,
        "load_seconds": ops["H2D"].seconds,
        "stored_bytes": ops["D2H"].bytes,
        "store_seconds": ops["D2H"].seconds,
        "ssd_read_bytes": ops["DISK2H"].bytes,
        "ssd_written_bytes": ops["H2DISK"].bytes,
        "remote_read_bytes": ops["REMOTE2H"].bytes,
        "remote_written_bytes": ops["H2REMOTE"].bytes,
        "skipped_blocks": sum(mine.skipped_blocks.values()),
        "failed_loads": sum(ops[kind].failed_ops for kind in ("H2D", "DISK2H", "REMOTE2H")),
        "dropped_blocks": sum(mine.dropped_blocks.values()),
    }
