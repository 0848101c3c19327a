"""The circuit breaker: when it opens, when it lets trials through, when it closes."""

from __future__ import annotations

import pytest

from flexcache.breaker import CircuitBreaker
from flexcache.ids import BreakerState


def opened(now: float = 100.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.trip("the worker died", now)
    return breaker


def reopened_until_closed(breaker: CircuitBreaker, now: float) -> float:
    """Let the back-off pass and three trials succeed; return the time."""
    deadline = breaker.next_deadline()
    assert deadline is not None
    assert breaker.wants_trial(max(now, deadline))
    for _ in range(3):
        breaker.succeeded(max(now, deadline))
    return max(now, deadline)


def test_a_few_failures_among_many_successes_do_not_open_it() -> None:
    breaker = CircuitBreaker()
    for call in range(200):
        if call % 5 == 4:
            breaker.failed("timeout", call)
        else:
            breaker.succeeded(call)
    assert breaker.is_closed


@pytest.mark.parametrize("pattern", ["f", "sf", "sff", "ssf"])
def test_a_high_share_of_failures_opens_it(pattern: str) -> None:
    breaker = CircuitBreaker()
    for call in range(40):
        if not breaker.is_closed:
            break
        if pattern[call % len(pattern)] == "f":
            breaker.failed("HTTP 500", call)
        else:
            breaker.succeeded(call)
    assert breaker.state is BreakerState.OPEN
    assert breaker.last_reason == "HTTP 500"
    assert breaker.num_openings == 1


def test_a_single_failure_at_the_start_is_not_enough() -> None:
    breaker = CircuitBreaker()
    breaker.failed("timeout", 0.0)
    assert breaker.is_closed


def test_no_trial_is_let_through_before_the_back_off_is_over() -> None:
    breaker = opened(100.0)
    deadline = breaker.next_deadline()
    assert deadline is not None
    assert not breaker.wants_trial(deadline - 0.001)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wants_trial(deadline)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.next_deadline() is None


def test_several_good_trials_close_it_and_one_bad_one_opens_it_again() -> None:
    breaker = opened(100.0)
    assert breaker.wants_trial(110.0)
    breaker.succeeded(110.0)
    breaker.succeeded(110.1)
    assert not breaker.is_closed
    breaker.failed("late", 110.2)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wants_trial(120.0)
    for _ in range(3):
        breaker.succeeded(120.0)
    assert breaker.is_closed
    assert not breaker.wants_trial(121.0)


def test_the_back_off_grows_to_a_bound_and_starts_over_after_a_long_good_time() -> None:
    breaker, now, waits = CircuitBreaker(), 0.0, []
    for _ in range(8):
        breaker.trip("down", now)
        deadline = breaker.next_deadline()
        assert deadline is not None
        waits.append(deadline - now)
        now = reopened_until_closed(breaker, now)
    assert waits == sorted(waits)
    assert waits[1] == 2 * waits[0]
    assert waits[-1] == waits[-2]
    breaker.trip("down", now + 1000.0)
    assert breaker.next_deadline() == now + 1000.0 + waits[0]


def test_what_failed_before_it_opened_is_not_held_against_it_afterwards() -> None:
    breaker = CircuitBreaker()
    for call in range(10):
        breaker.failed("timeout", call)
    now = reopened_until_closed(breaker, 100.0)
    breaker.failed("timeout", now)
    assert breaker.is_closed


def test_late_failures_do_not_extend_the_back_off() -> None:
    breaker = opened(100.0)
    deadline = breaker.next_deadline()
    breaker.failed("an op that was under way", 100.2)
    assert breaker.next_deadline() == deadline
    assert breaker.num_openings == 1
