"""The workers' socket under messages that no worker sends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from cluster import Cluster, running_cluster
from test_faults import SOURCE, TOKENS, until

from flexcache.logs import LogEvent
from flexcache.protocol.endpoints import runtime_dir
from flexcache.transfer.messages import Done, LookedUp, Ready, Stop

ABSURD: list[msgspec.Struct] = [
    Ready("again"), Done(-1, 1), Done(2**63, 2**63, error="?" * 1000),
    Done(1, -5, checksums=b"abc"), Done(1, 10**9, bad_block=True, checksums=bytes(8)),
    LookedUp(7, -3), LookedUp(2**63, 2**63, "?"), Stop(),
]  # fmt: skip
NO_MESSAGES = [
    [b""], [b"\xc1"], [b"\x93\x01\x02\x03"], [b"a", b"b"], [b"", b"", b""], [bytes(70_000)],
]  # fmt: skip


def worker_endpoint() -> str:
    """Return the workers' socket of the one running server."""
    (path,) = runtime_dir().glob("*.work")
    return f"ipc://{path}"


@contextmanager
def speaking_as(identity: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    """Connect a peer to the workers' socket, under a name of its choice."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 2000
        if identity is not None:
            socket.identity = identity
        socket.connect(worker_endpoint())
        yield socket


def refused(cluster: Cluster, why: str = "") -> int:
    rejected = cluster.manager.stats()["counters"]["rejected_messages"]
    return sum(count for reason, count in rejected.items() if reason.startswith(why))


def serves_on(cluster: Cluster, number: int) -> None:
    tokens = TOKENS + 10_000 * number
    expected = cluster.read(SOURCE)
    assert cluster.put(tokens, SOURCE).mask.all()
    cluster.manager.clear("CPU")
    cluster.wipe(SOURCE)
    assert cluster.get(tokens, SOURCE).mask.all()
    assert cluster.read(SOURCE) == expected


@pytest.mark.parametrize("identity", [None, b"disk-1", b"remote-1", b"\x07"])
def test_messages_of_a_stranger_at_the_workers_socket_are_dropped_and_counted(
    identity: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_cluster([tmp_path]) as cluster:
        frames = [[msgspec.msgpack.encode(message)] for message in ABSURD] + NO_MESSAGES
        with speaking_as(identity) as stranger:
            for message in frames:
                stranger.send_multipart(message)
            until(lambda: refused(cluster, "unknown_worker") == len(frames))
        serves_on(cluster, 1)
        assert cluster.manager.stats()["worker_restarts"] == {"disk": 0}
    told = [r.msg for r in caplog.records if isinstance(r.msg, LogEvent)]
    assert [event.name for event in told].count("worker_message_refused") == 1


def test_a_flood_of_noise_at_the_workers_socket_does_not_hold_up_the_server(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(5)
    with running_cluster([tmp_path]) as cluster, speaking_as(None) as stranger:
        for number in range(3000):
            stranger.send_multipart(
                [rng.bytes(int(n)) for n in rng.integers(0, 300, 1 + number % 3)]
            )
            if number % 1000 == 0:
                serves_on(cluster, number)
        until(lambda: refused(cluster) >= 3000)
        serves_on(cluster, 1)


def test_a_worker_that_sends_garbage_fails_its_own_ops_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr("flexcache.processes.secrets.token_hex", lambda _: str(next(numbers)))
    with running_cluster([tmp_path], op_timeout_s=5.0) as cluster:
        serves_on(cluster, 1)
        with speaking_as(b"disk-1") as impostor:
            frames = [[msgspec.msgpack.encode(message)] for message in ABSURD] + NO_MESSAGES
            for message in frames:
                impostor.send_multipart(message)
            until(lambda: refused(cluster) >= len(NO_MESSAGES))
            assert cluster.manager.stats()["counters"]["failed_messages"] == 0
            cluster.put(TOKENS, SOURCE)  # the impostor has the worker's ops now
            until(lambda: cluster.manager.stats()["worker_restarts"]["disk"] > 0)
        cluster.manager.wait_ready(60)
        serves_on(cluster, 2)
