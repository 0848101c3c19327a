"""Retention: what was not used for the set time goes, and nothing else does."""

from __future__ import annotations

import numpy as np
from builders import ROOT, ROOTS, prefixes, prompt
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tail_world import TailWorld
from task_builders import World
from test_restore import ROOT as RECORDED
from test_restore import record

from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.restore import restore_tier
from flexcache.cache.tier import Tier
from flexcache.config.model import KVGroup
from flexcache.ids import OpKind, RootId, TierName
from flexcache.storage.slot_index import ages_s, next_generation, older
from flexcache.tasks.instructions import DISK

CPU, SSD = TierName.CPU, TierName.SSD
KEEP_S = 64.0
STAMP_S = KEEP_S / 64
STATE = (KVGroup("full", 32), KVGroup("state", 32))

some_root = st.sampled_from(ROOTS)
some_word = st.text("ab", min_size=1, max_size=7)
Path = tuple[RootId, str]


def store(tier: Tier, word: str, root: RootId = ROOT, retain_s: float = 0.0) -> int:
    """Store what is lacking of a prompt; return how many of its blocks are there then."""
    keys = prompt(word, root)
    start = tier.match(keys, retain_s=retain_s).num_blocks
    lease = tier.reserve(keys, start, len(word), retain_s=retain_s)
    stop = start + len(lease)
    tier.publish(lease, len(lease))
    tier.release(lease)
    return stop


def sweep(tier: Tier, now: float) -> None:
    """Let all turns of a sweep take place at once."""
    tier.advance(now)
    tier.expire_all(now)


def cached(tier: Tier, word: str, root: RootId = ROOT) -> int:
    return tier.index.match(prompt(word, root)).num_blocks


