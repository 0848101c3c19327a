"""The parts of the server's event loop by themselves: waiting, idling, checking."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from test_hub import TIMEOUT_S, Engine, World

from flexcache.errors import InternalError
from flexcache.server.loop import EventLoop, IdleExit
from flexcache.server.outbox import BackgroundThread
from flexcache.server.reactor import Reactor, RouterSocket, Sent
from flexcache.server.workers import WorkerPool

WAIT_S = 60.0


class Loop:
    """A reactor with a bound socket."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = RouterSocket(self.context)
        self.socket.zmq_socket.bind("inproc://loop")
        self.reactor = Reactor()
        self.reactor.open(self.socket)
        self.ended: list[str] = []

    def wait(self) -> None:
        """Wait for an event, a minute at most."""
        for report in self.reactor.wait(lambda now: now + WAIT_S):
            report(time.monotonic())

    def wait_long(self) -> None:
        """Wait twice: the first wait of a loop that was busy only looks."""
        self.wait()
        self.wait()

    def close(self) -> None:
        self.reactor.close()
        self.socket.close()
        self.context.term()


def num_pidfds() -> int:
    """How many pidfds this process has open."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(path))
    return sum("pidfd" in link for link in links)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no wait end at once since the one before has only just ended."""
    monkeypatch.setattr("flexcache.server.reactor._POLL_INTERVAL_S", WAIT_S)


@pytest.mark.usefixtures("looks_seldom")
def test_a_wait_ends_when_another_thread_wakes_the_loop(loop: Loop) -> None:
    began = time.monotonic()
    loop.wait()
    threading.Timer(0.05, loop.reactor.wake).start()
    loop.wait()
    assert time.monotonic() - began < WAIT_S / 2
    loop.reactor.stop()
    assert loop.reactor.stopping


@pytest.mark.usefixtures("looks_seldom")
def test_a_wait_ends_when_it_is_due(loop: Loop) -> None:
    began = time.monotonic()
    for _ in range(2):
        assert loop.reactor.wait(lambda now: now + 0.02) == []
    assert 0.02 <= time.monotonic() - began < WAIT_S / 2


def test_a_wait_ends_with_a_message_that_can_then_be_received(loop: Loop) -> None:
    with loop.context.socket(zmq.DEALER) as peer:
        peer.identity = b"peer"
        peer.connect("inproc://loop")
        peer.send(b"hello")
        loop.wait_long()
        assert loop.socket.receive() == [b"peer", b"hello"]
        assert loop.socket.receive() is None
        assert loop.socket.send(b"peer", b"welcome") is Sent.QUEUED
        assert peer.recv() == b"welcome"
        assert loop.socket.send(b"stranger", b"?") is Sent.GONE
        loop.reactor.spins = True
        loop.reactor.took_message()
        peer.send(b"again")
        loop.wait()
        assert loop.socket.receive() == [b"peer", b"again"]


