"""Clients connect only to servers of their own user; another user's are refused by name."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest
import torch
import zmq
from ports import free_port
from zmq.utils.monitor import recv_monitor_message

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
from flexcache.client.link import read_status
from flexcache.errors import RegistrationError, UntrustedError
from flexcache.protocol import trust
from flexcache.protocol.endpoints import EndpointLock, is_served
from flexcache.protocol.messages import (
    Clear,
    GetStats,
    HelloEngine,
    ModelSpec,
    Refused,
    ToClient,
    WelcomeEngine,
)
from flexcache.protocol.trust import (
    Doorkeeper,
    check_server_process,
    find_listener,
    find_peer,
    stranger_of,
)
from flexcache.server.server import KVServer

OTHER_USER = 65_534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def _serve(endpoint: str, is_up: Event, is_over: Event, was_connected: Event) -> None:
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    os.umask(0)
    place = endpoint.partition("://")[2]
    family = socket.AF_UNIX if endpoint.startswith("ipc") else socket.AF_INET
    with socket.socket(family) as listener:
        if family is socket.AF_UNIX:
            listener.bind(place)
            Path(f"{place}.lock").write_text("1\n")
        else:
            host, _, port = place.rpartition(":")
            listener.bind((host, int(port)))
        listener.listen()
        is_up.set()
        is_over.wait(120)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.accept()
            was_connected.set()


@contextmanager
def another_user_serves(endpoint: str) -> Iterator[int]:
    """Run a process of another user that listens there; nothing must connect to it."""
    context = get_context("fork")
    is_up, is_over, was_connected = context.Event(), context.Event(), context.Event()
    process = context.Process(target=_serve, args=(endpoint, is_up, is_over, was_connected))
    process.start()
    try:
        assert is_up.wait(60)
        assert process.pid is not None
        yield process.pid
    finally:
        is_over.set()
        process.join(60)
    assert not was_connected.is_set()


@pytest.fixture
def shared_dir(tmp_path: Path) -> Iterator[Path]:
    """Make a directory that every user can reach and write to."""
    path = Path(f"/tmp/fc-shared-{os.getpid()}")
    path.mkdir()
    path.chmod(0o1777)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


MODEL = ModelConfig("m", 1, 1, 8, torch.uint8)


def _say(endpoint: str, uid: int, heard: Connection) -> None:
    os.setgid(uid)
    os.setuid(uid)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.ipv6 = 0, "[" in endpoint
        socket.connect(endpoint)
        hello = HelloEngine(f"of-{uid}", "c", os.getpid(), ModelSpec.of(MODEL, 16), b"calls")
        for message in (hello, Clear(1, None), GetStats(2)):
            socket.send(msgspec.msgpack.encode(message))
        for _ in range(3):
            heard.send_bytes(socket.recv() if socket.poll(30_000) else b"")
        heard.recv_bytes()  # stay connected until the other end has heard enough


@contextmanager
def heard_by(uid: int, endpoint: str) -> Iterator[list[object]]:
    """What a server answers to a user that greets, clears and asks, who stays connected."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_say, args=(endpoint, uid, theirs))
    process.start()
    try:
        assert ours.poll(60)
        answers = [ours.recv_bytes() for _ in range(3)]
        yield [msgspec.msgpack.decode(answer, type=ToClient) for answer in answers]
    finally:
        ours.send_bytes(b"")
        process.join(60)


@contextmanager
def serving(endpoint: str) -> Iterator[KVServer]:
    server = KVServer(CacheConfig(num_cpu_blocks=16), endpoint)
    server.start()
    try:
        yield server
    finally:
        server.shutdown()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_socket_is_told_apart_from_one_that_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    endpoint = f"ipc://{path}"
    assert find_listener(endpoint, False) is None
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))
        found = find_listener(endpoint, False)
        assert found is not None
        path.chmod(0o600)
        assert find_listener(endpoint, False) == found
    path.unlink()
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(str(path))
        assert find_listener(endpoint, False) not in (found, None)


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_is_told_apart_from_one_that_takes_its_place(bound: str, host: str) -> None:
    found = []
    with socket.socket() as first:
        first.bind((bound, 0))
        port = first.getsockname()[1]
        assert find_listener(f"tcp://{host}:{port}", False) is None
        first.listen()
        found.append(find_listener(f"tcp://{host}:{port}", False))
    with socket.socket() as second:
        second.bind((bound, port))
        second.listen()
        found.append(find_listener(f"tcp://{host}:{port}", False))
    assert None not in found
    assert found[0] != found[1]


