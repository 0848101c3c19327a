"""A server's sockets under random and mutated frames, from strangers and registered engines.

FUZZ_FRAMES says how many of each kind (default 1,500).
"""

from __future__ import annotations

import os
import socket as sockets
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from cluster import until
from load import make_model, tokens_of
from test_shared import Member, members
from test_soak import resident_mb

from flexcache import CacheConfig
from flexcache.config.values import server_of
from flexcache.ids import TaskIds, TaskKind
from flexcache.protocol.endpoints import private_endpoint, runtime_dir
from flexcache.protocol.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    CheckInvariants,
    Clear,
    GetStats,
    Goodbye,
    HelloEngine,
    HelloRank,
    Launch,
    Match,
    ModelSpec,
    Ping,
    Register,
    WelcomeEngine,
)
from flexcache.transfer.messages import Done, LookedUp, Ready, Stop

FRAMES = int(os.environ.get("FUZZ_FRAMES", 1500))
SPEC = ModelSpec.of(make_model(), 16)


def valid_messages(ids: TaskIds) -> list[Any]:
    return [
        HelloRank("fuzz", 0, "fuzz", os.getpid()), Register("layout", 4), Done(1, 1),
        HelloEngine("fuzz", "fuzz", os.getpid(), SPEC, b"other calls"),
        Match(1, ids.next(), TaskKind.PUT, bytes(16), 0, 4, 64, 8),
        Match(1, ids.next(), TaskKind.GET, bytes(16), 0, 4, 64, 0),
        Launch(ids.next(), bytes(32), True), Cancel(bytes(8)), Clear(1, "CPU"), GetStats(1),
        CheckInvariants(1), Ping(), Goodbye(),
    ]  # fmt: skip


def mutated(rng: np.random.Generator, messages: list[Any]) -> list[bytes]:
    """Return a valid message with bytes changed, cut off or added, and perhaps more frames."""
    frame = bytearray(msgspec.msgpack.encode(messages[rng.integers(len(messages))]))
    for _ in range(rng.integers(4)):
        frame[rng.integers(len(frame))] = rng.integers(256)
    if rng.random() < 0.2:
        del frame[rng.integers(len(frame)) :]
    frames = [bytes(frame)]
    while rng.random() < 0.5:
        frames.append(rng.bytes(rng.integers(200)))
    return frames


def noise(rng: np.random.Generator) -> list[bytes]:
    return [rng.bytes(int(rng.exponential(200))) for _ in range(rng.integers(1, 4))]


def drained(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    answers = []
    while socket.poll(0):
        answers.append(socket.recv_multipart())
    return answers


def send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """A peer that sends faster than the server reads has to wait, and read its answers."""
    while True:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            drained(socket)
            time.sleep(0.001)
        else:
            return


def test_strangers_do_not_disturb_clients() -> None:
    rng = np.random.default_rng(11)
    mine = Member(CacheConfig(num_cpu_blocks=256, client_timeout_s=6.0))
    with members(mine), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server_of(mine.manager.endpoint))
        messages = [m for m in valid_messages(TaskIds(0)) if not isinstance(m, HelloEngine)]  # type: ignore[arg-type]
        for number in range(FRAMES):
            send(socket, noise(rng) if number % 2 else mutated(rng, messages))
            drained(socket)
            if number % 100 == 0:
                mine.load.step()
        serves_on(mine)


def test_strangers_at_the_workers_socket_do_not_disturb_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(14)
    config = CacheConfig(
        num_cpu_blocks=256, num_ssd_blocks=512, ssd_cache_dirs=[str(tmp_path)],
        endpoint=private_endpoint("workers"),
    )  # fmt: skip
    mine = Member(config)
    with members(mine), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        (path,) = runtime_dir().glob("*.work")
        socket.linger = 0
        socket.identity = b"disk-1"
        socket.connect(f"ipc://{path}")
        messages = [Ready("?"), Done(1, 1, checksums=bytes(8)), LookedUp(1, 1), Stop()]
        for number in range(FRAMES):
            send(socket, noise(rng) if number % 2 else mutated(rng, messages))
            if number % 100 == 0:
                mine.load.step()
        serves_on(mine)
        stats = mine.manager.stats()
        assert stats["counters"]["rejected_messages"]["unknown_worker"] > 0
        assert stats["worker_restarts"] == {"disk": 0}


