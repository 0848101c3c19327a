"""Connections that do nothing use up neither an engine's descriptors nor its life."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from ports import free_ports

from flexcache.client.link import read_status

SOFT, HARD, NUM_IDLE = 256, 600, 290
ALLOWED = HARD // 4
ENGINE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {HARD}))
import torch
from flexcache import CacheConfig, KVManager, ModelConfig
events, replay = (f"tcp://127.0.0.1:{{port}}" for port in sys.argv[1:])
config = CacheConfig(
    num_cpu_blocks=16, kv_events_endpoint=events, kv_events_replay_endpoint=replay
)
with KVManager(ModelConfig("m", 1, 1, 8, torch.uint8), config) as manager:
    print(manager.endpoint, events, replay, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def engine() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """An engine's process, where its server is, and where it publishes events."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, *map(str, free_ports(2))], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()
        process.kill()


def num_files(process: subprocess.Popen[str]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_connected(client: socket.socket, place: str) -> bool:
    try:
        client.connect(place)
    except BlockingIOError:  # as many wait to be accepted as may
        return False
    return True


@contextmanager
def idle_connections(endpoint: str) -> Iterator[None]:
    kind, _, place = endpoint.partition("#")[0].partition("://")
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            if kind == "ipc":
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                until(lambda client=client: _is_connected(client, place))
            else:
                host, _, port = place.rpartition(":")
                stack.enter_context(socket.create_connection((host, int(port)), 30))
        yield


@pytest.mark.whole
@pytest.mark.parametrize("port", [1, 2])
def test_those_to_the_ports_of_kv_events_are_bounded_and_the_engine_lives(
    port: int, engine: tuple[subprocess.Popen[str], list[str]]
) -> None:
    process, endpoints = engine
    assert read_status(endpoints[0], None, 30)
    before = num_files(process)
    with idle_connections(endpoints[port]):
        assert read_status(endpoints[0], None, 30)  # one more by ipc:// ended the process
        until(lambda: num_files(process) <= before + ALLOWED + 1)
        assert read_status(endpoints[0], None, 30)
    assert process.poll() is None
    _, log = process.communicate("")
    assert process.returncode == 0
    assert "connections_refused" in log and log.count("connections_refused") == 1


def test_those_to_the_server_are_bounded_and_leave_room_once_they_end(
    engine: tuple[subprocess.Popen[str], list[str]],
) -> None:
    process, endpoints = engine
    assert read_status(endpoints[0], None, 30)
    before = num_files(process)
    with idle_connections(endpoints[0]):
        until(lambda: before + ALLOWED // 2 < num_files(process) <= before + ALLOWED + 1)
    until(lambda: num_files(process) <= before + 1)
    assert read_status(endpoints[0], None, 30)
    process.communicate("")
    assert process.returncode == 0
