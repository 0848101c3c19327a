"""The router's index against plain sets: who holds which block, and how deep each one matches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.errors import InternalError
from flexcache.router.fleet import EventSource, Tier, WorkerSpec
from flexcache.router.holdings import WorkerTable
from flexcache.router.index import (
    Holder,
    Holders,
    KeyChain,
    KVIndexer,
    Space,
    pack,
    pack_extra_keys,
)

CHAIN = KeyChain(Space(1))
HOLDERS = [Holder(source, tier) for source in ("a", "b", "c") for tier in (Tier.GPU, Tier.DRAM)]
A, B = HOLDERS[0], HOLDERS[2]

some_holder = st.sampled_from(HOLDERS)
some_prompt = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def keys_of(prompt: list[int]) -> list[int]:
    return CHAIN.block_keys(prompt)


def depth_of(index: KVIndexer, holder: Holder, keys: list[int]) -> int:
    bit = index.holders.bit(holder)
    return 0 if bit is None else int(index.depths(index.match(keys))[bit])


def walked(held: set[int], keys: list[int]) -> int:
    """Return the number of blocks before the first that is not held."""
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


class PrefixesMachine(RuleBasedStateMachine):
    """Holders keep whole prefixes, so matches are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndexer()
        self.held: dict[Holder, set[int]] = {holder: set() for holder in HOLDERS}

    @rule(holder=some_holder, prompt=some_prompt)
    def store(self, holder: Holder, prompt: list[int]) -> None:
        keys = keys_of(prompt)
        assert self.index.stored(holder, keys) == len(keys)
        self.held[holder] |= set(keys)

    @rule(holder=some_holder, prompt=some_prompt, suffixes=st.lists(some_prompt, max_size=3))
    def remove(self, holder: Holder, prompt: list[int], suffixes: list[list[int]]) -> None:
        """Remove a block and all after it that are held, some of them told twice."""
        start = keys_of(prompt)[-1]
        after = {
            key
            for length in range(8)
            for number in range(2**length)
            for key in keys_of(prompt + [number >> at & 1 for at in range(length)])[-1:]
        }
        lost = [key for key in after | {start} if key in self.held[holder]]
        lost += [keys_of(prompt + suffix)[-1] for suffix in suffixes]
        gone = self.index.removed(holder, lost)
        was_held = self.held[holder] & set(lost)
        self.held[holder] -= set(lost)
        assert set(gone) == was_held - set().union(*self.held.values())

    @rule(holder=some_holder)
    def forget(self, holder: Holder) -> None:
        self.index.forget(holder)
        self.held[holder] = set()

    @rule(num_blocks=st.sampled_from([1, 300, 5000]))
    def sweep(self, num_blocks: int) -> None:
        self.index.sweep(num_blocks)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep(1000):
            pass
        assert self.index.num_blocks == len(set().union(*self.held.values()))

    @rule(sources=st.sets(st.sampled_from("abc")))
    def copy(self, sources: set[str]) -> None:
        """A snapshot has the blocks of its sources and no others."""
        other = KVIndexer()
        for part in self.index.snapshot(sources):
            keys, set_of = (
                np.frombuffer(part.keys, np.uint64), np.frombuffer(part.set_of, np.uint32),
            )  # fmt: skip
            for number, positions in enumerate(part.sets):
                for position in positions:
                    other.stored(part.holders[position], keys[set_of == number].tolist())
        other.check()
        for holder, held in self.held.items():
            expected = held if holder.source in sources else set()
            assert other.num_held(holder) == len(expected)
            bit = other.holders.bit(holder)
            assert bit is not None or not expected
            assert all(other.mask(key) >> (bit or 0) & 1 for key in expected)

    @rule(prompt=some_prompt)
    def match(self, prompt: list[int]) -> None:
        keys = keys_of(prompt)
        segments = self.index.match(keys)
        assert [depth for depth, _ in segments] == sorted({depth for depth, _ in segments})
        for holder, held in self.held.items():
            assert depth_of(self.index, holder, keys) == walked(held, keys)

    @invariant()
    def is_consistent(self) -> None:
        self.index.check()
        for holder, held in self.held.items():
            assert self.index.num_held(holder) == len(held)


TestPrefixes = PrefixesMachine.TestCase
TestPrefixes.settings = settings(stateful_step_count=20)


