"""Hit rates of the write policies on a request trace, beside block LRU and the offline optimum.

    python benchmarks/bench_write_policies.py --trace ../shared/traces/conversation_trace.jsonl

A line of the trace is a request: timestamp (ms), input_length, output_length and hash_ids, one id
per 512 tokens of the prompt; equal ids stand for equal prefixes. Each prompt is looked up and then
put, with the real tiers and admissions, once with a tier on its own and once through the planner
with a DRAM tier of a tenth of its size in front. LRU and optimum are those of the tier on its own,
computed apart from it.

The columns are policies of eviction and of writing. Exits with how often `density` with
`write_through` hits less than `lru` with it. What an admission costs, in time and
memory, comes last.
"""

from __future__ import annotations

import heapq
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.admission import Selective
from flexcache.cache.block_keys import EngineBlockKeys, make_root
from flexcache.cache.eviction_policy import EvictionPolicy, make_policy
from flexcache.cache.plan import PlannerSettings
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.ids import TaskKind, TierName
from flexcache.replay.traces import TOKENS_PER_ID, hash_key, read_requests

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
SIZES = (1_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
POLICIES = ("lru, write_through", "density, write_through", "density, selective")
DRAM_SHARE = 10
LONG_PROMPT = 8_192
ROOT = make_root("trace", (), "engine")
NEVER = 1 << 60

console = Console(width=160)


@dataclass(frozen=True, slots=True)
class Request:
    time_s: float
    hash_ids: Sequence[int]
    keys: EngineBlockKeys
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks found and blocks written below DRAM."""

    hits: int
    written: int


Replay = Callable[[list[Request], int, str], Outcome]


def read_trace(path: Path) -> list[Request]:
    """Read a trace in order of time, without the ids of partial blocks."""
    requests = sorted(read_requests(path), key=lambda request: request.time_s)
    return [
        request_of(
            request.time_s, request.hash_ids[: request.input_length // request.tokens_per_id],
            request.output_length,
        )
        for request in requests
    ]  # fmt: skip


def request_of(time_s: float, hash_ids: Sequence[int], output_tokens: int = 0) -> Request:
    keys = [hash_key(number) for number in hash_ids]
    return Request(time_s, hash_ids, EngineBlockKeys(ROOT, keys, len(keys)), output_tokens)


def policies_of(policy: str, capacity: int) -> tuple[EvictionPolicy, Selective | None]:
    eviction, writes = policy.split(", ")
    admission = Selective(capacity) if writes == "selective" else None
    return make_policy(eviction, TOKENS_PER_ID), admission


def study(policy: EvictionPolicy) -> None:
    """Have a policy learn what it can, at once."""
    if (lesson := policy.begin_study()) is not None:
        lesson.run()
        policy.adopt(lesson)


def replay_alone(trace: list[Request], capacity: int, policy: str) -> Outcome:
    """A tier that is written to and read from directly."""
    eviction, admission = policies_of(policy, capacity)
    tier = Tier(TierName.SSD, capacity, eviction.for_tier(capacity))
    hits = 0
    for request in trace:
        keys = request.keys
        tier.advance(request.time_s)
        there = tier.match(keys).num_blocks
        hits += there
        eviction.look_up(keys, request.time_s)
        outlook = eviction.store(keys, keys.num_blocks)
        tier.match(keys, outlook)
        stop = keys.num_blocks
        admitted = stop if admission is None else admission.admit(keys, stop)
        if there < admitted:
            lease = tier.reserve(keys, there, admitted, outlook)
            tier.publish(lease, len(lease))
            tier.release(lease)
        study(eviction)
    tier.check()
    return Outcome(hits, tier.counters.stored_blocks)


def replay_behind_dram(trace: list[Request], capacity: int, policy: str) -> Outcome:
    """A tier behind DRAM: every request is a get and a put that end at once."""
    eviction, admission = policies_of(policy, capacity)
    num_host_blocks = capacity // DRAM_SHARE
    dram = Tier(TierName.CPU, num_host_blocks, eviction.for_tier(num_host_blocks))
    tier = Tier(TierName.SSD, capacity, eviction.for_tier(capacity))
    tiers = Tiers([dram, tier], eviction)
    settings = PlannerSettings(
        chunk_blocks=LONG_PROMPT, max_store_backlog=capacity,
        admissions={} if admission is None else {TierName.SSD: admission},
    )  # fmt: skip
    cache, hits = TieredCache(tiers, settings), 0
    for request in trace:
        keys = request.keys
        cache.tiers.advance(request.time_s)
        load = cache.loads.plan_get(Prompt(TaskKind.GET, keys, 0, keys.num_blocks, 0))
        hits += load.num_blocks
        cache.publish_staging(load, len(load.staging) if load.staging else 0)
        cache.finish(load)
        store(cache, keys)
        study(eviction)
    cache.check()
    return Outcome(hits, tier.counters.stored_blocks)


def store(cache: TieredCache, keys: EngineBlockKeys) -> None:
    """Store a prompt in all tiers, at once."""
    prompt = Prompt(TaskKind.PUT, keys, 0, keys.num_blocks, 0)
    put = cache.stores.plan_put(prompt)
    if put.num_blocks == 0:  # DRAM has it all, a lower tier perhaps not
        cache.finish(put)
        put = cache.stores.plan_store(prompt)
    cache.publish_staging(put, put.num_blocks)
    for name, lease in put.stores.items():
        cache.publish_store(put, name, len(lease))
    cache.finish(put)


def lru_hits(trace: list[Request], capacity: int) -> int:
    """Block LRU, no matter which block builds on which."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        hits += contiguous(request.hash_ids, cached)
        for number in reversed(request.hash_ids):  # a prompt's last block goes first
            cached[number] = None
            cached.move_to_end(number)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def optimal_hits(trace: Sequence[Request], capacity: int) -> list[int]:
    """Return the hits of each request by Belady: what is needed again last goes first, be it new
    or old.

    A block is needed no earlier than the one it builds on, so of equals the deeper one goes first
    and the blocks that stay are whole prefixes.
    """
    next_use: list[list[int]] = [[] for _ in trace]
    upcoming: dict[int, int] = {}
    for at in range(len(trace) - 1, -1, -1):
        next_use[at] = [upcoming.get(number, NEVER) for number in trace[at].hash_ids]
        upcoming.update(dict.fromkeys(trace[at].hash_ids, at))
    cached: dict[int, int] = {}  # block -> when it is needed again
    queue: list[tuple[int, int, int]] = []  # (-next use, -depth, block), lazily kept
    hits = []
    for request, needed in zip(trace, next_use, strict=True):
        hits.append(contiguous(request.hash_ids, cached))
        for depth, (number, again) in enumerate(zip(request.hash_ids, needed, strict=True)):
            cached[number] = again
            heapq.heappush(queue, (-again, -depth, number))
        while len(cached) > capacity:
            again, _, number = heapq.heappop(queue)
            if cached.get(number) == -again:
                del cached[number]
    return hits


def contiguous(hash_ids: Sequence[int], cached: OrderedDict[int, None] | dict[int, int]) -> int:
    """How many blocks of a prompt are cached, from its first on."""
    return next((at for at, number in enumerate(hash_ids) if number not in cached), len(hash_ids))


def compare(title: str, trace: list[Request], sizes: Sequence[int], replay: Replay) -> int:
    """Print a table, one row per tier size; at how many of them density lost."""
    table = Table(
        "tier, blocks", "LRU", *POLICIES, "optimum", "density / lru",
        "way from LRU to optimum", *(f"written, {policy}" for policy in POLICIES), title=title,
    )  # fmt: skip
    seen, lost = sum(len(request.hash_ids) for request in trace), 0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=len(sizes) * (len(POLICIES) + 2))
        for size in sizes:
            lru = lru_hits(trace, size)
            progress.advance(bar)
            optimum = sum(optimal_hits(trace, size))
            progress.advance(bar)
            outcomes = {}
            for policy in POLICIES:
                outcomes[policy] = replay(trace, size, policy)
                progress.advance(bar)
            through, density = outcomes[POLICIES[0]].hits, outcomes[POLICIES[1]].hits
            lost += density < through
            table.add_row(
                f"{size:,}", f"{lru / seen:.2%}",
                *(f"{outcomes[policy].hits / seen:.2%}" for policy in POLICIES),
                f"{optimum / seen:.2%}", f"{density / through:.4f}",
                f"{(density - lru) / (optimum - lru):.0%}",
                *(f"{outcomes[policy].written:,}" for policy in POLICIES),
            )  # fmt: skip
    console.print(table)
    return lost


