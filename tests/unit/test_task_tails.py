"""Gets and puts of models with tails: what is hit, what is stored, and what becomes of failures."""

from __future__ import annotations

import pytest
from builders import words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tail_world import TOKENS, TailWorld, keys_of

from flexcache.cache.prompt import Prompt
from flexcache.cache.tail_index import tail_keys
from flexcache.config.model import KVGroup
from flexcache.ids import KVStatus, OpKind, TaskKind, TierName

CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE
WINDOWS = (KVGroup("window", 32, 60), KVGroup("full", 16), KVGroup("window", 32, 60))
"""Two dense blocks per position; a tail of up to four blocks: two units."""
STATE = (KVGroup("full", 32), KVGroup("state", 32))
STATES_ONLY = (KVGroup("state", 32), KVGroup("state", 32))
MODELS = (WINDOWS, STATE, STATES_ONLY)
LONG_WORDS = words("ab", 4)

some_word = st.text("ab", min_size=1, max_size=4)
some_number = st.integers(0, 99)


class TailedTasks(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(MODELS),
        cpu=st.sampled_from([6, 12, 30]),
        ssd=st.sampled_from([0, 10, 30]),
        policy=st.sampled_from(["write_through", "write_back", "selective"]),
    )
    def make(self, groups: tuple[KVGroup, ...], cpu: int, ssd: int, policy: str) -> None:
        self.world = TailWorld(groups, cpu=cpu, ssd=ssd, policy=policy)
        self.ssd = ssd

    @rule(word=some_word, with_tail=st.booleans(), behind=st.integers(0, 3))
    def put(self, word: str, with_tail: bool, behind: int) -> None:
        """The word's first letters may be named by their key alone."""
        self.world.put(word, len(word) if with_tail else 0, behind=min(behind, len(word) - 1))

    @rule(word=st.sampled_from(LONG_WORDS), tail_at=st.integers(1, 4), num_ok=st.integers(0, 2))
    def put_half(self, word: str, tail_at: int, num_ok: int) -> None:
        """The copies off the GPU break off."""
        self.world.finish_all()
        self.world.put(word, tail_at)
        for run in list(self.world.running):
            self.world.finish(run, num_ok)

    @rule(word=some_word, start=st.integers(0, 3), behind=st.integers(0, 3))
    def get(self, word: str, start: int, behind: int) -> None:
        self.world.get(word, min(start, len(word)), min(behind, len(word) - 1))

    @rule(word=some_word, behind=st.integers(0, 3))
    def prefetch(self, word: str, behind: int) -> None:
        self.world.prefetch(word, min(behind, len(word) - 1))

    @precondition(lambda self: self.world.running)
    @rule(number=some_number)
    def finish(self, number: int) -> None:
        running = self.world.running
        self.world.finish(running[number % len(running)])

    @rule()
    def finish_all(self) -> None:
        self.world.finish_all()

    @precondition(lambda self: self.world.running)
    @rule(number=some_number, num_ok=st.integers(0, 1), is_bad=st.booleans())
    def fail(self, number: int, num_ok: int, is_bad: bool) -> None:
        run = self.world.running[number % len(self.world.running)]
        self.world.finish(run, num_ok, is_bad=is_bad and run.op.kind is OpKind.DISK2H)

    @precondition(lambda self: self.ssd)
    @rule(word=some_word)
    def rot_a_tail(self, word: str) -> None:
        tier = self.world.cache.tiers.by_name[SSD]
        tail = tier.tails.find(keys_of(word).root, keys_of(word).key(len(word) - 1))
        if tail is not None:
            self.world.rot(tier, int(tail.units[-1]))

    @rule()
    def cancel_all(self) -> None:
        self.world.cancel_all()

    @rule(name=st.sampled_from([CPU, SSD]))
    def clear(self, name: TierName) -> None:
        if name is CPU or self.ssd:
            self.world.cache.tiers.clear(name.value)

    @invariant()
    def holds(self) -> None:
        self.world.check(LONG_WORDS)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_all()
            self.world.check(LONG_WORDS)
            assert not any(tier.num_leased for tier in self.world.cache.tiers)


TailedTasks.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTailedTasks = TailedTasks.TestCase


