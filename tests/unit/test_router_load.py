"""Load: arrays against a plain model, backlog, leases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.router.load import Load, Work

REQUESTS = [f"r{i}" for i in range(6)]


def work(seconds: float, new: int = 100, total: int = 300) -> Work:
    return Work(total, new, service_s=seconds)


def test_a_backlog_is_what_is_predicted_less_what_the_head_has_run() -> None:
    load = Load(2)
    load.add("a", 0, 10.0, work(2.0))
    load.add("b", 0, 10.5, work(3.0))
    assert load.wait_s(10.5) == pytest.approx([4.5, 0])
    assert load.wait_s(14.0) == pytest.approx([3.0, 0]), "the head ran longer than predicted"
    served = load.first_token("a", 14.0)
    assert served is not None and served.seconds == 4.0 and served.worker == 0
    assert load.wait_s(15.0) == pytest.approx([2.0, 0])
    served = load.first_token("b", 16.0)
    assert served is not None and served.seconds == 2.0, "counted from when it became the head"
    assert load.wait_s(16.0).tolist() == [0, 0]
    assert load.num_requests.tolist() == [2, 0]
    load.check()


def test_a_request_that_overtakes_teaches_nothing() -> None:
    load = Load(1)
    load.add("a", 0, 0.0, work(2.0))
    load.add("b", 0, 0.0, work(1.0))
    assert load.first_token("b", 0.5) is None
    assert load.wait_s(0.5) == pytest.approx([1.5])
    assert load.first_token("b", 0.6) is None
    load.check()


def test_a_request_counts_until_its_lease_is_over() -> None:
    load = Load(1, lease_s=10)
    load.add("a", 0, 0.0, work(1.0))
    load.add("b", 0, 1.0, work(1.0))
    load.renew("a", 5.0)
    assert load.expire(11.5) == ["b"]
    assert load.expire(15.0) == ["a"]
    assert len(load) == 0
    load.check()


def test_requests_of_a_peer_or_a_worker_are_forgotten_together() -> None:
    load = Load(2)
    load.add("a", 0, 0.0, work(1.0), owner="peer")
    load.add("b", 1, 0.0, work(1.0))
    load.add("c", 1, 0.0, work(1.0))
    assert load.forget_owner("peer", 1.0) == 1
    assert load.forget_worker(1, 1.0) == 2
    assert load.num_requests.tolist() == [0, 0]
    load.check()


def test_a_request_that_is_sent_elsewhere_moves() -> None:
    load = Load(1)
    load.add("a", 0, 0.0, work(1.0))
    load.resize(3)
    load.add("a", 2, 1.0, work(1.0))
    assert load.num_requests.tolist() == [0, 0, 1]
    load.check()


Step = st.tuples(
    st.sampled_from(["add", "first", "end", "expire"]),
    st.sampled_from(REQUESTS),
    st.integers(0, 2),
    st.floats(0, 5),
)


@given(st.lists(Step, max_size=60))
def test_the_arrays_sum_up_what_is_in_flight(steps: list[tuple[str, str, int, float]]) -> None:
    load, now = Load(3, lease_s=20), 0.0
    flight: dict[str, tuple[int, float, float, bool]] = {}  # worker, service, since, first token
    for what, name, worker, number in steps:
        now += number
        if what == "add":
            load.add(name, worker, now, work(number))
            flight.pop(name, None)
            flight[name] = worker, number, now, False
        elif what == "first":
            load.first_token(name, now)
            if name in flight:
                flight[name] = (*flight[name][:3], True)
        elif what == "end":
            assert load.end(name, now) == (flight.pop(name, None) is not None)
        else:
            gone = {k for k, v in flight.items() if v[2] + 20 <= now}
            assert set(load.expire(now)) == gone
            flight = {k: v for k, v in flight.items() if k not in gone}
        load.check()
        wait = load.wait_s(now)
        for w in range(3):
            left = [v[1] for v in flight.values() if v[0] == w and not v[3]]
            assert load.num_requests[w] == sum(v[0] == w for v in flight.values())
            assert load.num_waiting[w] == len(left)
            assert -1e-6 <= wait[w] <= sum(left) + 1e-6
            assert wait[w] >= sum(left[1:]) - 1e-6
    assert np.all(load.new_tokens == 100 * load.num_waiting)