class RetainedTier(RuleBasedStateMachine):
    """Against a dictionary of the times at which each block was last used."""

    @initialize(capacity=st.sampled_from([8, 40]))
    def make(self, capacity: int) -> None:
        self.tier = Tier(CPU, capacity, retention_s=KEEP_S)
        self.now = 1000.0
        self.tier.advance(self.now)
        self.used: dict[Path, float] = {}
        self.pinned: list[tuple[PrefixMatch, Path]] = []

    @rule(root=some_root, word=some_word, retain_s=st.sampled_from([0.0, 1e6, -1e6]))
    def put(self, root: RootId, word: str, retain_s: float) -> None:
        """Priorities shift the order of eviction only."""
        count = store(self.tier, word, root, retain_s)
        self.use(root, word[:count])

    @rule(root=some_root, word=some_word, age_s=st.sampled_from([0.0, 5.0, 30.0, 60.0]))
    def load_early(self, root: RootId, word: str, age_s: float) -> None:
        """Blocks of another tier, where they were last used before; the first half later."""
        keys = prompt(word, root)
        start = self.tier.match(keys, is_use=False).num_blocks
        lease = self.tier.reserve(keys, start, len(word))
        new, half = len(lease), len(lease) // 2
        lease.used_s = self.now - np.array([age_s / 2] * half + [age_s] * (new - half))
        self.tier.publish(lease, new)
        self.tier.release(lease)
        used_s = lease.used_s.tolist()
        self.used |= {(root, word[: start + i + 1]): used for i, used in enumerate(used_s)}
        if new:
            for prefix in prefixes(word[:start]):
                self.used[root, prefix] = max(self.used[root, prefix], used_s[0])
            match = self.tier.index.match(keys)
            expected = [self.used[root, prefix] for prefix in prefixes(word[: match.num_blocks])]
            last_used = self.tier.last_used(match, 0)
            assert last_used is not None
            assert np.abs(last_used - expected).max() <= 0.51 * STAMP_S + 1e-2

    @rule(root=some_root, word=some_word)
    def get(self, root: RootId, word: str) -> None:
        self.use(root, word[: self.tier.match(prompt(word, root)).num_blocks])

    def use(self, root: RootId, word: str) -> None:
        self.used |= {(root, prefix): self.now for prefix in prefixes(word)}

    @rule(root=some_root, word=some_word)
    def retire(self, root: RootId, word: str) -> None:
        match = self.tier.index.match(prompt(word, root))
        if match.run is not None and match.length == match.run.length and not match.run.children:
            self.tier.retire(match, match.num_blocks - 1)

    @rule(root=some_root, word=some_word)
    def pin(self, root: RootId, word: str) -> None:
        match = self.tier.index.match(prompt(word, root))
        if match.run is not None:
            self.tier.pin(match)
            self.pinned.append((match, (root, word[: match.num_blocks])))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.tier.unpin(self.pinned.pop(0)[0])

    @rule(seconds=st.sampled_from([0.25, 3.0, 20.0, 40.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tier.advance(self.now)

    @rule()
    def turn(self) -> None:
        before = self.found()
        self.tier.expire(self.now)
        self.check_dropped(before - self.found())

    @rule()
    def sweep(self) -> None:
        before = self.found()
        self.tier.expire_all(self.now)
        after = self.found()
        self.check_dropped(before - after)
        for path in after:
            assert self.now - self.used[path] <= KEEP_S + 1.1 * STAMP_S, "kept for too long"

    def check_dropped(self, dropped: set[Path]) -> None:
        for path in dropped:
            assert self.now - self.used[path] > KEEP_S - 1e-2, "dropped too early"

    def found(self) -> set[Path]:
        return {
            (root, prefix)
            for root, word in {(root, word) for root, word in self.used}
            for prefix in prefixes(word)[: cached(self.tier, word, root)]
        }

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for match, _ in self.pinned:
            self.tier.unpin(match)
        sweep(self.tier, self.now + 2 * KEEP_S)
        assert self.tier.pool.num_free == self.tier.capacity


TestRetainedTier = RetainedTier.TestCase


def test_only_the_part_of_a_prompt_that_is_not_used_goes() -> None:
    tier = Tier(CPU, 20, retention_s=KEEP_S)
    tier.advance(0.0)
    store(tier, "abcdef")
    tier.advance(50.0)
    tier.match(prompt("abcx"))
    sweep(tier, 70.0)
    assert cached(tier, "abcdef") == 3
    sweep(tier, 130.0)
    assert cached(tier, "abcdef") == 0
    assert tier.stats().expired_blocks == 6


def test_the_work_of_a_turn_is_bounded_and_turns_follow_until_all_is_gone() -> None:
    tier = Tier(CPU, 20_000, retention_s=KEEP_S)
    tier.advance(0.0)
    for first in "abcdef":
        store(tier, first * 3_000)
    now, turns = 100.0, 0
    tier.advance(now)
    while tier.num_indexed:
        before = tier.num_indexed
        tier.expire(now)
        assert before - tier.num_indexed <= 4096 + 3_000
        assert tier.next_expiry is not None and tier.next_expiry > now
        now, turns = tier.next_expiry, turns + 1
        tier.check()
    assert 3 <= turns <= 10
    assert now < 100.0 + KEEP_S / 16 + 1.0


def test_a_pinned_block_is_not_found_any_more_and_freed_at_its_unpin() -> None:
    tier = Tier(CPU, 8, retention_s=KEEP_S)
    tier.advance(0.0)
    store(tier, "abcd")
    match = tier.index.match(prompt("abcd"))
    tier.pin(match)
    sweep(tier, 100.0)
    assert cached(tier, "abcd") == 0
    assert tier.pool.num_free == 4
    tier.unpin(match)
    assert tier.pool.num_free == 8
    tier.check()


# In a cache


def test_every_tier_drops_what_is_too_old_by_itself() -> None:
    world = World(cpu=10, ssd=20, remote=True, retention_s=600.0)
    world.put("abcd")
    world.finish_all()
    world.tick(300.0)
    world.get("ab")
    world.finish_all()
    for _ in range(4):  # no request comes
        due = world.engine.next_deadline()
        assert due is not None
        world.tick(max(0.0, due - world.now))
    world.tick(400.0)
    assert [world.cached(tier, "abcd") for tier in (CPU, SSD)] == [2, 0]
    world.tick(700.0)
    stats = world.stats()
    assert {name: tier.indexed for name, tier in stats.tiers.items()} == {
        "CPU": 0, "SSD": 0, "REMOTE": 0,
    }  # fmt: skip
    assert [tier.expired_blocks for tier in stats.tiers.values()] == [4, 4, 4]
    assert stats.retention_s == 600.0
    world.check_nothing_is_held()


def test_dirty_blocks_that_are_too_old_are_not_lost_but_gone() -> None:
    world = World(cpu=10, ssd=20, policy="write_back", retention_s=600.0)
    world.put("ab")
    world.finish_all()
    world.tick(700.0)
    assert world.cached(CPU, "ab") == 0
    assert not world.stats().totals.dropped_blocks
    assert world.stats().tiers["SSD"].dirty_blocks == 0


def test_without_a_retention_time_nothing_expires() -> None:
    world = World()
    world.put("abcd")
    world.finish_all()
    world.tick(1e9)
    assert world.cached(CPU, "abcd") == 4
    assert world.engine.next_deadline() is None


def test_tails_go_too() -> None:
    world = TailWorld(STATE, cpu=20, ssd=20, retention_s=600.0)
    world.put("ab", tail_at=2)
    world.finish_all()
    world.now += 300.0
    world.engine.tick(world.now)
    world.get("ab")
    world.finish_all()
    world.now += 400.0
    world.engine.tick(world.now)
    host, ssd = world.cache.tiers
    assert (host.tails.num_tails, ssd.tails.num_tails) == (1, 0)
    world.now += 700.0
    world.engine.tick(world.now)
    assert host.num_indexed == ssd.num_indexed == 0
    world.cache.check()


# After a restart


def test_what_was_written_too_long_ago_does_not_come_back() -> None:
    records = np.concatenate(
        [record("a", 0, 1), record("ab", 1, 2), record("abc", 2, 3), record("abx", 3, 4)]
    )
    written_s = np.array([10.0, 20.0, 30.0, 100.0])
    tier = Tier(SSD, 8, retention_s=KEEP_S)
    tier.advance(120.0)
    restore_tier(tier, records, written_s)
    tier.check()
    sweep(tier, 120.0)
    assert cached(tier, "abc", RECORDED) == 2, "what abx builds on was used with it"
    assert cached(tier, "abx", RECORDED) == 3
    sweep(tier, 170.0)
    assert tier.num_indexed == 0


def test_a_cache_finds_nothing_that_is_too_old_from_the_first_request_on() -> None:
    records = np.concatenate([record("a", 0, 1), record("ab", 1, 2), record("x", 2, 3)])
    world = World(ssd=8, retention_s=600.0)
    world.engine.restore(records, np.array([900.0, 700.0, 500.0]), world.now)
    assert world.stats().tiers["SSD"].indexed == 1
    world.engine.cache.check()


def test_generations_rise_and_are_times() -> None:
    wall_s = 1_760_000_000.0
    first = next_generation(0, wall_s)
    assert next_generation(first, wall_s) == first + 1
    assert next_generation(first, wall_s - 3600) == first + 1
    generations = np.array([17, first, first + 1], dtype=np.uint64)
    assert ages_s(generations, wall_s + 100.0).round(3).tolist() == [wall_s + 100.0, 100.0, 100.0]
    assert ages_s(generations[1:], wall_s - 100.0).tolist() == [0.0, 0.0]
    late = older(np.array([first, first]), np.array([40.0, 0.0]))
    assert ages_s(late.astype(np.uint64), wall_s + 100.0).round(3).tolist() == [140.0, 100.0]


# What is no use


def in_lower_tiers(text: str) -> World:
    """Store a prompt 500 s ago, of which DRAM has nothing left."""
    world = World(cpu=10, ssd=20, retention_s=600.0)
    world.put(text)
    world.finish_all()
    world.clear(CPU)
    world.tick(500.0)
    return world


def prefetch(world: World, text: str) -> None:
    world.prefetch(text)
    world.finish_all()


def test_prefetches_do_not_keep_what_no_request_uses() -> None:
    world = in_lower_tiers("abcd")
    prefetch(world, "abcd")
    world.tick(60.0)
    prefetch(world, "abcd")
    assert world.cached(CPU, "abcd") == world.cached(SSD, "abcd") == 4
    world.tick(55.0)
    assert world.cached(CPU, "abcd") == world.cached(SSD, "abcd") == 0
    assert world.stats().tiers["CPU"].indexed == 0, "the early load holds it no more"
    world.check_nothing_is_held()


def test_a_get_after_a_prefetch_is_a_use() -> None:
    world = in_lower_tiers("abcd")
    prefetch(world, "abcd")
    world.get("abcd")
    world.finish_all()
    world.tick(200.0)
    assert [world.cached(tier, "abcd") for tier in (CPU, SSD)] == [4, 0]


def test_hints_that_a_session_returns_do_not_keep_it() -> None:
    world = in_lower_tiers("")
    put = world.put("abcd")
    world.cache.sessions.used("a session", world.placed("abcd"), world.tasks[put].plan)
    world.finish_all()
    world.clear(CPU)
    for _ in range(6):
        world.tick(99.0)
        world.cache.sessions.hint("a session", False, 1.0, world.now)
        world.tick(1.0)
        world.finish_all()
    assert world.cached(CPU, "abcd") == world.cached(SSD, "abcd") == 4
    world.tick(80.0)
    assert world.cached(CPU, "abcd") == world.cached(SSD, "abcd") == 0


def test_an_early_load_of_a_tail_is_no_use_of_it() -> None:
    world = TailWorld(STATE, cpu=10, ssd=20, retention_s=600.0)
    world.put("ab", tail_at=2)
    world.finish_all()
    world.cache.tiers.clear("CPU")
    world.now += 500.0
    world.engine.tick(world.now)
    world.prefetch("ab")
    world.finish_all()
    assert world.has_tail(CPU, "ab")
    world.now += 140.0
    world.engine.tick(world.now)
    assert [tier.num_indexed for tier in world.cache.tiers] == [0, 0]
    world.cache.check()


def test_blocks_that_are_written_back_late_are_as_old_as_their_use() -> None:
    world = World(cpu=10, ssd=20, policy="write_back", retention_s=600.0)
    world.down(DISK)
    world.put("abcd")
    world.finish_all()
    world.tick(200.0)
    world.get("ab")
    world.finish_all()
    world.tick(300.0)
    world.up(DISK)
    world.tick()
    names = [run.op.names for run in world.ops(OpKind.H2DISK)]
    ages_s = [world.now - n.used_s for n in names if n is not None and n.used_s is not None]
    assert all(abs(age - used) <= 10 for age, used in zip(ages_s, [300, 500], strict=True))
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4
    world.tick(150.0)
    assert world.cached(SSD, "abcd") == 2
    world.tick(200.0)
    assert world.cached(SSD, "abcd") == 0
