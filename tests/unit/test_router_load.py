"""WorkerLoad: arrays against a plain model, and the backlog."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.errors import InternalError
from flexcache.router.load import Running, Work, WorkerLoad

REQUESTS = [f"r{i}" for i in range(6)]


def running(seconds: float, worker: int = 0) -> Running:
    return Running("", worker, Work(300, 100, service_s=seconds), 0.0, 0.0)


def test_a_backlog_is_what_is_predicted_less_what_the_head_has_run() -> None:
    load, a, b = WorkerLoad(2), running(2.0), running(3.0)
    load.add(a, 10.0)
    load.add(b, 10.5)
    assert load.wait_s(10.5) == pytest.approx([4.5, 0])
    assert load.wait_s(14.0) == pytest.approx([3.0, 0]), "the head ran longer than predicted"
    served = load.first_token(a, 14.0)
    assert served is not None and served.seconds == 4.0 and served.worker == 0
    assert load.wait_s(15.0) == pytest.approx([2.0, 0])
    served = load.first_token(b, 16.0)
    assert served is not None and served.seconds == 2.0, "counted from when it became the head"
    assert load.wait_s(16.0).tolist() == [0, 0]
    assert load.num_requests.tolist() == [2, 0]
    load.check([a, b])


def test_a_request_that_overtakes_teaches_nothing() -> None:
    load, a, b = WorkerLoad(1), running(2.0), running(1.0)
    load.add(a, 0.0)
    load.add(b, 0.0)
    assert load.first_token(b, 0.5) is None
    assert load.wait_s(0.5) == pytest.approx([1.5])
    assert load.first_token(b, 0.6) is None
    load.check([a, b])


def test_checks_find_a_request_that_is_not_counted() -> None:
    load = WorkerLoad(1)
    load.add(running(1.0), 0.0)
    with pytest.raises(InternalError):
        load.check([])


Step = st.tuples(
    st.sampled_from(["add", "first", "end"]),
    st.sampled_from(REQUESTS),
    st.integers(0, 2),
    st.floats(0, 5),
)


@given(st.lists(Step, max_size=60))
def test_the_arrays_sum_up_what_is_in_flight(steps: list[tuple[str, str, int, float]]) -> None:
    load, now = WorkerLoad(3), 0.0
    flight: dict[str, Running] = {}
    waiting: set[str] = set()
    for what, name, worker, number in steps:
        now += number
        if what == "add":
            if name in flight:
                load.end(flight[name], now)
            flight.pop(name, None)
            flight[name] = running(number, worker)
            waiting.add(name)
            load.add(flight[name], now)
        elif what == "first" and name in flight:
            load.first_token(flight[name], now)
            waiting.discard(name)
        elif what == "end" and name in flight:
            load.end(flight.pop(name), now)
            waiting.discard(name)
        load.check(flight.values())
        wait = load.wait_s(now)
        for w in range(3):
            its = {k: v for k, v in flight.items() if v.number == w}
            # In the order in which they became load.
            left = [v.work.service_s for k, v in its.items() if k in waiting]
            assert load.num_requests[w] == len(its)
            assert load.num_waiting[w] == len(left)
            assert -1e-6 <= wait[w] <= sum(left) + 1e-6
            assert wait[w] >= sum(left[1:]) - 1e-6
    assert np.all(load.new_tokens == 100 * load.num_waiting)
