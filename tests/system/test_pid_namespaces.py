"""A server and an engine in different pid namespaces, as in two containers of one host."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch

from flexcache import CacheConfig, ModelConfig
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.server import KVServer

ENGINE = """
import sys, torch
from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
import flexcache.client.rank, flexcache.client.remote
endpoint, knows, patience = sys.argv[1:]
if knows == "no":  # as a client that does not say where its process id counts
    flexcache.client.remote.pid_namespace = flexcache.client.rank.pid_namespace = lambda: 0
model = ModelConfig("m", 1, 1, 8, torch.uint8)
manager = KVManager(model, CacheConfig(), endpoint=endpoint, engine_id="e")
client = KVTPClient(endpoint, engine_id="e")
client.register_kv_caches({"layer": torch.zeros((4, 2, 16, 1, 8), dtype=torch.uint8)})
with manager, client:
    for wait in (manager.wait_ready, client.wait_registered):
        try:
            wait(float(patience))
        except Exception as error:
            print(type(error).__name__, error)
    print(manager.get_match(list(range(32)))[1].any())
"""


def run_elsewhere(*arguments: str) -> list[str]:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can make a pid namespace, with unshare")
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-c",
        ENGINE,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def endpoint() -> str:
    return private_endpoint()


def test_they_are_refused_by_name(endpoint: str) -> None:
    server = KVServer(CacheConfig(num_cpu_blocks=16), endpoint)
    server.start()
    try:
        ours = os.stat("/proc/self/ns/pid").st_ino
        engine, rank, hit = run_elsewhere(endpoint, "yes", "20")
        for line in (engine, rank):
            assert line.startswith("RegistrationError")
            assert f"the server in {ours}" in line and "--pid=host" in line
        assert hit == "False"
    finally:
        server.shutdown()


@pytest.mark.whole
def test_a_client_whose_sessions_all_fail_pauses_longer_and_longer(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flexcache")
    server = KVServer(
        CacheConfig(num_cpu_blocks=16), endpoint, model=ModelConfig("m", 1, 1, 8, torch.uint8)
    )
    server.start()
    try:
        engine, _, hit = run_elsewhere(endpoint, "no", "4")
        assert engine.startswith("TimeoutError") and "fence at" in engine
        assert hit == "False"
    finally:
        server.shutdown()
    events = [getattr(record.msg, "name", "") for record in caplog.records]
    assert 2 <= events.count("session_began") <= 12  # without pauses 30 a second
