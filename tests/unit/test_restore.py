"""Putting records back into a tier, against a plain model of what can be found again."""

from __future__ import annotations

import random

import numpy as np
from builders import key_of, prompt
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.restore import Records, Restoration
from flexcache.cache.tail_index import TAIL_FIRST, tail_keys
from flexcache.cache.tier import Tier
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.storage.slot_index import SLOT_RECORD, make_records

ROOT = RootId(b"root of a model!")
OTHER_ROOT = RootId(b"of another model")


def record(word: str, slot: int, generation: int, root: RootId = ROOT) -> Records:
    """Make the record of the last block of ``word``."""
    made = make_records(
        root, len(word) - 1, word[:-1].encode(), [word.encode()], np.zeros(1, np.uint64)
    )
    made["generation"] = generation
    loaded = made.view(SLOT_RECORD)
    loaded["slot"] = slot
    return loaded


def records(*words: str) -> Records:
    """Make records in slots that fall while generations rise."""
    made = [record(word, len(words) - 1 - i, i + 1) for i, word in enumerate(words)]
    return np.concatenate([np.empty(0, SLOT_RECORD), *made])


def restored(found: Records, capacity: int = 32) -> Tier:
    tier = Tier(TierName.SSD, capacity)
    report = Restoration(tier, found).report
    tier.check()
    assert report.num_restored == tier.index.num_blocks
    assert report.num_restored + report.num_dropped == len(found)
    return tier


def slots(tier: Tier, word: str, root: RootId = ROOT) -> list[int]:
    """Return the slots of the longest prefix that the tier has."""
    return tier.index.blocks(tier.match(prompt(word, root))).tolist()


def test_no_records_restore_nothing() -> None:
    assert restored(records()).index.num_blocks == 0


def test_a_prompt_comes_back_whatever_the_order_of_its_slots() -> None:
    tier = restored(records("a", "ab", "abc"))
    assert slots(tier, "abcd") == [2, 1, 0]
    assert tier.pool.num_free == 29
    assert len(tier.index._runs) == 1


def test_branches_share_what_they_have_in_common() -> None:
    tier = restored(records("a", "ab", "abc", "ax", "axy"))
    assert slots(tier, "abc") == [4, 3, 2]
    assert slots(tier, "axy") == [4, 1, 0]


def test_blocks_behind_a_lost_block_are_dropped() -> None:
    tier = restored(records("b", "a", "abc", "abcd", "bc"))
    assert slots(tier, "abcd") == [3]
    assert slots(tier, "bcd") == [4, 0]
    assert tier.index.num_blocks == 3


def test_the_later_of_two_records_of_a_key_counts() -> None:
    tier = restored(records("a", "ab", "a", "ab"))
    assert slots(tier, "ab") == [1, 0]
    assert tier.pool.num_free == 30


def test_the_later_record_counts_however_far_generations_are_apart() -> None:
    found = [record("a", 0, 2**63), record("ab", 1, 1), record("a", 2, 2), record("ab", 3, 2**62)]
    assert slots(restored(np.concatenate(found)), "ab") == [0, 3]


def test_more_records_than_are_handled_at_once_come_back() -> None:
    keys = [number.to_bytes(4, "little") for number in range(10_000)]
    found = make_records(ROOT, 0, b"", keys, np.zeros(len(keys), np.uint64)).view(SLOT_RECORD)
    found["slot"] = np.random.default_rng(0).permutation(len(keys))
    found["generation"] = np.arange(1, len(keys) + 1)
    expected = found["slot"].tolist()
    order = np.random.default_rng(1).permutation(len(keys))
    tier = restored(found[order], capacity=len(keys))
    match = tier.match(EngineBlockKeys(ROOT, [BlockKey(key) for key in keys], len(keys)))
    assert tier.index.blocks(match).tolist() == expected


def test_keys_of_different_roots_stay_apart() -> None:
    found = np.concatenate(
        [record("a", 0, 1), record("ab", 1, 2, OTHER_ROOT), record("b", 2, 3, OTHER_ROOT)]
    )
    tier = restored(found)
    assert slots(tier, "ab") == [0]
    assert slots(tier, "ab", OTHER_ROOT) == []
    assert slots(tier, "b", OTHER_ROOT) == [2]


