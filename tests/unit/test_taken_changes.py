"""Changes that are not taken are bounded, by batches and by tokens; the oldest goes first."""

from __future__ import annotations

import pytest

from flexcache.cache.journal import Change, Medium, Stored
from flexcache.config import CacheConfig
from flexcache.ids import BlockKey, RootId
from flexcache.server import observers
from flexcache.server.observers import Observers
from flexcache.stats import EventStats


def stored(number: int, num_tokens: int = 4) -> Change:
    key = BlockKey(number.to_bytes(8, "big"))
    return Stored(Medium.CPU, RootId(bytes(16)), None, [key], 4, range(num_tokens))


def observers_of(**settings: object) -> Observers:
    return Observers(CacheConfig(num_cpu_blocks=4, **settings))  # type: ignore[arg-type]


def test_changes_are_taken_once_and_in_order() -> None:
    seen = observers_of(kv_events=True)
    changes = [stored(number) for number in range(5)]
    seen.pass_on(changes[:2])
    seen.pass_on(changes[2:])
    assert seen.take_changes() == changes
    assert seen.take_changes() == []
    assert seen.event_stats() == EventStats(untaken_batches=0, lost_batches=0)


def test_beyond_the_bound_the_oldest_batches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "NUM_QUEUED", 3)
    seen = observers_of(kv_events=True)
    changes = [stored(number) for number in range(5)]
    for change in changes:
        seen.pass_on([change])
    assert seen.event_stats() == EventStats(untaken_batches=3, lost_batches=2)
    assert seen.take_changes() == changes[2:]


def test_large_batches_are_bounded_by_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "_MAX_WAITING_TOKENS", 10)
    seen = observers_of(kv_events=True)
    for round_ in range(2):  # what was taken does not count any more
        changes = [stored(3 * round_ + number) for number in range(3)]
        for change in changes:
            seen.pass_on([change])
        assert seen.take_changes() == changes[1:]
    seen.pass_on([stored(7, 100)])
    # The last is always kept.
    assert seen.event_stats() == EventStats(untaken_batches=1, lost_batches=2)
    seen.pass_on([stored(8)])
    assert seen.take_changes() == [stored(8)]


def test_nothing_is_kept_without_a_consumer() -> None:
    seen = observers_of()
    seen.pass_on([stored(1)])
    assert seen.take_changes() == []
