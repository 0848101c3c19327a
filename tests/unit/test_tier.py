"""Leases on a tier, against a model that knows words instead of runs, and what each block holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from builders import ROOT, ROOTS, ids, key_of, keys_of, prefixes, prompt, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.tier import Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import RootId, TierName

LONGEST = 5
LONG_WORDS = words("ab", LONGEST)

some_root = st.sampled_from(ROOTS)
some_word = st.text("ab", min_size=1, max_size=LONGEST)
some_part = st.text("ab", min_size=1, max_size=2)
some_position = st.integers(0, 99)

Path = tuple[RootId, str]


@dataclass(eq=False)
class Reservation:
    """What the model knows about a lease: the blocks of a word from ``start``."""

    lease: Lease
    root: RootId
    word: str
    start: int
    block_ids: list[int]
    num_arrived: int | None = None
    released: bool = False
    is_void: bool = False
    limit: int = LONGEST
    """How many of its blocks may be published."""

    @property
    def parent(self) -> Path | None:
        return (self.root, self.word[: self.start]) if self.start else None

    @property
    def paths(self) -> list[Path]:
        if not self.word:  # private
            return []
        ends = range(self.start + 1, self.start + len(self.block_ids) + 1)
        return [(self.root, self.word[:end]) for end in ends]


@dataclass
class Model:
    """Which words can be found, and which are in flight."""

    found: set[Path] = field(default_factory=set)
    owners: dict[Path, Reservation] = field(default_factory=dict)
    waiting: list[Reservation] = field(default_factory=list)

    def num_found(self, root: RootId, word: str) -> int:
        return sum((root, prefix) in self.found for prefix in prefixes(word))

    def num_in_flight(self, root: RootId, word: str, start: int) -> int:
        position = start
        while position < len(word) and (root, word[: position + 1]) in self.owners:
            position += 1
        return position - start

    def reserve(self, reservation: Reservation) -> None:
        for path in reservation.paths:
            self.owners.setdefault(path, reservation)

    def publish(self, reservation: Reservation) -> None:
        """Make arrived blocks findable if their prefix is, or wait while that is in flight."""
        parent = reservation.parent
        there = parent is None or parent in self.found
        if not there and parent in self.owners:
            self.waiting.append(reservation)
            return
        if there:
            self.found.update(reservation.paths[: reservation.num_arrived])
        self.land(reservation)

    def delete(self, root: RootId, word: str) -> None:
        """Forget a block and what continues it, there and in flight; what is before it stays."""

        def is_gone(path: Path) -> bool:
            return path[0] == root and path[1].startswith(word)

        self.found = {path for path in self.found if not is_gone(path)}
        for reservation in {*self.owners.values(), *self.waiting}:
            num_kept = sum(not is_gone(path) for path in reservation.paths)
            if num_kept < len(reservation.paths):
                reservation.limit = num_kept
                if reservation.num_arrived is not None:
                    reservation.num_arrived = min(reservation.num_arrived, num_kept)
        self.owners = {path: by for path, by in self.owners.items() if not is_gone(path)}
        self.waiting = [waiting for waiting in self.waiting if waiting.limit]

    def land(self, reservation: Reservation) -> None:
        landed = [path for path, owner in self.owners.items() if owner is reservation]
        for path in landed:
            del self.owners[path]
        followers = [waiting for waiting in self.waiting if waiting.parent in landed]
        for follower in followers:
            self.waiting.remove(follower)
        for follower in followers:
            self.publish(follower)

    def release(self, reservation: Reservation) -> None:
        if reservation not in self.waiting:
            self.land(reservation)


class TierMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([12, 9, 6, 3, 1, 0]))
    def make(self, capacity: int) -> None:
        self.tier = Tier(TierName.CPU, capacity)
        self.model = Model()
        self.leases: list[Reservation] = []  # released ones included
        self.content: dict[int, Path | None] = {}  # None: no block's bytes, or half of them

    @property
    def open(self) -> list[Reservation]:
        return [reservation for reservation in self.leases if not reservation.released]

    @property
    def unpublished(self) -> list[Reservation]:
        return [reservation for reservation in self.open if reservation.num_arrived is None]

    def held_ids(self) -> set[int]:
        """Return the ids of indexed blocks that some lease holds."""
        blocks = self.tier.index.blocks
        return {
            block
            for reservation in self.open
            for match in (reservation.lease.parent_pin, reservation.lease.published)
            for block in blocks(match).tolist()
        }

    def observed(self) -> dict[Path, int]:
        """Return every word that can be found, and its block."""
        found: dict[Path, int] = {}
        to_look_for = [(root, letter) for root in ROOTS for letter in "ab"]
        while to_look_for:
            root, word = to_look_for.pop()
            match = self.tier.index.locate(root, key_of(word))
            if match.num_blocks:
                found[root, word] = int(self.tier.index.blocks(match)[-1])
                to_look_for += [(root, word + "a"), (root, word + "b")]
        return found

    def forget_evicted(self, held: set[int], before: dict[Path, int]) -> None:
        """Check that the blocks the index evicted were evictable."""
        after = self.observed()
        assert before.keys() >= after.keys()
        evicted = before.keys() - after.keys()
        assert held.isdisjoint(before[path] for path in evicted)
        self.model.found -= evicted

    def hand_out(self, lease: Lease, root: RootId, word: str, start: int) -> Reservation:
        reservation = Reservation(lease, root, word, start, lease.blocks.tolist())
        self.leases.append(reservation)
        self.content.update(dict.fromkeys(reservation.block_ids))
        return reservation

    @rule(root=some_root, word=some_word)
    def reserve(self, root: RootId, word: str) -> None:
        self.put(root, word)

    @rule(root=some_root, word=some_word)
    def store(self, root: RootId, word: str) -> None:
        reservation = self.put(root, word)
        if reservation is not None:
            self.arrive(reservation, len(word))
            self.end(reservation)

    @precondition(lambda self: self.model.owners)
    @rule(position=some_position, tail=st.text("ab", max_size=2))
    def reserve_with_what_is_in_flight(self, position: int, tail: str) -> None:
        in_flight = list(self.model.owners)
        root, word = in_flight[position % len(in_flight)]
        self.put(root, word + tail)

    @rule(root=some_root, parts=st.lists(some_part, min_size=2, max_size=4))
    def reserve_a_chain(self, root: RootId, parts: list[str]) -> None:
        for end in range(1, len(parts) + 1):
            self.put(root, "".join(parts[:end]))

    def put(self, root: RootId, word: str) -> Reservation | None:
        keys = prompt(word, root)
        start = self.tier.match(keys).num_blocks
        assert start == self.model.num_found(root, word)
        parent = self.tier.index.match(keys)
        in_flight = self.tier.num_in_flight(keys, start, len(word))
        assert in_flight == self.model.num_in_flight(root, word, start)
        start += in_flight
        if start == len(word):
            return None  # it is all there or on its way: nothing moves
        held = self.held_ids()
        if not in_flight:
            held |= set(self.tier.index.blocks(parent).tolist())
        can_be_had = self.tier.capacity - self.tier.num_leased - len(held)
        before = self.observed()

        lease = self.tier.reserve(keys, start, len(word))

        assert len(lease) == min(len(word) - start, can_be_had)
        self.forget_evicted(held, before)
        reservation = self.hand_out(lease, root, word, start)
        self.model.reserve(reservation)
        return reservation

    @rule(root=some_root, count=st.integers(0, 4))
    def reserve_private(self, root: RootId, count: int) -> None:
        held, before = self.held_ids(), self.observed()
        can_be_had = self.tier.capacity - self.tier.num_leased - len(held)
        lease = self.tier.reserve_private(root, count)
        assert len(lease) == min(count, can_be_had)
        self.forget_evicted(held, before)
        self.hand_out(lease, root, "", 0)

    @precondition(lambda self: self.unpublished)
    @rule(position=some_position, num_arrived=st.integers(0, LONGEST))
    def publish(self, position: int, num_arrived: int) -> None:
        self.arrive(self.unpublished[position % len(self.unpublished)], num_arrived)

    @precondition(lambda self: self.unpublished)
    @rule(and_end=st.booleans())
    def publish_the_newest(self, and_end: bool) -> None:
        reservation = self.unpublished[-1]
        self.arrive(reservation, len(reservation.paths))
        if and_end:
            self.end(reservation)

    def arrive(self, reservation: Reservation, num_arrived: int) -> None:
        num_arrived = min(num_arrived, len(reservation.paths))
        for block, path in zip(
            reservation.block_ids[:num_arrived], reservation.paths, strict=False
        ):
            self.content[block] = path
        self.tier.publish(reservation.lease, num_arrived)
        reservation.num_arrived = num_arrived = min(num_arrived, reservation.limit)
        if num_arrived and not reservation.is_void:
            self.model.publish(reservation)

    @precondition(lambda self: self.open)
    @rule(position=some_position)
    def release(self, position: int) -> None:
        self.end(self.open[position % len(self.open)])

    def end(self, reservation: Reservation) -> None:
        reservation.released = True
        self.tier.release(reservation.lease)
        self.model.release(reservation)

    @rule(root=some_root, word=some_word)
    def discard(self, root: RootId, word: str) -> None:
        num_indexed = self.tier.index.num_blocks
        freed = self.tier.discard(root, key_of(word))
        assert freed == num_indexed - self.tier.index.num_blocks
        if (root, word) in self.model.found:
            bad = {path for path in self.model.found if path[0] == root}
            self.model.found -= {path for path in bad if path[1].startswith(word)}

    @rule(root=some_root, word=some_word)
    def delete(self, root: RootId, word: str) -> None:
        self.tier.delete(root, key_of(word))
        self.tier.void(root, {key_of(word)})
        self.model.delete(root, word)

    @rule(forgets=st.booleans())
    def clear(self, forgets: bool) -> None:
        held, before = self.held_ids(), self.observed()
        num_indexed = self.tier.index.num_blocks
        assert len(self.tier.clear()) == num_indexed - len(held)
        self.forget_evicted(held, before)
        if forgets:
            self.tier.forget_held()
            self.model = Model()
            for reservation in self.leases:
                reservation.is_void = True

    @invariant()
    def every_id_has_one_owner(self) -> None:
        self.tier.check()
        stats = self.tier.stats()
        assert stats.free + stats.indexed + stats.leased == stats.capacity
        free = [block for block in range(self.tier.capacity) if self.tier.pool.is_free(block)]
        indexed = [b for run in self.tier.index._runs.values() for b in run.blocks.tolist()]
        leased = [
            block for reservation in self.leases for block in reservation.lease.blocks.tolist()
        ]
        assert sorted(free + indexed + leased) == list(range(self.tier.capacity))
        assert len(leased) == self.tier.num_leased

    @invariant()
    def finds_what_the_model_finds_and_it_has_its_bytes(self) -> None:
        observed = self.observed()
        assert observed.keys() == self.model.found
        for path, block in observed.items():
            assert self.content[block] == path

    @invariant()
    def keeps_the_blocks_of_open_leases(self) -> None:
        held = self.held_ids()
        for reservation in self.open:
            for block in reservation.block_ids:
                assert not self.tier.pool.is_free(block)
        assert not any(self.tier.pool.is_free(block) for block in held)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for reservation in self.open:
            self.end(reservation)
        self.finds_what_the_model_finds_and_it_has_its_bytes()
        assert self.tier.num_leased == 0
        assert not self.tier._flights, "namespaces come and go"
        for root in ROOTS:
            for word in LONG_WORDS:
                self.store_anew(prompt(word, root))
        self.tier.clear()
        self.tier.check()
        assert self.tier.pool.num_free == self.tier.capacity

    def store_anew(self, keys: EngineBlockKeys) -> None:
        """Check that nothing of the past prevents a put."""
        start = self.tier.match(keys).num_blocks
        assert self.tier.num_in_flight(keys, start, keys.num_blocks) == 0
        lease = self.tier.reserve(keys, start, keys.num_blocks)
        self.tier.publish(lease, len(lease))
        self.tier.release(lease)
        assert self.tier.match(keys).num_blocks == min(keys.num_blocks, self.tier.capacity)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(stateful_step_count=40)


# -- by example -----------------------------------------------------------------------------


def tier_of(capacity: int) -> Tier:
    return Tier(TierName.CPU, capacity)


def reserve(tier: Tier, word: str) -> Lease:
    """Reserve as a put does: what is neither cached nor in flight."""
    keys = prompt(word)
    start = tier.match(keys).num_blocks
    start += tier.num_in_flight(keys, start, len(word))
    return tier.reserve(keys, start, len(word))


def store(tier: Tier, word: str) -> None:
    lease = reserve(tier, word)
    tier.publish(lease, len(lease))
    tier.release(lease)


def cached(tier: Tier, word: str) -> int:
    return tier.match(prompt(word)).num_blocks


def in_flight(tier: Tier, word: str) -> int:
    return tier.num_in_flight(prompt(word), 0, len(word))


def test_a_match_does_not_see_blocks_before_they_are_published() -> None:
    tier = tier_of(8)
    lease = reserve(tier, "abc")
    assert cached(tier, "abc") == 0
    tier.publish(lease, 3)
    assert cached(tier, "abc") == 3
    tier.release(lease)
    assert cached(tier, "abc") == 3
    assert tier.num_leased == 0


def test_a_lease_that_ends_unpublished_leaves_nothing() -> None:
    tier = tier_of(8)
    tier.release(reserve(tier, "abc"))
    assert cached(tier, "abc") == 0
    assert in_flight(tier, "abc") == 0
    assert tier.pool.num_free == 8


def test_only_the_published_part_of_a_lease_stays() -> None:
    tier = tier_of(8)
    lease = reserve(tier, "abcd")
    tier.publish(lease, 2)
    assert tier.num_leased == 2
    tier.release(lease)
    assert cached(tier, "abcd") == 2
    assert tier.pool.num_free == 6


def test_a_second_put_of_keys_in_flight_reserves_nothing() -> None:
    tier = tier_of(8)
    reserve(tier, "abc")
    assert len(reserve(tier, "abc")) == 0
    assert len(reserve(tier, "ab")) == 0
    assert reserve(tier, "abcde").keys == keys_of("abcde", 3)


def test_unpublished_keys_are_no_longer_in_flight() -> None:
    tier = tier_of(8)
    lease = reserve(tier, "abcd")
    tier.publish(lease, 1)
    again = reserve(tier, "abcd")
    assert again.keys == keys_of("abcd", 1)
    tier.publish(again, 3)
    assert cached(tier, "abcd") == 4


def test_a_lease_waits_for_the_one_that_it_builds_on() -> None:
    tier = tier_of(8)
    first, second = reserve(tier, "ab"), reserve(tier, "abcd")
    tier.publish(second, 2)
    assert cached(tier, "abcd") == 0
    tier.publish(first, 2)
    assert cached(tier, "abcd") == 4


@pytest.mark.parametrize(("num_arrived", "num_cached"), [(2, 4), (1, 1), (0, 0)])
def test_a_lease_released_while_it_waits_shares_the_fate_of_the_one_before(
    num_arrived: int, num_cached: int
) -> None:
    tier = tier_of(8)
    first, second = reserve(tier, "ab"), reserve(tier, "abcd")
    tier.publish(second, 2)
    tier.release(second)
    assert tier.num_leased == 4, "the bytes of the second must stay where they are"
    assert in_flight(tier, "abcd") == 4
    tier.publish(first, num_arrived)
    tier.release(first)
    assert cached(tier, "abcd") == num_cached
    assert tier.num_leased == 0
    assert in_flight(tier, "abcd") == 0
    assert tier.pool.num_free == 8 - num_cached


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_a_chain_of_leases_is_published_in_whatever_order_its_parts_arrive(
    order: tuple[int, ...],
) -> None:
    tier = tier_of(8)
    leases = [reserve(tier, word) for word in ("ab", "abcd", "abcdef")]
    for position in order:
        tier.publish(leases[position], 2)
        tier.release(leases[position])
        tier.check()
    assert cached(tier, "abcdef") == 6
    assert tier.num_leased == 0


def test_a_chain_whose_first_lease_fails_is_dropped_as_a_whole() -> None:
    tier = tier_of(8)
    leases = [reserve(tier, word) for word in ("ab", "abcd", "abcdef")]
    for lease in reversed(leases[1:]):
        tier.publish(lease, 2)
        tier.release(lease)
    tier.release(leases[0])
    assert tier.pool.num_free == 8
    store(tier, "abcdef")
    assert cached(tier, "abcdef") == 6


def test_what_builds_on_a_discarded_block_is_not_published() -> None:
    tier = tier_of(8)
    store(tier, "ab")
    lease = reserve(tier, "abc")
    tier.discard(ROOT, key_of("ab"))
    tier.publish(lease, 1)
    tier.release(lease)
    assert cached(tier, "abc") == 1
    tier.check()


def test_a_lease_builds_on_a_block_that_was_discarded_and_stored_again() -> None:
    tier = tier_of(8)
    store(tier, "ab")
    lease = reserve(tier, "abc")
    tier.discard(ROOT, key_of("ab"))
    again = reserve(tier, "ab")
    tier.publish(lease, 1)
    assert cached(tier, "abc") == 1, "what precedes it is on its way again"
    tier.publish(again, 1)
    assert cached(tier, "abc") == 3
    tier.release(lease)
    tier.release(again)
    tier.check()


def test_two_leases_of_one_key_publish_it_once() -> None:
    tier = tier_of(8)
    first, second = reserve(tier, "ab"), reserve(tier, "abcd")
    tier.release(first)  # "abc" and "abcd" are still in flight, what precedes them is not
    third = reserve(tier, "abcd")
    assert third.keys == keys_of("abcd")
    tier.publish(third, 4)
    tier.publish(second, 2)
    assert cached(tier, "abcd") == 4
    tier.release(second)
    tier.release(third)
    tier.check()
    assert tier.pool.num_free == 4


def test_the_block_that_a_lease_builds_on_is_kept() -> None:
    tier = tier_of(4)
    store(tier, "ab")
    lease = reserve(tier, "abc")
    assert len(reserve(tier, "xyz")) == 1
    assert cached(tier, "ab") == 2
    tier.release(lease)
    assert len(reserve(tier, "pqr")) == 3


def test_published_blocks_are_kept_until_the_lease_ends() -> None:
    tier = tier_of(2)
    lease = reserve(tier, "ab")
    tier.publish(lease, 2)
    assert len(reserve(tier, "x")) == 0
    tier.release(lease)
    assert len(reserve(tier, "y")) == 1
    assert cached(tier, "ab") == 1


def test_a_prompt_that_does_not_fit_gets_its_first_blocks_reserved() -> None:
    tier = tier_of(3)
    lease = reserve(tier, "abcde")
    assert lease.keys == keys_of("abc")
    assert in_flight(tier, "abcde") == 3


def test_unpinned_blocks_make_room() -> None:
    tier = tier_of(4)
    store(tier, "abcd")
    store(tier, "xyz")
    assert cached(tier, "xyz") == 3
    assert cached(tier, "abcd") == 1
    assert tier.counters.evicted_blocks == 3
    assert tier.counters.stored_blocks == 7


def test_matched_blocks_are_the_last_to_be_evicted() -> None:
    tier = tier_of(4)
    store(tier, "ab")
    store(tier, "xy")
    cached(tier, "ab")
    store(tier, "pq")
    assert cached(tier, "ab") == 2
    assert cached(tier, "xy") == 0


def test_a_private_lease_is_never_published() -> None:
    tier = tier_of(4)
    lease = tier.reserve_private(ROOT, 3)
    assert len(lease) == 3
    tier.publish(lease, 3)
    assert tier.index.num_blocks == 0
    tier.release(lease)
    assert tier.pool.num_free == 4


def test_a_lease_is_published_once() -> None:
    tier = tier_of(4)
    lease = reserve(tier, "ab")
    tier.publish(lease, 1)
    with pytest.raises(InternalError, match="published once"):
        tier.publish(lease, 1)


def test_a_lease_that_waits_is_published_once() -> None:
    tier = tier_of(4)
    reserve(tier, "a")
    lease = reserve(tier, "ab")
    tier.publish(lease, 1)
    with pytest.raises(InternalError, match="published once"):
        tier.publish(lease, 1)


def test_a_lease_ends_once() -> None:
    tier = tier_of(4)
    lease = reserve(tier, "ab")
    tier.release(lease)
    with pytest.raises(InternalError, match="ends once"):
        tier.release(lease)
    with pytest.raises(InternalError, match="before its release"):
        tier.publish(lease, 1)
    tier.check()


def test_discarding_a_block_frees_it_and_what_builds_on_it() -> None:
    tier = tier_of(8)
    store(tier, "abcd")
    assert tier.discard(ROOT, key_of("abc")) == 2
    assert tier.discard(ROOT, key_of("abc")) == 0
    assert cached(tier, "abcd") == 2
    assert tier.counters.dropped_blocks == 2
    assert tier.pool.num_free == 6


def test_clearing_a_tier_drops_unpinned_blocks() -> None:
    tier = tier_of(8)
    store(tier, "abc")
    store(tier, "xy")
    lease = reserve(tier, "xyz")
    assert len(tier.clear()) == 3
    assert cached(tier, "abc") == 0
    assert cached(tier, "xy") == 2
    tier.release(lease)
    assert len(tier.clear()) == 2
    assert tier.pool.num_free == 8


def test_stats_say_where_the_blocks_are() -> None:
    tier = tier_of(8)
    store(tier, "ab")
    reserve(tier, "abcde")
    stats = tier.stats()
    assert (stats.capacity, stats.free, stats.indexed, stats.leased) == (8, 3, 2, 3)
    assert stats.stored_blocks == 2


# -- keys of an engine that does not chain them -----------------------------------------------


def engine_prompt(letters: str) -> EngineBlockKeys:
    """Make keys that do not depend on what precedes them, unlike those of a prefix cache."""
    return EngineBlockKeys(ROOT, [letter.encode() for letter in letters], len(letters))


def test_a_key_repeated_in_a_prompt_ends_what_is_stored_of_it() -> None:
    tier = tier_of(8)
    keys = engine_prompt("abab")
    lease = tier.reserve(keys, 0, 4)
    tier.publish(lease, 4)
    tier.release(lease)
    tier.check()
    assert tier.match(engine_prompt("ab")).num_blocks == 2
    assert tier.pool.num_free + tier.index.num_blocks == 8


def test_a_key_stored_at_another_place_ends_what_is_stored() -> None:
    tier = tier_of(8)
    for letters in ("a", "cda"):
        lease = tier.reserve(engine_prompt(letters), 0, len(letters))
        tier.publish(lease, len(letters))
        tier.release(lease)
        tier.check()
    assert tier.match(engine_prompt("cd")).num_blocks == 2
    assert tier.match(engine_prompt("a")).num_blocks == 1
    assert tier.pool.num_free == 5


def test_a_lease_does_not_wait_for_itself() -> None:
    tier = tier_of(8)
    first = tier.reserve(engine_prompt("a"), 0, 1)
    tier.publish(first, 1)
    tier.release(first)
    lease = tier.reserve(engine_prompt("aba"), 1, 3)
    tier.discard(ROOT, key_of("a"))
    tier.publish(lease, 2)
    tier.release(lease)
    tier.check()
    assert tier.num_leased == 0


class UnchainedKeysMachine(RuleBasedStateMachine):
    """Arbitrary keys: no id is lost, and publishing raises no error."""

    @initialize(capacity=st.integers(1, 8))
    def make(self, capacity: int) -> None:
        self.tier = Tier(TierName.CPU, capacity)
        self.fresh: list[Lease] = []
        self.published: list[Lease] = []

    @rule(letters=st.text("abcd", min_size=1, max_size=5))
    def reserve(self, letters: str) -> None:
        keys = engine_prompt(letters)
        start = self.tier.match(keys).num_blocks
        start += self.tier.num_in_flight(keys, start, len(letters))
        if start < len(letters):
            self.fresh.append(self.tier.reserve(keys, start, len(letters)))

    @rule(letters=st.text("abcd", min_size=1, max_size=5))
    def store(self, letters: str) -> None:
        num_fresh = len(self.fresh)
        self.reserve(letters)
        if len(self.fresh) > num_fresh:
            lease = self.fresh.pop()
            self.tier.publish(lease, len(letters))
            self.tier.release(lease)

    @precondition(lambda self: self.fresh)
    @rule(position=some_position, count=st.integers(0, 5))
    def publish(self, position: int, count: int) -> None:
        lease = self.fresh.pop(position % len(self.fresh))
        self.tier.publish(lease, count)
        self.published.append(lease)

    @precondition(lambda self: self.fresh)
    @rule(position=some_position)
    def fail(self, position: int) -> None:
        self.tier.release(self.fresh.pop(position % len(self.fresh)))

    @precondition(lambda self: self.published)
    @rule(position=some_position)
    def release(self, position: int) -> None:
        self.tier.release(self.published.pop(position % len(self.published)))

    @rule(letter=st.sampled_from("abcd"))
    def discard(self, letter: str) -> None:
        self.tier.discard(ROOT, key_of(letter))

    @invariant()
    def loses_no_id(self) -> None:
        self.tier.check()

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for lease in self.fresh + self.published:
            self.tier.release(lease)
        assert self.tier.num_leased == 0
        self.tier.clear()
        assert self.tier.pool.num_free == self.tier.capacity


TestUnchainedKeysMachine = UnchainedKeysMachine.TestCase
TestUnchainedKeysMachine.settings = settings(stateful_step_count=30)


# -- the checker ----------------------------------------------------------------------------


def _lose_an_id(tier: Tier) -> None:
    tier.pool.take(1)


def _miscount_leases(tier: Tier) -> None:
    tier.num_leased += 1


def _break_the_pool(tier: Tier) -> None:
    tier.pool._stack[0] = tier.pool._stack[1]


def _break_the_index(tier: Tier) -> None:
    tier.index.num_blocks += 1


def _free_an_indexed_block(tier: Tier) -> None:
    tier.pool.give_back(tier.index.blocks(tier.match(prompt("a"))))


def _index_a_block_that_was_not_taken(tier: Tier) -> None:
    parent = tier.match(prompt("abc"))
    tier.index.insert(parent, ROOT, keys_of("abcd", 3), ids(7), np.inf)


@pytest.mark.parametrize(
    "damage",
    [
        _lose_an_id,
        _miscount_leases,
        _break_the_pool,
        _break_the_index,
        _free_an_indexed_block,
        _index_a_block_that_was_not_taken,
    ],
)
def test_check_notices_damage(damage: Callable[[Tier], None]) -> None:
    tier = tier_of(8)
    store(tier, "abc")
    reserve(tier, "xy")
    tier.check()
    damage(tier)
    with pytest.raises(InternalError):
        tier.check()
