"""An engine's client at a server played by the test: how a lost session ends."""

from __future__ import annotations

import os
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

from flexcache import CacheConfig, KVManager, KVStatus, ModelConfig
from flexcache.client import remote as life
from flexcache.errors import ClosedError
from flexcache.ids import SessionId, TaskIds, TierName, make_session
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
from flexcache.tasks.instructions import Offer
from flexcache.transfer.copier import CopyPermit
from flexcache.transfer.messages import Stop

Message = TypeVar("Message")
WAIT_S = 30.0
SESSION = make_session(7, 1)
TOKENS = range(32)


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

    def welcome(self, uses_scratch: bool = False) -> bytes:
        """Begin a session; return the identity that gets its events."""
        identity, _ = self.next(HelloEngine)
        path = self.fence.path
        self.say(identity, WelcomeEngine(SESSION, os.getpid(), path, [], uses_scratch))
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
def client(server: PlayedServer) -> Iterator[KVManager]:
    model = ModelConfig("m", 1, 1, 8, torch.float16)
    config = CacheConfig(endpoint=server.endpoint)
    client = KVManager(model, config, engine_id="e")
    client.start()
    yield client
    client.shutdown()


def load(server: PlayedServer, client: KVManager) -> int:
    """Have a task of two blocks matched and launched."""
    with ThreadPoolExecutor(1) as thread:
        matching = thread.submit(client.get_match, np.array(TOKENS))
        identity, request = server.next(Match)
        kind, num_tokens = request.kind, request.num_tokens
        offer = Offer(request.task_id, kind, num_tokens, 0, 2, {TierName.CPU: 2}, 2)
        server.say(identity, Matched(request.request_id, offer))
        task_id, _ = matching.result()
    client.launch([task_id], [np.array(TOKENS)])
    server.next(Launch)
    return task_id


def test_a_task_whose_server_is_lost_is_revoked_before_it_is_answered(
    server: PlayedServer, client: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = server.welcome()
    client.wait_ready(WAIT_S)
    rank = Fence.open(server.fence.path)
    rank.hold()  # it hangs, and never lets go
    permit = CopyPermit(rank.words)
    permit.task_id = load(server, client)
    assert not permit.is_revoked
    monkeypatch.setattr(life, "_ANSWER_WITHIN_S", 0.0)  # it is waited for in full
    server.say(events, Stop())
    [response] = client.wait([permit.task_id], WAIT_S).values()
    assert response.status is KVStatus.FAILED
    assert permit.is_revoked
    permit.task_id = TaskIds(SessionId(SESSION + 1)).next()
    assert not permit.is_revoked
    rank.close()


def test_a_client_that_lost_its_server_says_hello_in_one_conversation_until_it_is_welcomed(
    server: PlayedServer, client: KVManager
) -> None:
    server.say(server.welcome(), Stop())
    greeters = [server.next(HelloEngine)[0] for _ in range(8)]
    assert len(set(greeters[4:])) == 1  # the first ones may have been on their way


@pytest.mark.parametrize("uses_scratch", [False, True])
def test_a_match_after_the_shutdown_is_refused(
    server: PlayedServer, client: KVManager, uses_scratch: bool
) -> None:
    server.welcome(uses_scratch)
    client.wait_ready(WAIT_S)
    client.shutdown()
    with pytest.raises(ClosedError):
        client.get_match(np.array(TOKENS))
    with pytest.raises(ClosedError):
        client.get_match_by_tier(np.array(TOKENS), look_up=False)