@pytest.mark.parametrize("groups", MODELS)
def test_a_hit_is_the_longest_prefix_that_ends_at_a_tail(groups: tuple[KVGroup, ...]) -> None:
    world = TailWorld(groups, cpu=30)
    for tail_at in (2, 4):
        world.put("abcdef"[:tail_at], tail_at)
        world.finish_all()
    for word, end in (("abcdef", 4), ("abcd", 4), ("abc", 2), ("abx", 2), ("a", 0), ("x", 0)):
        assert world.get(word).plan.num_blocks == end
        world.finish_all()
    assert world.get("abcdef", 3).plan.num_blocks == 1
    assert world.get("abcdef", 4).plan.num_blocks == 0


@pytest.mark.parametrize(
    ("word", "hit", "shared"),
    [("abab", 4, 4), ("ababa", 4, 4), ("abba", 0, 2), ("aba", 0, 3), ("bb", 0, 0)],
)
@pytest.mark.parametrize("behind", [0, 1])
def test_a_match_tells_how_much_of_its_prompt_is_cached_behind_its_hit(
    word: str, hit: int, shared: int, behind: int
) -> None:
    world = TailWorld(WINDOWS, cpu=30)
    world.put("abab", 4)
    world.finish_all()
    keys, num_tokens = keys_of(word, behind), TOKENS * (len(word) - behind)
    prompt = Prompt(TaskKind.GET, keys, 0, len(word) - behind, num_tokens)
    offer = world.engine.match(world.ids.next(), prompt, world.now)
    assert offer.num_blocks == max(0, hit - behind if shared else 0)
    assert offer.num_cached == max(0, shared - behind)


@pytest.mark.parametrize("groups", [WINDOWS, STATE])
def test_a_prompt_stored_in_pieces_is_resumed_at_the_tail_of_each(
    groups: tuple[KVGroup, ...],
) -> None:
    world = TailWorld(groups, cpu=30, ssd=30)
    world.put("abc", 3)
    world.put("abcdef", 6, behind=3)
    world.finish_all()
    for tier in ("CPU", "SSD"):
        for word, behind, end in (("abcdefg", 0, 6), ("abcdefg", 2, 6), ("abcdx", 1, 3)):
            get = world.get(word, behind=behind)
            assert (get.plan.start, get.plan.stop) == (behind, end)
            world.finish_all()
            assert get.result is not None
            assert (get.result.status, get.result.num_ok) == (KVStatus.SUCCESS, end - behind)
        if tier == "CPU":
            world.cache.tiers.clear("CPU")


@pytest.mark.parametrize("groups", MODELS)
def test_half_a_tail_is_no_tail(groups: tuple[KVGroup, ...]) -> None:
    world = TailWorld(groups, cpu=30)
    put = world.put("abcd", 4)
    for run in list(world.running):
        is_tail = run.op.first >= 1 << 31
        world.finish(run, len(run.op) - 1 if is_tail else None)
    assert put.result is not None
    has_blocks = bool(world.shape.dense_blocks)
    assert put.result.status is (KVStatus.SUCCESS if has_blocks else KVStatus.FAILED)
    assert not world.has_tail(CPU, "abcd")
    assert world.get("abcd").plan.num_blocks == 0


@pytest.mark.parametrize("groups", MODELS)
def test_a_bad_tail_fails_the_load_and_the_next_finds_the_tail_before_it(
    groups: tuple[KVGroup, ...],
) -> None:
    world = TailWorld(groups, cpu=30, ssd=30)
    for tail_at in (2, 4):
        world.put("abcd"[:tail_at], tail_at)
        world.finish_all()
    world.cache.tiers.clear("CPU")
    ssd = world.cache.tiers.by_name[SSD]
    tail = ssd.tails.find(keys_of("abcd").root, keys_of("abcd").key(3))
    assert tail is not None
    world.rot(ssd, int(tail.units[-1]))
    first = world.get("abcd")
    world.finish_all()
    assert first.result is not None
    assert (first.result.status, first.result.num_ok) == (KVStatus.FAILED, 0)
    assert not world.has_tail(SSD, "abcd")
    retry = world.get("abcd")
    world.finish_all()
    assert retry.result is not None
    assert (retry.result.status, retry.result.num_ok) == (KVStatus.SUCCESS, 2)


