"""A forked child, as of `multiprocessing`, keeps and ends nothing of its parent's cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running_cluster, until

from flexcache.errors import ClosedError
from flexcache.protocol.endpoints import EndpointLock, is_served, private_endpoint
from flexcache.storage.pool_directory import PoolDirectory

TOKENS = np.arange(24 * 16)
SOURCE, DESTINATION = list(range(24)), list(range(24, 48))


def ours_in(pid: int) -> list[str]:
    """Our files and memory that a process has open."""
    names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return [name for name in names if "flexcache" in name]


@contextmanager
def child(does: Callable[[], None]) -> Iterator[int]:
    """A fork that has done something, and lives on."""
    context = get_context("fork")
    is_done, is_over = context.Event(), context.Event()

    def run() -> None:
        does()
        is_done.set()
        is_over.wait(120)

    process = context.Process(target=run)
    process.start()
    try:
        assert is_done.wait(60)
        assert process.pid is not None
        yield process.pid
        is_over.set()
    finally:
        process.join(60)
        process.kill()
    assert process.exitcode == 0


def end_all(cluster: Cluster) -> None:
    with pytest.raises(ClosedError, match=f"process {os.getppid()}"):
        cluster.manager.get_match(TOKENS)
    for client in cluster.clients:
        client.open_gates([1])
        client.close()
    cluster.manager.shutdown()
    cluster.server.shutdown()


def test_a_child_that_ends_what_it_inherited_ends_nothing_of_its_parents(tmp_path: Path) -> None:
    with running_cluster([tmp_path / "ssd"]) as cluster:
        before = cluster.read(SOURCE)
        with child(lambda: end_all(cluster)):
            assert cluster.put(TOKENS, SOURCE).mask.all()
            assert cluster.get(TOKENS, DESTINATION).mask.all()
            assert cluster.read(DESTINATION) == before
            assert is_served(cluster.manager.endpoint)
            cluster.manager.check()


def test_a_child_makes_a_cache_of_its_own(tmp_path: Path) -> None:
    def work() -> None:
        with running_cluster() as own:
            assert own.put(TOKENS, SOURCE).mask.all()

    with running_cluster() as cluster, child(work):
        assert cluster.put(TOKENS, SOURCE).mask.all()


def test_directories_and_memory_are_free_after_a_shutdown_though_a_child_lives(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        with running_cluster([tmp_path]) as cluster:
            cluster.put(TOKENS, SOURCE)
            pid = stack.enter_context(child(lambda: None))
        PoolDirectory(tmp_path).close()
        assert not ours_in(pid)


ENGINE = """
import multiprocessing, os, sys, time, torch
from flexcache import CacheConfig, KVManager, ModelConfig
model = ModelConfig("m", 1, 1, 8, torch.uint8)
directory = sys.argv[1]
config = CacheConfig(num_cpu_blocks=16, num_ssd_blocks=16, ssd_cache_dirs=[directory])
manager = KVManager(model, config, engine_id="a")
manager.start()
manager.stats()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
child.start()
print(child.pid, manager.endpoint, flush=True)
time.sleep(300)
"""


def test_all_is_free_after_the_parent_was_killed_though_a_child_lives(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid, endpoint = parent.stdout.readline().split()
        try:
            parent.kill()
            parent.wait()
            assert os.path.exists(f"/proc/{pid}")
            until(lambda: not is_served(endpoint))
            PoolDirectory(tmp_path).close()
            assert not ours_in(int(pid))
            EndpointLock(private_endpoint()).release()  # removes the files of the killed server
        finally:
            os.kill(int(pid), signal.SIGKILL)


def name_weights(cluster: Cluster) -> None:
    with pytest.raises(ClosedError, match=f"process {os.getppid()}"):
        cluster.manager.new_weights("v2")
    for client in cluster.clients:
        client.weights_changed("v2")


def test_a_child_of_a_process_that_is_updating_weights_names_none(tmp_path: Path) -> None:
    with running_cluster([tmp_path / "ssd"]) as cluster:
        assert cluster.put(TOKENS, SOURCE).mask.all()
        with cluster.clients[0]._updating, child(lambda: name_weights(cluster)):
            assert cluster.get(TOKENS, DESTINATION).mask.all()