@pytest.mark.whole
def test_an_engine_that_sends_garbage_does_not_disturb_the_others() -> None:
    rng = np.random.default_rng(12)
    mine = Member(CacheConfig(num_cpu_blocks=256, client_timeout_s=6.0))
    with members(mine), zmq.Context() as context:
        pid = mine.manager.stats()["server_pid"]
        before, sent = resident_mb(pid), 0
        while sent < FRAMES:
            with context.socket(zmq.DEALER) as events, context.socket(zmq.DEALER) as calls:
                ids = in_session(server_of(mine.manager.endpoint), events, calls)
                for _ in range(100):
                    send(calls if rng.random() < 0.8 else events, mutated(rng, valid_messages(ids)))
                    drained(calls)
                    drained(events)
                    sent += 1
                mine.load.step()
                events.send(msgspec.msgpack.encode(Goodbye()))
                time.sleep(0)
        assert resident_mb(pid) - before < 200
        serves_on(mine)


def in_session(endpoint: str, events: zmq.Socket[bytes], calls: zmq.Socket[bytes]) -> TaskIds:
    """Open both sockets of an engine, in a session with its own name."""
    events.identity, calls.identity = os.urandom(8).hex().encode(), os.urandom(8).hex().encode()
    name = events.identity.decode()
    for socket in (events, calls):
        socket.linger = 200
        socket.connect(endpoint)
    hello = HelloEngine(name, name, os.getpid(), SPEC, calls.identity)
    events.send(msgspec.msgpack.encode(hello))
    assert events.poll(60_000)
    welcome = msgspec.msgpack.decode(events.recv(), type=WelcomeEngine)
    return TaskIds(welcome.session)  # type: ignore[arg-type]


def test_an_oversized_frame_is_refused_and_a_huge_one_cut_off() -> None:
    mine = Member(CacheConfig(num_cpu_blocks=256, client_timeout_s=6.0))
    with members(mine), zmq.Context() as context:
        pid = mine.manager.stats()["server_pid"]
        before = resident_mb(pid)
        for size in (MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES):
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 2000
                socket.connect(server_of(mine.manager.endpoint))
                socket.send(bytes(size))
                if size < 2 * MAX_FRAME_BYTES:
                    assert socket.poll(60_000)
                    assert b"oversized" in socket.recv()
        serves_on(mine)
        assert mine.manager.stats()["counters"]["rejected_messages"]["oversized"] == 1
        assert resident_mb(pid) - before < 200


def test_peers_that_do_not_speak_zmq_are_ignored() -> None:
    rng = np.random.default_rng(13)
    mine = Member(CacheConfig(num_cpu_blocks=256, client_timeout_s=6.0))
    with members(mine):
        path = server_of(mine.manager.endpoint).removeprefix("ipc://")
        for _ in range(50):
            with sockets.socket(sockets.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(rng.bytes(int(rng.integers(1, 500))))
        serves_on(mine)


def serves_on(mine: Member) -> None:
    """Check that the server still works."""
    until(lambda: mine.manager.is_ready())
    mine.manager.check()
    assert mine.manager.stats()["counters"]["cache_forgotten"] == 0
    mine.load.put(4 * 7777, 20)
    assert mine.load.get(4 * 7777, 20) == 20
    assert mine.load.seen.wrong == []
    task_id, mask = mine.manager.get_match(tokens_of(4 * 7777, 20))
    assert mask.all()
    mine.manager.cancel([task_id])
