"""A rank shows the server that it lives while it gets ready, and hears when the server stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
from flexcache.client import lent_tensors as attachment
from flexcache.client.link import ServerLink
from flexcache.protocol.messages import Ping
from flexcache.server.server import KVServer
from flexcache.transfer.cuda_copier import show_life_during
from flexcache.transfer.messages import Stop

WAIT_S = 60.0


def test_heartbeats_are_sent_until_the_work_is_done() -> None:
    shown = threading.Event()
    assert show_life_during(lambda: shown.wait(WAIT_S), shown.set)


def test_exceptions_of_the_work_propagate() -> None:
    def fail() -> None:
        raise ValueError("no way")

    with pytest.raises(ValueError, match="no way"):
        show_life_during(fail, lambda: None)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[KVServer, KVManager, KVTPClient]]:
    endpoint = f"ipc://{tmp_path}/s.sock"
    server = KVServer(CacheConfig(num_cpu_blocks=16), endpoint)
    server.start()
    manager = KVManager(ModelConfig("m", 1, 1, 8, torch.uint8), CacheConfig(), endpoint=endpoint)
    client = KVTPClient(manager.endpoint)
    yield server, manager, client
    client.close()
    manager.shutdown()
    server.shutdown()


def register(client: KVTPClient) -> None:
    client.register_kv_caches({"layer": torch.zeros((4, 2, 16, 1, 8), dtype=torch.uint8)})


def test_a_rank_sends_heartbeats_while_its_copier_is_compiled(
    parts: tuple[KVServer, KVManager, KVTPClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manager, client = parts
    pinged = threading.Event()
    offer, open_copier = ServerLink.offer, attachment.open_copier

    def watch(link: ServerLink, message: Any) -> None:
        offer(link, message)
        if isinstance(message, Ping) and threading.current_thread().name == "flexcache-rank0":
            pinged.set()

    def compile_until_pinged(*arguments: Any) -> Any:
        pinged.clear()
        assert pinged.wait(20)
        return open_copier(*arguments)

    monkeypatch.setattr(ServerLink, "offer", watch)
    monkeypatch.setattr(attachment, "open_copier", compile_until_pinged)
    manager.start()
    register(client)
    manager.wait_ready(WAIT_S)


@pytest.mark.parametrize("round_", range(4))
def test_both_ends_of_an_engine_learn_that_the_server_stops(
    parts: tuple[KVServer, KVManager, KVTPClient],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    round_: int,
) -> None:
    server, manager, client = parts
    heard = threading.Semaphore(0)
    take = KVTPClient._take

    def watch(rank: KVTPClient, message: Any) -> bool:
        if isinstance(message, Stop):
            heard.release()
        return take(rank, message)

    monkeypatch.setattr(KVTPClient, "_take", watch)
    manager.start()
    register(client)
    manager.wait_ready(WAIT_S)
    server.shutdown()
    assert heard.acquire(timeout=20)  # without it only silence tells, since the process lives
    with pytest.raises(TimeoutError, match="the server was stopped"):
        manager.wait_ready(0.5)
