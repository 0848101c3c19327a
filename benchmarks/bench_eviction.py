"""Hit rates of eviction policies on a request trace and on generated traffic, beside the optimum.

    python benchmarks/bench_eviction.py --out results/eviction

FlexCache's own policies run through the real tier, without bytes: each prompt is looked up and what
is missing of it is stored, as a whole. LFU, ARC, S3-FIFO and SIEVE are simulated here block by
block, each confined to leaves, so that what is cached stays whole prefixes. The optimum (Belady)
knows the future, and may refuse a block that is needed later than all others.

The trace has one id per 512 tokens; the generated workloads have fixed seeds. Correctness comes
first: a simulated LRU must hit exactly what the tier hits with `lru`, or the run ends there.
Writes a table, and with --out NAME also NAME.json and NAME.png (needs matplotlib).
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import typer
from bench_write_policies import TRACE, Request, optimal_hits, read_trace, request_of
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.eviction import make_eviction_policy
from flexcache.cache.tier import Tier
from flexcache.ids import TierName

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
BUILT_IN = ("lru", "reuse")
DEFAULT = "reuse"
SMALL_QUEUE = 0.1
"""Share of S3-FIFO's queue for newcomers."""

console = Console(width=160)


# -- workloads ------------------------------------------------------------------------------------


class Writer:
    """Collects prompts as they are made; a prompt is the ids of its blocks."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._prompts: list[tuple[float, list[int]]] = []
        self._next_id = 0

    def blocks(self, count: int) -> list[int]:
        """Blocks that no prompt has had so far."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def ask(self, time_s: float, prompt: list[int]) -> None:
        self._prompts.append((time_s, list(prompt)))

    def about(self, median: float, spread: float) -> float:
        """A positive number, log-normal."""
        return float(median * np.exp(self.random.normal(0.0, spread)))

    def requests(self) -> list[Request]:
        ordered = sorted(self._prompts, key=lambda prompt: prompt[0])
        return [request_of(time_s, ids) for time_s, ids in ordered]


def chat() -> list[Request]:
    """Conversations behind one system prompt; most end after a turn, some go on for long."""
    writer, now = Writer(seed=1), 0.0
    system = writer.blocks(4)
    for _ in range(4_000):
        now += writer.random.exponential(1.0)
        at, prompt = now, system + writer.blocks(1 + int(writer.about(6.0, 1.0)))
        goes_on = writer.random.choice([0.2, 0.85], p=[0.6, 0.4])
        writer.ask(at, prompt)
        while writer.random.random() < goes_on:
            at += 5.0 + writer.about(60.0, 1.0)
            prompt = prompt + writer.blocks(1 + int(writer.about(2.0, 0.7)))
            writer.ask(at, prompt)
    return writer.requests()