def test_a_block_at_another_place_than_its_parent_says_is_dropped() -> None:
    wrong = record("ab", 1, 2)
    wrong["position"] = 7
    assert slots(restored(np.concatenate([record("a", 0, 1), wrong])), "ab") == [0]


def test_records_that_form_a_cycle_are_dropped() -> None:
    keys = [b"x", b"y"]
    circle = make_records(ROOT, 1, b"y", keys, np.zeros(2, np.uint64)).view(SLOT_RECORD)
    circle["slot"] = [0, 1]
    assert restored(circle).index.num_blocks == 0


def test_what_was_written_first_is_evicted_first() -> None:
    tier = restored(records("a", "x", "ab", "xy", "abc"), capacity=5)
    order = [tier.index.evict(1).tolist() for _ in range(5)]
    assert order == [[1], [3], [0], [2], [4]]


def test_a_block_older_than_what_it_builds_on_comes_back_too() -> None:
    found = np.concatenate([record("ab", 0, 1), record("x", 1, 2), record("a", 2, 3)])
    tier = restored(found)
    assert slots(tier, "ab") == [2, 0]
    assert tier.index.evict(1).tolist() == [1]


def test_a_restored_tier_works_as_usual() -> None:
    tier = restored(records("a", "ab"), capacity=4)
    keys = EngineBlockKeys(ROOT, [BlockKey(b"a"), BlockKey(b"ab"), BlockKey(b"abc")], 3)
    lease = tier.reserve(keys, 2, 3)
    tier.publish(lease, 1)
    tier.release(lease)
    tier.check()
    assert len(slots(tier, "abc")) == 3
    assert len(tier.clear()) == 3
    tier.check()


def test_keys_of_several_sizes_that_end_in_zeros_are_told_apart() -> None:
    keys = [b"\0" * size for size in range(1, 6)]
    found = make_records(ROOT, 0, b"", keys, np.zeros(5, np.uint64)).view(SLOT_RECORD)
    found["slot"], found["generation"] = np.arange(5), np.arange(5)
    tier = restored(found)
    assert tier.match(EngineBlockKeys(ROOT, keys, 5)).num_blocks == 5


words = st.text("ab", min_size=1, max_size=5)
roots = st.sampled_from([ROOT, OTHER_ROOT])
History = list[tuple[str, RootId]]
"""Which block was written at each generation, to a slot of its own."""


def made_of(history: History, random: random.Random) -> tuple[Records, list[int]]:
    """Return the records of a history in any order, and their slots in its order."""
    free = list(range(len(history)))
    random.shuffle(free)
    made = [record(w, free[i], i + 1, root) for i, (w, root) in enumerate(history)]
    random.shuffle(made)
    return np.concatenate([np.empty(0, SLOT_RECORD), *made]), free


def reachable(history: History) -> dict[tuple[str, RootId], int]:
    """Return the blocks that have all before them, and when each was last written."""
    latest = {place: i for i, place in enumerate(history)}
    return {
        (w, root): i
        for (w, root), i in latest.items()
        if all((w[:stop], root) in latest for stop in range(1, len(w)))
    }


@given(st.lists(st.tuples(words, roots), max_size=40), st.randoms())
def test_exactly_what_can_be_reached_is_restored(history, random) -> None:  # type: ignore[no-untyped-def]
    found, free = made_of(history, random)
    whole = reachable(history)
    tier = restored(found, capacity=40)
    assert tier.index.num_blocks == len(whole)
    for w, root in whole:
        expected = [free[whole[w[:stop], root]] for stop in range(1, len(w) + 1)]
        assert slots(tier, w, root) == expected


