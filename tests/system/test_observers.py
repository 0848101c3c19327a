"""An observer that cannot start does not harm the cache."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cluster import running_cluster, until

from flexcache import CacheConfig, KVManager, ModelConfig
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.server import KVServer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKENS = np.arange(64)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Hold a port, as another engine would."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_an_engine_whose_ports_are_taken_still_has_its_cache(
    taken_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "http_endpoint": str(taken_port),
        "kv_events": True,
        "kv_events_endpoint": f"tcp://127.0.0.1:{taken_port}",
    }
    with caplog.at_level(logging.ERROR, "flexcache"), running_cluster(**settings) as cluster:
        cluster.put(TOKENS, range(4))
        assert cluster.get(TOKENS, range(4)).mask.all()
        health = cluster.server.health()
        assert health == {"serving": True, "missing": ["KV events", "HTTP"]}
        assert cluster.manager.take_changes()  # changes can still be taken
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("observer_not_started" in line and str(taken_port) in line for line in lines)


def test_the_first_engine_of_a_server_is_served_even_if_events_cannot_be_published(
    taken_port: int,
) -> None:
    config = CacheConfig(num_cpu_blocks=8, kv_events_endpoint=f"tcp://127.0.0.1:{taken_port}")
    server = KVServer(config, private_endpoint("unseen"))
    server.start()
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16)
    try:
        with KVManager(model, config, endpoint=server.endpoint):
            until(lambda: server.hub.cache is not None)
            assert server.health()["missing"][-1] == "KV events"
    finally:
        server.shutdown()
