"""Latency of the control plane at 131,072 tokens, beside its targets.

    python scripts/bench_control.py

Correctness is checked first: each match must find exactly what was stored.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from flexcache import CacheConfig, KVManager, ModelConfig
from flexcache.cache.block_keys import EngineBlockKeys, make_root
from flexcache.cache.tier import Lease, Tier
from flexcache.ids import TierName

TOKENS, BLOCK = 131_072, 16
T = TypeVar("T")


def measure(
    call: Callable[[], T], undo: Callable[[T], object], rounds: int = 300
) -> tuple[float, float]:
    """Median and 99th percentile of ``call`` in microseconds; ``undo`` is not timed."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        made = call()
        times.append(time.perf_counter() - started)
        undo(made)
    times.sort()
    return times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6


def fill(manager: KVManager, tokens: np.ndarray, keys: list[bytes] | None, count: int) -> None:
    """Make the first ``count`` blocks cached, without moving bytes: no rank is registered."""
    with manager._backend.server.session() as engine:  # type: ignore[attr-defined]
        cache = engine.cache
        source = manager._keys(tokens, None, keys)
        plan = cache.plan_put(source, 0, count)
        cache.publish_staging(plan, plan.num_blocks)
        cache.finish(plan)


def match_rows() -> list[tuple[str, float, float, float]]:
    rows = []
    model = ModelConfig("bench", 1, 1, 8, torch.uint8)
    tokens = np.random.default_rng(0).integers(0, 100_000, TOKENS)
    keys = [i.to_bytes(32, "big") for i in range(TOKENS // BLOCK)]
    cases = [("all cached", TOKENS, 80), ("first 100,000 cached", 100_000, 160), ("none", 0, 60)]
    for kind, given, limit in (("tokens", None, None), ("block_keys", keys, 30)):
        for name, cached, target in cases:
            with KVManager(model, CacheConfig(num_cpu_blocks=20_000)) as manager:
                fill(manager, tokens, given, cached // BLOCK)

                def undo(match: tuple[int, Any], manager: KVManager = manager) -> None:
                    manager.cancel([match[0]])
                    assert int(match[1].sum()) == cached // BLOCK * BLOCK  # noqa: B023

                call = partial(manager.get_match, tokens, block_keys=given)
                median, tail = measure(call, undo)
                rows.append((f"get_match, {kind}, {name}", median, tail, limit or target))
    return rows


def allocate_row() -> tuple[str, float, float, float]:
    tier, root, leaves = Tier(TierName.CPU, 50_000), make_root("f", (), "k"), 50_000
    for i in range(leaves):
        lease = tier.reserve(EngineBlockKeys(root, [i.to_bytes(16, "big")], 1), 0, 1)
        tier.publish(lease, 1)
        tier.release(lease)
    assert tier.index.num_blocks == leaves

    leases: list[Lease] = []
    median, tail = measure(partial(tier.reserve_private, root, 4), leases.append)
    assert all(len(lease) == 4 for lease in leases)
    tier.check()
    return "allocate 4 blocks, full pool, 50,000 leaves", median, tail, 20


def memory_row() -> tuple[str, float, float, float]:
    count = 100_000
    tracemalloc.start()
    tier, root = Tier(TierName.CPU, count), make_root("f", (), "k")
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, count, 1000):
        keys = [i.to_bytes(16, "big") for i in range(start, start + 1000)]
        lease = tier.reserve(EngineBlockKeys(root, keys, 1000), 0, 1000)
        tier.publish(lease, 1000)
        tier.release(lease)
        del keys, lease
    used = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    return "memory of the index, bytes per block", used, used, 300


def main() -> int:
    table = Table("what", "median", "p99", "target", "median / target")
    missed = 0
    for name, median, tail, target in [*match_rows(), allocate_row(), memory_row()]:
        missed += median > target
        unit = "" if "memory" in name else " us"
        table.add_row(
            name, f"{median:.1f}{unit}", f"{tail:.1f}{unit}", f"{target}{unit}",
            f"{median / target:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main())