def long_prompt(number: int) -> EngineBlockKeys:
    """A prompt of its own, keys of 16 bytes."""
    prefix = number.to_bytes(8, "big")
    keys = [prefix + at.to_bytes(8, "big") for at in range(LONG_PROMPT)]
    return EngineBlockKeys(ROOT, keys, LONG_PROMPT)


def filled(capacity: int) -> tuple[Selective, count[int]]:
    """An admission that has seen so much that each further prompt makes it forget another."""
    admission, numbers = Selective(capacity), count()
    for _ in range(5 * capacity // LONG_PROMPT + 2):
        admission.admit(long_prompt(next(numbers)), LONG_PROMPT)
    return admission, numbers


def median_us(admission: Selective, prompts: Sequence[EngineBlockKeys]) -> float:
    times = []
    for keys in prompts:
        started = time.perf_counter()
        admission.admit(keys, LONG_PROMPT)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e6


def print_cost(capacities: Sequence[int]) -> None:
    table = Table(
        "tier, blocks", "admit, new prompt", "admit, prompt seen before",
        "memory per block of the tier", title=f"Cost of an admission, prompts of {LONG_PROMPT:,}",
    )  # fmt: skip
    for capacity in capacities:
        admission, numbers = filled(capacity)
        new = [long_prompt(next(numbers)) for _ in range(21)]
        first = median_us(admission, new)
        again = median_us(admission, [new[-1]] * 21)
        tracemalloc.start()
        kept = filled(capacity)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
        table.add_row(
            f"{capacity:,}", f"{first:.0f} us", f"{again:.1f} us", f"{held / capacity:.0f} bytes"
        )
    console.print(table)


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines")] = TRACE,
    size: Annotated[list[int] | None, typer.Option(help="Blocks of the tier")] = None,
    cost: Annotated[bool, typer.Option(help="Measure what an admission costs")] = True,
) -> None:
    requests, sizes = read_trace(trace), size or SIZES
    lost = compare("Tier alone", requests, sizes, replay_alone)
    title = f"Tier behind DRAM of 1/{DRAM_SHARE} its size"
    lost += compare(title, requests, sizes, replay_behind_dram)
    if cost:
        print_cost((10_000, 100_000, 1_000_000))
    raise typer.Exit(lost)


if __name__ == "__main__":
    typer.run(main)