@given(st.lists(st.tuples(words, st.integers(0, 2), roots), max_size=12), st.randoms())
def test_restored_blocks_are_told_in_order_and_go_by_their_last_use(parts, random) -> None:  # type: ignore[no-untyped-def]
    """A block was last used when the last block behind it was written.

    ``parts``: prompts, each written from its first block on, or from a later one.
    """
    history = [
        (w[:stop], root) for w, start, root in parts for stop in range(start + 1, len(w) + 1)
    ]
    found, free = made_of(history, random)
    whole = reachable(history)
    last_use = {
        (w, root): max(i for (v, other), i in whole.items() if other == root and v.startswith(w))
        for w, root in whole
    }
    tier = Tier(TierName.SSD, 60, retention_s=100.0)
    told: History = []

    def stored(root, parent, keys, content, first) -> None:  # type: ignore[no-untyped-def]
        assert parent is None or (parent.decode(), root) in told
        told.extend((key.decode(), root) for key in keys)

    tier.on_stored.append(stored)
    Restoration(tier, found, found["generation"].astype(np.float64))
    tier.check()
    assert sorted(told) == sorted(whole)
    left = {free[i]: place for place, i in whole.items()}
    while left:
        word, root = place = left.pop(tier.index.evict(1).tolist()[0])
        tier.index.check()
        assert all(last_use[place] <= last_use[other] for other in left.values())
        assert not any(
            v != word and v.startswith(word) for v, other in left.values() if other == root
        )


def tail_records(word: str, count: int, first_slot: int, first_generation: int = 1) -> Records:
    """Make the records of the units of a tail behind ``word``."""
    names = [bytes(name) for name in tail_keys(key_of(word), count)]
    made = make_records(ROOT, TAIL_FIRST, key_of(word), names, np.zeros(count, np.uint64))
    made["generation"] = np.arange(first_generation, first_generation + count)
    loaded = made.view(SLOT_RECORD)
    loaded["slot"] = np.arange(first_slot, first_slot + count)
    return loaded


def restored_tail(tier: Tier, word: str) -> list[int]:
    tail = tier.tails.find(ROOT, key_of(word))
    return [] if tail is None else tail.units.tolist()


@given(lost=st.sets(st.integers(0, 9)), order=st.randoms(use_true_random=False))
def test_only_whole_tails_come_back(lost: set[int], order: random.Random) -> None:
    tails = {"a": (1, 0), "ab": (3, 1), "abc": (2, 4), "b": (4, 6)}
    found = np.concatenate([tail_records(word, *place) for word, place in tails.items()])
    kept = [number for number in range(len(found)) if number not in lost]
    order.shuffle(kept)
    tier = Tier(TierName.SSD, 16)
    report = Restoration(tier, np.concatenate((record("a", 12, 50), found[kept]))).report
    tier.check()
    num_units = 0
    for word, (count, first) in tails.items():
        is_whole = not lost & set(range(first, first + count))
        assert restored_tail(tier, word) == (list(range(first, first + count)) if is_whole else [])
        num_units += count if is_whole else 0
    assert report.num_restored == num_units + 1
    assert report.num_restored + report.num_dropped == len(kept) + 1
    assert slots(tier, "ab") == [12]


def test_the_first_units_of_a_longer_tail_are_not_taken_for_a_tail() -> None:
    tier = Tier(TierName.SSD, 16)
    Restoration(tier, tail_records("ab", 3, 0)[:2])
    assert restored_tail(tier, "ab") == []
    assert tier.pool.num_free == 16


def test_of_a_unit_that_was_written_twice_the_later_slot_counts() -> None:
    tier = Tier(TierName.SSD, 16)
    twice = [tail_records("ab", 2, 0, 10), tail_records("ab", 2, 5, 20), tail_records("c", 1, 9)]
    report = Restoration(tier, np.concatenate(twice)).report
    assert restored_tail(tier, "ab") == [5, 6]
    assert (report.num_restored, report.num_dropped) == (3, 2)
    assert tier.pool.num_free == 13


def test_units_that_follow_themselves_are_dropped() -> None:
    circle = tail_records("ab", 2, 0)
    circle["parent"] = circle["key"]
    circle["parent_bytes"] = circle["key_bytes"]
    tier = Tier(TierName.SSD, 16)
    assert Restoration(tier, circle).report.num_restored == 0
