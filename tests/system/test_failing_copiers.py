"""A rank whose copier, driver or device fails: the server is notified, and nothing stays held."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cluster import Cluster, joined_kv, running_cluster
from test_faults import SOURCE, TOKENS, until

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.client import lent_tensors as attachment
from flexcache.client import rank
from flexcache.client.rank import ClientState
from flexcache.errors import RegistrationError
from flexcache.ids import OpKind
from flexcache.protocol.fence import Fence
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import Runs
from flexcache.transfer.cpu_copier import CpuCopier

MODEL = ModelConfig("test", 3, 4, 32, torch.bfloat16)


class DriverFault(Exception):
    """An error of a class unknown to the project."""


class Landed:
    """The completion of a copy, whose query may fail."""

    def __init__(self, copier: FailingCopier) -> None:
        self._copier = copier

    def query(self) -> bool:
        self._copier.reach("query")
        return True

    def wait(self) -> None:
        self._copier.reach("wait")


class FailingCopier:
    """Copies on the CPU that complete later; each step may fail or hang."""

    def __init__(self) -> None:
        self._copier = CpuCopier()
        self.numa_node = None
        self.wakes = False
        self.fails_at: set[str] = set()
        self.is_sticky = False
        self.num_closed = 0
        self.hangs_at: dict[str, threading.Event] = {}
        self.reached: set[str] = set()

    def reach(self, step: str) -> None:
        self.reached.add(step)
        if step in self.hangs_at:
            self.hangs_at[step].wait()
        if step in self.fails_at:
            if self.is_sticky:
                self.fails_at = {"attach", "start", "query", "wait", "close"}
            raise DriverFault("an illegal memory access was encountered")

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        self.reach("attach")
        after_each_step()

    def may_start(self, kind: OpKind, after: object) -> bool:
        return True

    def queue(self, kind: OpKind) -> None:
        return None

    def fence(self) -> None:
        pass

    def start(
        self, runs: Runs, kind: OpKind, after: None, urgent: bool = False, alone: bool = False
    ) -> Landed:
        self.reach("start")
        self._copier.start(runs, kind, after)
        return Landed(self)

    def close(self) -> None:
        self.num_closed += 1
        self.reach("close")


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingCopier]:
    copier = FailingCopier()
    monkeypatch.setattr(attachment, "open_copier", lambda *_: copier)
    yield copier
    for event in copier.hangs_at.values():
        event.set()


def holds_the_pool() -> bool:
    """Return whether the host pool is mapped in this process; the server does not map it."""
    return "flexcache-host-pool" in Path("/proc/self/maps").read_text()


def fence_is_free() -> bool:
    """Return whether no rank holds the fence, which is closed with the engine's last client."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError, RegistrationError):
            if "flexcache-fence" in os.readlink(path):
                fence = Fence.open(str(path))
                try:
                    return fence.is_free()
                finally:
                    fence.close()
    return True


@pytest.mark.parametrize("is_sticky", [False, True])
def test_a_rank_that_cannot_tell_what_has_landed_fails_its_ops_and_leaves(
    copier: FailingCopier, is_sticky: bool
) -> None:
    with running_cluster() as cluster:
        assert cluster.put(TOKENS[:64], SOURCE[:4]).mask.all()
        copier.fails_at, copier.is_sticky = {"query"}, is_sticky
        response = cluster.put(TOKENS, SOURCE)
        assert response.status is KVStatus.FAILED
        assert "illegal memory access" in (response.error or "")
        client = cluster.clients[0]
        until(lambda: client.state is ClientState.REFUSED)
        assert "illegal memory access" in (client.error or "")
        until(lambda: cluster.manager.stats()["workers"] == {})
        assert cluster.get(TOKENS[:64], SOURCE[:4]).status is KVStatus.NOT_FOUND
        assert copier.num_closed
        assert fence_is_free()
        assert not holds_the_pool()
        assert cluster.num_leased() == 0


@pytest.mark.parametrize("is_sticky", [False, True])
def test_waiters_in_the_engine_are_answered_when_their_rank_fails(
    copier: FailingCopier, is_sticky: bool
) -> None:
    with running_cluster() as cluster:
        cluster.put(TOKENS, SOURCE)
        manager, client = cluster.manager, cluster.clients[0]
        copier.fails_at, copier.is_sticky = {"query"}, is_sticky
        put, _ = manager.put_match(TOKENS + 10_000)
        get, _ = manager.get_match(TOKENS)
        manager.launch([put], [cluster.slots(SOURCE)], gated=True)
        manager.launch([get], [cluster.slots(SOURCE)], gated=True)
        client.open_gates([put])
        ended: dict[int, int] = {}
        until(lambda: bool(ended.update(client.take_ended([put])) or ended))
        assert ended == {put: 0}
        assert not client.load_by_layer(get, len(SOURCE)).wait_all(60)
        assert set(manager.wait([put, get], 30)) == {put, get}


def test_a_copy_that_cannot_start_fails_its_op_whatever_the_error_and_the_rank_goes_on(
    copier: FailingCopier,
) -> None:
    with running_cluster() as cluster:
        copier.fails_at = {"start"}
        response = cluster.put(TOKENS, SOURCE)
        assert response.status is KVStatus.FAILED
        assert "illegal memory access" in (response.error or "")
        copier.fails_at = set()
        assert cluster.put(TOKENS, SOURCE).mask.all()


@pytest.mark.parametrize("fails_at", [{"attach"}, {"attach", "close"}])
def test_a_rank_that_cannot_attach_is_refused_with_the_reason_and_holds_nothing(
    copier: FailingCopier, fails_at: set[str]
) -> None:
    copier.fails_at = fails_at
    with KVManager(MODEL, CacheConfig(num_cpu_blocks=8)) as manager:
        client = KVTPClient(manager.endpoint)
        client.register_kv_caches(joined_kv(MODEL, tokens=16))
        with pytest.raises(RegistrationError, match="illegal memory access"):
            manager.wait_ready(30)
        with pytest.raises(RegistrationError, match="illegal memory access"):
            client.wait_registered(30)
        assert copier.num_closed
        assert not holds_the_pool()
        client.close()


def test_a_rank_holds_the_fence_only_when_it_is_ready_to_copy(copier: FailingCopier) -> None:
    copier.hangs_at["attach"] = threading.Event()
    cluster = Cluster(MODEL, CacheConfig(num_cpu_blocks=48), joined_kv)
    try:
        cluster.manager.start()
        client = cluster.add_client(0, cluster.kv[0])
        until(lambda: "attach" in copier.reached)
        assert fence_is_free()
        copier.hangs_at["attach"].set()
        client.wait_registered(30)
        assert not fence_is_free()
    finally:
        copier.hangs_at["attach"].set()
        cluster.stop()


def test_closing_a_rank_whose_copier_hangs_returns_and_says_so(
    copier: FailingCopier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank, "_CLOSE_PATIENCE_S", 0.1)
    with running_cluster() as cluster:
        [client] = cluster.clients
        copier.hangs_at["close"] = threading.Event()
        with caplog.at_level(logging.ERROR):
            client.close()
        assert "rank_not_closed" in caplog.text
        assert client.state is not ClientState.CLOSED
        assert not fence_is_free()
        copier.hangs_at["close"].set()
        until(lambda: not any(t.name == "flexcache-rank0" for t in threading.enumerate()))
        assert fence_is_free()
        client.close()
        assert client.state is ClientState.CLOSED
