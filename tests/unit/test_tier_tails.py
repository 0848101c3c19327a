"""Tails beside blocks in one tier: one pool, one order of eviction, all or nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from builders import ROOT, ROOTS, ids, key_of, keys_of, prompt, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from s3_fifo import POLICIES

from flexcache.cache.eviction_policy import make_policy
from flexcache.cache.prefix_index import RestoredRun
from flexcache.cache.tail_index import Tail
from flexcache.cache.tier import Lease, Tier
from flexcache.ids import RootId, TierName

LONG_WORDS = words("ab", 3)
SHORT_WORDS = [word for length in (1, 2, 3) for word in words("ab", length)]

some_root = st.sampled_from(ROOTS)
some_word = st.sampled_from(SHORT_WORDS)
some_number = st.integers(0, 99)


def store(tier: Tier, word: str, root: RootId = ROOT) -> None:
    """Put the blocks of a word that are not there yet."""
    keys = prompt(word, root)
    lease = tier.reserve(keys, tier.match(keys).num_blocks, len(word))
    tier.publish(lease, len(lease))
    tier.release(lease)


def store_tail(tier: Tier, word: str, count: int, root: RootId = ROOT) -> Tail:
    lease = tier.reserve_tail(root, key_of(word), count)
    assert lease is not None
    tier.publish(lease, count)
    tier.release(lease)
    assert lease.tail is not None
    return lease.tail


def has_tail(tier: Tier, word: str, root: RootId = ROOT) -> bool:
    return tier.tails.find(root, key_of(word)) is not None


def num_stored(tier: Tier, word: str) -> int:
    return tier.index.match(prompt(word)).num_blocks


@dataclass(eq=False)
class Reserved:
    lease: Lease
    root: RootId
    word: str
    count: int
    arrived: int | None = None
    is_void: bool = False


class TailedTier(RuleBasedStateMachine):
    """Contents by unit: a tail that can be found has all of its own, whatever came between."""

    @initialize(capacity=st.sampled_from([3, 6, 12]), policy=st.sampled_from(POLICIES))
    def make(self, capacity: int, policy: str) -> None:
        make_queue = make_policy(policy, 512).for_tier(capacity)
        self.tier = Tier(TierName.CPU, capacity, make_queue)
        self.open: list[Reserved] = []
        self.pinned: list[tuple[Tail, list[int]]] = []
        self.content: dict[int, object] = {}
        self.now = 0.0

    @rule(root=some_root, word=st.sampled_from(LONG_WORDS))
    def put_blocks(self, root: RootId, word: str) -> None:
        keys = prompt(word, root)
        lease = self.tier.reserve(keys, self.tier.match(keys).num_blocks, len(word))
        for key, block in zip(lease.keys, lease.blocks.tolist(), strict=True):
            self.content[block] = (root, key)
        self.tier.publish(lease, len(lease))
        self.tier.release(lease)

    @rule(root=some_root, word=some_word, count=st.integers(1, 3))
    def reserve(self, root: RootId, word: str, count: int) -> None:
        is_awaited = any(
            (r.root, r.word, r.count) == (root, word, count) and not r.arrived and not r.is_void
            for r in self.open  # nothing that arrived is in flight until its release
        )
        assert self.tier.is_tail_in_flight(root, key_of(word), count) == is_awaited
        if is_awaited:
            return
        lease = self.tier.reserve_tail(root, key_of(word), count)
        if lease is None:
            return
        assert len(lease) == count
        for unit in lease.blocks.tolist():
            self.content[unit] = "half written"
        self.open.append(Reserved(lease, root, word, count))

    @precondition(lambda self: any(r.arrived is None for r in self.open))
    @rule(number=some_number, is_whole=st.booleans())
    def publish(self, number: int, is_whole: bool) -> None:
        awaited = [r for r in self.open if r.arrived is None]
        reserved = awaited[number % len(awaited)]
        reserved.arrived = reserved.count if is_whole else reserved.count - 1
        for j, unit in enumerate(reserved.lease.blocks.tolist()[: reserved.arrived]):
            self.content[unit] = (reserved.root, reserved.word, j, reserved.count)
        was_there = has_tail(self.tier, reserved.word, reserved.root)
        self.tier.publish(reserved.lease, reserved.arrived)
        is_there = has_tail(self.tier, reserved.word, reserved.root)
        assert is_there == (was_there or (is_whole and not reserved.is_void))

    @precondition(lambda self: self.open)
    @rule(number=some_number)
    def release(self, number: int) -> None:
        self.tier.release(self.open.pop(number % len(self.open)).lease)

    @rule(root=some_root, word=some_word)
    def use(self, root: RootId, word: str) -> None:
        self.tier.match(prompt(word, root))
        tail = self.tier.tails.find(root, key_of(word))
        if tail is not None:
            self.tier.use_tail(tail)
            self.tier.tails.pin(tail)
            self.pinned.append((tail, tail.units.tolist()))

    @precondition(lambda self: self.pinned)
    @rule(number=some_number)
    def unpin(self, number: int) -> None:
        tail, _ = self.pinned.pop(number % len(self.pinned))
        self.tier.unpin_tail(tail)

    @rule(root=some_root, word=some_word)
    def discard(self, root: RootId, word: str) -> None:
        self.tier.discard_tail(root, key_of(word))
        assert not has_tail(self.tier, word, root)

    @rule()
    def clear(self) -> None:
        self.tier.clear()

    @rule()
    def forget_held(self) -> None:
        self.tier.forget_held()
        assert not self.tier.tails.num_tails
        for reserved in self.open:
            reserved.is_void = True

    @rule()
    def pass_time(self) -> None:
        self.now += 1.0
        self.tier.advance(self.now)

    @invariant()
    def holds(self) -> None:
        tier = self.tier
        tier.check()
        stats = tier.stats()
        assert stats.free + stats.indexed + stats.leased == stats.capacity
        for tail, units in self.pinned:
            assert tail.units.tolist() == units
            assert not any(tier.pool.is_free(unit) for unit in units)
        for root in ROOTS:
            for word in SHORT_WORDS:
                tail = tier.tails.find(root, key_of(word))
                if tail is not None:
                    count = len(tail.units)
                    expected = [(root, word, j, count) for j in range(count)]
                    assert [self.content[unit] for unit in tail.units.tolist()] == expected
            for word in LONG_WORDS:
                match = tier.index.match(prompt(word, root))
                blocks = tier.index.blocks(match).tolist()
                expected_keys = [(root, key) for key in keys_of(word)[: len(blocks)]]
                assert [self.content[block] for block in blocks] == expected_keys

    def teardown(self) -> None:
        for reserved in self.open:
            self.tier.release(reserved.lease)
        for tail, _ in self.pinned:
            self.tier.unpin_tail(tail)
        self.tier.clear()
        assert self.tier.pool.num_free == self.tier.capacity


TailedTier.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTailedTier = TailedTier.TestCase


def test_the_oldest_go_first_whether_blocks_or_tails() -> None:
    tier = Tier(TierName.CPU, 10)
    store(tier, "aa")
    store_tail(tier, "aa", 2)
    store(tier, "bb")
    store_tail(tier, "bb", 2)
    assert tier.pool.num_free == 2
    store(tier, "cccc")  # room for two
    assert not has_tail(tier, "aa")
    assert (num_stored(tier, "aa"), num_stored(tier, "bb")) == (2, 2)
    store(tier, "cccccc")
    assert (num_stored(tier, "aa"), num_stored(tier, "bb")) == (0, 2)
    assert has_tail(tier, "bb")


def test_a_used_tail_stays_as_long_as_its_prefix() -> None:
    tier = Tier(TierName.CPU, 6)
    store(tier, "aa")
    tail = store_tail(tier, "aa", 1)
    store(tier, "bb")
    store_tail(tier, "bb", 1)
    tier.match(prompt("aa"))
    tier.use_tail(tail)
    store(tier, "ccc")
    assert has_tail(tier, "aa")
    assert not has_tail(tier, "bb")
    assert (num_stored(tier, "aa"), num_stored(tier, "bb"), num_stored(tier, "ccc")) == (2, 0, 3)


def test_a_tail_that_is_evicted_for_less_gives_the_rest_back() -> None:
    tier = Tier(TierName.CPU, 4)
    store_tail(tier, "a", 4)
    store(tier, "b")
    assert not has_tail(tier, "a")
    assert tier.pool.num_free == 3
    assert tier.counters.evicted_blocks == 4
    tier.check()


def test_a_tail_without_room_for_all_of_it_is_not_reserved() -> None:
    tier = Tier(TierName.CPU, 3)
    held = tier.reserve(prompt("ab"), 0, 2)
    assert tier.reserve_tail(ROOT, key_of("a"), 2) is None
    tier.check()
    assert tier.num_leased == 2
    tier.release(held)
    assert tier.reserve_tail(ROOT, key_of("a"), 2) is not None


def test_a_retained_tail_outlives_later_ones() -> None:
    tier = Tier(TierName.CPU, 2)
    lease = tier.reserve_tail(ROOT, key_of("a"), 1)
    assert lease is not None
    lease.retain_s = 60.0
    tier.publish(lease, 1)
    tier.release(lease)
    store_tail(tier, "b", 1)
    store_tail(tier, "aa", 1)
    assert has_tail(tier, "a")
    assert not has_tail(tier, "b")


@pytest.mark.parametrize("with_prefix", [True, False])
def test_restored_tails_are_as_recent_as_their_prefixes(with_prefix: bool) -> None:
    tier = Tier(TierName.SSD, 6)
    if with_prefix:
        tier.expect(ids(0, 1))
        tier.restore([RestoredRun(ROOT, None, keys_of("aa"), ids(0, 1))])
    tier.expect(ids(2, 3))
    tier.restore([RestoredRun(ROOT, None, keys_of("bb"), ids(2, 3))])
    tier.restore_tails([Tail(ROOT, key_of("aa"), ids(4)), Tail(ROOT, key_of("bb"), ids(5))])
    tier.check()
    if with_prefix:
        store(tier, "ccc")
        assert num_stored(tier, "aa") == 0
    else:
        store(tier, "ccc")
    assert not has_tail(tier, "aa")
    assert has_tail(tier, "bb")
    assert num_stored(tier, "bb") == 2
