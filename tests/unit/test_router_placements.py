"""What the router assumes of workers' caches, against a plain list in order of use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier
from flexcache.router.index import Holder, KeyChain, KVIndexer, Space
from flexcache.router.load import Running, Work
from flexcache.router.placements import (
    DEFAULT_BLOCK_SIZE,
    EXPECTED_FOR_S,
    Expectations,
    LowerTiers,
    Placements,
    guesses_about,
)

CHAIN = KeyChain(Space(1))
WORKERS = ("w", "v")


def keys_of(prompt: list[int] | str) -> list[int]:
    return CHAIN.block_keys([ord(token) if isinstance(token, str) else token for token in prompt])


def request(worker: str = "w", now: float = 0.0, num_tokens: int = 100) -> Running:
    return Running("", 0, Work(num_tokens, 0), now, now, worker)


def depth(index: KVIndexer, worker: str, prompt: list[int] | str) -> int:
    bit = index.holders.bit(Holder(guesses_about(worker), Tier.GPU))
    return 0 if bit is None else int(index.depths(index.match(keys_of(prompt)))[bit])


class Lru(RuleBasedStateMachine):
    """Requests come and end in any order; what is kept is what was used last."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndexer()
        self.placements = Placements(self.index)
        for worker in WORKERS:
            self.placements.set_capacity(worker, self.CAPACITY, 1)
        self.order: dict[str, list[int]] = {worker: [] for worker in WORKERS}
        self.running: list[Running] = []

    def use(self, worker: str, keys: list[int]) -> None:
        kept = [key for key in self.order[worker] if key not in keys]
        self.order[worker] = (kept + keys[::-1])[-self.CAPACITY :]

    @rule(worker=st.sampled_from(WORKERS), prompt=st.lists(st.integers(0, 1), max_size=8))
    def place(self, worker: str, prompt: list[int]) -> None:
        keys = keys_of(prompt)
        self.running.append(request(worker))
        self.placements.place(self.running[-1], keys)
        self.use(worker, keys)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            ended = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.placements.ended(ended)
            if ended.worker:
                self.use(ended.worker, list(ended.keys))

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.placements.forget(worker)
        self.placements.set_capacity(worker, self.CAPACITY, 1)
        self.order[worker] = []
        for each in self.running:
            if each.worker == worker:  # its end must change nothing
                each.worker = ""

    @invariant()
    def is_as_expected(self) -> None:
        self.placements.check()
        self.index.check()
        for worker in WORKERS:
            holder = Holder(guesses_about(worker), Tier.GPU)
            bit = self.index.holders.bit(holder)
            assert self.index.num_held(holder) == len(self.order[worker])
            for key in self.order[worker]:
                assert bit is not None and self.index.mask(key) >> bit & 1


TestLru = Lru.TestCase
TestLru.settings = settings(stateful_step_count=20)


def make(num_blocks: int) -> tuple[KVIndexer, Placements]:
    index = KVIndexer()
    placements = Placements(index)
    placements.set_capacity("w", num_blocks, 1)
    return index, placements


def place(placements: Placements, prompt: str) -> Running:
    placed = request()
    placements.place(placed, keys_of(prompt))
    return placed


def serve(placements: Placements, prompt: str, cached: int | None = None) -> None:
    placements.ended(place(placements, prompt), cached_tokens=cached)


def test_a_prompt_longer_than_the_cache_keeps_its_start() -> None:
    index, placements = make(4)
    serve(placements, "abcdef")
    assert depth(index, "w", "abcdef") == 4


def test_a_report_of_less_evicts_what_was_used_no_later() -> None:
    index, placements = make(100)
    serve(placements, "old")
    serve(placements, "abcd")
    serve(placements, "new")
    serve(placements, "abxy", cached=2)
    assert depth(index, "w", "old") == 3, "the report agreed"
    serve(placements, "abcd", cached=3)
    assert depth(index, "w", "abcd") == 4, "just computed again"
    assert depth(index, "w", "old") == 0, "used before the evicted block"
    assert depth(index, "w", "new") == 3
    assert depth(index, "w", "abxy") == 4
    placements.check()


