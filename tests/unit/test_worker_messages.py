"""Messages at the workers' socket: none raises, and only workers are trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hub import Engine, World

from flexcache.ids import TaskKind
from flexcache.server.reactor import Reactor
from flexcache.server.workers import WorkerPool
from flexcache.tasks.instructions import REMOTE
from flexcache.transfer.messages import Done, LookedUp, Ready, Stop

STRANGE: list[msgspec.Struct] = [
    Ready("x"), Done(1, 1), Done(2**63, -5), Done(1, 2**63, error="e", bad_block=True),
    Done(1, 1, checksums=b"abc"), Done(1, 1, checksums=bytes(16)), LookedUp(1, -3),
    LookedUp(1, 2**63), LookedUp(9, 1, "e"), Stop(),
]  # fmt: skip


@dataclass
class Worker:
    """The part of a supervised worker that decides about messages."""

    name: str
    identity: str
    pid: int | None = 1
    is_ready: bool = False


@dataclass
class Scene:
    """A hub with a remote store, and its worker."""

    world: World = field(default_factory=lambda: World(remote_url="memory://"))
    worker: Worker = field(default_factory=lambda: Worker(REMOTE, "remote-secret"))

    def __post_init__(self) -> None:
        self.engine = Engine(self.world, "one")
        self.engine.register()
        workers: Any = {REMOTE: self.worker}
        self.pool = WorkerPool(Reactor(), self.world.hub)
        self.pool._workers = workers

    def say(self, message: msgspec.Struct, sender: bytes = b"remote-secret") -> None:
        self.pool.take([sender, msgspec.msgpack.encode(message)], self.world.now)
        self.world.settle()

    def refused(self) -> dict[str, int]:
        return dict(self.world.hub.counters.rejected_messages)

    @property
    def is_up(self) -> bool:
        assert self.world.hub.cache is not None
        return self.world.hub.cache.tasks.executors.is_up(REMOTE)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.world.close()


@pytest.mark.parametrize("sender", [b"remote-1", b"remote", b"", b"\x00abcd"])
def test_only_the_worker_itself_can_report_ready(scene: Scene, sender: bytes) -> None:
    scene.say(Ready("me"), sender)
    assert not scene.is_up
    assert scene.refused() == {"unknown_worker": 1}
    scene.say(Ready("it"))
    assert scene.is_up


def test_messages_of_a_dead_worker_are_refused(scene: Scene) -> None:
    scene.worker.pid = None
    scene.say(Ready("late"))
    assert not scene.is_up
    assert scene.refused() == {"unknown_worker": 1}


def test_each_kind_of_nonsense_is_counted(scene: Scene) -> None:
    scene.say(Ready("it"))
    scene.say(Ready("again"))
    scene.say(Done(1, 1, checksums=b"abc"))
    scene.say(Stop())
    scene.pool.take([b"remote-secret"], 0.0)
    scene.pool.take([b"remote-secret", b"\xc1"], 0.0)
    scene.pool.take([b"remote-secret", b"", b""], 0.0)
    scene.pool.take([b"remote-secret", bytes(17 << 20)], 0.0)
    assert scene.refused() == {"misplaced": 1, "malformed": 5, "oversized": 1}
    assert scene.world.hub.counters.failed_messages == 0


@pytest.mark.whole
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_message_makes_the_workers_socket_raise(data: st.DataObject) -> None:
    scene = Scene()
    try:
        scene.say(Ready("it"))
        scene.engine.ask("abcd", may_wait=True)
        for _ in range(5):
            frame = bytearray(msgspec.msgpack.encode(data.draw(st.sampled_from(STRANGE))))
            for _ in range(data.draw(st.integers(0, 3))):
                frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
            extra = data.draw(st.lists(st.binary(max_size=40), max_size=2))
            sender = data.draw(st.sampled_from([b"remote-secret", b"remote-1"]))
            scene.pool.take([sender, bytes(frame), *extra], scene.world.now)
            scene.world.settle()
        assert scene.world.hub.counters.failed_messages == 0
        assert scene.world.hub.cache is not None
        scene.world.hub.cache.tasks.check()
        scene.engine.match(TaskKind.PUT, "xyz")
    finally:
        scene.world.close()
