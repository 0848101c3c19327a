"""Errors inside the cache of a running engine or server: what is got is right, or a miss.

Each method of `flexcache.cache` and `flexcache.tasks` that these workloads reach fails once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running_cluster
from failing_calls import FailingMethods

from flexcache import CacheConfig, KVStatus
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.server import KVServer

SIZE, BLOCKS = 16, 8
FAMILIES = 3
ERRORS = (MemoryError, KeyboardInterrupt)
SLOTS = list(range(BLOCKS))
PATIENCE_S = 20.0


def tokens_of(number: int) -> np.ndarray:
    """Return a prompt that shares its first half with the others of its family."""
    shared = np.full(BLOCKS // 2 * SIZE, number % FAMILIES)
    return np.concatenate((shared, np.full(BLOCKS // 2 * SIZE, 1000 + number)))


class Workload:
    """Puts and gets prompts whose KV bytes tell which prompt and block they are of."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.num_hits = 0

    def _fill(self, number: int) -> None:
        for kv in self._cluster.kv:
            for tensor in kv.values():
                for block in SLOTS:
                    who = number if block >= BLOCKS // 2 else number % FAMILIES
                    tensor[block] = 8 * (who % 30) + block + 1

    def put(self, number: int) -> None:
        manager = self._cluster.manager
        self._fill(number)
        task_id, _ = manager.put_async(tokens_of(number), self._cluster.slots(SLOTS))
        manager.wait([task_id], PATIENCE_S)

    def get(self, number: int) -> None:
        """Get a prompt, and compare what came."""
        cluster = self._cluster
        self._fill(number)
        expected = cluster.read(SLOTS)
        cluster.wipe(SLOTS)
        task_id, mask = cluster.manager.get_match(tokens_of(number))
        count = int(mask.sum()) // SIZE
        cluster.manager.launch([task_id], [cluster.slots(SLOTS[:count])])
        answer = cluster.manager.wait([task_id], PATIENCE_S)[task_id]
        assert answer.status is not KVStatus.TIMEOUT
        num_ok = int(answer.mask.sum()) // SIZE
        self.num_hits += num_ok
        found = cluster.read(SLOTS)
        for layer in range(len(found) // BLOCKS):
            begin = layer * BLOCKS
            assert found[begin : begin + num_ok] == expected[begin : begin + num_ok]

    def cancel(self, number: int) -> None:
        manager = self._cluster.manager
        task_id, _ = manager.put_match(tokens_of(number))
        manager.cancel([task_id])


def let_each_method_fail(
    cluster: Cluster, failing: FailingMethods, errors: tuple[type[BaseException], ...],
    here_only: bool,
) -> int:  # fmt: skip
    """Work on, with one error at a time; return how often all was forgotten."""
    work, num_quiet = Workload(cluster), 0
    for turn in itertools.count():
        first, num_before = 4 * turn, len(failing.failed)
        failing.arm(errors[turn % len(errors)], here_only)
        for act, number in [
            (work.put, first), (work.get, first), (work.put, first + 1), (work.cancel, first + 2),
            (work.put, first + 3), (work.get, first + 1), (work.get, first - 7),
        ]:  # fmt: skip
            try:
                act(number)
            except errors:
                pass
            except Exception:  # a server says that the call has failed
                if here_only:
                    raise
        failing.disarm()
        for number in range(max(0, first - 4), first + 4):
            work.get(number)
        num_quiet = num_quiet + 1 if len(failing.failed) == num_before else 0
        if num_quiet == 3:
            break
    assert work.num_hits
    return int(cluster.manager.stats()["counters"]["cache_forgotten"])


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """Records of the log would keep the frames that have failed, and what these hold open."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_an_engines_own_cache_is_right_or_empty_whatever_fails(tmp_path: Path) -> None:
    sizes = {"num_cpu_blocks": 40, "num_ssd_blocks": 80}
    with FailingMethods() as failing, running_cluster([tmp_path], **sizes) as cluster:
        num_forgotten = let_each_method_fail(cluster, failing, ERRORS, here_only=True)
    assert len(failing.failed) > 100
    assert num_forgotten > 50


def test_a_servers_cache_is_right_or_empty_whatever_fails() -> None:
    server = KVServer(CacheConfig(num_cpu_blocks=40), private_endpoint("failing"))
    with FailingMethods() as failing:
        server.start()
        with running_cluster(endpoint=server.endpoint) as cluster:
            num_forgotten = let_each_method_fail(cluster, failing, (MemoryError,), here_only=False)
        server.shutdown()
    assert len(failing.failed) > 100
    assert num_forgotten > 50


HALF_WAY = ("_unqueue", "_queue_if_evictable", "release")


@pytest.mark.parametrize("method", HALF_WAY)
def test_an_ssd_holds_nothing_wrong_for_the_next_process(method: str, tmp_path: Path) -> None:
    """After an error half-way the first process works on, with a full SSD."""
    sizes = {"num_cpu_blocks": 24, "num_ssd_blocks": 48}
    with FailingMethods(method) as failing, running_cluster([tmp_path], **sizes) as cluster:
        work = Workload(cluster)
        for number in range(12):
            work.put(number)
        failing.arm(MemoryError, here_only=False)
        for number in range(12, 300):
            try:
                work.put(number)
                work.get(number - 3)
            except MemoryError:
                pass
            if failing.failed and number >= 24:
                break
        failing.disarm()
        assert failing.failed
    with running_cluster([tmp_path], **sizes) as cluster:
        work = Workload(cluster)
        for each in range(number + 1):
            work.get(each)
