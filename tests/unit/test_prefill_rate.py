"""How fast an engine computes prompts, by the times of its batches."""

from __future__ import annotations

import pytest

from flexcache.integration.adapter import PrefillRate


def test_batches_that_run_one_after_the_other_are_timed_from_launch_to_end() -> None:
    rate = PrefillRate()
    assert rate.batch_ended(1000, launched_s=10.0, now=10.5) == 2000
    assert rate.batch_ended(3000, launched_s=90.0, now=93.0) == 1000  # idle in between


def test_a_batch_launched_during_another_begins_when_that_one_ends() -> None:
    rate = PrefillRate()
    assert rate.batch_ended(1000, launched_s=10.0, now=11.0) == 1000
    assert rate.batch_ended(0, launched_s=10.5, now=13.0) is None  # a decode
    assert rate.batch_ended(2000, launched_s=11.5, now=14.0) == 2000


def test_what_is_too_small_or_did_other_things_does_not_count() -> None:
    rate = PrefillRate()
    assert rate.batch_ended(10, launched_s=1.0, now=2.0) is None
    assert rate.batch_ended(0, launched_s=2.0, now=3.0) is None
    assert rate.batch_ended(500, launched_s=3.0, now=4.0) == 500


def test_small_changes_are_not_reported_and_the_past_is_forgotten() -> None:
    rate = PrefillRate()
    assert rate.batch_ended(1000, launched_s=0.0, now=1.0) == 1000
    assert rate.batch_ended(1010, launched_s=1.0, now=2.0) is None
    reported = [rate.batch_ended(4000, launched_s=s, now=s + 1.0) for s in range(2, 42)]
    assert [r for r in reported if r is not None][-1] == pytest.approx(4000, rel=0.05)


def test_a_first_batch_that_compiles_does_not_make_an_engine_slow() -> None:
    rate = PrefillRate()
    assert rate.batch_ended(300, launched_s=0.0, now=3.0) == 100
    assert rate.batch_ended(8000, launched_s=3.0, now=3.5) == 16_000


def test_large_batches_count_more_than_small_ones() -> None:
    rate = PrefillRate()
    for second in range(20):
        rate.batch_ended(150, launched_s=float(second), now=second + 0.1)
    assert rate.batch_ended(8000, launched_s=30.0, now=30.4) == pytest.approx(20_000)
