"""Every use of a server's hub, task engine and outbox is under its lock, which answers wait for."""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import joined_kv
from ports import free_port
from test_faults import TOKENS, until

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.density import DensityPolicy
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.hub import Hub
from flexcache.server.outbox import Outbox
from flexcache.server.server import KVServer
from flexcache.server.state import ServerState
from flexcache.tasks.engine import KVTaskEngine

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


UNGUARDED = {"state", "lock", "changed", "config"}
"""The way to the lock, and what never changes."""


class Watch:
    """Records every use by a thread that does not hold the server's lock."""

    def __init__(self) -> None:
        self.server: KVServer | None = None
        self.violations: dict[str, str] = {}

    def used(self, name: str) -> None:
        if self.server is None or self.server._changed._is_owned():  # type: ignore[attr-defined]
            return
        self.violations.setdefault(name, "".join(traceback.format_stack(limit=6)[:-2]))

    def watched(self, base: type) -> type:
        """Return a class whose attribute uses are all recorded."""
        watch = self

        class Watched(base):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                if not name.startswith("__") and name not in UNGUARDED:
                    watch.used(f"{base.__name__}.{name}")
                return super().__getattribute__(name)

        return Watched


def ask(port: int, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_hub_engine_and_outbox_are_used_under_the_lock_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr("flexcache.server.server.Hub", watch.watched(Hub))
    monkeypatch.setattr("flexcache.server.server.ServerState", watch.watched(ServerState))
    monkeypatch.setattr("flexcache.server.state.Outbox", watch.watched(Outbox))
    monkeypatch.setattr("flexcache.server.cache.KVTaskEngine", watch.watched(KVTaskEngine))
    port = free_port()
    config = CacheConfig(
        num_cpu_blocks=48, num_ssd_blocks=96, ssd_cache_dirs=[str(tmp_path)],
        remote_url="memory://", http_endpoint=str(port), ssd_write_policy="write_back",
        endpoint=private_endpoint("locked"), trace_dir=str(tmp_path / "traces"),
        server_timeout_s=60.0,
    )  # fmt: skip
    server = KVServer(config)
    watch.server = server
    server.start()
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16)
    client = KVTPClient(server.endpoint, engine_id="engine")
    try:
        with KVManager(model, config, engine_id="engine") as manager:
            client.register_kv_caches(joined_kv(model, 16))
            manager.wait_ready(60)
            until(lambda: manager.stats()["remote"]["available"])
            for number in range(4):
                tokens = TOKENS + 10_000 * number
                (task_id, _) = manager.put_async(tokens, TOKENS)
                manager.wait([task_id], 60)
            os.kill(manager.stats()["workers"]["disk"], signal.SIGKILL)
            assert ask(port, "/cache/prefetch", {"token_ids": TOKENS.tolist()})["blocks"] >= 0
            manager.clear("SSD")  # a background job
            ask(port, "/cache/clear", {"tier": None})
            assert ask(port, "/status")["tiers"]
            ask(port, "/cache/prefetch", {"token_ids": (TOKENS + 7).tolist()})
            manager.wait_ready(60)
            task_id, _ = manager.get_async(tokens, TOKENS)
            assert manager.wait([task_id], 60)[task_id].status is not KVStatus.FAILED
            manager.check()
    finally:
        client.close()
        server.shutdown()
    assert not watch.violations, "\n".join(f"{k}\n{v}" for k, v in watch.violations.items())


def test_an_answer_does_not_wait_for_what_is_learned_from_its_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_answered, was_answered = threading.Event(), list[bool]()
    look_up = DensityPolicy.look_up

    def wait_and_look_up(policy: DensityPolicy, keys: BlockKeys, *more: Any) -> None:
        if keys.num_blocks == 23:
            was_answered.append(is_answered.wait(30))
        look_up(policy, keys, *more)

    monkeypatch.setattr(DensityPolicy, "look_up", wait_and_look_up)
    config = CacheConfig(num_cpu_blocks=48, endpoint=private_endpoint("learning"))
    server = KVServer(config)
    server.start()
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16)
    client = KVTPClient(server.endpoint, engine_id="engine")
    try:
        with KVManager(model, config, engine_id="engine") as manager:
            client.register_kv_caches(joined_kv(model, 16))
            manager.wait_ready(60)
            manager.wait([manager.put_async(TOKENS, TOKENS)[0]], 60, completely=True)
            _, mask = manager.get_match(TOKENS[: 23 * 16])
            is_answered.set()
            assert mask.all(), "the client gave up"
            until(lambda: was_answered)
        assert was_answered == [True]
    finally:
        is_answered.set()
        client.close()
        server.shutdown()
