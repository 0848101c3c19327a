"""Hit rates of the eviction policies on a request trace, beside LRU and the offline optimum.

    python benchmarks/bench_eviction.py --trace FILE [--hints SHARE] [--json OUT]

The trace is in Mooncake's format, plain or gzipped, with one id per 512 tokens. Ids beyond the full
blocks of a prompt, ``input_length // 512``, are dropped: engines do not cache partial blocks. Each
prompt is looked up in the real tier, without bytes, and what is missing of it is stored. The order
of requests is that of their times. The optimum (Belady) knows the future, and may refuse a block.

With hints, a seeded share of the lineages say that they are over after their last prompt. A lineage
is a line of prompts each of which continues the one before. Only a session that names itself with
each prompt can say so; those lineages do, and the others do not. LRU gets no hints.

Correctness comes first: a plain simulation of LRU must hit exactly what the tier hits under `lru`,
at the first size, or the run ends there. Without a trace, generated workloads are compared instead,
by the seed, and the exit status is the number of sizes, over all of them, at which the default is
more than 0.05 points under LRU.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from bench_write_policies import Request, contiguous, optimal_hits, read_trace
from eviction_workloads import WORKLOADS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.density import DensityPolicy, unshared
from flexcache.cache.density_history import STRETCH_TOKENS
from flexcache.cache.eviction_policy import make_policy
from flexcache.cache.tier import Tier
from flexcache.config.cache import CacheConfig
from flexcache.ids import TierName

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
DEFAULT = str(CacheConfig(num_cpu_blocks=1).eviction_policy)
TOLERANCE = 0.0005
"""Share of blocks by which the default may hit less than LRU."""
HINT_SEED = 19

Sessions = dict[int, str]
"""Name of the session that a request belongs to, by the request's number."""

console = Console(width=160)


@dataclass
class Replayed:
    """What a tier hit, by request, and what it took."""

    hits: list[int]
    stored: int


def replay(
    requests: Sequence[Request], capacity: int, policy: str, sessions: Sessions | None = None
) -> Replayed:
    """Serve requests from the real tier: each prompt is looked up, and what is missing is stored.

    Args:
        sessions: The lineages that say that they are over.
    """
    sessions = sessions or {}
    last = {session: number for number, session in sorted(sessions.items())}
    order = make_policy(policy, STRETCH_TOKENS)
    forecaster = order if isinstance(order, DensityPolicy) else None
    tier, hits = Tier(TierName.CPU, capacity, order.for_tier(capacity), bypasses=True), []
    for number, request in enumerate(requests):
        keys, outlook = request.keys, None
        tier.advance(request.time_s)
        there = tier.match(keys).num_blocks
        hits.append(there)
        if forecaster is not None:
            forecaster.look_up(keys, request.time_s)
            if number in sessions:
                forecaster.name(keys, sessions[number])
            generated = request.output_tokens / STRETCH_TOKENS
            outlook = forecaster.store(keys, keys.num_blocks, generated)
            tier.match(keys, outlook)
        if there < keys.num_blocks:
            lease = tier.reserve(keys, there, keys.num_blocks, outlook)
            tier.publish(lease, len(lease))
            tier.release(lease)
        if number in sessions and last[sessions[number]] == number:
            for match, start in unshared(tier.index.match(keys)):
                tier.retire(match, start)
            if forecaster is not None:
                forecaster.end(sessions[number])
        if forecaster is not None and (study := forecaster.begin_study()) is not None:
            study.run()
            forecaster.adopt(study)
    tier.check()
    return Replayed(hits, tier.counters.stored_blocks)