def test_what_a_peer_does_not_read_is_bounded_in_bytes(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    large, socket = bytes(1 << 20), loop.socket
    with loop.context.socket(zmq.DEALER) as mute, loop.context.socket(zmq.DEALER) as other:
        for peer, identity in ((mute, b"mute"), (other, b"other")):
            peer.identity, peer.rcvhwm = identity, 1
            peer.connect("inproc://loop")
            peer.send(b"hello")
            loop.wait_long()
            assert loop.socket.receive() == [identity, b"hello"]
        for each in range(10_000):
            assert socket.send(b"other", b"%d" % each) is Sent.QUEUED
        sent = [socket.send(b"mute", large) for _ in range(1000)]
        assert sent.index(Sent.UNREAD) < 300
        num_dropped = sent.count(Sent.UNREAD)
        assert num_dropped >= 700 // 17  # 16 MiB at a time
        assert [r.msg.name for r in caplog.records] == ["client_does_not_read"] * num_dropped
        for each in range(10_000):  # who is slower than the server misses nothing
            while not other.poll(1):
                socket.flush()
            assert other.recv() == b"%d" % each
        while not mute.poll(1) or mute.recv() == large:  # it reads again
            socket.send(b"mute", b"news")
            socket.flush()
    while socket.send(b"mute", b"news") is not Sent.GONE:
        assert socket.receive() is None  # libzmq notices that a peer is gone when it is read from
        socket.flush()
    assert not socket.has_unsent


def test_the_end_of_a_watched_process_is_reported_until_it_is_unwatched(
    loop: Loop,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = num_pidfds()
    loop.reactor.watch_process(b"one", process.pid, lambda _: loop.ended.append("one"))
    loop.reactor.watch_process(b"other", other.pid, lambda _: loop.ended.append("other"))
    assert num_pidfds() == before + 2
    loop.reactor.unwatch_process(b"other")
    for each in (other, process):
        each.communicate()
    loop.wait_long()
    assert set(loop.ended) == {"one"}
    loop.reactor.unwatch_process(b"one")
    loop.reactor.unwatch_process(b"one")
    loop.reactor.watch_process(b"gone", process.pid, lambda _: loop.ended.append("gone"))
    assert num_pidfds() == before


def test_an_idle_server_ends_some_time_after_its_last_client_died() -> None:
    idle_exit = IdleExit(15.0, lambda: True, now=100.0)
    assert not idle_exit.is_due(True, False, 1000.0)
    assert not idle_exit.is_due(False, False, 1000.0)
    assert not idle_exit.is_due(False, False, 1014.9)
    assert not idle_exit.is_due(True, False, 1015.0)  # another one has come
    assert not idle_exit.is_due(False, False, 1020.0)
    assert idle_exit.is_due(False, False, 1035.0)


def test_an_idle_server_ends_at_once_after_an_orderly_disconnect() -> None:
    idle_exit = IdleExit(15.0, lambda: True, now=100.0)
    assert not idle_exit.is_due(True, False, 101.0)
    assert idle_exit.is_due(False, True, 101.1)


def test_a_server_without_a_client_yet_waits_longer_if_one_is_expected() -> None:
    needed = IdleExit(0.5, lambda: True, now=100.0)
    assert not needed.is_due(False, False, 159.0)
    assert needed.is_due(False, False, 161.0)
    assert IdleExit(0.5, lambda: False, now=100.0).is_due(False, False, 102.1)


def test_the_hubs_check_finds_leftovers_of_an_engine_that_is_gone() -> None:
    world = World()
    Engine(world).register()
    world.hub.check()
    state = world.hub.state
    fence = state.engine("gone").fence
    with pytest.raises(InternalError, match="engines and their peers disagree"):
        world.hub.check()
    del state.engines["gone"]
    fence.close()
    for table in (state.ranks, state.callers, state.sessions):
        entry = table.popitem()
        with pytest.raises(InternalError, match="disagree"):
            world.hub.check()
        table.update([entry])
    world.hub.check()
    world.close()


def test_silent_clients_are_looked_for_several_times_a_timeout(loop: Loop) -> None:
    world = World()
    world.now = time.monotonic()
    Engine(world)
    pool = WorkerPool(loop.reactor, world.hub)
    background = BackgroundThread(lambda job, error: None)
    events = EventLoop(world.hub, loop.reactor, loop.socket, pool, background, None)
    serving = threading.Thread(target=events.run, daemon=True)
    serving.start()
    give_up_s = time.monotonic() + WAIT_S
    while not world.now < loop.reactor.wakes_at_s < math.inf and time.monotonic() < give_up_s:
        time.sleep(0.001)
    assert loop.reactor.wakes_at_s < time.monotonic() + TIMEOUT_S / 2
    loop.reactor.stopping = True
    loop.reactor.wake()
    serving.join(WAIT_S)
    world.close()