def test_a_prompt_of_whole_blocks_evicts_nothing_though_its_last_one_is_computed() -> None:
    index, placements = make(100)
    serve(placements, "old")
    for _ in range(2):
        placed = request(num_tokens=4)
        placements.place(placed, keys_of("abcd"))
        placements.ended(placed, cached_tokens=3)
    assert depth(index, "w", "old") == 3
    placements.check()


def test_what_followed_an_evicted_block_is_evicted_too() -> None:
    index, placements = make(100)
    serve(placements, "abcd")
    serve(placements, "abc", cached=2)
    assert depth(index, "w", "abcd") == 3
    placements.check()


def test_a_report_of_more_changes_nothing() -> None:
    index, placements = make(100)
    serve(placements, "abcd", cached=3)
    assert depth(index, "w", "abcd") == 4


def test_a_request_that_was_refused_leaves_what_was_there() -> None:
    index, placements = make(100)
    serve(placements, "ab")
    placed = place(placements, "xyz")
    assert depth(index, "w", "xyz") == 3
    placements.ended(placed, was_served=False)
    assert depth(index, "w", "xyz") == 0
    assert depth(index, "w", "ab") == 2
    placements.check()


def test_a_request_that_was_refused_takes_no_blocks_of_earlier_ones_along() -> None:
    index, placements = make(100)
    serve(placements, "ab")
    placed = place(placements, "abxy")
    placements.ended(placed, was_served=False)
    assert depth(index, "w", "abxy") == 2
    placements.check()


def test_an_emptied_worker_keeps_its_capacity() -> None:
    index, placements = make(2)
    serve(placements, "ab")
    placed = place(placements, "ab")
    placements.empty("w")
    placements.ended(placed)
    assert depth(index, "w", "ab") == 0
    serve(placements, "abcd")
    assert (placements.block_size("w"), depth(index, "w", "abcd")) == (1, 2)
    placements.check()


def test_a_smaller_capacity_evicts_and_another_block_size_empties() -> None:
    index, placements = make(100)
    serve(placements, "abcdef")
    placements.set_capacity("w", 2, 1)
    assert depth(index, "w", "abcdef") == 2
    placements.set_capacity("w", 2, 4)
    assert depth(index, "w", "abcdef") == 0
    assert placements.block_size("w") == 4
    assert placements.block_size("other") == DEFAULT_BLOCK_SIZE
    assert placements.block_sizes == {4}
    placements.check()


def test_requests_of_forgotten_workers_end_quietly() -> None:
    index, placements = make(4)
    placed = place(placements, "ab")
    placements.forget("w")
    placements.set_capacity("w", 4, 1)
    placements.ended(placed, cached_tokens=2)
    placements.ended(request())
    assert depth(index, "w", "ab") == 0
    placements.check()


def test_a_full_index_takes_what_it_can() -> None:
    index = KVIndexer(max_blocks=3)
    placements = Placements(index)
    placements.set_capacity("w", 100, 1)
    serve(placements, "abcdef")
    assert depth(index, "w", "abcdef") == 3
    placements.check()


# -- tiers below the GPU -------------------------------------------------------------------------


class Lower(RuleBasedStateMachine):
    """Two caches of two tiers, against plain lists in order of use."""

    SIZES = {Tier.DRAM: 4, Tier.DISK: 7}

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndexer()
        self.lower = LowerTiers(self.index)
        self.order: dict[str, dict[Tier, list[int]]] = {}
        for url in WORKERS:
            self.lower.set_capacities(url, self.SIZES, 1)
            self.order[url] = {tier: [] for tier in self.SIZES}

    @rule(
        url=st.sampled_from(WORKERS),
        prompt=st.lists(st.integers(0, 1), max_size=8),
        cached=st.none() | st.integers(0, 8),
    )
    def serve(self, url: str, prompt: list[int], cached: int | None) -> None:
        keys = keys_of(prompt)
        self.lower.served(url, keys, 1, cached)
        for tier, order in self.order[url].items():
            lacked = keys[cached:] if cached is not None else []
            if lacked and lacked[0] in order:
                whole = self.groups[url, tier]
                use = next(at for at, used in enumerate(whole) if lacked[0] in used)
                gone = set().union(*whole[: use + 1])
                order[:] = [key for key in order if key not in gone]
            order[:] = [key for key in order if key not in keys] + keys[::-1]
            del order[: -self.SIZES[tier]]
            self.groups[url, tier] = [
                used - set(keys) for used in self.groups.setdefault((url, tier), [])
            ] + [set(keys)]

    @property
    def groups(self) -> dict[tuple[str, Tier], list[set[int]]]:
        """Blocks by the request that used them last."""
        found: dict[tuple[str, Tier], list[set[int]]] = self.__dict__.setdefault("_groups", {})
        return found

    @rule(url=st.sampled_from(WORKERS))
    def lose_dram(self, url: str) -> None:
        self.lower.empty(url, Tier.DRAM)
        self.order[url][Tier.DRAM].clear()
        self.groups[url, Tier.DRAM] = []

    @invariant()
    def is_as_expected(self) -> None:
        self.lower.check()
        self.index.check()
        for url, tiers in self.order.items():
            for tier, order in tiers.items():
                holder = Holder(guesses_about(url), tier)
                bit = self.index.holders.bit(holder)
                assert self.index.num_held(holder) == len(order)
                assert all(bit is not None and self.index.mask(key) >> bit & 1 for key in order)


