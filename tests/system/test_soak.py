"""Many engines at one server, each putting, getting, cancelling and leaving at random.

SOAK_ENGINES=64 SOAK_SECONDS=180 pytest tests/system/test_soak.py -s
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from cluster import NO_HANG_S
from load import MAX_BLOCKS
from test_chaos import settled
from test_shared import Member, child, until_free

from flexcache import CacheConfig

pytestmark = pytest.mark.whole


ENGINES = int(os.environ.get("SOAK_ENGINES", 16))
SECONDS = float(os.environ.get("SOAK_SECONDS", 10))
PER_PROCESS = 16
MOST_GROWTH_MB = 200


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


def test_many_engines_share_a_server_for_a_while(tmp_path: Path) -> None:
    config = CacheConfig(
        num_cpu_blocks=1024, num_ssd_blocks=4096, ssd_cache_dirs=[str(tmp_path / "ssd")]
    )
    watcher = Member(config, engine_id="survivor")
    watcher.manager.wait_ready(60)
    endpoint = watcher.manager.endpoint
    server = watcher.manager.stats()["server_pid"]
    before = resident_mb(server)
    try:
        processes = [
            child(
                "crowd", endpoint, str(first), str(min(PER_PROCESS, ENGINES - first)), str(SECONDS)
            )
            for first in range(0, ENGINES, PER_PROCESS)
        ]
        results: dict[str, dict[str, float]] = {}
        for process in processes:
            said, _ = process.communicate(timeout=SECONDS + 240)
            assert process.returncode == 0
            results |= json.loads(said.splitlines()[-1])
        assert len(results) == ENGINES
        assert all(seen["wrong"] == [] for seen in results.values())
        settled(watcher)
        watcher.load.put(4 * 9999, MAX_BLOCKS)
        assert watcher.load.get(4 * 9999, MAX_BLOCKS) == MAX_BLOCKS
        assert watcher.load.seen.wrong == []
        grown = resident_mb(server) - before
        report(results, grown, watcher.manager.stats())
        assert grown < MOST_GROWTH_MB
        # No engine starves: each was served, and no call had to wait for long.
        assert min(seen["hits"] for seen in results.values()) > 0
        assert max(seen["longest_call_s"] for seen in results.values()) < NO_HANG_S
    finally:
        watcher.close()
    until_free(endpoint)


def report(results: dict[str, dict[str, float]], grown_mb: float, stats: dict) -> None:
    def column(name: str) -> np.ndarray:
        return np.array([seen[name] for seen in results.values()])

    p99 = np.sort(column("get_p99_s")) * 1e3
    steps, longest = column("steps"), column("longest_call_s").max()
    print(
        f"\n{len(results)} engines, {SECONDS:g} s: {steps.sum():,} requests "
        f"(slowest engine {steps.min():,}, median {np.median(steps):,.0f}), "
        f"{column('visits').sum():,} visits, {column('hits').sum():,} blocks loaded, "
        f"{column('stored').sum():,} stored, {column('lost').sum()} requests lost\n"
        f"get: p99 of the slowest engine {p99[-1]:.1f} ms, of the median one "
        f"{np.median(p99):.1f} ms: {p99[-1] / np.median(p99):.2f}x; "
        f"median {np.median(column('get_p50_s')) * 1e3:.1f} ms; longest call {longest:.2f} s\n"
        f"server memory grew by {grown_mb:.1f} MB; dropped {stats['dropped_blocks']}, "
        f"counters {stats['counters']}"
    )
