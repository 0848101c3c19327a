"""Statistics as a tree and as the plain dictionary of `KVManager.stats`."""

from __future__ import annotations

import msgspec
import pytest
from server_stats import SERVER_STATS
from task_builders import World

from flexcache.errors import FlexCacheError
from flexcache.ids import OpKind, TaskKind
from flexcache.stats import (
    EngineStats,
    EventStats,
    HitRateStats,
    ServerCounters,
    Stats,
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
