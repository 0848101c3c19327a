"""How fast the engine computes, as told from the pace of its steps."""

from __future__ import annotations

import pytest

from flexcache.integration.vllm.prefill import PrefillMeter


def test_the_quickest_of_the_last_large_steps_counts() -> None:
    meter = PrefillMeter()
    assert meter.step(1000, 10.0) is None, "it has only begun"
    assert meter.step(1000, 12.0) == pytest.approx(500.0)
    assert meter.step(1000, 13.0) == pytest.approx(1000.0)
    assert meter.step(1000, 100.0) is None, "the engine was idle: that is no news"


def test_steps_that_mostly_decode_say_nothing() -> None:
    meter = PrefillMeter()
    for step in range(10):
        assert meter.step(8, float(step)) is None
    assert meter.step(1000, 10.0) is None
    assert meter.step(8, 11.0) == pytest.approx(1000.0)


def test_an_engine_that_has_become_slow_is_believed_after_a_while() -> None:
    meter = PrefillMeter()
    now, rate = 0.0, None
    for seconds in [1.0] * 5 + [4.0] * 40:
        rate = meter.step(1000, now) or rate
        now += seconds
    assert rate == pytest.approx(250.0)