def test_a_path_that_is_not_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s.sock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError, match=r"s\.sock is not a socket"):
        find_listener(f"ipc://{tmp_path}/s.sock", False)


def test_a_directory_that_others_can_write_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for use in (lambda e: find_listener(e, False), EndpointLock):
        with pytest.raises(UntrustedError, match=f"chmod go-w {tmp_path}"):
            use(f"ipc://{tmp_path}/s.sock")
    tmp_path.chmod(0o1777)
    assert find_listener(f"ipc://{tmp_path}/s.sock", False) is None


@as_root
def test_another_users_socket_in_a_shared_directory_is_refused_by_name(shared_dir: Path) -> None:
    endpoint = f"ipc://{shared_dir}/s.sock"
    with another_user_serves(endpoint):
        for use in (lambda e: find_listener(e, False), is_served, EndpointLock):
            with pytest.raises(UntrustedError, match=rf"{shared_dir}/s.sock.*{OTHER_USER}"):
                use(endpoint)


@as_root
def test_another_users_lock_in_a_shared_directory_is_not_taken(shared_dir: Path) -> None:
    lock = shared_dir / "s.sock.lock"
    lock.touch()
    os.chown(lock, OTHER_USER, OTHER_USER)
    with pytest.raises(UntrustedError, match=rf"lock {lock} belongs to .*{OTHER_USER}"):
        EndpointLock(f"ipc://{shared_dir}/s.sock")
    assert lock.read_text() == ""


@as_root
def test_another_users_port_and_process_are_refused_by_name() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with another_user_serves(endpoint) as pid:
        with pytest.raises(UntrustedError, match=rf"{endpoint} is served by .*{OTHER_USER}"):
            find_listener(endpoint, False)
        assert find_listener(endpoint, True) is not None  # keys prove who it is
        with pytest.raises(UntrustedError, match=rf"process {pid} belongs to .*{OTHER_USER}"):
            check_server_process(pid, [])


@as_root
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_no_client_connects_to_what_another_user_serves(shared_dir: Path, kind: str) -> None:
    place = f"{shared_dir}/s.sock" if kind == "ipc" else f"127.0.0.1:{free_port()}"
    endpoint = f"{kind}://{place}"
    with another_user_serves(endpoint):
        model = ModelConfig("m", 1, 1, 8, torch.uint8)
        manager = KVManager(model, CacheConfig(), endpoint=endpoint)
        client = KVTPClient(manager.endpoint)
        client.register_kv_caches({"layer": torch.zeros((4, 2, 16, 1, 8), dtype=torch.uint8)})
        refused = rf"{place} .*{OTHER_USER}.*start the server as this user"
        try:
            manager.start()
            with pytest.raises(RegistrationError, match=refused):
                manager.wait_ready(60)
            with pytest.raises(RegistrationError, match=refused):
                client.wait_registered(60)
        finally:
            client.close()
            manager.shutdown()
        with pytest.raises(UntrustedError, match=refused):
            read_status(endpoint, None, 1.0)


@as_root
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_over_tcp_without_keys_a_server_refuses_other_users_by_name(host: str) -> None:
    with serving(f"tcp://{host}:{free_port()}") as server:
        manager = KVManager(MODEL, CacheConfig(), endpoint=server.endpoint)
        client = KVTPClient(manager.endpoint)
        client.register_kv_caches({"layer": torch.zeros((4, 2, 16, 1, 8), dtype=torch.uint8)})
        with client, manager:
            manager.wait_ready(60)
            task, _ = manager.put_async(range(32), range(32))
            assert manager.wait([task], 60)[task].mask.all()
            with heard_by(OTHER_USER, server.endpoint) as answers:
                assert all(isinstance(answer, Refused) for answer in answers)
                assert f"({OTHER_USER}), the server to user root (0)" in str(answers[0])
                assert manager.get_match(range(32))[1].all()  # and was not cleared
                with heard_by(0, server.endpoint) as ours:  # comes while the other is connected
                    assert any(isinstance(answer, WelcomeEngine) for answer in ours)


