"""The policy by hit density: what a tier keeps, refuses and gives up, beside LRU."""

from __future__ import annotations

import heapq
import tracemalloc
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from builders import ROOT, put_of
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_fifo import POLICIES, S3_FIFO

from flexcache.cache.block_keys import EngineBlockKeys, TokenBlockKeys
from flexcache.cache.density import (
    DensityPolicy,
    DensityQueue,
    DensityRanking,
    DensityStudy,
    Guard,
    Seen,
    unshared,
)
from flexcache.cache.density_hazards import AGE_EDGES, NUM_KINDS
from flexcache.cache.eviction_policy import LruQueue, Outlook, make_policy
from flexcache.cache.prefix_index import PrefixIndex, Shadow
from flexcache.cache.prompt import PromptMaker
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import CacheSizes, build_cache
from flexcache.cache.tiers import Tiers
from flexcache.config.cache import CacheConfig
from flexcache.errors import ConfigError, InternalError
from flexcache.ids import BlockKey, PromptDetail, TaskKind, TierName

Request = tuple[float, list[int]]


def prompt_of(numbers: list[int]) -> EngineBlockKeys:
    keys = [BlockKey(n.to_bytes(8, "big")) for n in numbers]
    return EngineBlockKeys(ROOT, keys, len(keys))


class World:
    """A tier that is looked up and then stored to, under a policy; a block has 512 tokens."""

    def __init__(self, policy: str, capacity: int, bypasses: bool = True) -> None:
        self.policy = make_policy(policy, 512)
        self.tier = Tier(TierName.CPU, capacity, self.policy.for_tier(capacity), bypasses)
        self.lru_until = 0.0

    def serve(self, requests: Iterable[Request]) -> int:
        """Return how many blocks were found."""
        return sum(self.ask(now, numbers) for now, numbers in requests)

    def end(self, session_id: str, numbers: list[int]) -> None:
        """Say that a session is over whose last prompt this was."""
        for match, start in unshared(self.tier.index.match(prompt_of(numbers))):
            self.tier.retire(match, start)
        self.policy.end(session_id)

    def ask(self, now: float, numbers: list[int], session_id: str | None = None) -> int:
        tier, keys, policy = self.tier, prompt_of(numbers), self.policy
        tier.advance(now)
        there = tier.match(keys).num_blocks
        policy.look_up(keys, now)
        if session_id is not None:
            policy.name(keys, session_id)
        outlook = policy.store(keys, keys.num_blocks)
        tier.match(keys, outlook)
        if there < keys.num_blocks:
            lease = tier.reserve(keys, there, keys.num_blocks, outlook)
            tier.publish(lease, len(lease))
            tier.release(lease)
        if (study := policy.begin_study()) is not None:
            study.run()
            policy.adopt(study)
        queue = tier.index.queues[0]
        if not isinstance(queue, DensityQueue) or queue.ranking.is_lru:
            self.lru_until = now
        return there


