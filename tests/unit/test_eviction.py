"""Eviction policies: learned return times, shadows, and the resulting contents of a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from builders import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.eviction import make_eviction_policy
from flexcache.cache.eviction_policy import Lineage
from flexcache.cache.eviction_returns import ReturnTimes, bin_of
from flexcache.cache.eviction_reuse import Reuse
from flexcache.cache.eviction_shadow import Shadow
from flexcache.cache.tier import Tier
from flexcache.config.cache import EVICTION_POLICIES
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, TierName

CAPACITY = 12


class ShadowMachine(RuleBasedStateMachine):
    """Shadows against a plain model: due times by lineage; children leave first."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = Shadow(CAPACITY)
        self.lineages: list[Lineage] = []
        self.due: dict[Lineage, float] = {}
        self.size: dict[Lineage, int] = {}

    @rule(parent=st.integers(0, 99), blocks=st.integers(1, CAPACITY + 3))
    def begin(self, parent: int, blocks: int) -> None:
        choice = [None, *self.lineages]
        lineage = Lineage(choice[parent % len(choice)], 0)
        lineage.num_blocks = blocks
        self.lineages.append(lineage)

    @rule(which=st.integers(0, 99), due=st.integers(0, 9), more=st.integers(0, 2))
    def see(self, which: int, due: int, more: int) -> None:
        if not self.lineages:
            return
        lineage = self.lineages[which % len(self.lineages)]
        lineage.num_blocks += more
        was_there = self.shadow.see(lineage, due)
        assert was_there == (lineage in self.due)
        path: list[Lineage] = []
        hold: Lineage | None = lineage
        while hold is not None:
            path.append(hold)
            hold = hold.parent
        for hold in path:
            self.due[hold] = max(self.due.get(hold, due), due)
            self.size[hold] = hold.num_blocks
        kept = set(self.shadow._held)
        gone = [held for held in self.due if held not in kept]
        if gone:
            latest = max(self.due[held] for held in gone)
            assert latest <= min((self.due[held] for held in kept), default=latest)
            room = CAPACITY - sum(self.size[held] for held in kept)
            assert room < max(self.size[held] for held in gone if self.due[held] == latest), (
                "more went than had to"
            )
        for held in gone:
            del self.due[held]
        assert kept == set(self.due)

    @invariant()
    def is_consistent(self) -> None:
        self.shadow.check()
        assert sum(self.size[held] for held in self.due) <= CAPACITY


TestShadowMachine = ShadowMachine.TestCase
TestShadowMachine.settings = settings(stateful_step_count=40)


def test_a_shadow_keeps_its_queue_short() -> None:
    shadow, lineage = Shadow(10), Lineage(None, 0)
    lineage.num_blocks = 1
    for now in range(10_000):
        shadow.see(lineage, now)
    assert len(shadow._queue) < 200


def _lose_count(shadow: Shadow) -> None:
    shadow._num_blocks += 1


def _lose_the_queue(shadow: Shadow) -> None:
    shadow._queue.clear()


@pytest.mark.parametrize("damage", [_lose_count, _lose_the_queue])
def test_a_damaged_shadow_is_noticed_by_the_tier(damage: Callable[[Shadow], None]) -> None:
    policy = Reuse(10)
    tier = Tier(TierName.CPU, 10, policy)
    serve(tier, [(0.0, [1, 2])])
    tier.check()
    damage(policy._planned_shadow)
    with pytest.raises(InternalError, match="shadow"):
        tier.check()


# -- what is learned of returns -------------------------------------------------------------------


def counted(kinds: Iterable[Iterable[float | None]]) -> ReturnTimes:
    """Count, per kind, after what time lineages returned; None for those that did not."""
    times = ReturnTimes()
    for gaps in kinds:
        kind = times.add_kind()
        for gap in gaps:
            times.begin(kind, 10, now=0.0)
            if gap is not None:
                times.end(kind, bin_of(gap))
    return times


def test_without_history_all_kinds_get_the_same_patience() -> None:
    assert counted([[None] * 50, [None] * 10]).best_patience(100, now=100.0) == [0.0, 0.0]


def test_kinds_that_come_back_alike_get_the_same_patience() -> None:
    gaps = [10.0, 20.0, 40.0, None] * 50
    first, second = counted([gaps, gaps]).best_patience(1_000_000, now=100.0)
    assert first == second > 40.0


def test_scarce_space_goes_to_the_kind_that_comes_back() -> None:
    times = counted([[10.0] * 100, [10.0, *[None] * 99]])
    loyal, fickle = times.best_patience(120, now=100.0)
    assert loyal >= 10.0
    assert fickle < 10.0


def test_a_kind_seen_once_is_taken_for_an_average_one() -> None:
    times = counted([[10.0] * 100, [None]])
    often, once = times.best_patience(1_000, now=100.0)
    assert often >= 10.0
    assert once >= 10.0


@given(
    st.lists(
        st.lists(st.none() | st.floats(1e-3, 1e4), min_size=1, max_size=20), min_size=1, max_size=5
    ),
    st.integers(1, 10_000),
)
def test_more_space_never_means_less_patience(
    kinds: list[list[float | None]], capacity: int
) -> None:
    times = counted(kinds)
    small, large = (np.array(times.best_patience(size, 60.0)) for size in (capacity, 2 * capacity))
    assert (large >= small).all()
    assert (small >= 0).all()


