"""Limits of writes per second: the budget by itself, and what puts and write-backs do with it."""

from __future__ import annotations

import pytest
from builders import make_cache, prompt, put_of
from hypothesis import given
from hypothesis import strategies as st
from tail_world import TailWorld
from task_builders import World

from flexcache.cache.plan import Plan
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.write_back import BURST_S, WriteBudget
from flexcache.config.model import KVGroup
from flexcache.ids import OpKind, TierName

CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE
WINDOWS = (KVGroup("window", 32, 60), KVGroup("full", 16), KVGroup("window", 32, 60))

some_wishes = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 200), st.booleans()), min_size=1, max_size=40
)


# The budget


@given(some_wishes, st.floats(0.05, 100))
def test_no_time_has_more_writes_than_the_rate_and_one_burst_allow(
    wishes: list[tuple[float, int, bool]], rate: float
) -> None:
    budget, now = WriteBudget(rate * 8, 8), 0.0
    written: list[tuple[float, int]] = []
    largest_whole = 0
    for pause, wish, is_whole in wishes:
        now += pause
        count = min(wish, budget.room(now))
        if is_whole:
            count = wish if budget.allows(wish, now) else 0
            largest_whole = max(largest_whole, count)
        budget.spend(count)
        budget.check()
        written.append((now, count))
    burst = max(1.0, rate * BURST_S)
    for first, (begin, _) in enumerate(written):
        total = 0
        for end, count in written[first:]:
            total += count
            assert total <= burst + rate * (end - begin) + largest_whole + 1e-6


@given(some_wishes, st.floats(0.05, 100))
def test_it_allows_what_it_says_at_the_time_that_it_says(
    wishes: list[tuple[float, int, bool]], rate: float
) -> None:
    budget, now = WriteBudget(rate * 8, 8), 0.0
    for pause, wish, _ in wishes:
        now += pause
        turns = 0
        while not budget.allows(wish, now):
            later = budget.next_room(wish, now)
            assert later > now
            now, turns = later, turns + 1
            assert turns < 5
        assert budget.room(now) > 0
        budget.spend(wish)


def test_a_tier_that_was_left_alone_does_not_save_more_than_a_burst() -> None:
    budget = WriteBudget(2.0, 1)
    assert budget.room(0.0) == 20
    budget.spend(20)
    assert budget.room(1.0) == 2
    assert budget.room(1e6) == 20


def test_a_block_larger_than_a_burst_is_written_now_and_then() -> None:
    budget = WriteBudget(1.0, 100)
    assert budget.room(0.0) == 1
    budget.spend(1)
    assert budget.room(99.0) == 0
    assert budget.room(100.0) == 1


# Puts


def put(cache: TieredCache, word: str, now: float) -> Plan:
    """Put a prompt and let all writes end."""
    cache.tiers.advance(now)
    plan = cache.stores.plan_put(put_of(prompt(word)))
    cache.publish_staging(plan, len(word))
    for name in list(plan.stores):
        cache.publish_store(plan, name, len(plan.stores[name]))
    cache.finish(plan)
    cache.check()
    return plan


@pytest.mark.parametrize("tier", [SSD, REMOTE])
def test_a_put_beyond_the_limit_stays_in_dram_and_is_written_later(tier: TierName) -> None:
    ssd, remote = (100, 0) if tier is SSD else (0, 100)
    cache = make_cache(200, ssd, remote, write_blocks_per_s=0.4)  # four at once
    below = cache.tiers.by_name[tier].index
    throttled = f"{tier.value.lower()}_write_throttled"
    assert put(cache, "abc", 100.0).dropped == {}
    assert put(cache, "xyz", 100.0).dropped == {throttled: 2}
    assert put(cache, "pq", 100.0).dropped == {throttled: 2}
    assert (cache.tiers.host.index.num_blocks, below.num_blocks) == (8, 4)
    assert put(cache, "xyzw", 103.0).dropped == {throttled: 2}  # one block more has become due
    assert below.match(prompt("xyzw")).num_blocks == 2
    assert put(cache, "xyzwv", 113.0).dropped == {}
    assert below.match(prompt("xyzwv")).num_blocks == 5