def conversations_among_one_shots(num_requests: int) -> list[Request]:
    """Every fourth request continues one of ten conversations; the others never come back."""
    requests, next_id = [], 10_000_000
    talks: list[list[int]] = [[] for _ in range(10)]
    for at in range(num_requests):
        if at % 4:
            requests.append((float(at), list(range(next_id, next_id + 8))))
            next_id += 8
            continue
        talk = talks[at // 4 % 10]
        if not talk or len(talk) >= 30:
            talk[:] = range(at * 1_000, at * 1_000 + 8)
        else:
            talk.append(talk[-1] + 1)
        requests.append((float(at), list(talk)))
    return requests


@pytest.mark.whole
def test_what_comes_back_is_kept_where_lru_keeps_what_does_not() -> None:
    requests = conversations_among_one_shots(6_000)
    capacity = 300  # the conversations take 200; in between come 240 others
    density, lru = World("density", capacity), World("lru", capacity)
    assert density.serve(requests) > 1.3 * lru.serve(requests)
    assert density.lru_until < 3_000
    written, through = (w.tier.counters.stored_blocks for w in (density, lru))
    assert written < 0.5 * through, "what does not come back is not stored either"
    density.tier.check()
    density.policy.check()


def test_where_all_come_back_alike_it_hits_as_often_as_lru() -> None:
    random = np.random.default_rng(7)
    requests = [(float(at), [int(n) * 8 + i for i in range(8)])
                for at, n in enumerate(random.integers(0, 40, 3_000))]  # fmt: skip
    density, lru = (World(policy, 160).serve(requests) for policy in ("density", "lru"))
    assert density >= 0.98 * lru


def test_until_its_shadow_leads_the_order_is_exactly_lru() -> None:
    requests = conversations_among_one_shots(450)  # fewer than the first fit needs
    density, lru = World("density", 200), World("lru", 200)
    for now, numbers in requests:
        assert density.ask(now, numbers) == lru.ask(now, numbers)
    assert density.lru_until == requests[-1][0]


def test_a_tier_that_does_not_bypass_takes_everything() -> None:
    requests = conversations_among_one_shots(4_000)
    world = World("density", 300, bypasses=False)
    world.serve(requests)
    assert world.lru_until < requests[-1][0]
    new = list(range(900_000_000, 900_000_100))
    world.ask(5_000.0, new)
    assert world.tier.index.match(prompt_of(new)).num_blocks == 100


def test_a_prompt_to_be_retained_is_stored_whatever_it_is_worth() -> None:
    world = World("density", 300)
    world.serve(conversations_among_one_shots(4_000))
    keys = prompt_of(list(range(900_000_000, 900_000_100)))
    world.policy.look_up(keys, 5_000.0)
    outlook = world.policy.store(keys, 100)
    refused = world.tier.reserve(keys, 0, 100, outlook)
    assert (len(refused) < 100, refused.is_refused) == (True, True)
    world.tier.release(refused)
    retained = world.tier.reserve(keys, 0, 100, outlook, retain_s=60.0)
    assert (len(retained), retained.is_refused) == (100, False)
    world.tier.release(retained)


def test_a_study_runs_beside_look_ups_and_one_at_a_time() -> None:
    forecaster, open_study = DensityPolicy(512), list[DensityStudy]()
    ranking = forecaster.ranking(300)
    was_lru = True
    for now, numbers in conversations_among_one_shots(2_000):
        keys = prompt_of(numbers)
        forecaster.look_up(keys, now)
        forecaster.store(keys, keys.num_blocks)
        study = forecaster.begin_study()
        assert study is None or not open_study
        open_study += [] if study is None else [study]
        if open_study and now % 100 == 99:
            open_study[0].run()
            assert ranking.is_lru == was_lru
            forecaster.adopt(open_study.pop())
        was_lru = ranking.is_lru
    assert not ranking.is_lru


def test_a_study_that_failed_is_followed_by_another() -> None:
    forecaster = DensityPolicy(512)
    forecaster.ranking(300)
    studies = 0
    for now, numbers in conversations_among_one_shots(1_500):
        keys = prompt_of(numbers)
        forecaster.look_up(keys, now)
        forecaster.store(keys, keys.num_blocks)
        if (study := forecaster.begin_study()) is not None:
            studies += 1
            forecaster.adopt(study)  # as if a thread had refused it
    assert studies > 10


def test_shadows_are_not_checked_while_a_study_changes_them() -> None:
    forecaster = DensityPolicy(512)
    forecaster.ranking(300)
    study = None
    for now, numbers in conversations_among_one_shots(100):
        keys = prompt_of(numbers)
        forecaster.look_up(keys, now)
        forecaster.store(keys, keys.num_blocks)
        study = study or forecaster.begin_study()
    assert study is not None
    shadow = forecaster._guards[0]._lru.index
    shadow.num_blocks += 1  # as halfway through an insertion
    forecaster.check()
    forecaster.adopt(study)
    with pytest.raises(InternalError, match="counted"):
        forecaster.check()


def test_a_look_up_is_recorded_with_the_tokens_of_its_time() -> None:
    forecaster, tokens = DensityPolicy(512), np.arange(2_048)
    tiers = Tiers([Tier(TierName.CPU, 8, forecaster.for_tier(8))], forecaster)
    tiers.look_up(TokenBlockKeys(ROOT, tokens, 512))
    tokens += 1  # the caller's array; the look-up is recorded later
    tiers.settle()
    assert forecaster.recall(TokenBlockKeys(ROOT, tokens, 512)) is None
    assert forecaster.recall(TokenBlockKeys(ROOT, tokens - 1, 512)) is not None


@pytest.mark.parametrize("kind", [list, np.int32, np.int64])
def test_a_look_up_is_recorded_as_it_was_and_copies_no_long_prompt(
    kind: type[list[int]] | type[np.int32] | type[np.int64],
) -> None:
    whole = np.arange(131_072)
    tokens = whole.tolist() if kind is list else whole.astype(kind)
    maker = PromptMaker("model", 512, lambda: PromptDetail.NOTHING)
    forecaster = DensityPolicy(512)
    tiers = Tiers([Tier(TierName.CPU, 8, forecaster.for_tier(8))], forecaster)
    keys = maker.make(TaskKind.GET, tokens).keys
    tracemalloc.start()
    tiers.look_up(keys)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < whole.nbytes
    if not isinstance(tokens, list):
        tokens += 1  # it is the caller's, and stays so
    tiers.settle()
    as_seen, never_seen = (maker.make(TaskKind.GET, whole + more).keys for more in (0, 7))
    assert tiers.recall(as_seen) != tiers.recall(never_seen)


class Watched(TokenBlockKeys):
    """Keys that note how far a prompt is hashed."""

    num_hashed = 0

    def key(self, index: int) -> BlockKey:
        self.num_hashed = max(self.num_hashed, index + 1)
        return super().key(index)


def test_a_prompt_of_which_little_was_asked_for_before_is_not_hashed_whole() -> None:
    tokens, forecaster = np.arange(65_536), DensityPolicy(16)
    tiers = Tiers([Tier(TierName.CPU, 8, forecaster.for_tier(8))], forecaster)
    tiers.look_up(TokenBlockKeys(ROOT, tokens, 16))
    keys = Watched(ROOT, tokens, 16)
    tiers.look_up(keys)
    assert 0 < keys.num_hashed <= 64


class Backwards(DensityRanking):
    """Ranks what was used last the lowest."""

    edges = range(1, 10_000)

    def __init__(self) -> None:
        super().__init__(is_lru=False)
        self.worths = [range(10_000)] * NUM_KINDS

    def bar(self, outlook: Outlook) -> float:
        return 1e18


def seen_of(at: int, numbers: list[int]) -> Seen:
    keys = [BlockKey(n.to_bytes(8, "big")) for n in numbers]
    return Seen(ROOT, keys, Outlook(0, 0, 0), float(at), at, len(keys))


def test_a_guard_follows_the_order_that_hits_more_and_leaves_it_again() -> None:
    guard = Guard(40, Backwards())
    assert guard.is_lru
    for at in range(400):  # a scan of more than fits, again and again: LRU never hits
        guard.see(seen_of(at, [at % 60]))
    assert not guard.is_lru
    guard.check()
    for at in range(400, 2_000):  # each prompt twice, five others in between
        guard.see(seen_of(at, [1_000 + at - 5 * (at % 2)]))
    assert guard.is_lru
    guard.check()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.text("ab", min_size=1, max_size=7)), max_size=60),
    st.booleans(),
)
def test_with_any_policy_a_tier_stays_consistent(
    steps: list[tuple[int, str]], bypasses: bool
) -> None:
    for policy in POLICIES:
        world, now = World(policy, 9, bypasses), 0.0
        for pause, word in steps:
            now += pause
            numbers = [int(word[:end].encode().hex(), 16) for end in range(1, len(word) + 1)]
            found = world.ask(now, numbers)
            assert 0 <= found <= len(numbers)
            world.tier.check()
            if isinstance(world.policy, DensityPolicy) and pause % 7 == 0:
                flip(world.policy)
        tier = world.tier
        assert len(tier.clear()) == tier.counters.stored_blocks - tier.counters.evicted_blocks


