"""A server and ranks that differ: sizes that only they know, replicas, layouts shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_hub import ROOT, World, hello_engine, keys, note_news

from flexcache.config import ModelConfig
from flexcache.errors import ConfigError
from flexcache.ids import SessionId, TaskIds, TaskKind
from flexcache.protocol.messages import (
    HelloRank,
    Launch,
    Match,
    ModelSpec,
    Readiness,
    Refused,
    Register,
    Registered,
    WelcomeEngine,
    WelcomeRank,
)
from flexcache.server.cache import TOLD_TTL_S, ServedCache
from flexcache.transfer.messages import Done, Execute

STAGED = ModelConfig(
    "m", 3, 1, 8, torch.uint8, tp_size=2, pp_size=2, kv_replicas=2, sized_by_ranks=True
)
"""Two stages of two ranks that hold the same: two shards."""
SPEC = ModelSpec.of(STAGED, 16)
SIZES = [4096, 4096, 9000, 9000]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def greet(world: World, rank: int, engine: str = "e", size: int | None = None) -> list[Any]:
    block_bytes = SIZES[rank] if size is None else size
    hello = HelloRank(engine, rank, f"{engine}{rank}", 2, block_bytes=block_bytes)
    return world.send(f"{engine}{rank}".encode(), hello)


def register(world: World, rank: int, layout: str, engine: str = "e") -> Any:
    [welcome] = greet(world, rank, engine)
    assert isinstance(welcome, WelcomeRank)
    return world.send(f"{engine}{rank}".encode(), Register(layout, 99))[0]


def open_cache(world: World, engine: str = "e") -> ServedCache:
    for rank in range(4):
        assert greet(world, rank, engine) == []
    welcome = world.send(b"s", hello_engine(engine, spec=SPEC))[0]
    assert isinstance(welcome, WelcomeEngine)
    [cache] = world.caches
    return cache


def test_a_cache_opens_with_the_sizes_that_all_ranks_of_the_engine_tell(world: World) -> None:
    assert greet(world, 0) == []
    for rank in (1, 2, 3):
        assert greet(world, rank, "another") == []
    hello = hello_engine(spec=SPEC)
    missing = Readiness([f"rank {rank}" for rank in (1, 2, 3)], [])
    assert world.send(b"s", hello) == [missing]
    assert world.caches == []
    for rank in (3, 2, 1):
        assert greet(world, rank) == []
    assert isinstance(world.send(b"s", hello)[0], WelcomeEngine)
    [cache] = world.caches
    assert cache.shards.sizes == (4096, 9000)
    assert [segment.stride for segment in cache.store.segments] == [4096, 12288]
    for rank, size in enumerate(SIZES):
        [welcome] = greet(world, rank)
        assert welcome.block_bytes == size
        assert welcome.segment.inode == cache.store.segments[rank // 2].ref().inode


def test_ranks_that_have_gone_silent_open_nothing(world: World) -> None:
    greet(world, 0)
    world.now += TOLD_TTL_S
    for rank in (1, 2, 3):
        greet(world, rank)
    hello = hello_engine(spec=SPEC)
    assert world.send(b"s", hello) == [Readiness(["rank 0"], [])]
    greet(world, 0)
    assert isinstance(world.send(b"s", hello)[0], WelcomeEngine)


def test_replicas_that_differ_in_size_are_the_reason_for_the_refusal(world: World) -> None:
    for rank in range(4):
        greet(world, rank, size=SIZES[rank] + rank)
    [refused] = world.send(b"s", hello_engine(spec=SPEC))
    assert isinstance(refused, Refused)
    assert "4096, 4097 bytes" in refused.reason
    assert world.caches == []


def test_the_engine_of_this_process_calls_before_its_ranks_have_greeted() -> None:
    world = World(owner="e")
    ids = world.hub.state.open_local("e")
    world.hub.state.slot.expect(STAGED, 16, "e")
    assert world.hub.greeter.missing("e") == [f"rank {rank}" for rank in range(4)]
    for rank in range(3):
        assert greet(world, rank) == []
    assert world.hub.greeter.missing("e") == ["rank 3"]
    assert isinstance(greet(world, 3)[0], WelcomeRank)
    assert world.hub.cache is world.caches[0]
    assert world.hub.cache.tasks.sessions.num_open_of(ids.session) == 0
    world.close()


def test_a_failure_to_open_the_expected_cache_is_told_to_the_ranks_and_kept() -> None:
    world = World(owner="e")

    def fail(*_: object) -> ServedCache:
        raise ConfigError("no room")

    world.open = fail
    world.hub.state.slot.expect(STAGED, 16, "e")
    for rank in range(3):
        assert greet(world, rank) == []
    woken = note_news(world)
    assert greet(world, 3) == [Refused("no room", final=False)]
    assert woken  # those that wait for the ranks have to look
    assert world.hub.greeter.is_settled("e")
    with pytest.raises(ConfigError, match="no room"):
        world.hub.greeter.require("e", 1.0)
    world.close()


def test_one_rank_of_each_shard_stores_and_all_load(world: World) -> None:
    open_cache(world)
    session = next(m.session for m in world.inbox[b"s"] if isinstance(m, WelcomeEngine))
    ids = TaskIds(SessionId(session))
    for rank in range(4):
        assert register(world, rank, f"layout {rank // 2}") == Registered()
    for kind, movers in ((TaskKind.PUT, [0, 2]), (TaskKind.GET, [0, 1, 2, 3])):
        task_id = ids.next()
        world.send(b"calls", Match(5, task_id, kind, ROOT, 0, 1, 16, 8), keys("a"))
        world.send(b"calls", Launch(task_id, bytes(8), gated=False))
        ops = {rank: world.last(f"e{rank}".encode()) for rank in range(4)}
        seen = [
            rank for rank, op in ops.items() if isinstance(op, Execute) and op.task_id == task_id
        ]
        assert seen == movers
        for rank in movers:
            world.send(f"e{rank}".encode(), Done(ops[rank].op_id, 1))
        assert world.last(b"s").task_id == task_id
        assert world.last(b"s").result.num_ok == 1


def test_stages_of_different_layout_are_one_layout_of_a_block(world: World) -> None:
    cache = open_cache(world)
    for rank in (2, 3, 1):
        assert register(world, rank, f"layout {rank // 2}") == Registered()
    assert cache.layout == '["layout 0", "layout 1"]'
    assert register(world, 0, "layout 0") == Registered()
    # Another engine's ranks have to agree place by place.
    refused = register(world, 0, "layout 1", engine="f")
    assert isinstance(refused, Refused)
    assert not refused.final
    assert "layout 1 differs from the other ranks' layout 0" in refused.reason
    for rank in range(1, 4):
        assert register(world, rank, f"layout {rank // 2}", engine="f") == Registered()


def test_ranks_of_another_layout_serve_once_all_others_have_left(world: World) -> None:
    cache = open_cache(world)
    for rank in range(4):
        register(world, rank, "old")
    assert cache.layout == "old"
    for rank in range(4):
        world.die(f"e{rank}".encode())
    assert register(world, 3, "new") == Registered()
    assert cache.layout == "old"  # what the other stage will be is not known
    assert register(world, 0, "new") == Registered()
    assert cache.layout == "new"


def test_a_second_engine_of_the_same_sizes_waits_for_nothing(world: World) -> None:
    open_cache(world)
    welcome = world.send(b"t", hello_engine("f", "f", b"f-calls", spec=SPEC))[0]
    assert isinstance(welcome, WelcomeEngine)
    assert welcome.missing == [f"rank {rank}" for rank in range(4)]
    other = replace(STAGED, pp_size=1)
    [refused] = world.send(b"u", hello_engine("g", "g", b"g", spec=ModelSpec.of(other, 16)))
    assert "pp=2" in refused.reason
    more = replace(STAGED, tp_size=4, kv_replicas=4)  # the same bytes, but other places
    [refused] = world.send(b"v", hello_engine("h", "h", b"h", spec=ModelSpec.of(more, 16)))
    assert "has 8 ranks, this server's have 4" in refused.reason


def test_a_server_with_shards_takes_engines_that_have_as_many() -> None:
    world = World(store_shards=2)
    two = ModelConfig("m", 1, 2, 8, torch.uint8)
    for shards, expected in ((None, Refused), (1, Refused), (2, WelcomeEngine)):
        spec = ModelSpec.of(replace(two, store_shards=shards), 16)
        answer = world.send(b"s", hello_engine(spec=spec))[0]
        assert isinstance(answer, expected)
        if isinstance(answer, Refused):
            assert f"the engine has store_shards = {shards}, the server 2" in answer.reason
    [cache] = world.caches
    assert cache.shards.sizes == (256, 256)
    welcome = world.send(b"e0", HelloRank("e", 0, "e0", 2))[0]
    assert isinstance(welcome, WelcomeRank)
    assert (welcome.num_shards, welcome.block_bytes, welcome.segment.stride) == (2, 512, 8192)
    more = ModelSpec.of(replace(two, tp_size=2, store_shards=2), 16)
    [refused] = world.send(b"t", hello_engine("f", "f", b"f", spec=more))
    assert "has 2 ranks, this server's have 1" in refused.reason
    world.close()


def test_a_rank_beyond_the_engine_is_refused_by_name(world: World) -> None:
    open_cache(world)
    [refused] = greet(world, 4, size=1)
    assert "rank 4 of engine 'e' is not below the number of ranks, 4" in refused.reason


def test_a_rank_that_shares_its_kv_with_fewer_ranks_than_the_scheduler_says_is_refused(
    world: World,
) -> None:
    open_cache(world)
    for replicas, expected in ((1, Refused), (2, WelcomeRank)):
        hello = HelloRank("e", 2, "e2", 2, block_bytes=SIZES[2], kv_replicas=replicas)
        assert isinstance(world.send(b"e2", hello)[0], expected)
