"""A publisher that is misconfigured is found out by the answers of its workers, once."""

from __future__ import annotations

from flexcache.router.feed import (
    SILENT_REQUESTS,
    SILENT_TOKENS,
    UNMATCHED_REQUESTS,
    UNREACHED_REQUESTS,
    Alarm,
    SourceWatch,
)

PROMPT = SILENT_TOKENS // SILENT_REQUESTS


def alarms(
    watch: SourceWatch, count: int, num_tokens: int, predicted: int, cached: int | None
) -> list[Alarm]:
    """Answer the same request many times."""
    found = (watch.answered(num_tokens, predicted, cached, is_connected=True) for _ in range(count))
    return [alarm for alarm in found if alarm is not None]


def test_a_silent_source_is_reported_once_until_it_speaks() -> None:
    watch = SourceWatch()
    assert alarms(watch, SILENT_REQUESTS - 1, PROMPT, 0, None) == []
    assert alarms(watch, 1000, PROMPT, 0, None) == [Alarm.SILENT]
    assert watch.alarms == {Alarm.SILENT}
    watch.event()
    assert watch.alarms == set()
    assert alarms(watch, SILENT_REQUESTS, PROMPT, 0, None) == [Alarm.SILENT]


def test_prompts_that_store_nothing_are_no_reason() -> None:
    watch = SourceWatch()
    assert alarms(watch, 1000, PROMPT, PROMPT, None) == []  # predicted to be held
    assert alarms(watch, 1000, PROMPT, PROMPT // 2, PROMPT) == []  # and held
    assert alarms(watch, SILENT_TOKENS // 10 - 1, 10, 0, 0) == []  # shorter than a block


def test_blocks_that_never_match_are_reported_once_until_they_do() -> None:
    watch = SourceWatch()
    assert alarms(watch, UNMATCHED_REQUESTS - 1, PROMPT, 0, PROMPT) == []
    assert alarms(watch, 1, PROMPT, PROMPT, PROMPT) == []
    for _ in range(2):
        assert alarms(watch, 10 * UNMATCHED_REQUESTS, PROMPT, 0, PROMPT) == [Alarm.UNMATCHED]
        assert watch.alarms == {Alarm.UNMATCHED}
        assert watch.answered(PROMPT, PROMPT, PROMPT, is_connected=True) is None
        assert watch.alarms == set()


def test_an_engine_that_reports_nothing_or_little_does_not_count_as_unmatched() -> None:
    watch = SourceWatch()
    for _ in range(10 * UNMATCHED_REQUESTS):
        watch.event()
        assert watch.answered(PROMPT, 0, None, is_connected=True) is None
        assert watch.answered(PROMPT, 0, 16, is_connected=True) is None
    assert watch.alarms == set()


def test_a_publisher_out_of_reach_is_reported_once_until_it_is_there() -> None:
    watch = SourceWatch()
    for _ in range(2):
        found = [watch.answered(PROMPT, 0, None, is_connected=False) for _ in range(1000)]
        assert found[:UNREACHED_REQUESTS] == [None] * (UNREACHED_REQUESTS - 1) + [Alarm.UNREACHED]
        assert watch.alarms == {Alarm.UNREACHED}
        assert set(found[UNREACHED_REQUESTS:]) == {None}
        assert watch.answered(PROMPT, PROMPT, None, is_connected=True) is None
        assert watch.alarms == set()