def test_blocks_on_one_tier_and_the_tail_on_another_make_a_hit() -> None:
    world = TailWorld(STATE, cpu=30, ssd=30)
    world.put("abcd", 4)
    world.finish_all()
    root, key = keys_of("abcd").root, keys_of("abcd").key(3)
    world.cache.tiers.host.discard_tail(root, key)
    assert world.get("abcd").plan.num_blocks == 4
    assert {run.op.kind for run in world.running} == {OpKind.H2D, OpKind.DISK2H}
    world.finish_all()
    assert world.has_tail(CPU, "abcd")
    world.cache.tiers.host.discard(root, keys_of("abcd").key(0))
    assert world.get("abcd").plan.num_blocks == 4
    world.finish_all()


def test_without_room_to_stage_the_longest_hit_a_shorter_one_is_served() -> None:
    world = TailWorld(STATE, cpu=6, ssd=40)
    for tail_at in (2, 5):
        world.put("abcde"[:tail_at], tail_at)
        world.finish_all()
    world.cache.tiers.clear("CPU")
    held = world.cache.tiers.host.reserve_private(keys_of("a").root, 3)
    world.cache.tiers.num_holders += 1
    get = world.get("abcde")
    assert get.plan.num_blocks == 2
    world.finish_all()
    assert get.result is not None
    assert get.result.status is KVStatus.SUCCESS
    world.cache.tiers.host.release(held)
    world.cache.tiers.num_holders -= 1
    assert world.get("abcde").plan.num_blocks == 5


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("behind", [0, 2])
def test_a_tail_that_ssd_lacks_is_written_when_it_is_put_again(policy: str, behind: int) -> None:
    world = TailWorld(STATE, cpu=30, ssd=30, policy=policy)
    world.engine.executor_down("disk", "it died", world.now)
    world.put("abcd", 4)
    world.finish_all()
    assert not world.has_tail(SSD, "abcd")
    world.engine.executor_up("disk")
    again = world.put("abcd", 4, behind=behind)
    assert again.plan.is_empty
    world.finish_all()
    assert world.has_tail(SSD, "abcd")
    world.check(["abcd"])


def test_a_tail_that_ssd_has_is_as_recent_as_the_last_put_of_it() -> None:
    world = TailWorld(STATES_ONLY, cpu=30, ssd=4)
    for word in ("ab", "cd", "ab", "ef"):
        world.put(word, 2)
        world.finish_all()
    assert [world.has_tail(SSD, word) for word in ("ab", "cd", "ef")] == [True, False, True]


def test_a_tail_that_every_tier_has_is_not_held_by_another_put_of_it() -> None:
    world = TailWorld(STATES_ONLY, cpu=4, ssd=30)
    for word in ("ab", "ab", "cd", "ef"):
        world.put(word, 2)
        world.finish_all()
    assert not world.has_tail(CPU, "ab")
    assert world.cache.tiers.num_holders == 0


def test_a_tail_whose_blocks_have_no_room_is_not_stored() -> None:
    world = TailWorld(STATE, cpu=3)
    put = world.put("abcdef", 6)
    assert put.plan.num_blocks == 3
    assert put.plan.tail is None
    world.finish_all()
    world.check(["abcdef"])


@pytest.mark.parametrize("groups", MODELS)
def test_a_tail_stays_in_place_while_it_is_read(groups: tuple[KVGroup, ...]) -> None:
    world = TailWorld(groups, cpu=6)
    world.put("ab", 2)
    world.finish_all()
    get = world.get("abx")
    reading = list(world.running)
    for word in ("cdefgh", "ijklmn"):
        world.put(word, 6)
        while len(world.running) > len(reading):
            world.finish(world.running[len(reading)])
    world.finish_all()  # what arrives is compared
    assert get.result is not None
    assert get.result.status is KVStatus.SUCCESS


def test_a_tail_on_the_host_is_not_evicted_to_stage_its_blocks() -> None:
    world = TailWorld(STATE, cpu=5, ssd=30)
    world.put("abcd", 4)
    world.finish_all()
    world.cache.tiers.host.discard(keys_of("abcd").root, keys_of("abcd").key(0))
    world.put("x")
    world.finish_all()
    held = world.get("x")  # which leaves room for three
    assert held.plan.num_blocks == 0
    get = world.get("abcd")
    assert get.plan.num_blocks == 4
    world.finish_all()
    assert get.result is not None
    assert get.result.status is KVStatus.SUCCESS


