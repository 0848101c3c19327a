"""A tier that is used while a restart's blocks return to it, against a plain model of its slots."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from builders import key_of, make_cache, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexcache.cache import tiered_cache
from flexcache.cache.block_keys import EngineBlockKeys, make_root
from flexcache.cache.block_pool import Quotas
from flexcache.cache.restore import Records, Restoration, restore_tier
from flexcache.cache.tier import Tier
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.storage.slot_index import SLOT_RECORD, make_records

ROOT = make_root("restoration", (), "engine")
CAPACITY = 24
words = st.text("ab", min_size=1, max_size=6)


def records(*names: str) -> Records:
    """Make records of blocks, written in this order, in slots that fall."""
    made = [np.empty(0, SLOT_RECORD)]
    for age, word in enumerate(names):
        one = make_records(
            ROOT, len(word) - 1, word[:-1].encode(), [word.encode()], np.zeros(1, np.uint64)
        )
        one["generation"] = age + 1
        one = one.view(SLOT_RECORD)
        one["slot"] = len(names) - 1 - age
        made.append(one)
    return np.concatenate(made)


def prefixes(word: str) -> list[str]:
    return [word[:stop] for stop in range(1, len(word) + 1)]


def slots(tier: Tier, word: str) -> list[int]:
    return tier.index.blocks(tier.index.match(prompt(word, ROOT))).tolist()


class RestorationMachine(RuleBasedStateMachine):
    """Whatever is found, its slots hold its bytes; and nothing is lost that was not let go."""

    @initialize(
        written=st.lists(words, max_size=14), start=st.integers(0, 3), has_quotas=st.booleans()
    )
    def begin(self, written: list[str], start: int, has_quotas: bool) -> None:
        names = [name for word in written for name in prefixes(word)[min(start, len(word) - 1) :]]
        names = names[:CAPACITY]
        found = records(*names)
        quotas = Quotas(CAPACITY, {"*": 8, "a": CAPACITY - 8}) if has_quotas else None
        self.tier = Tier(TierName.SSD, CAPACITY, quotas=quotas)
        self.content = {int(slot): name for slot, name in zip(found["slot"], names, strict=True)}
        self.restoration = Restoration(self.tier, found, None, 0)
        whole = Tier(TierName.SSD, CAPACITY)
        restore_tier(whole, found)
        self.whole = {name: slots(whole, name) for name in names}
        self.now, self.is_undisturbed = 0.0, True
        self.tier.index.on_removed.append(self.removed)
        self.tier.on_stored.append(self.stored)
        self.told = set[str]()

    def removed(self, root: RootId, keys: Any) -> None:
        self.told -= {key.decode() for key in keys}

    def stored(self, root: RootId, parent: BlockKey | None, keys: Any, *_: Any) -> None:
        assert parent is None or parent.decode() in self.told
        self.told |= {key.decode() for key in keys}

    @rule(seconds=st.sampled_from([0.001, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tier.advance(self.now)

    @rule(num_blocks=st.integers(1, 4))
    def go_on(self, num_blocks: int) -> None:
        before = self.tier.num_expected
        self.restoration.go_on(num_blocks)
        assert self.tier.num_expected < before or self.restoration.is_over

    @rule(word=words, is_used=st.booleans())
    def store(self, word: str, is_used: bool) -> None:
        keys = prompt(word, ROOT)
        there = self.tier.match(keys).num_blocks
        lease = self.tier.reserve(keys, there, len(word))
        self.is_undisturbed = False
        self.content.update(
            {int(slot): word[: there + i + 1] for i, slot in enumerate(lease.blocks)}
        )
        if is_used:
            self.restoration.go_on(2)  # some of them may be the same
        self.tier.publish(lease, len(lease))
        self.tier.release(lease)

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        self.is_undisturbed = False
        self.tier.release(self.tier.reserve_private(ROOT, count))

    @rule(word=words)
    def retire(self, word: str) -> None:
        match = self.tier.index.match(prompt(word, ROOT))
        if match.run is not None and match.length == match.run.length:
            self.tier.retire(match, match.run.depth + match.run.held_length)

    @rule(word=words)
    def discard(self, word: str) -> None:
        self.is_undisturbed = False
        self.tier.discard(ROOT, key_of(word))

    @rule(how=st.sampled_from([0, 0, 0, 1]))
    def clear(self, how: int) -> None:
        if how:
            self.is_undisturbed = False
            self.tier.clear()
            assert self.restoration.is_over
            assert self.tier.pool.num_free == CAPACITY

    @invariant()
    def what_is_found_has_its_bytes(self) -> None:
        self.tier.check()
        assert self.tier.stats().restoring == self.tier.num_expected
        names = {name for word in self.content.values() for name in prefixes(word)}
        for name in names:
            found = slots(self.tier, name)
            assert [self.content[slot] for slot in found] == prefixes(name)[: len(found)]
        can_be_found = {name for name in names if len(slots(self.tier, name)) == len(name)}
        assert self.told == can_be_found

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        while not self.restoration.is_over:
            self.restoration.go_on(CAPACITY)
        self.what_is_found_has_its_bytes()
        if self.is_undisturbed:
            assert {name: slots(self.tier, name) for name in self.whole} == self.whole
        self.tier.clear()
        assert self.tier.pool.num_free == CAPACITY


TestRestoration = RestorationMachine.TestCase
TestRestoration.settings = settings(stateful_step_count=25)


def test_prompts_return_in_the_reverse_order_of_their_last_use() -> None:
    prompts = [f"{letter}{letter}{letter}" for letter in "abcdefgh"]
    random.Random(1).shuffle(prompts)
    names = [name for word in prompts for name in prefixes(word)]
    tier = Tier(TierName.SSD, CAPACITY)
    restoration = Restoration(tier, records(*names), None, 0)
    for number in range(1, len(prompts) + 1):
        restoration.go_on(3)
        there = [word for word in prompts if len(slots(tier, word)) == 3]
        assert there == prompts[-number:]
    assert restoration.is_over
    assert restoration.report.num_restored == CAPACITY


def test_a_restart_in_steps_leaves_the_same_order_of_eviction() -> None:
    names = [name for word in ("aab", "bb", "aaa", "abab", "ba") for name in prefixes(word)]
    at_once, in_steps = Tier(TierName.SSD, CAPACITY), Tier(TierName.SSD, CAPACITY)
    restore_tier(at_once, records(*names))
    restoration = Restoration(in_steps, records(*names), None, 0)
    for second in range(len(names)):
        in_steps.advance(float(second))
        restoration.go_on(1)
    orders = [
        [tier.index.evict(1).tolist() for _ in range(CAPACITY)] for tier in (at_once, in_steps)
    ]
    assert orders[0] == orders[1]


def test_what_was_stored_again_is_kept_and_its_old_slots_are_free() -> None:
    tier = Tier(TierName.SSD, 8)
    restoration = Restoration(tier, records("a", "ab", "abc", "x"), None, 0)
    lease = tier.reserve(prompt("ab", ROOT), 0, 2)
    tier.publish(lease, 2)
    tier.release(lease)
    stored = slots(tier, "ab")
    restoration.go_on(99)
    assert slots(tier, "abc") == [*stored, 1], "only the block behind it comes from the restart"
    assert slots(tier, "x") == [0]
    assert tier.pool.num_free == 4
    tier.check()


def test_what_builds_on_an_evicted_block_is_free_again() -> None:
    tier = Tier(TierName.SSD, 4)
    restoration = Restoration(tier, records("a", "ab", "ax", "axy"), None, 0)
    restoration.go_on(1)
    assert slots(tier, "ab") == [3, 2]
    assert tier.discard(ROOT, key_of("a")) == 2
    restoration.go_on(99)
    tier.check()
    assert (tier.pool.num_free, slots(tier, "axy")) == (4, [])


def test_keys_of_an_engine_that_do_not_chain_are_not_restored_twice() -> None:
    tier = Tier(TierName.SSD, 6)
    made = make_records(ROOT, 0, b"", [b"p", b"y", b"z"], np.zeros(3, np.uint64)).view(SLOT_RECORD)
    made["slot"], made["generation"] = [0, 1, 2], [1, 2, 3]
    restoration = Restoration(tier, made, None, 0)
    other = EngineBlockKeys(ROOT, [BlockKey(b"q"), BlockKey(b"y")], 2)
    lease = tier.reserve(other, 0, 2)
    tier.publish(lease, 2)
    tier.release(lease)
    restoration.go_on(99)
    tier.check()
    assert tier.match(other).num_blocks == 2
    assert tier.pool.num_free == 3


def test_where_there_is_no_other_room_what_was_used_first_and_cannot_be_found_yet_goes() -> None:
    quotas = Quotas(8, {"*": 8})
    for tier in (Tier(TierName.SSD, 8), Tier(TierName.SSD, 8, quotas=quotas)):
        restoration = Restoration(
            tier, records("a", "ab", "abc", "b", "bb", "bbb", "x", "xx"), None, 1
        )
        assert len(slots(tier, "xx")) == 2
        lease = tier.reserve(prompt("yyyy", ROOT), 0, 4)
        assert len(lease) == 4, "though all that is indexed was used later"
        tier.publish(lease, 4)
        tier.release(lease)
        while not restoration.is_over:
            restoration.go_on(1)
        tier.check()
        found = {word: len(slots(tier, word)) for word in ("xx", "yyyy", "bbb", "abc")}
        assert found == {"xx": 2, "yyyy": 4, "bbb": 2, "abc": 0}


def test_a_tier_with_a_retention_time_or_tails_is_restored_at_once() -> None:
    tier = Tier(TierName.SSD, 8, retention_s=100.0)
    found = records("a", "ab", "b", "x")
    assert Restoration(tier, found, np.zeros(4), 1).is_over
    assert tier.num_indexed == 4


def test_a_run_that_is_cut_keeps_when_its_blocks_were_used() -> None:
    tier = Tier(TierName.SSD, 9)
    names = ("a", "ab", "abc", "abcd", "x", "abce", "y", "ax")  # uses of a, ab and c, d differ
    restoration = Restoration(tier, records(*names), None, 0)
    lease = tier.reserve(prompt("a", ROOT), 0, 1)
    tier.publish(lease, 1)
    tier.release(lease)
    while not restoration.is_over:
        restoration.go_on(1)
    whole = Tier(TierName.SSD, 9)
    restore_tier(whole, records(*names))
    tier.check()
    orders = [
        [int(each.index.evict(1)[0]) for _ in range(each.index.num_blocks - 1)]
        for each in (tier, whole)
    ]
    assert orders[0] == orders[1], "a itself goes last, wherever it is"


def test_a_cache_at_rest_goes_on_restoring_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_cache, "_RESTORED_AT_ONCE", 1)
    monkeypatch.setattr(tiered_cache, "_RESTORED_A_TURN", 1)
    cache = make_cache(4, ssd=CAPACITY)
    names = [name for word in ("aa", "bb", "ab") for name in prefixes(word)]
    cache.restore(records(*names), np.zeros(len(names)), 10.0)
    ssd, turns, now = cache.tiers.by_name[TierName.SSD], 0, 10.0
    while ssd.num_expected:
        due = cache.next_deadline()
        assert due is not None, "nothing else wakes it"
        now = max(now, due)
        cache.tick(now)
        cache.catch_up(now)
        turns += 1
    assert turns > 1
    cache.catch_up(now + 1.0)
    assert cache.next_deadline() is None
    assert ssd.num_indexed == 5
    cache.check()
