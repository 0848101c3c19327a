"""Which way loads from SSD take, by how long loads have taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.load_cost import LoadWay, LoadWays

TIMES = st.lists(
    st.tuples(st.sampled_from(list(LoadWay)), st.integers(1, 100), st.floats(1e-4, 10)), max_size=60
)


def timed(staged_s: float, direct_s: float) -> LoadWays:
    """Both ways, known by four loads of ten blocks each that take so long."""
    ways = LoadWays()
    for way, seconds in ((LoadWay.STAGED, staged_s), (LoadWay.DIRECT, direct_s)):
        for _ in range(4):
            ways.ended(way, 10, seconds)
    return ways


def chosen(ways: LoadWays, count: int) -> list[LoadWay]:
    return [ways.choose()[0] for _ in range(count)]


def test_both_ways_are_timed_before_one_is_preferred() -> None:
    ways, taken = LoadWays(), []
    for _ in range(8):
        taken.append(ways.choose()[0])
        ways.ended(taken[-1], 10, 1.0)
    assert taken == [LoadWay.STAGED] * 4 + [LoadWay.DIRECT] * 4


@pytest.mark.parametrize(
    ("direct_s", "way"), [(0.5, LoadWay.DIRECT), (0.9, LoadWay.STAGED), (2.0, LoadWay.STAGED)]
)
def test_past_dram_must_be_clearly_faster(direct_s: float, way: LoadWay) -> None:
    assert chosen(timed(1.0, direct_s), 30) == [way] * 30


def test_the_other_way_is_tried_now_and_then_and_may_win_again() -> None:
    ways = timed(1.0, 0.5)
    for _ in range(40 * 32):
        way = ways.choose()[0]
        ways.ended(way, 10, 0.1 if way is LoadWay.STAGED else 0.5)
    assert chosen(ways, 64).count(LoadWay.STAGED) >= 60


@pytest.mark.parametrize(("rule", "way"), [("always", LoadWay.DIRECT), ("never", LoadWay.STAGED)])
def test_a_rule_needs_no_times(rule: str, way: LoadWay) -> None:
    ways = LoadWays(rule)  # type: ignore[arg-type]
    ways.ended(LoadWay.STAGED if way is LoadWay.DIRECT else LoadWay.DIRECT, 10, 1e-6)
    assert chosen(ways, 40) == [way] * 40


def test_a_load_that_fails_makes_the_next_ones_go_through_dram() -> None:
    ways = timed(1.0, 0.5)
    ways.failed()
    assert [ways.choose() for _ in range(31)] == [[LoadWay.STAGED]] * 31, "not even instead"
    assert ways.choose() == [LoadWay.DIRECT, LoadWay.STAGED]
    assert ways.choose() == [LoadWay.STAGED], "until one was seen to arrive"
    ways.ended(LoadWay.DIRECT, 10, 0.5)
    assert chosen(ways, 20) == [LoadWay.DIRECT] * 20


@given(TIMES)
def test_whatever_was_timed_it_stays_consistent(times: list[tuple[LoadWay, int, float]]) -> None:
    ways = LoadWays()
    for way, blocks, seconds in times:
        ways.ended(way, blocks, seconds)
        ways.choose()
        ways.check()
    for way in LoadWay:
        mine = [blocks / seconds for each, blocks, seconds in times if each is way]
        speed = ways.blocks_per_s(way)
        assert speed == 0 if not mine else min(mine) * 0.99 <= speed <= max(mine) * 1.01