def test_each_tier_has_its_own_limit_and_reads_have_none() -> None:
    world = World(cpu=8, ssd=30, remote=True, write_blocks_per_s=0.2)
    world.put("abcd")
    world.finish_all()
    assert world.stats().totals.dropped_blocks == {
        "ssd_write_throttled": 2, "remote_write_throttled": 2,
    }  # fmt: skip
    assert world.stats().tiers["SSD"].write_limit_bytes_per_s == 0
    world.clear(CPU)
    task_id = world.get("abcd")
    world.finish_all()
    assert world.final(task_id).num_ok == 2
    world.check_nothing_is_held()


def test_without_a_limit_nothing_is_throttled() -> None:
    world = World(cpu=60, ssd=60)
    for first in "abcdefgh":
        world.put(first * 6)
    world.finish_all()
    assert not world.stats().totals.dropped_blocks
    assert world.stats().tiers["SSD"].write_limit_bytes_per_s is None


def test_puts_past_dram_have_the_limit_too() -> None:
    world = World(cpu=2, ssd=30, past_dram="always", keeps_on_host=False, write_blocks_per_s=0.3)
    world.put("abcde")
    world.finish_all()
    assert world.cached(SSD, "abcde") == 3
    assert world.stats().totals.dropped_blocks == {"ssd_write_throttled": 2}
    world.check_nothing_is_held()


def test_blocks_and_their_tail_are_written_together_or_not_at_all() -> None:
    world = TailWorld(WINDOWS, cpu=40, ssd=40, write_blocks_per_s=0.5)  # five units at once
    ssd, found = world.cache.tiers.by_name[SSD], []
    for word, pause_s in (("ab", 0.0), ("cd", 6.0), ("cd", 0.0)):  # four units each
        world.put(word, tail_at=2)
        world.finish_all()
        found.append((ssd.index.num_blocks, ssd.tails.num_tails))
        world.now += pause_s
        world.engine.tick(world.now)
    assert found == [(2, 1), (2, 1), (4, 2)]
    world.cache.check()


def test_under_a_lasting_limit_all_that_is_written_can_be_resumed() -> None:
    world = TailWorld(WINDOWS, cpu=900, ssd=900, write_blocks_per_s=2.0)
    ssd = world.cache.tiers.by_name[SSD]
    for number in range(40):  # ten units a second
        world.put(chr(ord("A") + number) * 8, tail_at=8)
        world.finish_all()
        world.now += 1.0
        world.engine.tick(world.now)
    assert ssd.index.num_blocks == 8 * ssd.tails.num_tails
    assert 8 <= ssd.tails.num_tails <= 10


def test_what_no_burst_pays_for_is_written_once_the_budget_is_full() -> None:
    world = TailWorld(WINDOWS, cpu=40, ssd=40, write_blocks_per_s=0.1)  # one unit at once
    ssd, found = world.cache.tiers.by_name[SSD], []
    for word in ("ab", *["cd"] * 5):  # four units each
        world.put(word, tail_at=2)
        world.finish_all()
        found.append((ssd.index.num_blocks, ssd.tails.num_tails))
        world.now += 10.0
        world.engine.tick(world.now)
    assert found == [*[(2, 1)] * 4, (4, 2), (4, 2)]


# Write-backs


def test_a_write_back_waits_for_the_limit_and_goes_on_by_itself() -> None:
    world = World(cpu=40, ssd=40, policy="write_back", write_blocks_per_s=0.4)
    for word in ("abcd", "efgh", "ijkl"):
        world.put(word)
        world.finish_all()
    first = written(world)
    assert 0 < first <= 4
    assert "ssd_write_throttled" not in world.stats().totals.dropped_blocks
    due = world.engine.next_deadline()
    assert due == pytest.approx(world.now + 10.0)  # when there is room for the next four
    world.tick(due - world.now)
    world.finish_all()
    assert first < written(world) <= 8
    world.check_nothing_is_held()


def written(world: World) -> int:
    return world.stats().totals.ops[OpKind.H2DISK.value].blocks
