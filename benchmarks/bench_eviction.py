"""Hit rates of eviction policies on a request trace and on generated traffic, beside the optimum.

    python benchmarks/bench_eviction.py --out results/eviction

FlexCache's own policies run through the real tier, without bytes: each prompt is looked up and what
is missing of it is stored, as a whole. LFU, ARC, S3-FIFO and SIEVE are simulated in
`eviction_policies`. The optimum (Belady) knows the future, and may refuse a block that is needed
later than all others.

The trace has one id per 512 tokens; the generated workloads have fixed seeds. Correctness comes
first: a simulated LRU must hit exactly what the tier hits with `lru`, or the run ends there.
Writes a table, and with --out NAME also NAME.json and NAME.png (needs matplotlib).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from bench_write_policies import TRACE, Request, optimal_hits, read_trace
from eviction_policies import SIMULATED, LruList, simulated_hits
from eviction_workloads import agents, chat, documents, shifting
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.eviction import make_eviction_policy
from flexcache.cache.tier import Tier
from flexcache.ids import TierName

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
BUILT_IN = ("lru", "reuse")
DEFAULT = "reuse"

console = Console(width=160)


def tier_hits(requests: list[Request], capacity: int, policy: str) -> int:
    """Through the real tier: each prompt is looked up, and what is missing is stored."""
    tier, hits = Tier(TierName.CPU, capacity, make_eviction_policy(policy, capacity)), 0
    for request in requests:
        keys = request.keys
        tier.advance(request.time_s)
        there = tier.match(keys).num_blocks
        hits += there
        if there < keys.num_blocks:
            lease = tier.reserve(keys, there, keys.num_blocks)
            tier.publish(lease, len(lease))
            tier.release(lease)
    tier.check()
    return hits


@dataclass
class Comparison:
    """Hit rates of one workload: policy -> share of all blocks, per size."""

    name: str
    num_requests: int
    num_blocks: int
    sizes: list[int]
    rates: dict[str, list[float]] = field(default_factory=dict)

    def way(self, at: int) -> float | None:
        """How much of the way from LRU to the optimum the default goes."""
        lru, best = self.rates["lru"][at], self.rates["optimum"][at]
        return (self.rates[DEFAULT][at] - lru) / (best - lru) if best > lru else None


def compare(name: str, requests: list[Request], sizes: Sequence[int], bar: Progress) -> Comparison:
    total = sum(len(request.hash_ids) for request in requests)
    distinct = len({block for request in requests for block in request.hash_ids})
    sizes = [size for size in sizes if size < distinct]
    result = Comparison(name, len(requests), total, list(sizes))
    task = bar.add_task(name, total=len(sizes) * (len(BUILT_IN) + len(SIMULATED) + 2))
    for size in sizes:
        hits = {}
        for policy in BUILT_IN:
            hits[policy] = tier_hits(requests, size, policy)
            bar.advance(task)
        if simulated_hits(requests, size, LruList) != hits["lru"]:
            raise RuntimeError(f"{name}, {size} blocks: the tier's LRU is not LRU")
        bar.advance(task)
        for policy, make in SIMULATED.items():
            hits[policy] = simulated_hits(requests, size, make)
            bar.advance(task)
        hits["optimum"] = optimal_hits(requests, size)
        bar.advance(task)
        for policy, count in hits.items():
            result.rates.setdefault(policy, []).append(count / total)
    return result


def show(result: Comparison) -> None:
    table = Table(
        "blocks", *result.rates, "way from LRU to optimum",
        title=f"{result.name}: {result.num_requests:,} requests, {result.num_blocks:,} blocks",
    )  # fmt: skip
    for at, size in enumerate(result.sizes):
        way = result.way(at)
        rates = (f"{rates[at]:.2%}" for rates in result.rates.values())
        table.add_row(f"{size:,}", *rates, "" if way is None else f"{way:.0%}")
    console.print(table)


def plot(results: list[Comparison], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.6))
    for axis, result in zip(np.atleast_1d(axes), results, strict=True):
        for policy, rates in result.rates.items():
            width = 2.2 if policy in (*BUILT_IN, "optimum") else 1.0
            style = "k--" if policy == "optimum" else "-"
            axis.plot(result.sizes, rates, style, label=policy, linewidth=width)
        axis.set(xscale="log", title=result.name, xlabel="blocks")
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("share of blocks found")
    np.atleast_1d(axes)[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines")] = TRACE,
    size: Annotated[list[int] | None, typer.Option(help="Blocks of the tier")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="Only these")] = None,
    out: Annotated[Path | None, typer.Option(help="Writes NAME.json and NAME.png")] = None,
) -> None:
    makers: dict[str, Callable[[], list[Request]]] = {
        "trace": lambda: read_trace(trace), "chat": chat, "agents": agents,
        "documents": documents, "shifting": shifting,
    }  # fmt: skip
    results = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for name, make in makers.items():
            if workload is None or name in workload:
                results.append(compare(name, make(), size or SIZES, bar))
    for result in results:
        show(result)
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps([vars(r) for r in results], indent=1))
        plot(results, out.with_suffix(".png"))
    lost = [
        (result.name, size)
        for result in results
        for at, size in enumerate(result.sizes)
        if result.rates[DEFAULT][at] < result.rates["lru"][at]
    ]
    if lost:
        console.print(f"{DEFAULT} hits less than LRU at {lost}")
    raise typer.Exit(len(lost))


if __name__ == "__main__":
    typer.run(main)
