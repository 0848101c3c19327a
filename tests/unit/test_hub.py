"""The server's side of the protocol, without sockets: random lives of clients beside a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from server_stats import SERVER_STATS

from flexcache.cache.journal import Stored
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError, InternalError, RegistrationError
from flexcache.ids import KVStatus, RequestInfo, TaskIds, TaskKind, TierName, last_id
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    UNKNOWN_WEIGHTS,
    Answer,
    Cancel,
    CheckInvariants,
    Clear,
    Control,
    Ended,
    Failed,
    GetStats,
    Goodbye,
    HelloEngine,
    HelloRank,
    Launch,
    Match,
    Matched,
    ModelSpec,
    Ping,
    Pong,
    Readiness,
    Refused,
    Register,
    Registered,
    Rejected,
    SessionOver,
    TaskAnswer,
    ToServer,
    Weights,
    WeightsChanged,
    WelcomeEngine,
    WelcomeRank,
)
from flexcache.server.cache import ServedCache
from flexcache.server.claims import CLAIM_TTL_S
from flexcache.server.hub import Hub
from flexcache.server.observers import Observers
from flexcache.server.outbox import make_execute
from flexcache.server.reactor import EndReport, Reactor
from flexcache.server.state import ServerState
from flexcache.stats import CacheStats, TierStats
from flexcache.storage.pool_directory import DirectoryInUseError
from flexcache.storage.shards import Shards
from flexcache.tasks.instructions import REMOTE, RunLookUp, RunOp, TaskResult, device
from flexcache.tasks.model import DEFAULT_LIMITS
from flexcache.transfer.copier import CopyPermit
from flexcache.transfer.messages import Done, Execute, LookedUp

ROOT = bytes(16)
MODEL = ModelConfig("m", 1, 1, 8, torch.uint8)
SPEC = ModelSpec.of(MODEL, 16)
BLOCKS = 12
TIMEOUT_S = 30.0


class Watching(Reactor):
    """Watches processes that do not exist; they end when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[bytes, EndReport] = {}

    def watch_process(self, name: bytes, pid: int, ended: EndReport) -> None:
        self.watched[name] = ended

    def unwatch_process(self, name: bytes) -> None:
        del self.watched[name]


class World:
    """A hub with a clock, whose answers are collected by peer."""

    def __init__(self, owner: str | None = None, **settings: Any) -> None:
        self.config = CacheConfig(num_cpu_blocks=BLOCKS, client_timeout_s=TIMEOUT_S, **settings)
        self.reactor = Watching()
        self.open: Callable[[ModelConfig, int, Shards], ServedCache] = self.open_cache
        state = ServerState(
            self.config, self.reactor, Observers(self.config), lambda *known: self.open(*known),
            owner,
        )  # fmt: skip
        self.hub = Hub(state, lambda: SERVER_STATS)
        self.caches: list[ServedCache] = []
        self.now = 100.0
        self.inbox: dict[bytes, list[Any]] = {}
        self.asked: list[int] = []
        """Look-ups that the remote store was asked for."""

    def open_cache(self, model: ModelConfig, tokens_per_block: int, shards: Shards) -> ServedCache:
        config = replace(self.config, tokens_per_block=tokens_per_block)
        cache = ServedCache(model, config, shards)
        cache.open()
        self.caches.append(cache)
        return cache

    def cache_stats(self) -> CacheStats:
        stats = self.hub.stats(self.now).cache
        assert stats is not None
        return stats

    def tier(self) -> TierStats:
        return self.cache_stats().tiers["CPU"]

    def send(
        self, peer: bytes, message: ToServer, data: bytes | memoryview | None = None
    ) -> list[Any]:
        """Send messages; return the answers to the peer."""
        frames = [msgspec.msgpack.encode(message)] + ([] if data is None else [data])
        return self.send_raw(peer, frames)

    def send_raw(self, peer: bytes, frames: list[Any]) -> list[Any]:
        before = len(self.inbox.get(peer, []))
        with self.hub.state.lock:
            self.hub.take(peer, frames, self.now)
        self.settle()
        return self.inbox.get(peer, [])[before:]

    def settle(self) -> None:
        with self.hub.state.lock:
            self.hub.route(self.now)
        to_peers, to_workers, jobs = self.hub.outbox.take()
        self.asked += [i.lookup_id for i in to_workers if isinstance(i, RunLookUp)]
        for peer, message in to_peers:
            received = make_execute(message) if isinstance(message, RunOp) else message
            self.inbox.setdefault(peer, []).append(received)
        for job in jobs:
            job.work()
            job.end(None)
        if jobs:
            self.settle()
        self.hub.check()

    def die(self, peer: bytes) -> None:
        self.reactor.watched[peer](self.now)
        self.settle()

    def last(self, peer: bytes) -> Any:
        return self.inbox[peer][-1]

    def close(self) -> None:
        self.hub.close()
        for cache in self.caches:
            cache.store.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def note_news(world: World) -> list[bool]:
    """Count how often those that wait for news are woken from now on."""
    woken: list[bool] = []
    world.hub.state.changed.notify_all = lambda: woken.append(True)  # type: ignore[method-assign]
    return woken


def hello_engine(name: str = "e", client: str = "c", calls: bytes = b"calls",
                 spec: ModelSpec = SPEC, **more: Any) -> HelloEngine:  # fmt: skip
    return HelloEngine(name, client, 1, spec, calls, **more)


def keys(text: str) -> bytes:
    return b"".join(text[: i + 1].encode().ljust(8) for i in range(len(text)))


