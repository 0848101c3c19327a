"""An engine's counters of its cache, for the engine's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flexcache.tasks.stats import TotalsStats

COUNTERS = {
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
    "skipped_blocks": "Blocks cached and not loaded: computing is faster, or DRAM is full.",
    "failed_loads": "Loads that did not load all of their blocks.",
    "dropped_blocks": "Blocks that could not be stored, for any reason.",
}

_LOADS = ("H2D", "DISK2H", "REMOTE2H", "DISK2D")


def increases(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what has increased. A counter that fell is a new server's, which started at zero."""
    gains = {k: v - before.get(k, 0) for k, v in after.items()}
    return {k: gain if gain > 0 else after[k] for k, gain in gains.items() if gain}


def read_counters(stats: Mapping[str, Any], tokens_per_block: int) -> dict[str, float]:
    """Read this engine's current counters from `KVManager.stats`."""
    mine = msgspec.convert(stats["engine"], TotalsStats)
    hits, ops = mine.hit_blocks, mine.ops
    return {
        "dram_hit_tokens": hits.get("CPU", 0) * tokens_per_block,
        "ssd_hit_tokens": hits.get("SSD", 0) * tokens_per_block,
        "remote_hit_tokens": hits.get("REMOTE", 0) * tokens_per_block,
        "missed_tokens": mine.missed_blocks * tokens_per_block,
        "stored_tokens": (ops["D2H"].blocks + ops["D2DISK"].blocks) * tokens_per_block,
        "loaded_bytes": ops["H2D"].bytes + ops["DISK2D"].bytes,
        "load_seconds": ops["H2D"].seconds + ops["DISK2D"].seconds,
        "stored_bytes": ops["D2H"].bytes + ops["D2DISK"].bytes,
        "store_seconds": ops["D2H"].seconds + ops["D2DISK"].seconds,
        "ssd_read_bytes": ops["DISK2H"].bytes + ops["DISK2D"].bytes,
        "ssd_written_bytes": ops["H2DISK"].bytes + ops["D2DISK"].bytes,
        "remote_read_bytes": ops["REMOTE2H"].bytes,
        "remote_written_bytes": ops["H2REMOTE"].bytes,
        "skipped_blocks": sum(mine.skipped_blocks.values()),
        "failed_loads": sum(ops[kind].failed_ops for kind in _LOADS),
        "dropped_blocks": sum(mine.dropped_blocks.values()),
    }
