"""Load or recompute: conclusions from the measurements."""

from __future__ import annotations

import pytest

from flexcache.cache.load_cost import LoadCost
from flexcache.ids import OpKind

SSD, REMOTE, DIRECT = OpKind.DISK2H, OpKind.REMOTE2H, OpKind.DISK2D


def measured(kind: OpKind, blocks: int, seconds: float, ops: int = 10) -> tuple[LoadCost, float]:
    """Loads that have moved ``blocks`` blocks in ``seconds`` per op, one op after the other."""
    cost, now = LoadCost(), 1000.0
    for _ in range(ops):
        cost.started(kind, now)
        now += seconds
        cost.ended(kind, now, blocks, seconds)
    return cost, now


def test_without_measurements_blocks_are_loaded() -> None:
    cost, now = measured(SSD, blocks=1, seconds=100.0)
    assert cost.pays(REMOTE, 1000, 1e9, now)
    assert cost.pays(SSD, 1, 0.0, now), "the engine has not said how fast it is"


def test_a_few_ops_are_not_enough_to_judge() -> None:
    cost, now = measured(SSD, blocks=1, seconds=100.0, ops=2)
    assert cost.seconds(SSD, 1, now) is None


def test_bandwidth_decides_where_much_is_loaded() -> None:
    cost, now = measured(SSD, blocks=8, seconds=0.1)  # 80 blocks/s
    assert cost.seconds(SSD, 800, now) == pytest.approx(10.0)
    assert cost.pays(SSD, 800, 79.0, now)
    assert not cost.pays(SSD, 800, 81.0, now)


def test_latency_decides_where_little_is_loaded() -> None:
    cost, now = measured(REMOTE, blocks=100, seconds=2.0)  # 50 blocks/s, but never under 2 s
    assert cost.seconds(REMOTE, 1, now) == pytest.approx(2.0)
    assert not cost.pays(REMOTE, 10, 10.0, now)
    assert cost.pays(REMOTE, 1000, 10.0, now)


def test_what_is_read_before_counts_too() -> None:
    cost, now = measured(SSD, blocks=8, seconds=0.1)  # 80 blocks/s
    ahead = {False: 160, True: 400}
    cost.blocks_ahead = lambda kind, is_early: ahead[is_early]
    assert cost.seconds(SSD, 80, now) == pytest.approx(3.0)
    assert cost.pays(SSD, 80, 26.0, now)
    assert not cost.pays(SSD, 80, 27.0, now)
    assert not cost.pays(SSD, 80, 26.0, now, wait_s=0.0)
    assert cost.pays(SSD, 80, 26.0, now, wait_s=3.0), "its request waits longer than the queue"


def test_ops_side_by_side_count_together() -> None:
    cost, now = LoadCost(), 0.0
    for _ in range(10):
        for _ in range(4):
            cost.started(SSD, now)
        now += 1.0
        for _ in range(4):
            cost.ended(SSD, now, 10, 1.0)
    assert cost.seconds(SSD, 400, now) == pytest.approx(10.0, rel=0.3)  # 40 blocks/s, not 10


def test_a_recovered_tier_is_noticed() -> None:
    cost, now = measured(REMOTE, blocks=1, seconds=10.0)
    assert not cost.pays(REMOTE, 1, 1.0, now)
    assert cost.pays(REMOTE, 1, 1.0, now + 60.0)
    for _ in range(60):
        cost.started(REMOTE, now)
        now += 0.01
        cost.ended(REMOTE, now, 10, 0.01)
    assert cost.pays(REMOTE, 1, 1.0, now)


def test_a_tier_from_which_nothing_arrives_is_not_judged_by_its_speed() -> None:
    cost, now = measured(REMOTE, blocks=0, seconds=1.0)
    assert cost.seconds(REMOTE, 1, now) is None


def test_old_measurements_do_not_outweigh_recent_ones() -> None:
    cost, now = measured(REMOTE, blocks=1, seconds=10.0)
    now += 1000.0
    for _ in range(5):
        cost.started(REMOTE, now)
        now += 0.01
        cost.ended(REMOTE, now, 10, 0.01)
    assert cost.seconds(REMOTE, 10, now) == pytest.approx(0.01)


def test_the_wait_at_the_gate_is_no_cost_of_a_load_past_dram() -> None:
    cost, now = LoadCost(), 0.0
    for _ in range(3):  # loads of four ops each, given to the rank together
        for _ in range(4):
            cost.started(DIRECT, now)
        given, now = now, now + 5.0
        for _ in range(4):
            now += 0.1
            cost.ended(DIRECT, now, 10, now - given)
    assert cost.seconds(DIRECT, 1, now) == pytest.approx(0.1)
    assert cost.seconds(DIRECT, 100, now) == pytest.approx(1.0)
    assert cost.seconds(SSD, 100, now) is None