def flip(policy: DensityPolicy) -> None:
    """Have every tier change its order, with other worths."""
    for ranking in policy._rankings:
        ranking.set_lru(not ranking.is_lru)
        ranking.set_worths([[float((kind * 7 + age * 5) % 11) for age in range(40)]
                            for kind in range(NUM_KINDS)])  # fmt: skip


def test_to_sort_what_is_retained_does_not_end_the_retention_of_others() -> None:
    tier = Tier(TierName.CPU, 3, partial(DensityQueue, Backwards()))
    prompts = [prompt_of([number]) for number in range(4)]
    for now, retain_s in ((0.0, 600.0), (1.0, 60.0), (2.0, 0.0)):
        tier.advance(now)
        lease = tier.reserve(prompts[int(now)], 0, 1, None, retain_s)
        tier.publish(lease, 1)
        tier.release(lease)
    tier.sort(prompts[0], Outlook(1, 1, 0))
    tier.advance(4.0)
    tier.use(tier.index.match(prompts[2]), None)
    tier.release(tier.reserve(prompts[3], 0, 1))
    there = [tier.index.match(keys).num_blocks for keys in prompts]
    assert there == [1, 1, 0, 0], "what is not retained goes first"


@pytest.mark.parametrize("path", ["mru", "no_such:Policy", "s3_fifo:Policy", "s3_fifo:Entry", ":"])
def test_what_is_no_policy_is_refused_by_name(path: str) -> None:
    with pytest.raises(ConfigError, match=f"eviction_policy = '{path}': (cannot be|is no)"):
        make_policy(path, 16)


