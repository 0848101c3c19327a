"""Admission: sightings against a plain count, ghosts against a plain LRU, and the hits of a tier
under each policy with prompt patterns that favour one or the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from builders import ROOT, ROOTS, key_of, prompt
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.admission import (
    SAMPLED_BLOCKS,
    SIGHTINGS_PER_BLOCK,
    Selective,
    stride_for,
)
from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.prefix_index import Shadow
from flexcache.cache.tier import Tier
from flexcache.ids import RootId, TierName

Sight = tuple[RootId, str, int]  # a prompt, and how many of its blocks were offered
Pattern = Callable[[Iterator[int], int], Iterator[EngineBlockKeys]]

POLICIES = ("write_through", "selective")
CAPACITY = 100

some_word = st.text("ab", min_size=1, max_size=12)
some_sight = st.tuples(st.sampled_from(ROOTS), some_word, st.integers(0, 12))


# Sightings


@given(st.lists(some_sight, max_size=40), st.sampled_from([1, 2, 3, 5]))
def test_selective_admits_up_to_the_first_sampled_block_that_was_not_seen_often_enough(
    sights: list[Sight], stride: int
) -> None:
    capacity = stride * SAMPLED_BLOCKS  # nothing is forgotten
    assert stride_for(capacity) == stride
    admission = Selective(capacity)
    seen: Counter[tuple[RootId, str]] = Counter()
    for root, word, offered in sights:
        stop = min(offered, len(word))
        sampled = range(stride // 2, stop, stride)
        new = (at for at in sampled if not seen[root, word[: at + 1]])
        first_new = next(new, stop)
        admitted = 0 if first_new in sampled[:1] else first_new
        assert admission.admit(prompt(word, root), stop) == admitted
        seen.update((root, word[:end]) for end in range(1, stop + 1))


@given(st.lists(some_sight, max_size=60), st.integers(1, 3))
def test_blocks_seen_too_rarely_are_never_admitted_however_small_the_memory(
    sights: list[Sight], capacity: int
) -> None:
    admission = Selective(capacity)
    seen: Counter[tuple[RootId, str]] = Counter()
    for root, word, offered in sights:
        stop = min(offered, len(word))
        admitted = admission.admit(prompt(word, root), stop)
        assert 0 <= admitted <= stop
        assert all(seen[root, word[:end]] for end in range(1, admitted + 1))
        seen.update((root, word[:end]) for end in range(1, stop + 1))


@given(
    st.lists(st.tuples(some_sight, st.integers(1, 11)), max_size=40),
    st.sampled_from([1, 3]),
)
def test_a_request_that_is_offered_in_two_puts_is_seen_once(
    sights: list[tuple[Sight, int]], stride: int
) -> None:
    capacity = stride * SAMPLED_BLOCKS  # nothing is forgotten
    whole, parts = (Selective(capacity) for _ in range(2))
    for (root, word, offered), split in sights:
        keys, stop = prompt(word, root), min(offered, len(word))
        expected = whole.admit(keys, stop)
        if split >= stop:
            assert parts.admit(keys, stop) == expected
            continue
        first, rest = parts.admit(keys, split), parts.admit(keys, stop, split)
        if stride == 1:
            assert max(first, rest) == expected
        assert rest == 0 or rest == expected > split
    assert stride > 1 or parts.stats() == whole.stats()


def test_old_sightings_do_not_count() -> None:
    remembered = SIGHTINGS_PER_BLOCK * CAPACITY
    for others, admitted in ((remembered - 1, 1), (remembered, 0)):
        admission, names = Selective(CAPACITY), count()
        returning = one_off(names, 1)
        assert admission.admit(returning, 1) == 0
        for _ in range(others):
            admission.admit(one_off(names, 1), 1)
        assert admission.admit(returning, 1) == admitted


def test_an_unbounded_tier_too_is_written_to_on_the_second_sighting() -> None:
    admission = Selective(1 << 20)
    keys = one_off(count(), 4096)
    assert admission.admit(keys, 4096) == 0
    assert admission.admit(keys, 4096) == 4096


# Ghosts


@given(st.lists(some_sight, max_size=60), st.integers(1, 10))
def test_a_ghost_holds_what_an_lru_tier_would(sights: list[Sight], capacity: int) -> None:
    ghost = Shadow(capacity)
    last_use: dict[tuple[RootId, str], int] = {}
    for now, (root, word, offered) in enumerate(sights):
        path = [(root, word[:end]) for end in range(1, len(word) + 1)]
        there = [block for block in path if block in last_use]
        admitted = min(offered, len(word))
        assert ghost.see(prompt(word, root), admitted) == len(there)
        last_use.update(dict.fromkeys([*there, *path[: min(admitted, capacity)]], now))
        by_age = sorted(last_use, key=lambda block: (last_use[block], -len(block[1])))
        for block in by_age[: max(0, len(last_use) - capacity)]:
            del last_use[block]
        ghost.index.check()
        assert ghost.index.num_blocks == len(last_use)
        for block in last_use:
            assert ghost.index.contains(block[0], key_of(block[1]))


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6), max_size=20))
def test_keys_that_do_not_chain_break_nothing(prompts: list[list[bytes]]) -> None:
    ghost, admission = Shadow(3), Selective(3)
    for keys in prompts:
        unchained = EngineBlockKeys(ROOT, keys, len(keys))
        assert 0 <= admission.admit(unchained, len(keys)) <= len(keys)
        ghost.see(unchained, len(keys))
        ghost.index.check()
        assert ghost.index.num_blocks <= 3


# What a tier hits


def one_off(names: Iterator[int], num_blocks: int) -> EngineBlockKeys:
    """Make a prompt that shares nothing with earlier ones."""
    name = next(names).to_bytes(8, "big")
    keys = [name + at.to_bytes(2, "big") for at in range(num_blocks)]
    return EngineBlockKeys(ROOT, keys, num_blocks)


def hot_set_in_a_scan(names: Iterator[int], rounds: int) -> Iterator[EngineBlockKeys]:
    """Half a tier of prompts that come back, each round behind a tier of prompts that do not."""
    hot = [one_off(names, 10) for _ in range(CAPACITY // 20)]
    for _ in range(rounds):
        for keys in hot:
            yield keys
            yield from (one_off(names, 10) for _ in range(2))


def seen_twice(names: Iterator[int], rounds: int) -> Iterator[EngineBlockKeys]:
    """Loops that fit into the tier and are gone after the second time."""
    for _ in range(rounds):
        loop = [one_off(names, 10) for _ in range(CAPACITY // 20)]
        yield from loop
        yield from loop


def num_hits(admission: Selective | None, stream: Iterable[EngineBlockKeys]) -> int:
    """Return the blocks a tier hits when it stores what the policy admits."""
    tier, hits = Tier(TierName.SSD, CAPACITY), 0
    for keys in stream:
        there = tier.match(keys).num_blocks
        hits += there
        admitted = keys.num_blocks if admission is None else admission.admit(keys, keys.num_blocks)
        assert 0 <= admitted <= keys.num_blocks
        if there < admitted:
            lease = tier.reserve(keys, there, admitted)
            tier.publish(lease, len(lease))
            tier.release(lease)
    tier.check()
    return hits


def hits_by_policy(*patterns: tuple[Pattern, int]) -> dict[str, int]:
    """Return blocks hit when the patterns follow one another, each for this many rounds."""
    hits = {}
    for policy in POLICIES:
        names = count()
        stream = (keys for pattern, rounds in patterns for keys in pattern(names, rounds))
        admission = Selective(CAPACITY) if policy == "selective" else None
        hits[policy] = num_hits(admission, stream)
    return hits


def test_selective_keeps_a_hot_set_that_a_scan_would_flush() -> None:
    hits = hits_by_policy((hot_set_in_a_scan, 40))
    assert hits["write_through"] == 0
    assert hits["selective"] == 38 * 50  # all but the first two rounds


def test_selective_misses_what_comes_back_once() -> None:
    hits = hits_by_policy((seen_twice, 40))
    assert hits["selective"] == 0
    assert hits["write_through"] == 40 * 50


# Counters


def test_refused_blocks_are_counted() -> None:
    admission, keys = Selective(CAPACITY), one_off(count(), 10)
    admission.admit(keys, 6)
    admission.admit(keys, 10)
    assert admission.stats() == {"seen_blocks": 16, "refused_blocks": 6 + 4}
