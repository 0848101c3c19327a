"""Seconds of prefill that a cache saves, with and without loads that begin while requests wait.

    python benchmarks/bench_early_loads.py --trace FILE

Replays a trace through the real planners: DRAM and an SSD ten times its size. Each request waits
``--wait`` seconds before it is computed; its early load begins when it arrives. The SSD is
simulated: one queue for all reads. A block found saves the time of computing it, less that of
bringing it to the GPU: from DRAM, or from the SSD if it was not loaded early enough.

The model has 8 billion parameters (131,072 bytes of KV per token) and computes 30,000 tokens/s.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from bench_write_policies import Request, read_trace, store
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.build import CacheSizes, build_cache
from flexcache.cache.plan import Plan
from flexcache.cache.tiered_cache import TieredCache
from flexcache.config import CacheConfig
from flexcache.ids import BlockKey, OpKind, TaskId, TierName

BLOCK_BYTES = 512 * 131_072
SSD_S = BLOCK_BYTES / 6e9
DRAM_S = BLOCK_BYTES / 40e9
COMPUTE_S = 512 / 30_000
SSD_PER_DRAM = 10
SIZES = (1_000, 2_000, 5_000)
WAITS = (0.0, 0.5, 2.0)

console = Console(width=120)


@dataclass(slots=True)
class Replay:
    """One replay over a cache of its own.

    Attributes:
        wait_s: How long a request waits before it is computed.
        is_early: Whether its load begins when it arrives.
        saved_s: Seconds of prefill saved.
        total_s: Seconds that computing everything takes.
    """

    cache: TieredCache
    wait_s: float
    is_early: bool
    saved_s: float = 0.0
    total_s: float = 0.0
    _disk_free_s: float = 0.0
    _lands: dict[BlockKey, float] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._until(request.time_s)
            if self.is_early and self.wait_s:
                self._begin(request.keys, request.time_s)
            self._at(request.time_s + self.wait_s, lambda now, r=request: self._compute(r, now))  # type: ignore[misc]
        self._until(float("inf"))
        self.cache.check()

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            due_s, _, act = heapq.heappop(self._events)
            act(due_s)

    def _read(self, num_blocks: int, now: float) -> float:
        """Return when the disk has read so many blocks."""
        ends_s = self._disk_free_s = max(self._disk_free_s, now) + num_blocks * SSD_S
        cost = self.cache.loads.cost
        assert cost is not None
        cost.started(OpKind.DISK2H, now)
        self._at(ends_s, lambda then: cost.ended(OpKind.DISK2H, then, num_blocks, then - now))
        return ends_s

    def _begin(self, keys: EngineBlockKeys, now: float) -> None:
        cache = self.cache
        cache.tiers.advance(now)
        cache.early.expire(now)
        rate = 1 / COMPUTE_S
        plan = cache.loads.plan_prefetch(keys, 0, keys.num_blocks, rate, cache.early.room)
        num_below = plan.sources.get(TierName.SSD, 0)
        cache.early.begin(TaskId(next(self._order)), plan, keys, now)
        lands_s = self._read(num_below, now) if num_below else now
        if num_below:
            self._lands[keys.key(plan.stop - 1)] = lands_s
        self._at(lands_s, lambda then: self._landed(plan, num_below, then))

    def _landed(self, plan: Plan, num_below: int, now: float) -> None:
        self.cache.publish_staging(plan, num_below)
        self.cache.finish(plan)
        self.cache.early.ended(plan, num_below, num_below, now)

    def _compute(self, request: Request, now: float) -> None:
        keys, stop = request.keys, request.keys.num_blocks
        cache = self.cache
        cache.tiers.advance(now)
        if cache.early.awaits(keys, now, stop * COMPUTE_S):
            coming = [load for load in cache.early.find(keys) if not load.has_landed]
            late_s = min(now + stop * COMPUTE_S, max(self._lands[load.key] for load in coming))
            self.saved_s -= late_s - now
            self._at(late_s, lambda then: self._serve(request, then))
        else:
            self._serve(request, now)

    def _serve(self, request: Request, now: float) -> None:
        keys, stop = request.keys, request.keys.num_blocks
        cache = self.cache
        cache.tiers.advance(now)
        found = cache.early.find(keys)
        in_time = keys.num_blocks
        if cache.early.is_overdue(keys, now):
            in_time = cache.tiers.host.index.match(keys).num_blocks
        load = cache.loads.plan_get(keys, 0, in_time, 1 / COMPUTE_S)
        cache.early.use(found)
        in_dram, on_ssd = load.sources.get(TierName.CPU, 0), load.sources.get(TierName.SSD, 0)
        saved = load.num_blocks * COMPUTE_S - in_dram * DRAM_S
        saved -= self._read(on_ssd, now) - now if on_ssd else 0.0
        self.saved_s += saved
        self.total_s += stop * COMPUTE_S
        cache.publish_staging(load, on_ssd)
        cache.finish(load)
        store(cache, keys)


def replay(requests: Sequence[Request], size: int, wait_s: float, is_early: bool) -> Replay:
    config = CacheConfig(num_cpu_blocks=size, ssd_write_policy="write_through")
    sizes = CacheSizes(size, size * SSD_PER_DRAM, 1 << 20, size * SSD_PER_DRAM)
    replayed = Replay(build_cache(config, sizes), wait_s, is_early)
    replayed.run(requests)
    return replayed


def main(
    trace: Annotated[Path, typer.Option(help="In Mooncake's format, maybe gzipped.")],
    size: Annotated[list[int], typer.Option(help="Blocks of DRAM.")] = list(SIZES),  # noqa: B006
    wait: Annotated[list[float], typer.Option(help="Seconds.")] = list(WAITS),  # noqa: B006
) -> None:
    requests = [request for request in read_trace(trace) if request.keys.num_blocks]
    table = Table(title=f"{trace.name}: prefill time saved, of all")
    for column in ("DRAM blocks", "wait", "on demand", "early", "early / late / wasted blocks"):
        table.add_column(column, justify="right")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(size) * len(wait) * 2)
        for num_blocks, wait_s in itertools.product(size, wait):
            row = []
            for is_early in (False, True):
                done = replay(requests, num_blocks, wait_s, is_early)
                row.append(f"{done.saved_s:,.0f} s, {done.saved_s / done.total_s:.1%}")
                progress.advance(task)
            counts = done.cache.early.counters
            outcome = f"{counts.early:,} / {counts.late:,} / {counts.wasted:,}"
            table.add_row(f"{num_blocks:,}", f"{wait_s:g} s", *row, outcome)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