def test_what_was_counted_long_ago_counts_less() -> None:
    times = counted([[10.0] * 64, [None] * 64])
    before = times.best_patience(200, now=100.0)
    for _ in range(8):
        times.halve(now=100.0)
        for _ in range(64):
            times.begin(0, 10, now=100.0)
            times.begin(1, 10, now=100.0)
            times.end(1, bin_of(10.0))
    after = times.best_patience(2_000_000, now=101.0)
    assert before[0] > before[1]
    assert after[1] >= 10.0


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-6, 0.5, 1.0, 1e5, 1e30])
def test_every_gap_has_a_bin(gap: float) -> None:
    assert 0 <= bin_of(gap) <= bin_of(2 * gap) < 96


# -- what a tier keeps by it ----------------------------------------------------------------------


def prompt_of(numbers: list[int]) -> EngineBlockKeys:
    keys = [BlockKey(n.to_bytes(8, "big")) for n in numbers]
    return EngineBlockKeys(ROOT, keys, len(keys))


def serve(tier: Tier, requests: Iterable[tuple[float, list[int]]]) -> int:
    """Look up each prompt and store what is missing; return how many blocks were found."""
    hits = 0
    for now, numbers in requests:
        tier.advance(now)
        keys = prompt_of(numbers)
        there = tier.match(keys).num_blocks
        hits += there
        assert tier.refresh(keys).num_blocks == there
        if there < keys.num_blocks:
            lease = tier.reserve(keys, there, keys.num_blocks)
            tier.publish(lease, len(lease))
            tier.release(lease)
    return hits


def conversations_among_one_shots(num_requests: int) -> list[tuple[float, list[int]]]:
    """Every fourth request continues one of ten conversations; the others never come back."""
    requests, next_id = [], 10_000
    talks = [list(range(1_000 * talk, 1_000 * talk + 8)) for talk in range(10)]
    for at in range(num_requests):
        if at % 4:
            requests.append((float(at), list(range(next_id, next_id + 8))))
            next_id += 8
            continue
        talk = talks[at // 4 % 10]
        if len(talk) < 30:
            talk.append(talk[-1] + 1)
        requests.append((float(at), list(talk)))
    return requests


def hits_by(policy: str, capacity: int, requests: list[tuple[float, list[int]]]) -> int:
    tier = Tier(TierName.CPU, capacity, make_eviction_policy(policy, capacity))
    hits = serve(tier, requests)
    tier.check()
    return hits


def test_reuse_keeps_what_comes_back_where_lru_keeps_what_does_not() -> None:
    requests = conversations_among_one_shots(4_000)
    capacity = 400  # the conversations take 300; in between come 240 others
    assert hits_by("reuse", capacity, requests) > 1.5 * hits_by("lru", capacity, requests)


def test_where_all_come_back_alike_reuse_hits_as_often_as_lru() -> None:
    random = np.random.default_rng(7)
    requests = [(float(at), [int(n) * 8 + i for i in range(8)])
                for at, n in enumerate(random.integers(0, 40, 3_000))]  # fmt: skip
    lru, reuse = (hits_by(policy, 160, requests) for policy in ("lru", "reuse"))
    assert reuse >= 0.98 * lru


def test_a_lineage_that_returns_after_its_eviction_is_recognised() -> None:
    policy = Reuse(8)
    tier = Tier(TierName.CPU, 8, policy)
    serve(tier, [(0.0, [1, 2, 3, 4]), (1.0, list(range(10, 18)))])
    lineage = policy._ghosts[ROOT, BlockKey((1).to_bytes(8, "big"))]
    assert lineage.num_returns == 0
    serve(tier, [(5.0, [1, 2, 3, 4, 5])])
    run = tier.index.match(prompt_of([1])).run
    assert run is not None
    assert run.lineage is lineage
    assert (lineage.num_returns, lineage.used_at) == (1, pytest.approx(5.0, abs=0.01))


def test_storing_a_prompt_does_not_count_as_a_use() -> None:
    tier = Tier(TierName.CPU, 8, Reuse(8))
    serve(tier, [(0.0, [1, 2]), (1.0, [1, 2])])
    run = tier.index.match(prompt_of([1])).run
    assert run is not None
    assert run.lineage.num_returns == 1
    tier.advance(2.0)
    tier.refresh(prompt_of([1, 2]))
    assert run.lineage.num_returns == 1


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexcache.cache.eviction_reuse._MIN_GHOSTS", 3)
    policy = Reuse(4)
    tier = Tier(TierName.CPU, 4, policy)
    serve(tier, [(float(at), [2 * at, 2 * at + 1]) for at in range(50)])
    assert len(policy._ghosts) == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.text("ab", min_size=1, max_size=7)), max_size=60))
def test_with_any_policy_a_tier_stays_consistent(steps: list[tuple[int, str]]) -> None:
    for name in EVICTION_POLICIES:
        policy = make_eviction_policy(name, 9)
        if isinstance(policy, Reuse):
            policy._spells_to_plan = 2
        tier, now = Tier(TierName.CPU, 9, policy), 0.0
        for pause, word in steps:
            now += pause
            serve(
                tier,
                [(now, [int(word[:end].encode().hex(), 16) for end in range(1, len(word) + 1)])],
            )
            tier.check()
        assert len(tier.clear()) == tier.counters.stored_blocks - tier.counters.evicted_blocks


def test_every_configurable_policy_can_be_created() -> None:
    for name in EVICTION_POLICIES:
        make_eviction_policy(name, 10)
    with pytest.raises(ValueError, match=r"mru.*lru or reuse"):
        make_eviction_policy("mru", 10)
