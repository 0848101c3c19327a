"""Statistics as a tree and as the plain dictionary of `KVManager.stats`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_stats import SERVER_STATS
from task_builders import World

from flexcache.errors import FlexCacheError
from flexcache.ids import BreakerState, OpKind, TaskKind
from flexcache.stats import (
    BreakerStats,
    EngineStats,
    EventStats,
    HitRateStats,
    LoanStats,
    LookUpStats,
    RemoteStats,
    ServerCounters,
    Stats,
    TierStats,
    from_plain,
    to_plain,
)
from flexcache.transfer.messages import Done

SERVER = msgspec.structs.replace(
    SERVER_STATS,
    workers={"disk": 5},
    worker_restarts={"disk": 0, "remote": 1},
    events=EventStats(untaken_batches=1, lost_batches=0),
)
EMPTY = Stats(server=SERVER, counters=ServerCounters(failed_messages=2), engines={})


def used_world() -> World:
    world = World(remote=True, policy="write_back", skip_slow_loads=True)
    world.put("abc")
    world.finish_all()
    world.get("abcd")
    return world


def stats_of(world: World) -> Stats:
    ours = world.engine.queries.totals_of(world.ids.session)
    engines = {"an engine": EngineStats(pid=6, open_tasks=1, ranks=2)}
    return Stats(
        server=SERVER, counters=ServerCounters(), engines=engines, cache=world.stats(), engine=ours
    )


@pytest.mark.parametrize("has_engine", [True, False])
def test_the_tree_survives_the_wire(has_engine: bool) -> None:
    plain = to_plain(stats_of(used_world()) if has_engine else EMPTY)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    assert sent == plain
    assert to_plain(from_plain(sent)) == plain


def test_plain_statistics_are_flat_and_omit_absent_parts() -> None:
    plain = to_plain(stats_of(used_world()))
    assert plain["tokens_per_block"] == 16
    assert plain["hit_blocks"] == plain["engine"]["hit_blocks"] == {"CPU": 3}
    assert plain["tiers"]["SSD"]["dirty_blocks"] == 0
    assert "dirty_blocks" not in plain["tiers"]["CPU"]
    assert plain["events"] == {"untaken_batches": 1, "lost_batches": 0}
    assert "trace" not in plain
    assert plain["remote"]["breaker"]["state"] == "closed"


def test_the_recent_hit_rate_is_of_the_blocks_that_were_asked_for() -> None:
    world = World()
    world.put("ab")
    world.finish_all()
    world.match(TaskKind.GET, "abcd", start=1)
    assert world.stats().hit_rate["1m"] == HitRateStats(asked_blocks=3, hit_blocks=1, rate=1 / 3)


@given(
    gets=st.lists(st.tuples(st.floats(0, 400), st.integers(0, 3), st.integers(0, 2)), max_size=30),
    rest=st.floats(0, 4000),
)
def test_hits_by_minute_and_by_window_are_those_of_the_last_hour(
    gets: list[tuple[float, int, int]], rest: float
) -> None:
    world = World()
    world.put("abc")
    world.finish_all()
    asked: list[tuple[float, int, int]] = []
    for pause, num_found, num_missed in gets:
        world.tick(pause)
        word = "abc"[:num_found] + "xyz"[:num_missed]
        if word:
            world.match(TaskKind.GET, word)
            asked.append((world.now, num_found, num_missed))
    world.now += rest
    now, minutes = world.now, dict[int, tuple[int, int]]()
    # Slices of ten seconds leave when another begins an hour after their end.
    last = next((when for when, *_ in asked if when // 10 == asked[-1][0] // 10), 0.0)
    for when, num_found, num_missed in asked:
        if (when // 10 + 1) * 10 > last - 3600:
            ago = int(now // 60 - when // 60)
            found, missed = minutes.get(ago, (0, 0))
            minutes[ago] = (found + num_found, missed + num_missed)
    told = world.engine.accounts.hits_by_minute(now)
    assert {
        each.minutes_ago: (each.hit_blocks.get("CPU", 0), each.missed_blocks) for each in told
    } == minutes
    assert [each.minutes_ago for each in told] == sorted(minutes, reverse=True)
    for name, length in (("1m", 60), ("10m", 600), ("1h", 3600)):
        lately = [(f, m) for when, f, m in asked if (when // 10 + 1) * 10 > now - length]
        rate = world.stats().hit_rate[name]
        assert rate.hit_blocks == sum(found for found, _ in lately)
        assert rate.asked_blocks == sum(found + missed for found, missed in lately)


HEALTHY = TierStats(capacity=100, available=1)
BREAKER = BreakerStats(state=BreakerState.OPEN, last_reason="timed out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"missing": ["disk worker"]}, "Missing: disk worker. What is on SSD"),
        ({"missing": ["rank 0 of engine 'a'"]}, "Missing: rank 0 of engine 'a'. The log"),
        ({"engines": {}}, "No engine is connected"),
        ({"tiers": {"CPU": TierStats(capacity=100, leased=91)}}, "nearly all of DRAM"),
        (
            {"remote": RemoteStats(available=False, breaker=BREAKER, lookups=LookUpStats())},
            "remote store is cut off: timed out.",
        ),
        ({"peers": LoanStats(up=0)}, "No other host"),
        ({"peers": LoanStats(up=1)}, ""),
        (
            {"hit_rate": {"10m": HitRateStats(asked_blocks=1000, rate=0.2),
                          "1h": HitRateStats(asked_blocks=9000, rate=0.5)}},
            "hit rate fell: 20% in ten minutes, 50% in the hour",
        ),
        (
            {"hit_rate": {"10m": HitRateStats(asked_blocks=999, rate=0.2),
                          "1h": HitRateStats(asked_blocks=9000, rate=0.5)}},
            "",
        ),
    ],
)  # fmt: skip
def test_what_costs_hits_is_told_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    stats = stats_of(used_world())
    assert stats.cache is not None
    parts = {"missing": [], "engines": stats.engines, **changes}
    stats = Stats(
        server=stats.server.snapshot(missing=parts.pop("missing")),
        counters=stats.counters,
        engines=parts.pop("engines"),
        cache=stats.cache.snapshot(**{"tiers": {"CPU": HEALTHY}, **parts}),
    )
    found = to_plain(stats)["trouble"]
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_before_the_first_engine_there_are_no_tiers() -> None:
    plain = to_plain(EMPTY)
    assert (plain["tiers"], plain["tasks"]) == ({}, {})
    assert "ops" not in plain


def test_statistics_of_another_version_are_refused_with_its_name() -> None:
    plain = to_plain(stats_of(used_world()))
    del plain["ops"]
    with pytest.raises(FlexCacheError, match=r"version 1\.2 cannot be read: .*ops"):
        from_plain(plain)


def test_a_gated_load_took_as_long_as_the_copies_of_the_slowest_rank() -> None:
    world = World(load_ranks=(0, 1))
    world.put("ab")
    world.finish_all()
    world.launch(world.match(TaskKind.GET, "ab"), gated=True)
    world.now += 5.0
    for run, seconds in zip(world.ops(OpKind.H2D), (2.0, 0.5), strict=True):
        done = Done(run.op.op_id, len(run.op), seconds=seconds)
        world.engine.op_done(run.executor, done, world.now)
    assert world.stats().op_seconds["H2D"].sum == 2.0


def test_a_session_has_loaded_for_as_long_as_its_ops_ran() -> None:
    world = World()
    world.put("ab")
    world.finish_all()
    world.get("ab")
    world.tick(2.0)
    world.finish_all()
    ours = world.engine.queries.totals_of(world.ids.session)
    everyones = world.stats().totals
    assert ours.ops[OpKind.H2D].seconds == everyones.ops[OpKind.H2D].seconds == 2.0