def test_a_cache_that_was_served_outlives_another_users_listener_at_its_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    config = CacheConfig(num_cpu_blocks=16)
    manager = KVManager(ModelConfig("m", 1, 1, 8, torch.uint8), CacheConfig(), endpoint=endpoint)
    client = KVTPClient(manager.endpoint)
    client.register_kv_caches({"layer": torch.zeros((4, 2, 16, 1, 8), dtype=torch.uint8)})
    try:
        server = KVServer(config, endpoint)
        server.start()
        manager.start()
        manager.wait_ready(60)
        with monkeypatch.context() as patch:
            theirs = (ip_address("127.0.0.1"), port, OTHER_USER, 99)
            patch.setattr(trust, "_listeners", lambda: iter([theirs]))
            server.shutdown()

            def notices() -> int:
                texts = [record.getMessage() for record in caplog.records]
                return sum("is served by user" in text for text in texts)

            until(lambda: notices() == 2)
        server = KVServer(config, endpoint)
        server.start()
        manager.wait_ready(60)
        client.wait_registered(60)
    finally:
        client.close()
        manager.shutdown()
        server.shutdown()


def test_a_socket_is_private_to_its_user_from_the_first_moment_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)  # what comes after is too late
    server = KVServer(CacheConfig(num_cpu_blocks=16), f"ipc://{tmp_path}/s.sock")
    umask = os.umask(0)
    try:
        server.start()
        assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    finally:
        os.umask(umask)
        server.shutdown()
    assert not (tmp_path / "s.sock").exists()


def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/s.sock")
    server = KVServer(CacheConfig(num_cpu_blocks=16), f"ipc://{tmp_path}/s.sock")
    server.start()
    try:
        assert read_status(server.endpoint, None, 30.0)
    finally:
        server.shutdown()


@pytest.mark.parametrize(
    "path", ["/proc/1/fd/3", "/tmp/x", "/proc/{pid}/fd/../mem", "/proc/{pid}/fd/3\n"]
)
def test_memory_of_another_process_than_the_server_is_refused(path: str) -> None:
    pid = os.getpid()
    check_server_process(pid, [f"/proc/{pid}/fd/7"])
    with pytest.raises(UntrustedError, match="is not memory of server process"):
        check_server_process(pid, [path.format(pid=pid)])


def _idle(port: int, count: int, are_there: Event, is_over: Event) -> None:
    "".encode("idna")  # loads what the other user cannot read
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        are_there.set()
        is_over.wait(120)


@as_root
def test_another_users_idle_connections_do_not_shut_the_owner_out() -> None:
    """Over TCP without keys, where they are accepted before they are told apart."""
    fork = get_context("fork")
    are_there, is_over = fork.Event(), fork.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as door:
        doorkeeper = Doorkeeper([door], 16, only_own_user=True)
        port = door.bind_to_random_port("tcp://127.0.0.1")
        process = fork.Process(target=_idle, args=(port, 40, are_there, is_over))
        process.start()
        try:
            assert are_there.wait(60)
            with context.socket(zmq.DEALER) as owner:
                owner.linger = 0
                owner.connect(f"tcp://127.0.0.1:{port}")
                owner.send(b"hello")
                assert door.poll(20_000), "it is not let in"
                frames = door.recv_multipart(copy=False)
                assert stranger_of(frames[-1]) is None
                assert len(str(frames[-1].get("User-Id"))) < 1000
        finally:
            is_over.set()
            process.join(60)
            doorkeeper.close()


def test_a_pipe_where_a_connection_was_ends_when_its_writer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: Queue[int] = Queue()
    goes_on = threading.Event()

    def read_late(monitor: Any) -> Any:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_ACCEPTED:
            accepted.put(event["value"])
            assert goes_on.wait(60)
        return event

    monkeypatch.setattr(trust, "recv_monitor_message", read_late)
    reader, writer = os.pipe()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as door:
        doorkeeper = Doorkeeper([door], 16)
        port = door.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)):
            connection = accepted.get(timeout=60)
        until(lambda: not Path(f"/proc/self/fd/{connection}").exists())
        os.dup2(writer, connection)  # as a child's output may be
        goes_on.set()
        doorkeeper.close()
    os.close(writer)
    os.close(connection)
    assert select.select([reader], [], [], 60)[0], "something holds the other end"
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("bound", "host"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1")]
)
def test_the_user_at_the_other_end_is_found_in_either_family(bound: str, host: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    is_dual = bound == "::"
    with (
        socket.create_server((bound, 0), family=family, dualstack_ipv6=is_dual) as listener,
        socket.create_connection((host, listener.getsockname()[1])) as client,
        listener.accept()[0] as ours,
    ):
        there, here = client.getsockname()[:2], client.getpeername()[:2]
        assert find_peer(here, there) == os.geteuid()
        assert find_peer(ours.getsockname()[:2], ours.getpeername()[:2]) == os.geteuid()
        assert find_peer(here, (host, 1)) is None
