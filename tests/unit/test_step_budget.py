"""Which loads are short enough to run within a step that others compute in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.integration.vllm.step_loads import SHARE, LoadTimes, StepBudget, StepTimes


class Counters:
    """What a cache says of its loads, and how often it was asked."""

    def __init__(self) -> None:
        self.so_far: tuple[int, float] | None = (1000, 0.010)
        self.num_read = 0

    def read(self) -> tuple[int, float] | None:
        self.num_read += 1
        return self.so_far


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def budget(counters: Counters) -> StepBudget:
    """Loads 100 tokens a millisecond; steps of 32 tokens take 40 ms, so 1,000 tokens fit."""
    budget = StepBudget(counters.read, interval_s=1.0)
    take_steps(budget, 32, 0.040)
    return budget


_starts = itertools.count(100, 100)


def take_steps(budget: StepBudget, num_tokens: int, seconds: float) -> None:
    for _ in range(2):
        now = next(_starts)
        budget.begin_step(0)
        budget.steps.ended(num_tokens, now, now + seconds)


def test_a_load_has_room_up_to_its_share_of_the_step(budget: StepBudget) -> None:
    assert SHARE == 0.25
    assert budget.has_room(990, 32, now=1.0)
    assert not budget.has_room(1010, 32, now=1.0)


def test_loads_of_one_step_share_its_room(budget: StepBudget) -> None:
    budget.add(600, 32)
    assert budget.has_room(390, 32, now=1.0)
    assert not budget.has_room(410, 32, now=1.0)
    take_steps(budget, 64, 0.040)
    assert budget.has_room(990, 64, now=1.0)


def test_requests_that_compute_more_make_room_for_more(budget: StepBudget) -> None:
    take_steps(budget, 128, 0.160)
    assert not budget.has_room(1010, 100, now=1.0)
    assert budget.has_room(3990, 128, now=1.0)
    budget.add(2000, 64)
    assert budget.has_room(1990, 64, now=1.0)


def test_running_requests_lengthen_the_step(budget: StepBudget) -> None:
    assert not budget.has_room(990, 20, now=1.0)
    budget.begin_step(12)
    assert budget.has_room(990, 20, now=1.0)


def test_nothing_runs_within_a_step_before_times_are_known(counters: Counters) -> None:
    budget = StepBudget(counters.read, interval_s=1.0)
    assert not budget.has_room(1, 1000, now=0.0)
    counters.so_far = None
    budget = StepBudget(counters.read, interval_s=1.0)
    take_steps(budget, 32, 0.040)
    assert not budget.has_room(1, 1000, now=0.0)


def test_the_counters_are_not_read_again_too_soon(budget: StepBudget, counters: Counters) -> None:
    for now in (5.0, 5.5, 5.9):
        budget.has_room(1, 32, now)
    assert counters.num_read == 1
    counters.so_far = (2000, 1.010)  # a thousand tokens in a second
    assert not budget.has_room(500, 32, now=6.0)
    assert counters.num_read == 2


def test_a_step_that_is_launched_early_begins_when_the_one_before_it_has_ended() -> None:
    steps = StepTimes()
    for number in range(1, 5):
        steps.ended(32, 0.040 * (number - 1) - 0.039, 0.040 * number)
    assert steps.at_least(32) == pytest.approx(0.040)


def test_an_idle_step_says_nothing() -> None:
    steps = StepTimes()
    for _ in range(2):
        steps.ended(0, 0.0, 9.0)
    assert steps.at_least(1 << 20) == 0


def test_a_slow_step_alone_says_nothing(budget: StepBudget) -> None:
    budget.begin_step(0)
    budget.steps.ended(48, 0.0, 9.0)
    assert not budget.has_room(1010, 64, now=10.0)


def test_slow_steps_say_nothing_where_larger_ones_are_fast(budget: StepBudget) -> None:
    take_steps(budget, 48, 9.0)
    assert budget.has_room(1010, 64, now=10.0)
    take_steps(budget, 128, 0.040)
    assert not budget.has_room(1010, 64, now=10.0)
    assert not budget.has_room(1010, 256, now=10.0)


def test_loads_that_still_run_count_with_the_time_they_take() -> None:
    loads = LoadTimes()
    loads.read(1000, 1.0)
    loads.read(5000, 1.0)  # time counts once no load runs
    assert loads.seconds(1000) == pytest.approx(1.0)
    loads.read(9000, 17.0)
    assert loads.seconds(9000) == pytest.approx(17.0)


def test_loads_of_a_new_server_count_from_zero() -> None:
    loads = LoadTimes()
    loads.read(1000, 1.0)
    loads.read(100, 0.5)
    assert loads.seconds(1100) == pytest.approx(1.5)


_steps = st.lists(st.tuples(st.integers(0, 9), st.floats(0.001, 1.0)), max_size=60)


@given(_steps)
def test_a_step_takes_at_least_as_long_as_a_smaller_one(seen: list[tuple[int, float]]) -> None:
    """Steps of powers of two are told apart, and of each the fastest of the last 16 counts, if
    there are two."""
    steps, now = StepTimes(), 0.0
    for power, seconds in seen:
        steps.ended(1 << power, now, now + seconds)
        now += seconds
    fastest = {}
    for power in range(10):
        alike = [seconds for each, seconds in seen if each == power]
        if len(alike) >= 2:
            fastest[power] = min(alike[-16:])
    expected = 0.0
    for power in range(10):
        if power in fastest:
            expected = min(seconds for each, seconds in fastest.items() if each >= power)
        assert steps.at_least(1 << power) == pytest.approx(expected)