@given(
    st.lists(
        st.tuples(some_holder, st.integers(0, 40), st.sets(st.integers(0, 39), max_size=6)),
        max_size=8,
    ),
    st.integers(1, 40),
)
def test_a_hole_costs_no_blocks_before_it_and_the_last_block_is_held(
    told: list[tuple[Holder, int, set[int]]], length: int
) -> None:
    index = KVIndexer()
    keys = keys_of(list(range(40)))
    held: dict[Holder, set[int]] = {holder: set() for holder in HOLDERS}
    for holder, stop, holes in told:
        index.stored(holder, keys[:stop])
        held[holder] |= set(keys[:stop])
        index.removed(holder, [keys[at] for at in holes])
        held[holder] -= {keys[at] for at in holes}
    index.check()
    for holder in HOLDERS:
        depth = depth_of(index, holder, keys[:length])
        assert depth >= walked(held[holder], keys[:length])
        assert depth == 0 or keys[depth - 1] in held[holder]


def test_a_removed_copy_in_the_middle_of_a_long_prompt_hides_little() -> None:
    index, keys = KVIndexer(), keys_of(list(range(1000)))
    index.stored(A, keys)
    index.removed(A, [keys[100]])
    assert depth_of(index, A, keys) == 1000


def test_many_holders_of_different_depths() -> None:
    index, keys = KVIndexer(), keys_of(list(range(3000)))
    rng = np.random.default_rng(1)
    depths = {Holder(f"{at}", Tier.GPU): int(rng.integers(0, 3001)) for at in range(200)}
    for holder, depth in depths.items():
        index.stored(holder, keys[:depth])
    found = index.depths(index.match(keys))
    for holder, depth in depths.items():
        bit = index.holders.bit(holder)
        assert bit is not None and found[bit] == depth
    assert found[-1] == 0
    index.check()


def test_a_full_index_keeps_prefixes_and_takes_blocks_again_once_others_went() -> None:
    index = KVIndexer(max_blocks=10)
    first, second = keys_of([1] * 8), keys_of([2] * 8)
    assert index.stored(A, first) == 8
    assert index.stored(A, second) == 2
    assert index.num_refused == 6
    assert depth_of(index, A, second) == 2
    assert index.stored(B, first) == 8, "a further holder needs no room"
    index.check()
    index.removed(A, first)
    index.removed(B, first)
    assert index.stored(A, second) == 8
    assert depth_of(index, A, second) == 8
    index.check()


def test_forgetting_makes_room_with_the_sweep() -> None:
    index = KVIndexer(max_blocks=8)
    index.stored(A, keys_of([1] * 8))
    index.forget(A)
    assert index.match(keys_of([1] * 8)) == []
    assert index.stored(B, keys_of([2] * 8)) == 0
    while index.sweep(1):
        index.check()
    assert index.num_blocks == 0
    assert index.stored(B, keys_of([2] * 8)) == 8


def test_blocks_of_forgotten_holders_only_are_gone() -> None:
    index, keys = KVIndexer(), keys_of([1, 2, 3])
    index.stored(A, keys)
    index.stored(B, keys)
    index.forget(A)
    assert index.removed(B, keys[1:]) == keys[1:]
    assert index.num_blocks == 1
    index.check()


def test_a_bit_is_given_again_only_after_a_whole_sweep() -> None:
    index = KVIndexer()
    index.stored(A, keys_of([1, 2, 3]))
    index.sweep(1)
    index.forget(A)
    index.stored(A, keys_of([4]))
    index.sweep(10)  # begins
    index.forget(A)  # too late for this sweep
    while index.sweep(10):
        index.check()
    index.stored(A, keys_of([5]))
    assert index.num_blocks == 1
    for prompt, depth in (([1, 2, 3], 0), ([4], 0), ([5], 1)):
        assert depth_of(index, A, keys_of(prompt)) == depth
    assert index.holders.num_bits <= 3


def test_bits_do_not_grow_when_holders_come_and_go() -> None:
    index = KVIndexer()
    for number in range(50):
        index.stored(Holder(f"worker {number}", Tier.GPU), keys_of([number, 1]))
        index.forget(Holder(f"worker {number}", Tier.GPU))
        while index.sweep(1000):
            pass
    index.check()
    assert index.num_blocks == 0
    assert index.holders.num_bits == 1


def test_check_finds_a_wrong_count() -> None:
    index = KVIndexer()
    index.stored(A, keys_of([1, 2]))
    index._num_held[0] += 1
    with pytest.raises(InternalError, match="numbers"):
        index.check()


def test_check_finds_a_block_that_nothing_holds() -> None:
    index = KVIndexer()
    index.stored(A, keys_of([1, 2]))
    index.holders.retire(A)
    index.holders.begin_sweep()
    index.holders.end_sweep()  # though no block was visited
    with pytest.raises(InternalError, match="held by nothing"):
        index.check()


def test_check_finds_a_bit_with_two_uses() -> None:
    holders = Holders()
    holders.make_bit(A)
    holders._free.append(0)
    with pytest.raises(InternalError, match="bits"):
        holders.check()


# -- keys ----------------------------------------------------------------------------------------

some_tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


some_lookahead = st.integers(0, 3)


