"""The index of one tier: the cost of its operations, and how it grows with the number of blocks.

A tier of its own, no bytes. Beside each figure stands what plain structures take for the same:
a dictionary for what is looked up and filed, a heap for what is evicted.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import tracemalloc
from collections.abc import Iterable, Iterator
from functools import partial
from random import Random

import numpy as np

from flexcache.bench.suite import Case, Result, sample, sample_beside
from flexcache.cache.block_keys import EngineBlockKeys, make_root
from flexcache.cache.density import DensityQueue
from flexcache.cache.density_hazards import NUM_BINS
from flexcache.cache.eviction_policy import Outlook, make_policy
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.tier import Lease, Tier
from flexcache.config.cache import EVICTION_POLICIES
from flexcache.ids import TierName

ROOT = make_root("bench", (), "engine")
PROMPT_BLOCKS = 1_000
TURN_BLOCKS = 16
"""Blocks that each turn of a conversation adds."""
ALLOCATED = 4
_ALLOCATE_LIMIT_US = 15
_BYTES_LIMIT = 160
_LEAF_S = 0.01
"""Seconds between two uses of leaves."""
_ROUNDS = 1_000
_POLICY = "density"


def cases(thorough: bool) -> list[Case]:
    leaves = (1_000, 10_000, 50_000, 100_000, *((1_000_000,) if thorough else ()))
    sizes = (10_000, 100_000, 1_000_000, *((10_000_000,) if thorough else ()))
    turns = (1, 10, 100, 500)
    return [
        *(Case(f"use, allocate and evict, {n:,} leaves", partial(_leaves, n)) for n in leaves),
        *(Case(f"index of {n:,} blocks", partial(_steps, n)) for n in sizes),
        *(Case(f"conversation of {n} turns", partial(_conversation, n)) for n in turns),
        *(Case(f"memory of the index, {p}", partial(_memory, p)) for p in EVICTION_POLICIES),
    ]


def _prompt(number: int, num_blocks: int) -> EngineBlockKeys:
    """A prompt of its own, keys of 16 bytes."""
    prefix = number.to_bytes(8, "big")
    keys = [prefix + at.to_bytes(8, "big") for at in range(num_blocks)]
    return EngineBlockKeys(ROOT, keys, num_blocks)


def _tier(capacity: int, policy: str = _POLICY) -> Tier:
    return Tier(TierName.CPU, capacity, make_policy(policy, 16).for_tier(capacity))


def _store(tier: Tier, keys: EngineBlockKeys, outlook: Outlook | None = None) -> int:
    """Look a prompt up and store what is missing; how much was there."""
    there = tier.match(keys).num_blocks
    if there < keys.num_blocks:
        lease = tier.reserve(keys, there, keys.num_blocks, outlook)
        tier.publish(lease, len(lease))
        tier.release(lease)
    return there


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)


def _leaves(num_leaves: int) -> Iterator[Result]:
    """A full tier of prompts of one block: one is used, and each allocation evicts as many leaves.

    Under `density` the leaves are of all kinds, at random, and so is what these are worth.
    """
    for policy in EVICTION_POLICIES:
        tier, random = _tier(num_leaves, policy), Random(num_leaves)
        order, num_kinds = tier.index.queues[0], 1
        if isinstance(order, DensityQueue):
            num_kinds = order.ranking.num_kinds
            worths = [[random.random() for _ in range(NUM_BINS)] for _ in range(num_kinds)]
            order.ranking.set_worths([sorted(of_kind, reverse=True) for of_kind in worths])
            order.ranking.set_lru(False)
        times = itertools.count(0.0, _LEAF_S)
        for number in range(num_leaves):
            tier.advance(next(times))
            _store(tier, _prompt(number, 1), _any_kind(random, num_kinds))
        _expect(tier.index.num_blocks == num_leaves, "the tier is not full")
        prompts = iter([_prompt(random.randrange(num_leaves), 1) for _ in range(2 * _ROUNDS)])

        def use() -> PrefixMatch:
            tier.advance(next(times))  # noqa: B023
            return tier.match(next(prompts), _any_kind(random, num_kinds))  # noqa: B023

        used = sample(use, lambda match: _expect(match.num_blocks == 1, "a leaf is gone"), _ROUNDS)
        yield Result(f"use a leaf, {policy}", "us", used)
        leases: list[Lease] = []
        queue = [(float(number), number) for number in range(num_leaves)]
        table = dict.fromkeys((_prompt(number, 1).key(0) for number in range(num_leaves)), 0)
        keys = iter(list(table))
        pinned = tier.match(_prompt(0, 1))
        tier.pin(pinned)

        def evict_plainly() -> None:
            for _ in range(ALLOCATED):
                heapq.heappop(queue)  # noqa: B023
                del table[next(keys)]  # noqa: B023

        def keep(lease: Lease) -> None:
            leases.append(lease)  # noqa: B023
            tier.advance(next(times))  # noqa: B023
            tier.use(pinned, None)  # noqa: B023

        allocated, bound = sample_beside(
            partial(tier.reserve_private, ROOT, ALLOCATED), evict_plainly, keep,
            min(_ROUNDS, num_leaves // ALLOCATED // 2),
        )  # fmt: skip
        _expect(all(len(lease) == ALLOCATED for lease in leases), "an allocation fell short")
        evicted = tier.counters.evicted_blocks
        _expect(evicted == ALLOCATED * len(leases), "more was evicted than allocated")
        tier.unpin(pinned)
        for lease in leases:
            tier.release(lease)
        tier.check()
        yield Result(
            f"allocate {ALLOCATED} blocks, full tier, {policy}", "us", allocated, bound,
            "heap and dict", limit=_ALLOCATE_LIMIT_US,
        )  # fmt: skip


def _any_kind(random: Random, num_kinds: int) -> Outlook:
    kind = random.randrange(num_kinds)
    return Outlook(kind, kind, 0)


def _steps(num_blocks: int) -> Iterator[Result]:
    """Match, touch, insert and evict a prompt, in a full tier of such."""
    tier = _tier(num_blocks)
    count = num_blocks // PROMPT_BLOCKS
    for number in range(count):
        _store(tier, _prompt(number, PROMPT_BLOCKS))
    order = np.random.default_rng(0).permutation(count)
    cached = [_prompt(int(number), PROMPT_BLOCKS) for number in order[:200]]
    table: dict[bytes, int] = dict.fromkeys(
        (key for prompt in cached for key in prompt.slice(0, PROMPT_BLOCKS)), 0
    )

    def probe(prompts: Iterator[EngineBlockKeys]) -> int:
        prompt = next(prompts)
        return table[prompt.key(0)] + table[prompt.key(PROMPT_BLOCKS - 1)]

    rounds = 150
    found = sample_beside(
        partial(lambda prompts: tier.index.match(next(prompts)), _round(cached)),
        partial(probe, _round(cached)),
        lambda match: _expect(match.num_blocks == PROMPT_BLOCKS, "a prompt was not found"),
        rounds,
    )
    yield Result(f"match {PROMPT_BLOCKS:,} blocks", "us", found[0], found[1], "two look-ups")
    touched = sample(
        partial(lambda prompts: tier.match(next(prompts)), _round(cached)),
        lambda match: _expect(match.num_blocks == PROMPT_BLOCKS, "a prompt was not found"),
        rounds,
    )
    yield Result(f"match and touch {PROMPT_BLOCKS:,} blocks", "us", touched)
    prompts = [_prompt(count + at, PROMPT_BLOCKS) for at in range(2 * rounds)]
    new = iter(prompts)
    filed = iter([prompt.slice(0, PROMPT_BLOCKS) for prompt in prompts])
    old: list[list[bytes]] = []

    def file_plainly() -> None:
        keys: list[bytes] = list(next(filed))
        table.update(zip(keys, range(PROMPT_BLOCKS), strict=True))
        if old:
            for key in old.pop():
                del table[key]
        old.append(keys)

    stored = sample_beside(
        lambda: _store(tier, next(new)),
        file_plainly,
        lambda there: _expect(there == 0, "a new prompt was there"),
        rounds,
    )
    yield Result(f"evict and insert {PROMPT_BLOCKS:,} blocks", "us", stored[0], stored[1], "dict")
    _expect(tier.index.num_blocks == count * PROMPT_BLOCKS, "the tier is not full")
    if num_blocks <= 1_000_000:
        tier.check()


def _round(prompts: list[EngineBlockKeys]) -> Iterator[EngineBlockKeys]:
    while True:
        yield from prompts


def _conversation(num_turns: int) -> Iterator[Result]:
    """A conversation stored turn by turn, then looked up as a whole and with one turn more."""
    length = num_turns * TURN_BLOCKS
    tier, whole = _tier(length + 200 * TURN_BLOCKS), _prompt(0, length + TURN_BLOCKS)
    keys = whole.slice(0, whole.num_blocks)
    for turn in range(1, num_turns + 1):
        there = _store(tier, EngineBlockKeys(ROOT, keys, turn * TURN_BLOCKS))
        _expect(there == (turn - 1) * TURN_BLOCKS, "the turn before was not found")
    found = sample(
        partial(tier.match, whole),
        lambda match: _expect(match.num_blocks == length, "the conversation was not found"),
    )
    yield Result(f"match and touch {length:,} blocks, one turn more asked", "us", found)
    blocks = sample(
        partial(tier.index.blocks, tier.index.match(whole)),
        lambda ids: _expect(len(ids) == length, "blocks are missing"),
    )
    yield Result(f"block ids of {length:,} blocks", "us", blocks)


def _memory(policy: str) -> Iterable[Result]:
    count = 100_000
    gc.collect()
    tracemalloc.start()
    tier = _tier(count, policy)
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count // PROMPT_BLOCKS):
        _store(tier, _prompt(number, PROMPT_BLOCKS))
    used = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    _expect(tier.index.num_blocks == count, "the tier is not full")
    yield Result("memory per block, keys included", "bytes", [used], limit=_BYTES_LIMIT)