TestLower = Lower.TestCase
TestLower.settings = settings(stateful_step_count=20)


def test_a_cache_that_is_gone_and_one_with_other_blocks_have_nothing() -> None:
    index = KVIndexer()
    lower = LowerTiers(index)
    for url in WORKERS:
        lower.set_capacities(url, {Tier.DRAM: 8}, 1)
        lower.served(url, keys_of("abc"), 1)
    lower.served("w", keys_of("xyz"), 4)
    assert index.num_blocks == 3
    lower.set_capacities("w", {Tier.DRAM: 8}, 2)
    lower.keep(["w"])
    assert lower.block_sizes == {2} and index.num_holdings == 0
    lower.check()


# -- expectations --------------------------------------------------------------------------------


def expect(expectations: Expectations, prompt: str, worker: str = "w", now: float = 0.0) -> Running:
    expected = request(worker, now)
    expectations.expect(expected, keys_of(prompt))
    return expected


def test_blocks_are_expected_until_the_first_token() -> None:
    index = KVIndexer()
    expectations = Expectations(index)
    first = expect(expectations, "abc")
    others = [expect(expectations, "abde"), expect(expectations, "ab", "v")]
    assert (depth(index, "w", "abc"), depth(index, "v", "abc")) == (3, 2)
    expectations.settle(first)
    expectations.check(others)
    assert (depth(index, "w", "abc"), depth(index, "w", "abde")) == (2, 4)
    expectations.settle(first)
    expectations.forget("w")
    expectations.check(others)
    assert (depth(index, "w", "ab"), depth(index, "v", "ab")) == (0, 2)
    expectations.settle(others[0])
    again = expect(expectations, "ab")
    expectations.settle(others[0])
    assert depth(index, "w", "ab") == 2, "what was forgotten settles nothing"
    expectations.check([*others, again])


def test_expectations_expire() -> None:
    index = KVIndexer()
    expectations = Expectations(index)
    both = [expect(expectations, "a", now=0.0), expect(expectations, "b", now=1.0)]

    def expire(now: float) -> tuple[int, int]:
        for running in both:
            expectations.expire(running, now)
        expectations.check(both)
        return depth(index, "w", "a"), depth(index, "w", "b")

    assert expire(EXPECTED_FOR_S - 0.1) == (1, 1)
    assert expire(EXPECTED_FOR_S) == (0, 1)
    assert expire(EXPECTED_FOR_S + 1) == (0, 0)
    assert index.num_blocks == 0


def test_checks_find_what_the_index_lost() -> None:
    index, placements = make(4)
    serve(placements, "ab")
    expectations = Expectations(index)
    expected = expect(expectations, "ab", "v")
    index.removed(Holder(guesses_about("w"), Tier.GPU), keys_of("a"))
    index.removed(Holder(guesses_about("v"), Tier.GPU), keys_of("a"))
    with pytest.raises(InternalError, match="disagree"):
        placements.check()
    with pytest.raises(InternalError, match="expected"):
        expectations.check([expected])
    with pytest.raises(InternalError, match="miscounted"):
        expectations.check([])