def agents() -> list[Request]:
    """Tool loops behind a few long system prompts; some fan out, some are picked up much later."""
    writer, now = Writer(seed=2), 0.0
    systems = [writer.blocks(30) for _ in range(8)]
    popularity = 1.0 / np.arange(1, 9)
    popularity /= popularity.sum()

    def loop(at: float, prompt: list[int], steps: int, may_fan_out: bool) -> None:
        for _ in range(steps):
            writer.ask(at, prompt)
            if may_fan_out and writer.random.random() < 0.05:
                for _ in range(3):
                    loop(at + writer.about(3.0, 0.5), prompt + writer.blocks(2), 5, False)
            at += writer.about(5.0, 0.8)
            prompt = prompt + writer.blocks(1 + int(writer.about(1.0, 0.8)))
        if may_fan_out and writer.random.random() < 0.3:
            loop(at + writer.about(300.0, 1.0), prompt, steps // 2, True)

    for _ in range(250):
        now += writer.random.exponential(12.0)
        system = systems[int(writer.random.choice(8, p=popularity))]
        steps = 5 + int(writer.random.integers(0, 25))
        loop(now, system + writer.blocks(4), steps, True)
    return writer.requests()


def documents() -> list[Request]:
    """Questions about documents, some of which are asked about far more often than others."""
    writer, now = Writer(seed=3), 0.0
    system = writer.blocks(2)
    library = [writer.blocks(2 + int(writer.about(20.0, 0.8))) for _ in range(3_000)]
    popularity = 1.0 / np.arange(1, 3_001) ** 0.8
    popularity /= popularity.sum()
    for chosen in writer.random.choice(3_000, size=10_000, p=popularity):
        now += writer.random.exponential(0.5)
        writer.ask(now, system + library[int(chosen)] + writer.blocks(1))
    return writer.requests()


def shifting() -> list[Request]:
    """Chat whose users change every half hour: first they return soon, then late, then hardly."""
    writer, now = Writer(seed=4), 0.0
    for goes_on, gap_s in ((0.8, 20.0), (0.7, 400.0), (0.1, 60.0), (0.8, 60.0)):
        end = now + 1_800.0
        while now < end:
            now += writer.random.exponential(2.0)
            at, prompt = now, writer.blocks(1 + int(writer.about(8.0, 1.0)))
            writer.ask(at, prompt)
            while writer.random.random() < goes_on:
                at += writer.about(gap_s, 0.5)
                prompt = prompt + writer.blocks(2)
                writer.ask(at, prompt)
    return writer.requests()


# -- simulated policies, over leaves --------------------------------------------------------------


class Tree:
    """Which block precedes which, and how many cached ones build on each."""

    def __init__(self) -> None:
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int | None, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    def __len__(self) -> int:
        return len(self._parent)

    def add(self, block: int, parent: int | None) -> None:
        self._parent[block] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def remove(self, block: int) -> None:
        parent = self._parent.pop(block)
        self._num_children[parent] -= 1

    def is_leaf(self, block: int) -> bool:
        return not self._num_children.get(block)


class Simulation(Protocol):
    """A policy over the blocks of a `Tree`. It hears of a prompt's blocks from the last one on."""

    def hit(self, block: int) -> None:
        """A cached block is used."""

    def add(self, block: int) -> None:
        """A block is now cached."""

    def victim(self, spared: set[int]) -> int:
        """Give up a cached leaf that is not spared; it is removed from the tree by the caller."""


class LruList:
    """What was not used for longest."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._order: OrderedDict[int, None] = OrderedDict()

    def hit(self, block: int) -> None:
        self._order.move_to_end(block)

    def add(self, block: int) -> None:
        self._order[block] = None

    def victim(self, spared: set[int]) -> int:
        block = first_leaf(self._order, self._tree, spared)
        if block is None:
            raise ValueError("nothing can be evicted")
        del self._order[block]
        return block


class Lfu:
    """What was used least often since it is cached; of equals what was not used for longest."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._by_count: list[OrderedDict[int, None]] = [OrderedDict()]
        self._count: dict[int, int] = {}

    def hit(self, block: int) -> None:
        count = self._count[block] + 1
        del self._by_count[count - 1][block]
        if count == len(self._by_count):
            self._by_count.append(OrderedDict())
        self._by_count[count][block] = None
        self._count[block] = count

    def add(self, block: int) -> None:
        self._count[block] = 0
        self._by_count[0][block] = None

    def victim(self, spared: set[int]) -> int:
        for blocks in self._by_count:
            block = first_leaf(blocks, self._tree, spared)
            if block is not None:
                del blocks[block], self._count[block]
                return block
        raise ValueError("nothing can be evicted")


class Arc:
    """Seen once and seen again, in two lists whose sizes follow the hits among the evicted."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree, self._capacity, self._target = tree, capacity, 0.0
        self._lists: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())

    def hit(self, block: int) -> None:
        self._lists[0].pop(block, None)
        self._lists[1][block] = None
        self._lists[1].move_to_end(block)

    def add(self, block: int) -> None:
        once, again = self._ghosts
        if block in once:
            self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
        elif block in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
        came_back = block in once or block in again
        once.pop(block, None)
        again.pop(block, None)
        self._lists[came_back][block] = None

    def victim(self, spared: set[int]) -> int:
        first = 0 if len(self._lists[0]) > self._target else 1
        for which in (first, 1 - first):
            block = first_leaf(self._lists[which], self._tree, spared)
            if block is not None:
                del self._lists[which][block]
                self._ghosts[which][block] = None
                while len(self._ghosts[which]) > self._capacity:
                    self._ghosts[which].popitem(last=False)
                return block
        raise ValueError("nothing can be evicted")


class S3Fifo:
    """A small queue that newcomers must be used in twice, and a main one that gives chances."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree, self._capacity = tree, capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def hit(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)

    def add(self, block: int) -> None:
        self._uses[block] = 0
        known = block in self._ghosts
        self._ghosts.pop(block, None)
        (self._main if known else self._small).append(block)

    def victim(self, spared: set[int]) -> int:
        barren = 0  # looks in a row that found nothing in the small queue
        while True:
            is_full = len(self._small) > SMALL_QUEUE * self._capacity or not self._main
            if is_full and barren <= len(self._small):
                block = self._small.popleft()
                if self._uses[block] > 1:
                    self._uses[block] = 0
                    self._main.append(block)
                elif not self._tree.is_leaf(block) or block in spared:
                    self._small.append(block)
                    barren += 1
                else:
                    self._ghosts[block] = None
                    while len(self._ghosts) > self._capacity:
                        self._ghosts.popitem(last=False)
                    return block
            else:
                block = self._main.popleft()
                if self._uses[block] or not self._tree.is_leaf(block) or block in spared:
                    self._uses[block] = max(0, self._uses[block] - 1)
                    self._main.append(block)
                else:
                    return block


class Sieve:
    """One queue; a hand goes from old to new and takes the first that was not used meanwhile."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self._tree = tree
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._oldest: int | None = None
        self._newest: int | None = None
        self._hand: int | None = None
        self._used: set[int] = set()

    def hit(self, block: int) -> None:
        self._used.add(block)

    def add(self, block: int) -> None:
        self._older[block], self._newer[block] = self._newest, None
        if self._newest is None:
            self._oldest = block
        else:
            self._newer[self._newest] = block
        self._newest = block

    def victim(self, spared: set[int]) -> int:
        while True:
            block = self._oldest if self._hand is None else self._hand
            assert block is not None
            self._hand = self._newer[block]
            if not self._tree.is_leaf(block) or block in spared:
                continue
            if block in self._used:
                self._used.discard(block)
                continue
            self._unlink(block)
            return block

    def _unlink(self, block: int) -> None:
        older, newer = self._older.pop(block), self._newer.pop(block)
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older


def first_leaf(blocks: OrderedDict[int, None], tree: Tree, spared: set[int]) -> int | None:
    return next((b for b in blocks if tree.is_leaf(b) and b not in spared), None)


SIMULATED: dict[str, Callable[[Tree, int], Simulation]] = {
    "LFU": Lfu, "ARC": Arc, "S3-FIFO": S3Fifo, "SIEVE": Sieve,
}  # fmt: skip


def simulated_hits(
    requests: list[Request], capacity: int, make: Callable[[Tree, int], Simulation]
) -> int:
    tree, hits = Tree(), 0
    policy = make(tree, capacity)
    for request in requests:
        prompt = request.hash_ids
        there = next((at for at, block in enumerate(prompt) if block not in tree), len(prompt))
        hits += there
        stop = min(len(prompt), capacity)
        spared = set(prompt[:there])
        while len(tree) + stop - there > capacity:
            tree.remove(policy.victim(spared))
        for at in range(stop - 1, -1, -1):  # its last block goes first
            if at < there:
                policy.hit(prompt[at])
            else:
                policy.add(prompt[at])
                tree.add(prompt[at], prompt[at - 1] if at else None)
    return hits


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


# -- the comparison -------------------------------------------------------------------------------


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