@given(
    some_tokens,
    st.integers(1, 5),
    st.integers(0, 8),
    st.sampled_from([None, "salt"]),
    some_lookahead,
)
def test_keys_are_the_same_in_one_go_and_block_by_block(
    tokens: list[int], size: int, split: int, salt: str | None, lookahead: int
) -> None:
    chain = KeyChain(Space(size, None, lookahead))
    keys = chain.block_keys(tokens, salt=salt)
    assert len(keys) == max(0, len(tokens) - lookahead) // size
    assert chain.block_keys(np.array(tokens, np.int64), salt=salt) == keys
    split = min(split, len(keys))
    extra = pack_extra_keys([[salt] if salt and not at else None for at in range(len(keys))])
    stop = len(keys) * size + lookahead
    first = chain.extend(None, pack(tokens[: split * size + lookahead]), extra[:split])
    parent = first[-1] if first else None
    rest = chain.extend(parent, pack(tokens[split * size : stop]), extra[split:])
    assert first + rest == keys


@given(some_tokens.filter(len), some_tokens.filter(len), some_lookahead)
def test_only_equal_prefixes_have_equal_keys(
    one: list[int], other: list[int], lookahead: int
) -> None:
    chain = KeyChain(Space(1, None, lookahead))
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    length = min(len(one), len(other)) if common is None else common
    length = max(0, length - lookahead)
    first, second = chain.block_keys(one), chain.block_keys(other)
    assert first[:length] == second[:length]
    assert not set(first[length:]) & set(second[length:])


def test_spaces_salts_and_extra_keys_share_nothing() -> None:
    tokens = list(range(32))
    chains = [KeyChain(Space(size, name)) for size in (8, 16) for name in (None, "x", "y", 1)]
    sets = [chain.block_keys(tokens, salt=salt) for chain in chains for salt in (None, "x", "y")]
    sets += [
        chain.extend(None, pack(tokens), pack_extra_keys(extra))
        for chain in chains
        for extra in ([["image", 0]], [[["x", 0]]], [[["x", 1]]], [[b"x"]])
    ]
    keys = [key for each in sets for key in each]
    assert len(set(keys)) == len(keys)


def test_an_empty_salt_is_none() -> None:
    assert CHAIN.block_keys([1, 2], salt="") == CHAIN.block_keys([1, 2])


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5], np.array([-1]), np.array([2**32])])
def test_token_ids_out_of_range_are_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        KeyChain(Space(1)).block_keys(tokens)  # type: ignore[arg-type]


# -- workers -------------------------------------------------------------------------------------


def worker(name: str, *sources: str, rank: int | None = None) -> WorkerSpec:
    return WorkerSpec(
        name=name,
        url=f"http://{name}",
        data_parallel_rank=rank,
        sources=tuple(EventSource(source) for source in sources),
    )


def test_a_token_counts_for_the_fastest_tier_that_has_it() -> None:
    index = KVIndexer()
    table = WorkerTable(index.holders)
    keys = keys_of(list(range(20)))
    for source, tier, depth in (
        ("a", Tier.GPU, 5),
        ("a", Tier.DRAM, 3),
        ("b", Tier.DRAM, 9),
        ("shared", Tier.DRAM, 7),
        ("shared", Tier.DISK, 12),
    ):
        index.stored(Holder(source, tier), keys[:depth])
    table.set_workers(
        [worker("1", "a", "shared"), worker("2", "b", "shared"), worker("3"), worker("4", "a")]
    )
    matched = table.matched(index.depths(index.match(keys)))
    assert matched.tolist() == [[5, 0, 0, 5], [2, 9, 0, 0], [5, 3, 0, 0]]


def test_ranks_of_one_publisher_are_kept_apart_once_there_are_several() -> None:
    index = KVIndexer()
    table = WorkerTable(index.holders)
    keys = keys_of(list(range(8)))
    table.set_workers([worker("0", "s", rank=0), worker("1", "s", rank=1), worker("x", "s")])

    def gpu() -> list[int]:
        return table.matched(index.depths(index.match(keys)))[0].tolist()

    assert gpu() == [0, 0, 0]
    index.stored(Holder("s", Tier.GPU, 4), keys[:3])
    assert gpu() == [3, 3, 3], "an engine may count its ranks differently"
    index.stored(Holder("s", Tier.GPU, 1), keys[:5])
    assert gpu() == [0, 5, 5]
    index.stored(Holder("s", Tier.DRAM), keys[:8])
    assert table.matched(index.depths(index.match(keys)))[1].tolist() == [8, 3, 3]
    index.forget(Holder("s", Tier.GPU, 1))
    assert gpu() == [3, 3, 3]


def test_no_workers() -> None:
    index = KVIndexer()
    table = WorkerTable(index.holders)
    table.set_workers([])
    assert table.matched(index.depths([])).shape == (3, 0)