class Engine:
    """A scheduler in session and its rank, which executes ops at once or later."""

    def __init__(self, world: World, name: str = "e") -> None:
        self.world = world
        self.name = name
        self.events = f"{name}-events".encode()
        self.calls = f"{name}-calls".encode()
        self.rank = f"{name}-rank".encode()
        welcome, _ = world.send(self.events, hello_engine(name, name, self.calls))
        assert isinstance(welcome, WelcomeEngine)
        self.ids = TaskIds(welcome.session)  # type: ignore[arg-type]

    def register(self) -> None:
        [welcome] = self.world.send(self.rank, HelloRank(self.name, 0, self.name, 2))
        assert isinstance(welcome, WelcomeRank)
        assert Registered() in self.world.send(self.rank, Register("layout", 99))

    def ask(self, text: str, may_wait: bool) -> list[Any]:
        """Match a get with a store that has to be asked first; return the immediate answer."""
        request = Match(
            9, self.ids.next(), TaskKind.GET, ROOT, 0, len(text), 16 * len(text), 8,
            may_wait=may_wait,
        )  # fmt: skip
        return self.world.send(self.calls, request, keys(text))

    def match(self, kind: TaskKind, text: str) -> tuple[int, Any]:
        task_id = self.ids.next()
        request = Match(5, task_id, kind, ROOT, 0, len(text), 16 * len(text), 8)
        [reply] = self.world.send(self.calls, request, keys(text))
        return task_id, reply

    def launch(self, task_id: int, count: int, gated: bool = False) -> None:
        blocks = np.arange(count, dtype="<i8").tobytes()
        self.world.send(self.calls, Launch(task_id, blocks, gated))

    def work(self) -> None:
        """Let the rank execute all its ops."""
        for message in self.world.inbox.get(self.rank, []):
            if isinstance(message, Execute):
                self.world.send(self.rank, Done(message.op_id, len(message.src) // 8))
        self.world.inbox[self.rank] = []

    def put(self, text: str) -> int:
        task_id, reply = self.match(TaskKind.PUT, text)
        self.launch(task_id, reply.offer.num_blocks)
        self.work()
        return task_id

    def answers(self, task_id: int) -> list[TaskResult]:
        return [
            m.result for m in self.world.inbox[self.events]
            if isinstance(m, TaskAnswer) and m.task_id == task_id
        ]  # fmt: skip


@pytest.fixture
def asking() -> Iterator[World]:
    """A world with a remote store."""
    world = World(remote_url="memory://")
    yield world
    world.close()


def up_with_store(world: World, name: str = "one") -> Engine:
    engine = Engine(world, name)
    engine.register()
    assert world.hub.cache is not None
    world.hub.cache.tasks.executor_up(REMOTE)
    return engine


def test_a_check_that_a_client_asks_for_compares_counts_and_walks_no_tier(asking: World) -> None:
    engine = up_with_store(asking)
    assert asking.hub.cache is not None
    tasks = asking.hub.cache.tasks
    for name in list(tasks.cache.tiers.by_name):
        tasks.cache.tiers.by_name[name].pool.take(1)
        [failed] = asking.send(engine.calls, CheckInvariants(1))
        assert isinstance(failed, Failed)
        tasks.check()  # what was wrong is forgotten
    host = tasks.cache.tiers.host
    host.pool._stack[0] = host.pool._stack[1]  # seen only by a walk
    assert asking.send(engine.calls, CheckInvariants(2)) == [Answer(2, None)]
    with pytest.raises(InternalError):
        tasks.check()


def look_up_answered(world: World, num_present: int) -> None:
    assert world.hub.cache is not None
    world.hub.cache.tasks.looked_up(LookedUp(world.asked.pop(), num_present), world.now)
    world.settle()


def test_the_answer_of_a_put_is_final_once_nothing_is_written_below_any_more(asking: World) -> None:
    engine = up_with_store(asking)
    task_id = engine.put("abc")
    assert [answer.is_final for answer in engine.answers(task_id)] == [False]
    assert asking.hub.cache is not None
    asking.hub.cache.tasks.executor_down(REMOTE, "it died", asking.now)
    asking.settle()
    assert [answer.is_final for answer in engine.answers(task_id)] == [False, True]


def test_a_match_waits_for_the_remote_store_if_its_client_does(asking: World) -> None:
    engine = up_with_store(asking)
    assert engine.ask("abcd", may_wait=True) == []
    look_up_answered(asking, 3)
    [matched] = asking.inbox[engine.calls]
    assert matched.request_id == 9
    assert (matched.offer.num_blocks, matched.offer.sources) == (3, {TierName.REMOTE: 3})


def test_a_client_that_may_not_wait_gets_a_pending_answer(asking: World) -> None:
    engine = up_with_store(asking)
    assert engine.ask("abcd", may_wait=False) == [Matched(9)]
    assert engine.ask("abcd", may_wait=False) == [Matched(9)]
    assert len(asking.asked) == 1
    look_up_answered(asking, 3)
    [matched] = engine.ask("abcd", may_wait=False)
    assert matched.offer.num_blocks == 3


def test_a_match_goes_on_without_an_answer_in_time(asking: World) -> None:
    engine = up_with_store(asking)
    assert engine.ask("abcd", may_wait=True) == []
    asking.now += 1.0
    assert asking.hub.cache is not None
    asking.hub.cache.tasks.tick(asking.now)
    asking.settle()
    [matched] = asking.inbox[engine.calls]
    assert matched.offer.num_blocks == 0


def test_a_client_that_left_during_a_look_up_gets_no_task(asking: World) -> None:
    engine, other = up_with_store(asking), up_with_store(asking, "two")
    assert engine.ask("abcd", may_wait=True) == []
    assert other.ask("abc", may_wait=True) == []
    asking.die(engine.events)
    look_up_answered(asking, 4)
    assert asking.inbox.get(engine.calls, []) == []
    [matched] = asking.inbox[other.calls]
    assert matched.offer.num_blocks == 3
    assert asking.hub.cache is not None
    assert asking.hub.cache.tasks.sessions.num_open == 1


def test_one_engine_gets_what_another_put(world: World) -> None:
    one, two = Engine(world, "one"), Engine(world, "two")
    one.register()
    two.register()
    task_id = one.put("abc")
    [answer] = one.answers(task_id)
    assert (answer.status, answer.num_ok, answer.is_final) == (KVStatus.SUCCESS, 3, True)
    task_id, reply = two.match(TaskKind.GET, "abcd")
    offer = reply.offer
    assert (offer.start, offer.num_blocks, offer.num_gpu_blocks) == (0, 3, 3)
    assert offer.sources == {TierName.CPU: 3}
    two.launch(task_id, 3)
    assert not two.answers(task_id)
    two.work()
    assert two.answers(task_id)[0].num_ok == 3
    assert one.answers(task_id) == []


def test_the_first_engine_decides_what_is_cached_and_another_model_is_refused(world: World) -> None:
    assert world.send(b"r", HelloRank("e", 0, "c", 2)) == []  # the model is not known yet
    Engine(world)
    assert isinstance(world.send(b"r", HelloRank("e", 0, "c", 2))[0], WelcomeRank)
    other = ModelSpec.of(ModelConfig("other", 1, 1, 8, torch.uint8), 16)
    [refused] = world.send(b"x", hello_engine("x", "x", b"xc", other))
    assert isinstance(refused, Refused)
    assert refused.final
    assert "other|" in refused.reason
    assert "m|" in refused.reason


@pytest.mark.parametrize("spec", [
    ModelSpec("m", 1, 1, 8, "nonsense", False, 1, 16),
    ModelSpec("m", 0, 1, 8, "uint8", False, 1, 16),
    ModelSpec("m", 1, 1, 8, "uint8", False, 1, 0),
    ModelSpec("", 1, 1, 8, "uint8", False, 1, 16),
    ModelSpec("m", 1, 1, 1 << 50, "uint8", False, 1, 16),
])  # fmt: skip
def test_an_invalid_model_is_refused_and_decides_nothing(world: World, spec: ModelSpec) -> None:
    [refused] = world.send(b"x", hello_engine(spec=spec))
    assert isinstance(refused, Refused)
    Engine(world)


def test_a_cache_that_cannot_be_opened_is_the_reason_for_the_refusal(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> ServedCache:
        raise ConfigError("no room")

    world.open = fail
    assert world.send(b"x", hello_engine()) == [Refused("no room")]
    assert "engine_refused" in caplog.text
    assert "no room" in caplog.text


def test_another_version_is_refused_and_counted(world: World) -> None:
    for message in (hello_engine(version=1), HelloRank("e", 0, "c", 2, version=99)):
        [refused] = world.send(b"x", message)
        assert isinstance(refused, Refused)
        assert "protocol" in refused.reason
    assert world.hub.counters.rejected_messages["version"] == 2


def test_a_name_belongs_to_its_holder_until_the_holder_is_gone(world: World) -> None:
    Engine(world)
    [refused] = world.send(b"late", hello_engine("e", "another", b"late-calls"))
    assert isinstance(refused, Refused)
    assert not refused.final
    world.die(b"e-events")
    welcome, _ = world.send(b"late", hello_engine("e", "another", b"late-calls"))
    assert isinstance(welcome, WelcomeEngine)


def test_a_client_that_reconnects_takes_its_place_again_and_loses_its_tasks(world: World) -> None:
    engine = Engine(world)
    engine.register()
    engine.match(TaskKind.PUT, "abc")
    assert world.tier().leased == 3
    welcome, _ = world.send(b"again", hello_engine("e", "e", b"again-calls"))
    assert isinstance(welcome, WelcomeEngine)
    assert world.tier().leased == 0
    [rejected] = world.send(engine.events, Ping())
    assert isinstance(rejected, Rejected)  # the former self learns that it is not known any more


def test_a_new_engine_waits_until_the_slots_of_its_predecessor_are_released(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, reply = engine.match(TaskKind.PUT, "abc")
    engine.launch(task_id, reply.offer.num_blocks)
    world.die(engine.events)
    [refused] = world.send(b"new", hello_engine("e", "new", b"new-calls"))
    assert isinstance(refused, Refused)
    assert not refused.final
    assert "still move bytes" in refused.reason
    engine.work()
    assert isinstance(world.send(b"new", hello_engine("e", "new", b"nc"))[0], WelcomeEngine)
    assert world.tier().indexed == 0  # a cancelled put publishes nothing


def test_a_silent_scheduler_expires_and_one_that_pings_does_not(world: World) -> None:
    quiet, lively = Engine(world, "quiet"), Engine(world, "lively")
    world.now += TIMEOUT_S - 1
    assert world.send(lively.events, Ping()) == [Pong()]
    world.hub.greeter.expire(world.now + 2)
    assert list(world.hub.stats(world.now).engines) == ["lively"]
    assert world.hub.counters.expired_clients == 1
    assert quiet.events not in world.reactor.watched


def test_a_silent_rank_expires_unless_it_may_be_copying(world: World) -> None:
    engine = Engine(world)
    engine.register()
    world.send(b"half", HelloRank("half", 0, "half", 2))
    task_id, reply = engine.match(TaskKind.PUT, "abc")
    engine.launch(task_id, reply.offer.num_blocks)
    world.now += TIMEOUT_S
    world.send(engine.events, Ping())
    world.hub.greeter.expire(world.now)
    assert set(world.hub.state.peers) == {engine.events, engine.rank}
    engine.work()
    assert engine.answers(task_id)[0].num_ok == 3
    world.now += TIMEOUT_S
    world.send(engine.events, Ping())
    world.hub.greeter.expire(world.now)
    assert set(world.hub.state.peers) == {engine.events}


def test_a_rank_of_this_process_may_be_silent_until_its_line_is_closed(world: World) -> None:
    class Line:
        is_closed = False

        def put(self, message: object) -> None:
            raise AssertionError

    engine, line = Engine(world), Line()
    engine.register()
    world.hub.outbox.lines[engine.rank] = line  # type: ignore[assignment]
    world.hub.greeter.expire(world.now + 2 * TIMEOUT_S)
    assert set(world.hub.state.peers) == {engine.rank}
    line.is_closed = True
    world.hub.greeter.expire(world.now + 4 * TIMEOUT_S)
    assert world.hub.state.peers == {}


def test_a_rank_with_a_different_layout_is_refused_and_its_engine_is_notified(world: World) -> None:
    one, two = Engine(world, "one"), Engine(world, "two")
    one.register()
    world.send(two.rank, HelloRank("two", 0, "two", 2))
    answers = world.send(two.rank, Register("another layout", 9))
    assert isinstance(answers[0], Refused)
    assert "another layout" in answers[0].reason
    told = world.last(two.events)
    assert isinstance(told, Readiness)
    assert told.missing == ["rank 0"]
    assert "another layout" in told.problems[0]
    assert world.last(one.events).problems == []
    assert not world.hub.cache.tasks.executors.is_up(device("two", 0))  # type: ignore[union-attr]


def test_a_rank_that_comes_back_learns_what_ended_while_it_was_away(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, reply = engine.match(TaskKind.PUT, "abc")
    engine.launch(task_id, reply.offer.num_blocks, gated=True)
    world.die(engine.rank)
    engine.rank = b"rank again"
    engine.register()
    assert Ended(task_id, 0) in world.inbox[engine.rank]


def test_ranks_are_notified_when_a_session_is_over_and_its_copies_have_ended(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, reply = engine.match(TaskKind.PUT, "abc")
    engine.launch(task_id, reply.offer.num_blocks, gated=True)
    never_launched, _ = engine.match(TaskKind.PUT, "xyz")
    world.die(engine.events)
    over = SessionOver(engine.ids.session)
    assert over not in world.inbox[engine.rank]  # the copy goes on
    [run] = [m for m in world.inbox[engine.rank] if isinstance(m, Execute)]
    told = world.send(engine.rank, Done(run.op_id, 3))
    assert told == [Ended(task_id, 0), over]
    assert never_launched in engine.ids  # it is over by its session
    world.die(engine.rank)
    world.hub.check()


def test_ranks_are_notified_of_a_gated_launch_of_an_ended_task(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, _ = engine.match(TaskKind.PUT, "abc")
    world.send(engine.calls, Cancel(np.array([task_id], dtype="<u8").tobytes()))
    engine.launch(task_id, 3, gated=True)
    assert world.last(engine.rank) == Ended(task_id, 0)


def test_an_engine_cannot_touch_the_tasks_of_another(world: World) -> None:
    one, two = Engine(world, "one"), Engine(world, "two")
    one.register()
    task_id, _ = one.match(TaskKind.PUT, "abc")
    world.send(two.calls, Cancel(np.array([task_id], dtype="<u8").tobytes()))
    two.launch(task_id, 3)
    assert world.cache_stats().tasks["created"] == 1
    stolen = Match(5, task_id + 1, TaskKind.PUT, ROOT, 0, 1, 16, 8)
    [failed] = world.send(two.calls, stolen, keys("z"))
    assert isinstance(failed, Failed)


def test_every_request_is_answered_even_if_it_cannot_be_carried_out(world: World) -> None:
    engine = Engine(world)
    task_id = engine.ids.next()
    good = Match(1, task_id, TaskKind.GET, ROOT, 0, 2, 32, 8)
    bad: list[tuple[ToServer, bytes | None]] = [
        (msgspec.structs.replace(good, stop=3), keys("ab")),
        (msgspec.structs.replace(good, start=-1), keys("ab")),
        (msgspec.structs.replace(good, start=2, stop=1), keys("ab")),
        (msgspec.structs.replace(good, key_bytes=-8), keys("ab")),
        (msgspec.structs.replace(good, key_bytes=0), b"odd"),
        (msgspec.structs.replace(good, token_bytes=-8), keys("ab")),
        (msgspec.structs.replace(good, retain_s=math.nan), keys("ab")),
        (msgspec.structs.replace(good, prefill_blocks_per_s=math.inf), keys("ab")),
        (msgspec.structs.replace(good, token_bytes=999), keys("ab")),
        (msgspec.structs.replace(good, task_id=3), keys("ab")),
        (Clear(1, "NOWHERE"), None),
    ]
    for message, data in bad:
        [failed] = world.send(engine.calls, message, data)
        assert isinstance(failed, Failed), message
        assert failed.request_id == 1
    assert isinstance(world.send(b"stranger", Clear(4, None))[0], Failed)
    assert isinstance(world.send(engine.calls, good, keys("ab"))[0], Matched)
    assert world.send(engine.calls, CheckInvariants(9)) == [Answer(9, None)]
    assert world.send(engine.calls, Clear(2, None)) == [Answer(2, 0)]
    assert isinstance(world.send(b"stranger", GetStats(3))[0], Answer)


def test_request_info_is_passed_on_with_stored_blocks() -> None:
    world = World(kv_events=True)
    engine = Engine(world)
    engine.register()
    tokens = np.arange(40, dtype="<i8")  # two blocks and a half
    info = RequestInfo("a-request", 7, "an-adapter", [["x"], ["y"]])
    task_id = engine.ids.next()
    request = Match(
        1, task_id, TaskKind.PUT, ROOT, 0, 2, 40, 8, token_bytes=tokens.nbytes, info=info
    )
    data = bytearray(keys("ab") + tokens.tobytes())
    [matched] = world.send(engine.calls, request, memoryview(data))
    assert isinstance(matched, Matched)
    data[:] = bytes(len(data))  # the client may use its memory for something else by now
    engine.launch(task_id, 2)
    engine.work()
    [stored] = world.hub.state.observers.take_changes()
    assert isinstance(stored, Stored)
    assert (stored.token_ids, stored.info) == (list(range(32)), info)
    assert stored.extra_keys == [["x"], ["y"]]

    torn = msgspec.structs.replace(request, task_id=engine.ids.next(), token_bytes=3)
    [failed] = world.send(engine.calls, torn, keys("ab") + b"odd")
    assert isinstance(failed, Failed)
    world.close()


def test_an_invalid_launch_fails_its_task(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, _ = engine.match(TaskKind.PUT, "abc")
    engine.launch(task_id, 2)
    [answer] = engine.answers(task_id)
    assert answer.status is KVStatus.FAILED
    assert "3 blocks, 2 were given" in (answer.error or "")


def test_absurd_values_are_refused_at_once(world: World) -> None:
    engine = Engine(world)
    for spec in (
        ModelSpec("m", 1, 1, 8, "_inductor", False, 1, 16),
        ModelSpec("m", 1, 1, 8, "uint8", True, 1 << 33, 16),
        ModelSpec("m" * 10_000, 1, 1, 8, "uint8", False, 1, 16),
    ):
        [refused] = world.send(b"x", hello_engine("x", "x", b"xc", spec))
        assert isinstance(refused, Refused)
    assert isinstance(world.send(b"x", hello_engine("x" * 1000, "x", b"xc"))[0], Rejected)
    many = np.arange(DEFAULT_LIMITS.max_open_tasks + 1, dtype="<u8").tobytes()
    for ids in (many, b"odd"):
        assert isinstance(world.send(engine.calls, Cancel(ids))[0], Rejected)
    wide = Match(1, engine.ids.next(), TaskKind.PUT, ROOT, 0, 1, 16, 1 << 20)
    long_root = Match(1, engine.ids.next(), TaskKind.PUT, b"r" * 1000, 0, 1, 16, 8)
    for request, data in ((wide, bytes(1 << 20)), (long_root, keys("a"))):
        assert isinstance(world.send(engine.calls, request, data)[0], Failed)
    for roots in ([ROOT] * 3, [ROOT * 1000], [b""]):
        [refused] = world.send(engine.calls, Control(1, "delete", roots=roots))
        assert isinstance(refused, Failed)
        assert "roots" in refused.reason


@pytest.mark.parametrize(
    "report",
    [{"checksums": b"odd"}, {"device_bytes": -1}, {"seconds": -1.0}, {"seconds": math.inf}],
    ids=str,
)
def test_reports_that_make_no_sense_are_rejected(world: World, report: dict[str, Any]) -> None:
    engine = Engine(world)
    engine.register()
    [rejected] = world.send(engine.rank, Done(1, 0, **report))
    assert isinstance(rejected, Rejected)


def test_a_launch_that_comes_after_its_cancel_is_answered(world: World) -> None:
    engine = Engine(world)
    engine.register()
    task_id, _ = engine.match(TaskKind.PUT, "abc")
    world.send(engine.calls, Cancel(np.array([task_id], dtype="<u8").tobytes()))
    engine.launch(task_id, 3)
    [answer] = engine.answers(task_id)
    assert (answer.status, answer.is_final) == (KVStatus.CANCELLED, True)


def test_a_cache_that_cannot_be_opened_now_may_be_opened_later(world: World) -> None:
    errors = [RegistrationError("in use"), OSError("no fds"), DirectoryInUseError("by another")]
    real, failures = world.open, iter(errors)

    def fail_at_first(model: ModelConfig, tokens: int, shards: Shards) -> ServedCache:
        for failure in failures:
            raise failure
        return real(model, tokens, shards)

    world.open = fail_at_first
    for _ in errors:
        [refused] = world.send(b"x", hello_engine())
        assert isinstance(refused, Refused)
        assert not refused.final
    assert isinstance(world.send(b"x", hello_engine())[0], WelcomeEngine)


def test_problems_of_a_rank_are_reported_to_its_engine_and_forgotten_with_it(
    world: World,
) -> None:
    other = Engine(world, "other")
    other.register()
    world.send(b"rank", HelloRank("e", 0, "e", 2))
    world.send(b"rank", Register("", 0, "does not fit"))
    engine = Engine(world)
    assert world.last(engine.events) == Readiness(["rank 0"], ["rank 0: does not fit"])
    world.send(b"rank", HelloRank("e", 0, "e", 2))  # another try
    assert world.hub.greeter.problems("e") == []
    world.send(b"rank", Register("", 0, "does not fit"))
    world.die(engine.events)
    assert world.hub.greeter.problems("e") == []


def test_an_engine_does_not_get_the_problems_of_one_whose_name_starts_the_same(
    world: World,
) -> None:
    Engine(world, "e")
    world.send(b"rank", HelloRank("e:0", 0, "other", 2))
    world.send(b"rank", Register("", 0, "does not fit"))
    assert world.hub.greeter.problems("e") == []
    assert len(world.hub.greeter.problems("e:0")) == 1


def test_an_oversized_frame_is_counted_and_answered(world: World) -> None:
    engine = Engine(world)
    big = bytes(MAX_FRAME_BYTES + 8)
    request = Match(1, engine.ids.next(), TaskKind.GET, ROOT, 0, 1, 16, 8)
    [rejected] = world.send(engine.calls, request, big)
    assert isinstance(rejected, Rejected)
    assert world.hub.counters.rejected_messages["oversized"] == 1


def test_a_failing_handler_is_answered_and_affects_no_other_engine(world: World) -> None:
    one, two = Engine(world, "one"), Engine(world, "two")
    assert world.hub.cache is not None
    real = world.hub.cache.tasks.match

    def fail_for_one(task_id: int, *rest: Any) -> Any:
        if task_id in one.ids:
            raise RuntimeError("a bug")
        return real(task_id, *rest)

    world.hub.cache.tasks.match = fail_for_one  # type: ignore[assignment, method-assign]
    _, failed = one.match(TaskKind.GET, "ab")
    assert failed == Failed(5, "internal", "RuntimeError('a bug')")
    assert isinstance(two.match(TaskKind.GET, "ab")[1], Matched)
    assert world.hub.counters.failed_messages == 1


def test_fences_and_problems_do_not_outlive_their_engines(world: World) -> None:
    fences = []
    for turn in range(50):
        engine = Engine(world, f"engine-{turn}")
        engine.register()
        fences.append(world.hub.state.engines[engine.name].fence.path)
        world.send(engine.rank, Goodbye())
        world.send(engine.events, Goodbye())
    assert not any(Path(fence).exists() for fence in fences)
    assert world.hub.state.peers == {}
    assert world.reactor.watched == {}


def test_a_task_answered_over_a_late_rank_is_revoked_and_the_next_session_is_not() -> None:
    world = World()
    world.hub.state.session_numbers = count(0xFFFF)  # the next one has the lowest number
    engine = Engine(world)
    [welcome] = world.send(engine.rank, HelloRank(engine.name, 0, engine.name, 2))
    world.send(engine.rank, Register("layout", 99))
    fence = Fence.open(welcome.fence)
    permit = CopyPermit(fence.words)
    early, late = (engine.match(TaskKind.PUT, text) for text in ("ab", "xyz"))
    engine.launch(late[0], late[1].offer.num_blocks)
    permit.task_id = late[0]
    assert not permit.is_revoked
    world.now += 1000
    assert world.hub.cache is not None
    world.hub.cache.tasks.tick(world.now)
    world.settle()
    assert world.last(engine.events).result.status is KVStatus.FAILED
    assert permit.is_revoked
    permit.task_id = late[0] + 1
    assert not permit.is_revoked
    permit.task_id = early[0]
    assert permit.is_revoked
    engine.work()
    fence.revoke(last_id(engine.ids.session))  # the scheduler loses its session
    [welcome, _] = world.send(b"new", hello_engine("e", "e", b"new-calls"))
    permit.task_id = TaskIds(welcome.session).next()
    assert permit.task_id < late[0]
    assert not permit.is_revoked
    world.close()
    assert permit.is_revoked
    fence.close()


def test_an_op_planned_before_an_update_carries_the_number_of_before(world: World) -> None:
    """Also if it waits to be routed when the news of the update comes."""
    engine = Engine(world)
    engine.register()
    engine.put("ab")
    task_id, _ = engine.match(TaskKind.GET, "ab")
    world.hub.cache.tasks.launch([task_id], [np.arange(2)], world.now)  # type: ignore[union-attr]
    world.send(engine.rank, WeightsChanged(1))
    executes = [m for m in world.inbox[engine.rank] if isinstance(m, Execute)]
    assert [each.weights for each in executes] == [0]


@pytest.mark.parametrize("last", [3, UNKNOWN_WEIGHTS])
def test_news_of_an_earlier_update_that_come_last_change_nothing(world: World, last: int) -> None:
    engine = Engine(world)
    engine.register()
    world.send(engine.rank, WeightsChanged(2))
    world.send(engine.rank, WeightsChanged(last, "v3"))
    before = world.hub.state.weights.of("e")
    world.send(engine.rank, WeightsChanged(2))
    assert world.hub.state.weights.of("e") == before
    assert before.ranks[0][1] == last


def test_news_of_an_update_pass_on_that_a_look_up_has_ended(asking: World) -> None:
    engine = up_with_store(asking)
    engine.ask("ab", may_wait=True)
    tasks = asking.hub.cache.tasks  # type: ignore[union-attr]
    tasks.looked_up(LookedUp(asking.asked[-1], 0), asking.now)
    frames = [msgspec.msgpack.encode(WeightsChanged(1))]
    woken = note_news(asking)
    asking.hub.take(engine.rank, frames, asking.now)
    asking.hub.route(asking.now)
    assert len(woken) == 1, "threads of this process wait for that"


def test_a_rank_that_registers_with_updated_weights_hears_that_they_are_known(world: World) -> None:
    """Who updated them waits for that."""
    Engine(world)
    world.send(b"rank", HelloRank("e", 0, "r", 2))
    answers = world.send(b"rank", Register("layout", 99, weights=3, version="v3"))
    assert answers[0] == Registered()
    [weights] = [each for each in answers if isinstance(each, Weights)]
    assert weights.ranks == {0: ("r", 3)}


@pytest.mark.parametrize("generation", [-1, 2**63, 2**64 - 1])
def test_a_greeting_with_an_absurd_generation_is_refused(world: World, generation: int) -> None:
    """Each change adds one, which must fit into a message."""
    hello = hello_engine(weights=Weights(generation, "v"), heard=max(0, generation))
    [answer] = world.send(b"events", hello)
    assert isinstance(answer, Rejected)


def test_a_match_of_a_negative_generation_is_refused(world: World) -> None:
    engine = Engine(world)
    engine.register()
    world.send(engine.rank, WeightsChanged(UNKNOWN_WEIGHTS))
    request = Match(5, engine.ids.next(), TaskKind.PUT, ROOT, 0, 2, 32, 8, weights=-1)
    [reply] = world.send(engine.calls, request, keys("ab"))
    assert isinstance(reply, Failed) and reply.kind == "value"


@pytest.mark.parametrize("socket", ["events", "calls"])
def test_a_scheduler_that_does_not_read_is_given_up(world: World, socket: str) -> None:
    engine = Engine(world)
    world.hub.does_not_read(getattr(engine, socket), world.now)
    assert engine.events not in world.hub.state.peers
    [failed] = world.send(engine.calls, CheckInvariants(7))
    assert isinstance(failed, Failed) and failed.kind == "session"


def test_a_rank_that_missed_messages_registers_again_once_it_reads(world: World) -> None:
    """What it was to do is open until then: it may be copying."""
    engine = Engine(world)
    engine.register()
    task_id, matched = engine.match(TaskKind.PUT, "ab")
    engine.launch(task_id, matched.offer.num_blocks)
    world.hub.does_not_read(engine.rank, world.now)
    assert engine.rank in world.hub.state.peers
    assert engine.answers(task_id) == []
    [rejected] = world.send(engine.rank, Ping())
    assert isinstance(rejected, Rejected)
    engine.rank = b"the same client"
    engine.register()
    [answer] = engine.answers(task_id)
    assert answer.status is KVStatus.FAILED
    assert world.send(engine.rank, Ping()) == [Pong()]


def test_no_session_has_two_matches_that_wait(asking: World) -> None:
    """A client that does not wait for answers must not have the server keep its prompts."""
    engine = up_with_store(asking)
    assert engine.ask("abcd", may_wait=True) == []
    [matched] = engine.ask("abce", may_wait=True)
    assert matched.offer.num_blocks == 0
    while asking.asked:
        look_up_answered(asking, 3)
    assert engine.ask("xyz", may_wait=True) == []


# -- random lives --------------------------------------------------------------------------------

NAMES = ["one", "two"]
CLIENTS = ["a", "b"]
TEXTS = ["abcd", "abx", "q"]


class HubHistories(RuleBasedStateMachine):
    """Engines and ranks come, work and go in any order; a model says who holds which place."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.count = 0
        self.engines: dict[str, tuple[str, bytes, bytes, TaskIds]] = {}
        self.ranks: dict[str, tuple[str, bytes, bool]] = {}
        self.open: dict[int, str] = {}  # task -> matched | launched
        self.sizes: dict[int, int] = {}
        self.decided = False

    def fresh(self) -> bytes:
        self.count += 1
        return f"peer {self.count}".encode()

    @rule(name=st.sampled_from(NAMES), client=st.sampled_from(CLIENTS))
    def engine_comes(self, name: str, client: str) -> None:
        peer, calls = self.fresh(), self.fresh()
        held = self.engines.get(name)
        answers = self.world.send(peer, hello_engine(name, client, calls))
        [answer] = [a for a in answers if isinstance(a, (WelcomeEngine, Refused))]
        self.decided = True
        if held is not None and held[0] != client:
            assert isinstance(answer, Refused)
            assert not answer.final
            return
        if held is not None:
            self.engine_is_gone(name)
        if isinstance(answer, Refused):  # only while its former self's copies go on
            assert "still move bytes" in answer.reason
            return
        self.engines[name] = (client, peer, calls, TaskIds(answer.session))  # type: ignore[arg-type]

    @rule(name=st.sampled_from(NAMES), client=st.sampled_from(CLIENTS), fits=st.booleans())
    def rank_comes(self, name: str, client: str, fits: bool) -> None:
        peer = self.fresh()
        held = self.ranks.get(name)
        answers = self.world.send(peer, HelloRank(name, 0, client, 2))
        if not self.decided:
            assert answers == []
            return
        if held is not None and held[0] != client:
            [refused] = answers
            assert isinstance(refused, Refused)
            return
        assert isinstance(answers[0], WelcomeRank)
        self.ranks.pop(name, None)
        problem = None if fits else "it does not fit"
        answers = self.world.send(peer, Register("layout", 9, problem))
        assert isinstance(answers[0], Registered if fits else Refused)
        if fits:
            self.ranks[name] = (client, peer, True)

    def engine_is_gone(self, name: str) -> None:
        ids = self.engines.pop(name)[3]
        for task_id in [t for t in self.open if t in ids]:
            del self.open[task_id]

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), how=st.sampled_from(["bye", "dies", "silent", "stuck"]))
    def engine_goes(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        peer = self.engines[name][1]
        if how == "bye":
            self.world.send(peer, Goodbye())
        elif how == "dies":
            self.world.die(peer)
        elif how == "stuck":
            self.world.hub.does_not_read(peer, self.world.now)
        else:
            self.world.now += TIMEOUT_S - 1
            for other, (_, events, _, _) in self.engines.items():
                if other != name:
                    self.world.send(events, Ping())
            for _, events, _ in self.ranks.values():
                self.world.send(events, Ping())
            self.world.now += 1
            self.world.hub.greeter.expire(self.world.now)
        self.world.settle()
        self.engine_is_gone(name)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), bye=st.booleans())
    def rank_goes(self, data: st.DataObject, bye: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.ranks)))
        peer = self.ranks.pop(name)[1]
        if bye:
            self.world.send(peer, Goodbye())
        else:
            self.world.die(peer)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), kind=st.sampled_from([TaskKind.PUT, TaskKind.GET, TaskKind.PREFETCH]),
          text=st.sampled_from(TEXTS))  # fmt: skip
    def match(self, data: st.DataObject, kind: TaskKind, text: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        _, _, calls, ids = self.engines[name]
        task_id = ids.next()
        request = Match(1, task_id, kind, ROOT, 0, len(text), 16 * len(text), 8)
        [matched] = self.world.send(calls, request, keys(text))
        assert isinstance(matched, Matched)
        if matched.offer.num_blocks:
            self.open[task_id] = "matched"
            self.sizes[task_id] = 0 if kind is TaskKind.PREFETCH else matched.offer.num_blocks

    def caller_of(self, task_id: int) -> bytes:
        return next(e[2] for e in self.engines.values() if task_id in e[3])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), gated=st.booleans())
    def launch(self, data: st.DataObject, gated: bool) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.open)))
        blocks = np.arange(self.sizes[task_id], dtype="<i8").tobytes()
        self.world.send(self.caller_of(task_id), Launch(task_id, blocks, gated))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.open)))
        self.world.send(self.caller_of(task_id), Cancel(np.array([task_id], dtype="<u8").tobytes()))

    @rule(name=st.sampled_from(NAMES), part=st.booleans())
    def rank_works(self, name: str, part: bool) -> None:
        if name not in self.ranks:
            return
        peer = self.ranks[name][1]
        box, self.world.inbox[peer] = self.world.inbox.get(peer, []), []
        for message in box:
            if isinstance(message, Execute):
                count = len(message.src) // 8
                self.world.send(peer, Done(message.op_id, count // 2 if part else count))

    @rule(peer=st.sampled_from([b"stranger", b"peer 1", b"peer 2", b"peer 3"]), frame=st.binary())
    def noise(self, peer: bytes, frame: bytes) -> None:
        self.world.send_raw(peer, [frame])

    @invariant()
    def places_are_held_by_whom_the_model_says(self) -> None:
        hub = self.world.hub
        assert set(hub.stats(self.world.now).engines) == set(self.engines)
        if hub.cache is None:
            return
        hub.cache.tasks.check()
        assert hub.workers() == {device(name, 0): 2 for name in self.ranks}
        for name in NAMES:
            assert hub.cache.tasks.executors.is_up(device(name, 0)) == (name in self.ranks)
        expected = {e[1] for e in self.engines.values()} | {r[1] for r in self.ranks.values()}
        assert set(hub.state.peers) == set(self.world.reactor.watched) == expected
        tier = self.world.tier()
        assert tier.free + tier.indexed + tier.leased == BLOCKS

    @invariant()
    def only_owners_are_notified_of_tasks(self) -> None:
        for _, peer, _, ids in self.engines.values():
            for message in self.world.inbox.get(peer, []):
                if isinstance(message, TaskAnswer):
                    assert message.task_id in ids
                    if message.result.is_final:
                        self.open.pop(message.task_id, None)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for peer in [*self.world.hub.state.peers]:
            self.world.die(peer)
        if self.world.hub.cache is not None:
            assert self.world.tier().leased == 0
            assert sum(self.world.cache_stats().tasks.values()) == 0
        self.world.close()


TestHubHistories = HubHistories.TestCase
TestHubHistories.settings = settings(stateful_step_count=40)


# -- hostile frames ------------------------------------------------------------------------------


@given(st.data())
def test_no_frame_makes_the_hub_raise_or_hurts_an_engine(data: st.DataObject) -> None:
    world = World()
    try:
        engine, other = Engine(world, "one"), Engine(world, "two")
        engine.register()
        task_id, _ = other.match(TaskKind.PUT, "abc")
        valid: list[ToServer] = [
            hello_engine("x", "x", b"x"), HelloRank("x", 0, "x", 2), Register("l", 1),
            Done(1, 1), Launch(engine.ids.next(), b"12345678", True), Cancel(b"12345678"),
            Match(1, engine.ids.next(), TaskKind.PUT, ROOT, 0, 1, 16, 8), Clear(1, "CPU"),
            GetStats(1), CheckInvariants(1), Ping(),
        ]  # fmt: skip
        for _ in range(5):
            frame = bytearray(msgspec.msgpack.encode(data.draw(st.sampled_from(valid))))
            for _ in range(data.draw(st.integers(0, 3))):
                frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
            extra = data.draw(st.lists(st.binary(max_size=40), max_size=2))
            peer = data.draw(st.sampled_from([b"?", engine.events, engine.calls, engine.rank]))
            world.send_raw(peer, [bytes(frame), *extra])
        assert world.hub.cache is not None
        world.hub.cache.tasks.check()
        assert "two" in world.hub.stats(world.now).engines
        world.send(other.calls, Cancel(np.array([task_id], dtype="<u8").tobytes()))
        assert world.hub.stats(world.now).engines["two"].open_tasks == 0
    finally:
        world.close()


def test_a_rank_that_another_client_claims_too_stops_its_engine_until_one_is_left(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    engine.put("abc")
    waiting, reply = engine.match(TaskKind.GET, "abc")
    assert reply.offer.num_blocks == 3
    [refused] = world.send(b"second", HelloRank("e", 0, "another", 77))
    assert isinstance(refused, Refused) and not refused.final
    assert "process 2 and process 77" in refused.reason and "engine_id" in refused.reason
    ready = [m for m in world.inbox[engine.events] if isinstance(m, Readiness)][-1]
    assert ready.missing == ["rank 0 (claimed by process 2 and process 77)"]
    assert ready.problems == []  # it may be the successor of one whose death is not seen yet
    engine.launch(waiting, 3)
    assert world.last(engine.events).result.status is KVStatus.CANCELLED
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0
    assert engine.match(TaskKind.PUT, "xyz")[1].offer.num_blocks == 0
    assert world.cache_stats().totals.dropped_blocks == {"name_disputed": 3}
    other = Engine(world, "o")
    other.register()
    assert other.match(TaskKind.GET, "abc")[1].offer.num_blocks == 3  # of another name
    world.send(b"second", HelloRank("e", 0, "another", 77))
    ready = [m for m in world.inbox[engine.events] if isinstance(m, Readiness)][-1]
    assert ready.problems == [refused.reason]
    world.send(b"second", Goodbye())
    assert world.last(engine.events) == Readiness([], [])
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 3


def register_heir(world: World, engine: Engine) -> None:
    """Another client claims the rank's place, and gets it when the rank dies."""
    world.send(b"second", HelloRank("e", 0, "another", 77))
    world.die(engine.rank)
    welcome = world.send(b"second", HelloRank("e", 0, "another", 77))[0]
    assert isinstance(welcome, WelcomeRank)
    assert Registered() in world.send(b"second", Register("layout", 99))


def test_a_rank_that_had_claimed_the_place_of_one_that_died_is_not_paired_with_its_scheduler(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    engine.put("abc")
    register_heir(world, engine)
    ready = world.last(engine.events)
    assert ready.missing == ["rank 0 (taken over by process 77)"]
    assert "engine_id" in ready.problems[0]
    assert engine.match(TaskKind.PUT, "xyz")[1].offer.num_blocks == 0
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0
    welcome = world.send(b"again", HelloRank("e", 0, "another", 77))[0]  # no other client
    assert isinstance(welcome, WelcomeRank)
    world.send(b"again", Register("layout", 99))
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0


def test_a_rank_that_took_a_place_over_serves_the_scheduler_that_comes_after_it(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    register_heir(world, engine)
    world.die(engine.events)
    welcome = world.send(b"new", hello_engine("e", "new", b"new-calls"))[0]
    assert isinstance(welcome, WelcomeEngine)
    assert world.last(b"new") == Readiness([], [])


def test_an_engine_goes_on_when_the_rank_that_took_a_place_over_leaves_it(world: World) -> None:
    engine = Engine(world)
    engine.register()
    engine.put("abc")
    register_heir(world, engine)
    world.send(b"second", Goodbye())
    assert world.last(engine.events) == Readiness(["rank 0"], [])
    engine.rank = b"third"
    [welcome] = world.send(engine.rank, HelloRank("e", 0, "third", 2))
    assert isinstance(welcome, WelcomeRank)
    world.send(engine.rank, Register("layout", 99))
    assert world.last(engine.events) == Readiness([], [])
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 3


def test_a_scheduler_that_had_claimed_the_place_of_one_that_died_is_not_paired_with_its_rank(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    world.send(b"second", hello_engine("e", "another", b"second-calls"))
    world.die(engine.events)
    world.send(b"second", hello_engine("e", "another", b"second-calls"))
    assert world.last(b"second").missing == ["the scheduler (taken over by process 1)"]
    world.die(engine.rank)
    world.send(b"theirs", HelloRank("e", 0, "theirs", 77))
    world.send(b"theirs", Register("layout", 99))
    assert world.last(b"second") == Readiness([], [])


def test_an_engine_that_two_schedulers_claim_is_over_for_both_until_one_is_silent(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    engine.put("abc")
    [refused] = world.send(b"second", hello_engine("e", "another", b"second-calls"))
    assert isinstance(refused, Refused) and not refused.final
    assert "the scheduler of engine 'e' is claimed by" in refused.reason
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0
    world.now += CLAIM_TTL_S
    world.hub.greeter.expire(world.now)
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 3


def test_a_dispute_outlasts_a_stall_of_the_server_in_which_its_claimants_said_hello(
    world: World,
) -> None:
    engine = Engine(world)
    engine.register()
    engine.put("abc")
    again = hello_engine("e", "another", b"second-calls")
    world.send(b"second", again)
    world.now += 2 * CLAIM_TTL_S  # what came meanwhile is taken in any order
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0
    world.send(b"second", again)
    world.hub.greeter.expire(world.now)
    assert engine.match(TaskKind.GET, "abc")[1].offer.num_blocks == 0


def test_a_client_without_an_engines_name_is_refused_where_several_share_the_server(
    world: World,
) -> None:
    for hello in (HelloRank("dp0", 0, "c", 3), hello_engine("dp0")):
        [refused] = world.send(b"nameless", hello)
        assert isinstance(refused, Refused) and refused.final
        assert "KVManager.endpoint" in refused.reason


def test_a_rank_of_another_engine_is_refused_where_one_keeps_the_cache_to_itself() -> None:
    world = World(owner="mine/dp0")
    [refused] = world.send(b"rank", HelloRank("dp0", 0, "c", 3))
    assert isinstance(refused, Refused) and refused.final
    assert "'mine/dp0'" in refused.reason and "'dp0'" in refused.reason


def num_calls_to_end(num_engines: int) -> int:
    """How many functions run, or go on, while that many engines die in one turn."""
    world = World()
    engines = [Engine(world, str(number)) for number in range(num_engines)]
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for engine in engines:
            world.reactor.watched[engine.events](world.now)
        world.hub.route(world.now)
    finally:
        sys.setprofile(None)
    world.close()
    return calls


def test_the_end_of_many_sessions_at_once_costs_each_the_same() -> None:
    few, many = num_calls_to_end(50), num_calls_to_end(400)
    assert many < 8 * few * 1.5
