"""What the router assumes of workers' caches, against a plain list in order of use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier
from flexcache.router.index import Holder, KeyChain, KVIndexer, Space
from flexcache.router.placements import (
    DEFAULT_BLOCK_SIZE,
    EXPECTED_FOR_S,
    Expectations,
    Placements,
    guesses_about,
)

CHAIN = KeyChain(Space(1))
WORKERS = ("w", "v")


def keys_of(prompt: list[int] | str) -> list[int]:
    return CHAIN.block_keys([ord(token) if isinstance(token, str) else token for token in prompt])


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
        self.running: dict[str, tuple[str, list[int]]] = {}
        self.number = 0

    def use(self, worker: str, keys: list[int]) -> None:
        kept = [key for key in self.order[worker] if key not in keys]
        self.order[worker] = (kept + keys[::-1])[-self.CAPACITY :]

    @rule(worker=st.sampled_from(WORKERS), prompt=st.lists(st.integers(0, 1), max_size=8))
    def place(self, worker: str, prompt: list[int]) -> None:
        self.number += 1
        keys = keys_of(prompt)
        self.placements.place(str(self.number), worker, keys)
        self.use(worker, keys)
        self.running[str(self.number)] = worker, keys

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            request = data.draw(st.sampled_from(sorted(self.running)))
            self.placements.ended(request)
            self.use(*self.running.pop(request))

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.placements.forget(worker)
        self.placements.set_capacity(worker, self.CAPACITY, 1)
        self.order[worker] = []
        self.running = {at: each for at, each in self.running.items() if each[0] != worker}

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


def serve(placements: Placements, name: str, prompt: str, cached: int | None = None) -> None:
    placements.place(name, "w", keys_of(prompt))
    placements.ended(name, cached_tokens=cached)


def test_a_prompt_longer_than_the_cache_keeps_its_start() -> None:
    index, placements = make(4)
    serve(placements, "1", "abcdef")
    assert depth(index, "w", "abcdef") == 4


def test_a_report_of_less_evicts_what_was_used_no_later() -> None:
    index, placements = make(100)
    serve(placements, "1", "old")
    serve(placements, "2", "abcd")
    serve(placements, "3", "new")
    serve(placements, "4", "abxy", cached=2)
    assert depth(index, "w", "old") == 3, "the report agreed"
    serve(placements, "5", "abcd", cached=3)
    assert depth(index, "w", "abcd") == 4, "just computed again"
    assert depth(index, "w", "old") == 0, "used before the evicted block"
    assert depth(index, "w", "new") == 3
    assert depth(index, "w", "abxy") == 4
    placements.check()


def test_what_followed_an_evicted_block_is_evicted_too() -> None:
    index, placements = make(100)
    serve(placements, "1", "abcd")
    serve(placements, "2", "abc", cached=2)
    assert depth(index, "w", "abcd") == 3
    placements.check()


def test_a_report_of_more_changes_nothing() -> None:
    index, placements = make(100)
    serve(placements, "1", "abcd", cached=3)
    assert depth(index, "w", "abcd") == 4


def test_a_request_that_was_refused_leaves_what_was_there() -> None:
    index, placements = make(100)
    serve(placements, "1", "ab")
    placements.place("2", "w", keys_of("xyz"))
    assert depth(index, "w", "xyz") == 3
    placements.ended("2", was_served=False)
    assert depth(index, "w", "xyz") == 0
    assert depth(index, "w", "ab") == 2
    placements.check()


def test_a_request_that_was_refused_takes_no_blocks_of_earlier_ones_along() -> None:
    index, placements = make(100)
    serve(placements, "1", "ab")
    placements.place("2", "w", keys_of("abxy"))
    placements.ended("2", was_served=False)
    assert depth(index, "w", "abxy") == 2
    placements.check()


def test_an_emptied_worker_keeps_its_capacity() -> None:
    index, placements = make(2)
    serve(placements, "1", "ab")
    placements.place("2", "w", keys_of("ab"))
    placements.empty("w")
    placements.ended("2")
    assert depth(index, "w", "ab") == 0
    serve(placements, "3", "abcd")
    assert (placements.block_size("w"), depth(index, "w", "abcd")) == (1, 2)
    placements.check()


def test_a_smaller_capacity_evicts_and_another_block_size_empties() -> None:
    index, placements = make(100)
    serve(placements, "1", "abcdef")
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
    placements.place("1", "w", keys_of("ab"))
    placements.forget("w")
    placements.set_capacity("w", 4, 1)
    placements.ended("1", cached_tokens=2)
    placements.ended("never placed")
    assert depth(index, "w", "ab") == 0
    placements.check()


def test_a_full_index_takes_what_it_can() -> None:
    index = KVIndexer(max_blocks=3)
    placements = Placements(index)
    placements.set_capacity("w", 100, 1)
    serve(placements, "1", "abcdef")
    assert depth(index, "w", "abcdef") == 3
    placements.check()


# -- expectations --------------------------------------------------------------------------------


def test_blocks_are_expected_until_the_first_token() -> None:
    index = KVIndexer()
    expectations = Expectations(index)
    expectations.expect("1", "w", keys_of("abc"), now=0.0)
    expectations.expect("2", "w", keys_of("abde"), now=1.0)
    expectations.expect("3", "v", keys_of("ab"), now=1.0)
    assert (depth(index, "w", "abc"), depth(index, "v", "abc")) == (3, 2)
    expectations.settle("1")
    expectations.check()
    assert (depth(index, "w", "abc"), depth(index, "w", "abde")) == (2, 4)
    expectations.settle("1")
    expectations.forget("w")
    expectations.check()
    assert (depth(index, "w", "ab"), depth(index, "v", "ab")) == (0, 2)


def test_expectations_expire() -> None:
    index = KVIndexer()
    expectations = Expectations(index)
    expectations.expect("1", "w", keys_of("a"), now=0.0)
    expectations.expect("2", "w", keys_of("b"), now=1.0)
    expectations.expire(EXPECTED_FOR_S - 0.1)
    assert len(expectations) == 2
    expectations.expire(EXPECTED_FOR_S)
    assert (depth(index, "w", "a"), depth(index, "w", "b")) == (0, 1)
    expectations.expire(EXPECTED_FOR_S + 1)
    assert index.num_blocks == 0
    expectations.check()


def test_the_expected_of_a_retried_request_is_that_of_its_last_worker() -> None:
    index = KVIndexer()
    expectations = Expectations(index)
    expectations.expect("1", "w", keys_of("ab"), now=0.0)
    expectations.expect("1", "v", keys_of("ab"), now=0.5)
    assert (depth(index, "w", "ab"), depth(index, "v", "ab")) == (0, 2)
    expectations.check()


def test_checks_find_what_the_index_lost() -> None:
    index, placements = make(4)
    serve(placements, "1", "ab")
    expectations = Expectations(index)
    expectations.expect("1", "v", keys_of("ab"), now=0.0)
    index.removed(Holder(guesses_about("w"), Tier.GPU), keys_of("a"))
    index.removed(Holder(guesses_about("v"), Tier.GPU), keys_of("a"))
    with pytest.raises(InternalError, match="disagree"):
        placements.check()
    with pytest.raises(InternalError, match="expected"):
        expectations.check()
