"""The engine's prefill rate, derived from the pace of its steps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from flexcache.integration.vllm.prefill import PrefillMeter


def told(steps: Iterable[tuple[int, float]]) -> list[float]:
    meter = PrefillMeter()
    rates = [meter.step(tokens, now) for tokens, now in steps]
    return [rate for rate in rates if rate is not None]


def test_a_run_of_large_steps_reports_the_rate_once() -> None:
    assert told((1000, 2.0 * step) for step in range(30)) == [pytest.approx(500.0)]


def test_a_few_steps_report_nothing() -> None:
    assert told((1000, float(step)) for step in range(8)) == []


def test_steps_that_mostly_decode_report_nothing() -> None:
    assert told((8, 0.01 * step) for step in range(100)) == []
    assert told((1000 if step % 4 else 8, float(step)) for step in range(100)) == []


def test_scheduling_ahead_does_not_inflate_the_rate() -> None:
    # The first two steps begin at once, and then one whenever one has been computed (0.1 s).
    steps = [(1000, 0.1 * max(0, step - 1)) for step in range(40)]
    assert max(told(steps)) <= 1.2 * 10_000


def test_a_pause_does_not_make_an_engine_slow() -> None:
    times = [float(step) + (100.0 if step > 12 else 0.0) for step in range(40)]
    assert told((1000, now) for now in times) == [pytest.approx(1000.0)]


def test_an_engine_that_becomes_slow_is_believed_after_a_while() -> None:
    times = [0.0]
    for seconds in [1.0] * 10 + [4.0] * 60:
        times.append(times[-1] + seconds)
    assert told((1000, now) for now in times)[-1] == pytest.approx(250.0)