def plain_lru_hits(requests: Sequence[Request], capacity: int) -> int:
    """Simulate LRU block by block. A prompt's last block counts as used first, and goes first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        prompt = request.hash_ids[:capacity]
        there = contiguous(prompt, cached)
        hits += there
        for block in reversed(prompt[:there]):
            cached.move_to_end(block)
        while len(cached) + len(prompt) - there > capacity:
            cached.popitem(last=False)
        for block in reversed(prompt):
            cached[block] = None
            cached.move_to_end(block)
    return hits


def sessions_of(requests: Sequence[Request], share: float) -> Sessions:
    """Return which requests belong to which lineage, for a seeded share of the lineages."""
    lineage_of_block: dict[int, int] = {}  # of the last prompt that has the block
    start_of_new: list[int] = []
    lineages: list[int] = []
    for number, request in enumerate(requests):
        ids = request.hash_ids
        num_seen = next((n for n, i in enumerate(ids) if i not in lineage_of_block), len(ids))
        lineage = number
        if num_seen:
            before = lineage_of_block[ids[num_seen - 1]]
            continues = num_seen > start_of_new[before] or (
                num_seen == start_of_new[before] == len(requests[before].hash_ids)
            )
            lineage = lineages[before] if continues else number
        start_of_new.append(num_seen)
        lineages.append(lineage)
        lineage_of_block.update(dict.fromkeys(ids, number))
    chosen = random.Random(HINT_SEED)
    named = {lineage for lineage in dict.fromkeys(lineages) if chosen.random() < share}
    return {number: str(line) for number, line in enumerate(lineages) if line in named}


@dataclass
class Comparison:
    """Hit rates of one workload: policy -> share of all blocks, per size."""

    name: str
    num_requests: int
    num_blocks: int
    sizes: list[int]
    rates: dict[str, list[float]] = field(default_factory=dict)
    written: list[float] = field(default_factory=list)
    """Blocks that the default stored, as a share of what LRU stored, per size."""

    def way(self, at: int) -> float | None:
        """How much of the way from LRU to the optimum the default goes."""
        lru, best = self.rates["lru"][at], self.rates["optimum"][at]
        return (self.rates["default"][at] - lru) / (best - lru) if best > lru else None

    def points_below_lru(self) -> list[int]:
        """Sizes at which the default hits less than LRU, by more than is tolerated."""
        pairs = zip(self.sizes, self.rates["lru"], self.rates["default"], strict=True)
        return [size for size, lru, default in pairs if default < lru - TOLERANCE]


def compare(
    name: str, requests: Sequence[Request], sizes: Sequence[int], hints: float, bar: Progress
) -> Comparison:
    total = sum(len(request.hash_ids) for request in requests)
    result = Comparison(name, len(requests), total, list(sizes))
    sessions = sessions_of(requests, hints) if hints else None
    task = bar.add_task(name, total=len(sizes) * 3)
    for size in sizes:
        plain = replay(requests, size, "lru")
        bar.advance(task)
        if size == sizes[0] and plain_lru_hits(requests, size) != sum(plain.hits):
            raise RuntimeError(f"{name}, {size} blocks: the tier's LRU is not LRU")
        default = replay(requests, size, DEFAULT, sessions)
        bar.advance(task)
        best = optimal_hits(requests, size)
        bar.advance(task)
        for policy, hits in (("lru", plain.hits), ("default", default.hits), ("optimum", best)):
            result.rates.setdefault(policy, []).append(sum(hits) / total if total else 0.0)
        result.written.append(default.stored / plain.stored if plain.stored else 1.0)
    return result


def show(result: Comparison) -> None:
    table = Table(
        "blocks", *result.rates, "default - lru, points", "way from LRU to optimum",
        "blocks stored, of LRU's",
        title=f"{result.name}: {result.num_requests:,} requests, {result.num_blocks:,} blocks",
    )  # fmt: skip
    for at, size in enumerate(result.sizes):
        way = result.way(at)
        rates = (f"{rates[at]:.2%}" for rates in result.rates.values())
        lead = 100 * (result.rates["default"][at] - result.rates["lru"][at])
        table.add_row(
            f"{size:,}", *rates, f"{lead:+.2f}", "" if way is None else f"{way:.0%}",
            f"{result.written[at]:.0%}",
        )  # fmt: skip
    console.print(table)


def main(
    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format")] = None,
    hints: Annotated[
        float, typer.Option(help="Share of lineages that say when they are over", min=0, max=1)
    ] = 0.0,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Writes the hit rates; without a trace, by workload"),
    ] = None,
    size: Annotated[list[int] | None, typer.Option(help="Blocks of the tier")] = None,
    seed: Annotated[int, typer.Option(help="Of the generated workloads")] = 1,
) -> None:
    sizes = size or SIZES
    makers: dict[str, Callable[[], Sequence[Request]]] = {
        name: lambda make=make: make(seed)  # type: ignore[misc]
        for name, make in WORKLOADS.items()
    }
    if trace is not None:
        makers = {trace.name: lambda: read_trace(trace)}
    lost, rates = 0, dict[str, dict[str, dict[str, float]]]()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for name, make in makers.items():
            result = compare(name, make(), sizes, hints, bar)
            show(result)
            lost += len(result.points_below_lru())
            rates[name] = {
                policy: dict(zip(map(str, sizes), of_policy, strict=True))
                for policy, of_policy in result.rates.items()
            }
    if json_out is not None:
        found = rates if trace is None else rates[trace.name]
        json_out.write_text(json.dumps(found, indent=1) + "\n")
    if lost:
        console.print(f"{DEFAULT} hits clearly less than LRU at {lost} points")
    raise typer.Exit(0 if trace is not None else lost)


if __name__ == "__main__":
    typer.run(main)