def unshared_in(index: PrefixIndex, numbers: list[int]) -> list[tuple[int, int]]:
    """Return the depths from which and up to which a prompt's runs are its own."""
    found = unshared(index.match(prompt_of(numbers)))
    return [(start, match.num_blocks) for match, start in found]


def test_a_prompts_own_blocks_are_those_that_no_other_builds_on() -> None:
    shadow = Shadow(100, LruQueue)
    for numbers in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7, 8], [9, 10]):
        shadow.see(prompt_of(numbers), len(numbers))
    index = shadow.index
    assert unshared_in(index, [9, 10]) == [(0, 2)]
    assert unshared_in(index, [1, 2, 5, 7, 8]) == [(3, 5)], "6 builds on 5"
    assert unshared_in(index, [1, 2, 3, 4]) == [(2, 4)]
    assert unshared_in(index, [1, 2]) == []
    for run, start in unshared(index.match(prompt_of([1, 2, 5, 6]))):
        index.retire(run, start)
    index.evict(1)
    assert unshared_in(index, [1, 2, 5, 7, 8]) == [(3, 5), (2, 3)], "nothing else builds on 5"


def test_shadows_evict_first_what_is_over() -> None:
    guard = Guard(4, Backwards())
    for at in range(4):
        guard.see(seen_of(at, [at]))
    guard.see(replace(seen_of(2, [2]), is_over=True))
    guard.see(seen_of(5, [5]))
    for shadow in (guard._lru, guard._density):
        assert not shadow.index.contains(ROOT, prompt_of([2]).key(0))
        assert shadow.index.num_blocks == 4


def sessions_that_tell(tells: bool) -> tuple[int, World]:
    """Serve sessions of one or four turns, each named; a half of all prompts are of no session."""
    random, world, hits = np.random.default_rng(3), World("density", 400), 0
    waiting: list[tuple[float, int, int, int]] = []  # when, number, turn, turns
    for number in range(4_000):
        waiting.append((float(number), number, 1, int(random.choice([1, 4]))))
    heapq.heapify(waiting)
    while waiting:
        now, number, turn, turns = heapq.heappop(waiting)
        numbers = list(range(number * 100, number * 100 + 4 * turn))
        is_session = number % 2 == 0
        hits += world.ask(now, numbers, str(number) if is_session and tells else None)
        if turn < turns:
            heapq.heappush(waiting, (now + random.exponential(60.0), number, turn + 1, turns))
        elif is_session and tells:
            world.end(str(number), numbers)
    return hits, world


@pytest.mark.whole
def test_sessions_that_tell_when_they_are_over_are_kept_until_then() -> None:
    silent, _ = sessions_that_tell(tells=False)
    told, world = sessions_that_tell(tells=True)
    assert told > 1.05 * silent
    fresh, queue = [], world.tier.index.queues[0]
    assert isinstance(queue, DensityQueue)
    for name, start in (("a", 10**9), (None, 10**9 + 50)):
        numbers = list(range(start, start + 4))
        world.ask(1e5, numbers, name)
        outlook = world.policy.recall(prompt_of(numbers))
        assert outlook is not None
        fresh.append(queue.ranking.worths[outlook.rear][bisect_right(AGE_EDGES, 16.0)])
    assert fresh[0] > 1.5 * fresh[1], "those who name themselves and are not over return"


def test_a_policy_from_elsewhere_keeps_what_is_used_again_through_a_scan() -> None:
    hits = {}
    for policy in ("lru", S3_FIFO):
        world = World(policy, 12)
        hits[policy] = world.serve(
            (float(at), [at % 4] if at % 10 < 2 else [1_000 + at]) for at in range(2_000)
        )
        world.tier.check()
    assert hits[S3_FIFO] > 300 > 10 * hits["lru"]


def test_a_cache_is_built_with_a_policy_from_elsewhere() -> None:
    config = CacheConfig(num_cpu_blocks=4, eviction_policy=S3_FIFO)
    cache = build_cache(config, CacheSizes(4, 0, 4, 4))
    for number in range(9):
        plan = cache.stores.plan_put(put_of(prompt_of([number])))
        cache.publish_staging(plan, 1)
        cache.finish(plan)
    cache.check()
    assert type(cache.tiers.policy).__name__ == "S3FifoPolicy"
    assert cache.tiers.host.counters.evicted_blocks == 5
