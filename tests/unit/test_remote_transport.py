"""An engine's client at a server played by the test: how a lost session ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
import torch
import zmq

from flexcache import CacheConfig, KVStatus, ModelConfig
from flexcache.cache.block_keys import TokenBlockKeys
from flexcache.cache.prompt import Prompt
from flexcache.client.client import EngineClient
from flexcache.client.remote import RemoteTransport
from flexcache.errors import ClosedError
from flexcache.ids import RootId, SessionId, TaskKind
from flexcache.protocol.call_stream import CallReader
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import (
    HelloEngine,
    Launch,
    Match,
    Matched,
    ToClient,
    ToServer,
    WelcomeEngine,
)
from flexcache.tasks.ids import TaskIds, make_session
from flexcache.transfer.messages import Stop
from flexcache.transfer.workers.permit import CopyPermit

Message = TypeVar("Message")
WAIT_S = 30.0
SESSION = make_session(7, 1)
PROMPT = Prompt(TokenBlockKeys(RootId(b"root"), np.arange(32), 16), 0, 2, 32)


class PlayedServer:
    """A server that sends what the test specifies."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}/s"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.rcvtimeo = int(WAIT_S * 1000)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self.fence = Fence.create()
        self._decode = msgspec.msgpack.Decoder(ToServer).decode

    def next(self, kind: type[Message]) -> tuple[bytes, Message]:
        """Return the next message of a kind, and its sender."""
        deadline = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < deadline, f"no {kind.__name__} comes"
            identity, data, *_ = self._socket.recv_multipart()
            message = self._decode(data)
            if isinstance(message, kind):
                return identity, message

    def say(self, identity: bytes, message: ToClient) -> None:
        self._socket.send_multipart([identity, msgspec.msgpack.encode(message)])

    def welcome(self, uses_scratch: bool = False, calls_path: str = "") -> bytes:
        """Begin a session; return the identity that gets its events."""
        identity, _ = self.next(HelloEngine)
        welcome = WelcomeEngine(
            SESSION, os.getpid(), self.fence.path, [], uses_scratch, calls_path=calls_path
        )
        self.say(identity, welcome)
        return identity

    def close(self) -> None:
        self._context.destroy()
        self.fence.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PlayedServer]:
    server = PlayedServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def client(server: PlayedServer) -> Iterator[EngineClient]:
    model = ModelConfig("m", 1, 1, 8, torch.float16)
    config = CacheConfig(endpoint=server.endpoint, server_timeout_s=2 * WAIT_S)
    client = EngineClient(RemoteTransport(server.endpoint, model, config, "e", 0.0))
    client.start()
    yield client
    client.shutdown()


def load(server: PlayedServer, client: EngineClient) -> int:
    """Have a task of two blocks matched and launched."""
    with ThreadPoolExecutor(1) as thread:
        matching = thread.submit(client.match, TaskKind.GET, PROMPT)
        identity, request = server.next(Match)
        server.say(identity, Matched(request.request_id, 0, 2, {"CPU": 2}, num_gpu_blocks=2))
        task = matching.result()
    client.launch([task.task_id], [np.arange(2)], gated=False)
    server.next(Launch)
    return task.task_id


def test_a_task_whose_server_is_lost_is_revoked_before_it_is_answered(
    server: PlayedServer, client: EngineClient
) -> None:
    events = server.welcome()
    client.wait_ready(WAIT_S)
    rank = Fence.open(server.fence.path)
    rank.hold()  # it hangs, and never lets go
    permit = CopyPermit(rank.words)
    permit.task_id = load(server, client)
    assert not permit.is_revoked
    server.say(events, Stop())
    [result] = client.results([permit.task_id], WAIT_S, completely=False).values()
    assert result.status is KVStatus.FAILED
    assert permit.is_revoked
    permit.task_id = TaskIds(SessionId(SESSION + 1)).next()
    assert not permit.is_revoked
    rank.close()


def test_a_client_that_lost_its_server_says_hello_in_one_conversation_until_it_is_welcomed(
    server: PlayedServer, client: EngineClient
) -> None:
    server.say(server.welcome(), Stop())
    greeters = {server.next(HelloEngine)[0] for _ in range(4)}
    assert len(greeters) == 1


@pytest.mark.parametrize("uses_scratch", [False, True])
def test_a_match_after_the_shutdown_is_refused(
    server: PlayedServer, client: EngineClient, uses_scratch: bool
) -> None:
    server.welcome(uses_scratch)
    client.wait_ready(WAIT_S)
    client.shutdown()
    with pytest.raises(ClosedError):
        client.match(TaskKind.GET, PROMPT)
    with pytest.raises(ClosedError):
        client.match_nowait(TaskKind.GET, PROMPT, look_up=False)


_LISTEN = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_calls_do_not_go_to_a_socket_at_which_another_process_listens(
    server: PlayedServer, client: EngineClient, tmp_path: Path
) -> None:
    path = str(tmp_path / "calls")
    command = [sys.executable, "-c", _LISTEN, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        server.welcome(calls_path=path)
        client.wait_ready(WAIT_S)
        load(server, client)


def test_a_match_whose_server_hangs_up_is_a_miss_at_once_and_a_new_session_is_sought(
    server: PlayedServer, client: EngineClient, tmp_path: Path
) -> None:
    path = str(tmp_path / "calls")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.settimeout(WAIT_S)
        listener.bind(path)
        listener.listen()
        server.welcome(calls_path=path)
        client.wait_ready(WAIT_S)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            matching = thread.submit(client.match, TaskKind.GET, PROMPT)
            reader, calls = CallReader(), []
            while len(calls) < 2:
                calls += reader.read(connection.recv(1 << 16))
        assert isinstance(msgspec.msgpack.decode(calls[1][0], type=ToServer), Match)
        assert matching.result(WAIT_S).num_blocks == 0
    server.next(HelloEngine)