def test_tails_are_prefetched_with_their_blocks() -> None:
    world = TailWorld(WINDOWS, cpu=30, ssd=30)
    world.put("abcd", 4)
    world.finish_all()
    world.cache.tiers.clear("CPU")
    prefetch = world.prefetch("abcdx")
    world.finish_all()
    assert prefetch.result is not None
    assert (prefetch.result.status, prefetch.result.num_ok) == (KVStatus.SUCCESS, 4)
    assert world.has_tail(CPU, "abcd")


def test_a_second_put_of_a_tail_in_flight_copies_nothing() -> None:
    world = TailWorld(STATES_ONLY, cpu=30)
    world.put("ab", 2)
    assert world.put("ab", 2).plan.is_empty
    assert world.get("ab").plan.num_blocks == 0
    world.finish_all()
    assert world.get("ab").plan.num_blocks == 2


def another_node(groups: tuple[KVGroup, ...], store: TailWorld) -> TailWorld:
    """Return a node without a local copy of anything, at the same remote store."""
    world = TailWorld(groups, cpu=30, remote=True)
    world.store = store.store
    return world


@pytest.mark.parametrize("groups", MODELS)
def test_another_node_finds_the_last_tail_at_the_store(groups: tuple[KVGroup, ...]) -> None:
    writer = TailWorld(groups, cpu=30, remote=True)
    for tail_at in (2, 4):
        writer.put("abcd"[:tail_at], tail_at)
        writer.finish_all()
    for word, end in (("abcdef", 4), ("abc", 2), ("abx", 2), ("a", 0), ("x", 0)):
        world = another_node(groups, writer)
        asked = world.look_up(word)
        assert asked is not None
        world.answer(asked)
        get = world.get(word)
        assert get.plan.num_blocks == end
        world.finish_all()
        if end:
            assert get.result is not None
            assert get.result.status is KVStatus.SUCCESS
            assert world.has_tail(CPU, word[:end])


def test_what_the_store_was_asked_for_is_not_asked_again() -> None:
    writer = TailWorld(STATE, cpu=30, remote=True)
    writer.put("ab", 2)
    writer.finish_all()
    world = another_node(STATE, writer)
    asked = world.look_up("abcd")
    assert asked is not None
    assert [num_needed for num_needed, *_ in asked.tails] == [4, 3, 2, 1]
    world.answer(asked)
    again = world.look_up("ab")
    assert again is None
    later = world.look_up("abcdef")  # beyond two blocks nothing is known of tails
    assert later is None  # but the store has no blocks there
    world.now += 1000.0
    much_later = world.look_up("abcd")
    assert much_later is not None
    assert len(much_later.tails) == 2


def test_a_tail_is_asked_for_where_its_blocks_are_here() -> None:
    writer = TailWorld(STATE, cpu=30, remote=True)
    writer.put("abcd", 4)
    writer.finish_all()
    world = another_node(STATE, writer)
    world.put("abcd")
    world.finish_all()
    assert world.get("abcd").plan.num_blocks == 0
    asked = world.look_up("abcd")
    assert asked is not None
    assert not asked.keys
    world.answer(asked)
    assert world.get("abcd").plan.num_blocks == 4
    world.finish_all()


def test_a_tail_that_the_store_has_lost_is_forgotten_by_the_failed_load() -> None:
    writer = TailWorld(WINDOWS, cpu=30, remote=True)
    for tail_at in (2, 4):
        writer.put("abcd"[:tail_at], tail_at)
        writer.finish_all()
    world = another_node(WINDOWS, writer)
    asked = world.look_up("abcd")
    assert asked is not None
    world.answer(asked)
    first_unit = tail_keys(keys_of("abcd").key(3), world.shape.tail_units(4))[0]
    del world.store[first_unit]
    failed = world.get("abcd")
    world.finish_all()
    assert failed.result is not None
    assert failed.result.status is KVStatus.FAILED
    retry = world.look_up("abcd")
    assert retry is not None
    assert len(retry.tails) == 3
    world.answer(retry)
    assert world.get("abcd").plan.num_blocks == 2
    world.finish_all()
