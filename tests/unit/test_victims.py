"""The victims of the built-in eviction policies, recorded before they were classes of their own."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from random import Random

import numpy as np
import pytest

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.density import DensityQueue, DensityRanking
from flexcache.cache.eviction_policy import LruQueue, Outlook
from flexcache.cache.prefix_index import PrefixIndex, PrefixMatch
from flexcache.ids import BlockKey, RootId

ROOTS = [RootId(b"root-%d" % number) for number in range(4)]


class Traffic:
    """Seeded calls of an index of two tenants, and a digest of all that they evict.

    Args:
        retires: Whether prompts and roots are retired and blocks discarded, too.
    """

    def __init__(self, policy: str, seed: int, retires: bool) -> None:
        self.random, self.retires = Random(seed), retires
        self.ranking = DensityRanking(is_lru=False) if policy == "density" else None
        make_queue = partial(DensityQueue, self.ranking) if self.ranking else LruQueue
        self.index = PrefixIndex(make_queue, 2, lambda root: root[-1] % 2)  # type: ignore[arg-type]
        self.victims = hashlib.sha256()
        self.index.on_removed.append(lambda root, keys: self.victims.update(root + b"".join(keys)))
        self.pins: list[PrefixMatch] = []
        self.now, self.next_id = 0.0, 0
        if self.ranking:
            self.ranking.set_worths(self.worths())

    def worths(self) -> list[list[float]]:
        return [[self.random.random() for _ in range(40)] for _ in range(128)]

    def outlook(self) -> Outlook | None:
        random = self.random
        if random.random() < 0.8:
            return Outlook(random.randrange(128), random.randrange(128), random.randrange(5))
        return None

    def prompt(self) -> EngineBlockKeys:
        root, keys, text = self.random.choice(ROOTS), list[BlockKey](), b""
        for digit in [self.random.randrange(3) for _ in range(self.random.randrange(1, 9))]:
            text += bytes([digit])
            keys.append(BlockKey(hashlib.md5(text).digest()))
        return EngineBlockKeys(root, keys, len(keys))

    def step(self) -> None:
        random, index = self.random, self.index
        self.now += random.choice([0.001, 0.05, 0.7, 20.0])
        keys = self.prompt()
        match, kind = index.match(keys), random.random()
        if kind < 0.45:
            self.store(keys, match)
        elif kind < 0.6:
            index.touch(match, self.now, 0, self.outlook())
        elif kind < 0.7:
            below = random.choice([math.inf, 0.4, self.now - 30.0])
            before = random.choice([math.inf, math.inf, self.now - 10.0])
            count = random.randrange(1, 9)
            self.victims.update(index.evict(count, before, below, random.randrange(2)).tobytes())
        elif kind < 0.78:
            index.pin(match)
            self.pins += [match] if match.run is not None else []
        elif kind < 0.86 and self.pins:
            index.unpin(self.pins.pop(random.randrange(len(self.pins))))
            self.victims.update(index.sweep().tobytes())
        elif kind < 0.935 and self.retires:
            self.retire(keys, match, kind)
        elif kind < 0.95 and self.ranking:
            if random.random() < 0.5:
                self.ranking.set_lru(not self.ranking.is_lru)
            else:
                self.ranking.set_worths(self.worths())
        elif match.run is not None:
            index.sort(match, self.outlook() or Outlook(0, 0, 0))

    def store(self, keys: EngineBlockKeys, match: PrefixMatch) -> None:
        random, index = self.random, self.index
        index.touch(match, self.now, random.choice([0, 0, 0, 0, 100.0]), self.outlook())
        new = keys.slice(match.num_blocks, keys.num_blocks)
        if not new:
            return
        ids = np.arange(self.next_id, self.next_id + len(new))
        self.next_id += len(new)
        index.pin(match)
        over = index.num_blocks - 600
        self.victims.update(index.evict(over, tenant=random.randrange(2)).tobytes())
        index.unpin(match)
        retain = random.choice([0, 0, 0, 60.0])
        index.insert(match, keys.root, new, ids, self.now, retain, self.outlook())

    def retire(self, keys: EngineBlockKeys, match: PrefixMatch, kind: float) -> None:
        run, index = match.run, self.index
        if kind > 0.93:
            index.retire_root(keys.root)
        elif run is not None and kind > 0.9:
            key = keys.key(self.random.randrange(match.num_blocks))
            self.victims.update(index.discard(keys.root, key).tobytes())
        elif run is not None and run.held_length < match.length == run.length:
            start = self.random.randrange(run.held_length, run.length)
            index.retire(match, run.depth + start)


@pytest.mark.parametrize(("policy", "retires", "recorded"), [
    ("lru", True, "cd8008213b2ff587"),
    ("lru", False, "8738e398870584b9"),
    ("density", False, "52fc98539d69f6ca"),
])  # fmt: skip
def test_the_victims_are_those_that_were_recorded(
    policy: str, retires: bool, recorded: str
) -> None:
    traffic = Traffic(policy, 7, retires)
    for step in range(6_000):
        traffic.step()
        if step % 1_000 == 0:
            traffic.index.check()
    assert traffic.victims.hexdigest()[:16] == recorded
