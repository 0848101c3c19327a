"""A client to which no message can be sent, as seen by the others."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
import zmq
from cluster import PATIENCE_S, until
from load import make_model
from test_shared import Member, serving, until_free

from flexcache.config import CacheConfig
from flexcache.protocol.endpoints import private_endpoint
from flexcache.protocol.messages import (
    Clear,
    GetStats,
    HelloEngine,
    HelloRank,
    ModelSpec,
    Ping,
    Register,
    SessionOver,
    ToClient,
    WelcomeEngine,
)
from flexcache.server import reactor
from flexcache.server.reactor import RouterSocket, Sent
from flexcache.server.server import KVServer

ENGINE = "an engine"
SPEC = ModelSpec.of(make_model(), 16)


def say(socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
    socket.send(msgspec.msgpack.encode(message))


def hear(socket: zmq.Socket[bytes], kind: type) -> None:
    """Wait for a message of this kind."""
    while socket.poll(PATIENCE_S * 1000):
        message = msgspec.msgpack.decode(socket.recv(), type=ToClient)
        if isinstance(message, kind):
            return
    raise AssertionError(f"no {kind.__name__} came")


def test_a_rank_learns_that_its_scheduler_was_given_up_though_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The event loop looks again, unasked, only if its last look was this long ago.
    monkeypatch.setattr(reactor, "_POLL_INTERVAL_S", 1e6)
    send, is_full = RouterSocket.send, threading.Event()

    def send_unless_full(socket: RouterSocket, identity: bytes, data: bytes) -> Sent:
        if identity == b"events" and is_full.is_set():
            return Sent.UNREAD
        return send(socket, identity, data)

    monkeypatch.setattr(RouterSocket, "send", send_unless_full)
    config = CacheConfig(num_cpu_blocks=64, client_timeout_s=100_000.0)
    server = KVServer(config, private_endpoint("unread"))
    server.start()
    try:
        with zmq.Context() as context:
            events, rank = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            with events, rank:
                for socket, identity in ((events, b"events"), (rank, b"rank")):
                    socket.linger, socket.identity = 0, identity
                    socket.connect(server.endpoint)
                say(events, HelloEngine(ENGINE, "its scheduler", os.getpid(), SPEC, b"calls"))
                hear(events, WelcomeEngine)
                say(rank, HelloRank(ENGINE, 0, "its rank", os.getpid()))
                say(rank, Register("a layout", 4))
                server.wait_ready(ENGINE, PATIENCE_S)
                is_full.set()
                say(events, Ping())
                hear(rank, SessionOver)
    finally:
        server.shutdown()


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "has_session",
    [
        pytest.param(True, id="a session"),
        pytest.param(False, id="a stranger", marks=pytest.mark.whole),
    ],
)
def test_a_client_that_asks_and_never_reads_costs_others_nothing(has_session: bool) -> None:
    endpoint = private_endpoint("unread-answers")
    with serving("--endpoint", endpoint, FLEXCACHE_NUM_CPU_BLOCKS="64") as process:
        victim = Member(CacheConfig(endpoint=endpoint, server_timeout_s=60.0), engine_id="victim")
        with zmq.Context() as context:
            events, calls = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            with events, calls:
                victim.manager.wait_ready(PATIENCE_S)
                victim.load.put(3, 20)
                for socket, identity in ((events, b"events"), (calls, b"calls")):
                    socket.linger, socket.identity, socket.sndhwm = 0, identity, 0
                    socket.rcvhwm = 1
                    socket.connect(endpoint)
                if has_session:
                    spec = ModelSpec.of(victim.model, 16)
                    say(events, HelloEngine("greedy", "a client", os.getpid(), spec, b"calls"))
                    hear(events, WelcomeEngine)
                before = resident_bytes(process.pid)
                for each in range(200):  # one whose refusal could quote a MiB
                    say(calls, Clear(each, "x" * (1 << 20)))
                for each in range(4000):
                    say(calls, GetStats(each))

                def was_dropped() -> bool:
                    assert victim.load.get(3, 20) == 20
                    assert victim.load.seen.wrong == []
                    assert resident_bytes(process.pid) - before < 100 << 20
                    return bool(victim.manager.stats()["counters"]["unread_messages"])

                until(was_dropped)
                until(lambda: victim.manager.stats()["engines"].keys() == {"victim/dp0"})
                assert victim.load.get(3, 20) == 20
        victim.close()
    until_free(endpoint)
