"""Background jobs: one thread, a bounded queue, and an end that does not wait forever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from cluster import until

from flexcache import CacheConfig, KVManager, ModelConfig
from flexcache.protocol.messages import Clear, Failed, Reply
from flexcache.server import outbox as background
from flexcache.server.outbox import MAX_WAITING, BackgroundJob, BackgroundThread
from flexcache.server.server import KVServer
from flexcache.storage.disk_pool import DiskPool

WAIT_S = 60.0


class Disk:
    """Jobs that end when the test lets them."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.ended: list[tuple[int, Exception | None]] = []
        self.thread = BackgroundThread(lambda job, error: job.end(error))

    def begin(self, number: int) -> None:
        def work() -> None:
            assert self.answers.wait(WAIT_S)
            if number == 1:
                raise RuntimeError("not one that is foreseen")

        self.thread.begin(BackgroundJob(work, lambda error: self.ended.append((number, error))))


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()
    disk.thread.close()


def test_jobs_run_and_end_in_order_also_one_that_raises(disk: Disk) -> None:
    for number in range(4):
        disk.begin(number)
    disk.answers.set()
    assert disk.thread.close()
    assert [number for number, _ in disk.ended] == [0, 1, 2, 3]
    assert [type(error) for _, error in disk.ended if error is not None] == [RuntimeError]
    assert disk.thread.close()


def test_jobs_beyond_the_bound_are_ended_at_once_with_the_reason(disk: Disk) -> None:
    for number in range(500):
        disk.begin(number)
    refused = [error for _, error in disk.ended]
    assert 500 - MAX_WAITING - 1 <= len(refused) <= 500 - MAX_WAITING
    assert all("the disk is behind" in str(error) for error in refused)


def test_closing_does_not_wait_for_a_disk_that_hangs(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_CLOSE_PATIENCE_S", 0.01)
    disk.begin(0)
    assert not disk.thread.close()
    assert disk.ended == []


def why_not_ready(manager: KVManager) -> str:
    with pytest.raises(TimeoutError) as reason:
        manager.wait_ready(0)
    return str(reason.value)


def test_a_flood_of_clears_makes_one_thread_and_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(DiskPool, "erase", lambda *_: answers.wait(WAIT_S))
    config = CacheConfig(
        num_cpu_blocks=16, tokens_per_block=16, num_ssd_blocks=16, ssd_cache_dirs=[str(tmp_path)]
    )
    endpoint = f"ipc://{tmp_path}/s.sock"
    server = KVServer(config, endpoint)
    server.start()
    manager = KVManager(ModelConfig("m", 1, 1, 8, torch.uint8), CacheConfig(), endpoint=endpoint)
    try:
        manager.start()
        until(lambda: "rank 0" in why_not_ready(manager))  # it has its session
        calls: zmq.Socket[bytes] = manager._transport._calls._socket  # type: ignore[attr-defined]
        calls.rcvtimeo = int(WAIT_S * 1000)
        for number in range(100):
            calls.send(msgspec.msgpack.encode(Clear(number, "SSD")))
        reply = msgspec.msgpack.decode(calls.recv(), type=Reply)
        assert isinstance(reply, Failed) and "the disk is behind" in reply.reason
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("flexcache-background") == 1
    finally:
        answers.set()
        manager.shutdown()
        server.shutdown()
