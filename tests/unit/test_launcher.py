"""A server is started if there is none, and no second one while the first is starting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexcache.client import remote as launcher
from flexcache.client.remote import ServerLauncher
from flexcache.config import CacheConfig, ServerConfig
from flexcache.server.process import has_left

SLOW = """
import os, sys, time
os.fork() and os._exit(0)
sys.stdin.read()
path = os.path.join({directory!r}, str(os.getpid()))
open(path + ".part", "w").close()
os.rename(path + ".part", path)
time.sleep(600)
"""


def started(directory: Path, count: int) -> list[int]:
    """Wait for this many started processes, and return them."""
    deadline = time.monotonic() + 60
    while len(pids := [int(p.name) for p in directory.iterdir() if p.name.isdecimal()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pids


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which servers that never come up leave their process ids."""
    monkeypatch.setattr(launcher, "_DETACH", SLOW.format(directory=str(tmp_path)))
    yield tmp_path
    for pid in started(tmp_path, 0):
        os.kill(pid, signal.SIGKILL)


def make_launcher(directory: Path) -> ServerLauncher:
    config = CacheConfig(num_cpu_blocks=4)
    return ServerLauncher(ServerConfig.for_engines(config, f"ipc://{directory}/x.sock"), 0.0)


def test_a_server_that_takes_long_to_come_up_is_started_once(slow: Path) -> None:
    starter = make_launcher(slow)
    for now in (100.0, 106.0, 120.0, 150.0):
        starter.ensure(now)
    assert len(started(slow, 1)) == 1
    starter.ensure(161.0)  # it hangs
    assert len(started(slow, 2)) == 2
    starter.close()


def test_a_server_that_died_before_it_came_up_is_replaced(slow: Path) -> None:
    starter = make_launcher(slow)
    starter.ensure(100.0)
    [first] = started(slow, 1)
    os.kill(first, signal.SIGKILL)
    now = 106.0
    while not set(started(slow, 1)) - {first}:
        starter.ensure(now)
        now += 0.001
        time.sleep(0.01)
    (slow / str(first)).unlink()
    starter.close()


def test_a_server_sees_that_the_engine_that_started_it_has_left(slow: Path) -> None:
    engine_fd, server_fd = os.pipe()
    assert not has_left(server_fd)
    os.close(engine_fd)
    assert has_left(server_fd)
    os.close(server_fd)


def test_a_launcher_leaves_no_descriptor_behind(slow: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    starter = make_launcher(slow)
    starter.ensure(100.0)
    started(slow, 1)
    starter.close()
    starter.close()
    assert set(os.listdir("/proc/self/fd")) == before
