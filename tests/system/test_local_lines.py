"""Ranks in the process of their server: ops and reports take no socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cluster import PATIENCE_S, Cluster, running_cluster, until

from flexcache import KVStatus
from flexcache.client.lent_tensors import Attachment
from flexcache.client.link import ServerLink
from flexcache.client.rank import ClientState, KVTPClient
from flexcache.client.rank_ops import RankTasks
from flexcache.ids import OpId, OpKind, TaskId
from flexcache.server.loop import EventLoop
from flexcache.server.outbox import LocalLine
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done, Execute
from flexcache.transfer.scheduler import TransferOp

TOKENS = np.arange(64)
BLOCKS = [0, 1, 2, 3]


@contextmanager
def standing(
    patch: pytest.MonkeyPatch, owner: type, method: str, nudge: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Have the thread that calls a method stand still there meanwhile; ``nudge`` has it call."""
    goes_on, stands = threading.Event(), threading.Event()
    call = getattr(owner, method)

    def stand(*arguments: object) -> object:
        stands.set()
        assert goes_on.wait(PATIENCE_S)
        return call(*arguments)

    with patch.context() as patched:
        patched.setattr(owner, method, stand)
        nudge()
        assert stands.wait(PATIENCE_S)
        try:
            yield
        finally:
            goes_on.set()


def standing_loop(patch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    """Have the server's event loop stand still meanwhile."""
    return standing(patch, EventLoop, "_turn")


def standing_rank(patch: pytest.MonkeyPatch, client: KVTPClient) -> AbstractContextManager[None]:
    """Have a rank's thread stand still meanwhile, where it waits for messages."""
    return standing(patch, ServerLink, "receive", client._link.wake)


def store_and_load(cluster: Cluster, gated: bool) -> None:
    """Put a prompt, wipe its blocks and get it into others, and compare all bytes."""
    manager, [client] = cluster.manager, cluster.clients
    expected = cluster.read(BLOCKS)
    for match, blocks in ((manager.put_match, BLOCKS), (manager.get_match, [8, 9, 10, 11])):
        task_id, mask = match(TOKENS)
        assert mask.all()
        manager.launch([task_id], [cluster.slots(blocks)], gated=gated)
        if gated:
            client.open_gates([task_id])
            assert client.wait_ended(PATIENCE_S)
            assert client.take_ended([task_id]) == {task_id: len(blocks)}
        response = manager.wait([task_id], PATIENCE_S, completely=True)[task_id]
        assert response.status is KVStatus.SUCCESS
    assert cluster.read([8, 9, 10, 11]) == expected


@pytest.mark.parametrize("gated", [False, True])
def test_copies_do_not_wait_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        with standing_loop(monkeypatch):
            store_and_load(cluster, gated)
        cluster.manager.check()


def test_the_loop_is_woken_for_what_a_report_has_it_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.client.link._PING_INTERVAL_S", 2 * PATIENCE_S)
    with running_cluster([tmp_path], client_timeout_s=20 * PATIENCE_S) as cluster:
        store_and_load(cluster, gated=False)
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == len(BLOCKS)
        expected = cluster.read(BLOCKS)
        assert cluster.manager.clear("CPU") == len(BLOCKS)
        assert cluster.get(TOKENS, [4, 5, 6, 7]).mask.all()
        assert cluster.read([4, 5, 6, 7]) == expected


def test_the_deadline_of_an_op_is_seen_in_time_though_nothing_else_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexcache.client.link._PING_INTERVAL_S", 2 * PATIENCE_S)
    with running_cluster(client_timeout_s=20 * PATIENCE_S, op_timeout_s=0.2) as cluster:
        manager = cluster.manager
        task_id, _ = manager.put_match(TOKENS)
        with monkeypatch.context() as patched:
            patched.setattr(DeviceWorker, "advance", lambda worker: [])  # it hangs
            manager.launch([task_id], [cluster.slots(BLOCKS)])
            response = manager.wait([task_id], PATIENCE_S)[task_id]
        assert response.status is KVStatus.FAILED
        assert "missed its deadline" in (response.error or "")


def test_a_rank_that_has_left_is_passed_nothing_more() -> None:
    with running_cluster() as cluster:
        lines = cluster.server.hub.outbox.lines
        [(identity, line)] = lines.items()
        [client] = cluster.clients
        client.close()
        until(lambda: not cluster.server.hub.outbox.lines)
        assert isinstance(line, LocalLine)
        line.report([Done(1, 1)])  # of a rank that the hub does not know
        assert cluster.manager.put_match(TOKENS)[1].sum() == 0
        cluster.manager.check()
        cluster.clients[:] = [cluster.add_client(0, cluster.kv[0])]
        cluster.clients[0].wait_registered(PATIENCE_S)
        store_and_load(cluster, gated=True)
        assert identity not in lines


def test_a_closed_client_is_not_woken_for_an_op_though_the_server_does_not_know_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        manager, [client] = cluster.manager, cluster.clients
        with standing_loop(monkeypatch):
            client.close()
            task_id, mask = manager.put_match(TOKENS)
            assert mask.all()
            manager.launch([task_id], [cluster.slots(BLOCKS)])
        assert manager.wait([task_id], PATIENCE_S)[task_id].status is KVStatus.FAILED
        manager.check()


class Lines:
    """The server of a line: each report is answered at once."""

    def __init__(self) -> None:
        self.line: LocalLine | None = None

    def take_reports(self, identity: bytes, reports: object) -> None:
        assert self.line is not None
        self.line.put(op(2, gated=False))


def op(task_id: int, gated: bool) -> RunOp:
    blocks = np.arange(2)
    transfer = TransferOp(OpId(task_id), OpKind.D2H, 0, blocks, blocks)
    return RunOp("device", TaskId(task_id), transfer, None, gated)


class Rank:
    """A rank whose thread takes what gates hold when they open, and starts nothing unless told."""

    def __init__(self) -> None:
        self.num_woken = 0
        self.starts = self.is_interrupted = False
        self.started: list[TaskId] = []

    def wake(self) -> None:
        self.num_woken += 1

    def start(self, run: RunOp) -> None:
        if self.starts:
            self.started.append(run.task_id)
        if self.is_interrupted:
            raise KeyboardInterrupt

    def has_started(self, run: RunOp) -> bool:
        return run.task_id in self.started

    def can_wait(self, run: RunOp) -> bool:
        return run.gated


def test_a_ranks_thread_is_woken_only_where_it_would_not_look() -> None:
    rank, lines = Rank(), Lines()
    lines.line = LocalLine(lines, b"rank", rank)
    lines.line.put(op(1, gated=True))
    assert rank.num_woken == 0
    lines.line.report([Done(1, 2)])  # it looks after its own reports
    assert rank.num_woken == 0
    assert [execute.op_id for execute in lines.line.take()] == [1, 2]
    lines.line.put(op(3, gated=False))
    assert rank.num_woken == 1
    assert len(lines.line.take()) == 1
    assert lines.line.take() == []


def test_no_op_is_started_before_those_that_came_before_it() -> None:
    rank = Rank()
    line = LocalLine(Lines(), b"rank", rank)
    line.put(op(1, gated=False))
    rank.starts = True
    line.put(op(2, gated=False))
    assert rank.started == []
    assert [execute.op_id for execute in line.take()] == [1, 2]
    line.put(op(3, gated=False))
    assert rank.started == [3]
    assert line.take() == []
    line.close()
    line.put(op(4, gated=False))
    assert rank.started == [3]


@pytest.mark.parametrize("starts", [False, True])
def test_an_op_is_left_once_if_its_start_was_interrupted_before_its_end(starts: bool) -> None:
    rank = Rank()
    rank.starts, rank.is_interrupted = starts, True
    line = LocalLine(Lines(), b"rank", rank)
    with pytest.raises(KeyboardInterrupt):
        line.put(op(1, gated=False))
    assert [execute.op_id for execute in line.take()] == ([] if starts else [1])


def test_copies_do_not_wait_for_the_ranks_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        manager = cluster.manager
        cluster.await_copy_thread()
        expected = cluster.read(BLOCKS)
        assert cluster.put(TOKENS, BLOCKS).mask.all()
        task_id, mask = manager.get_match(TOKENS)
        assert mask.all()
        with standing_rank(monkeypatch, cluster.clients[0]):
            manager.launch([task_id], [cluster.slots([8, 9, 10, 11])])
            until(lambda: cluster.read([8, 9, 10, 11]) == expected)
            assert manager.try_wait([task_id]) == {}  # only the rank's thread reports
        assert manager.wait([task_id], PATIENCE_S)[task_id].status is KVStatus.SUCCESS
        manager.check()


def test_a_launch_does_not_drive_a_rank_that_is_driven(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        manager = cluster.manager
        cluster.await_copy_thread()
        queued: list[bool] = []
        queue, advance = DeviceWorker.queue, DeviceWorker.advance
        drives, goes_on = threading.Event(), threading.Event()

        def watch(worker: DeviceWorker, message: Execute) -> bool:
            queued.append(is_queued := queue(worker, message))
            return is_queued

        def stand(worker: DeviceWorker) -> list[Done]:
            drives.set()
            assert goes_on.wait(PATIENCE_S)
            return advance(worker)

        monkeypatch.setattr(DeviceWorker, "queue", watch)
        task_id, _ = manager.put_match(TOKENS)
        with monkeypatch.context() as patched:
            patched.setattr(DeviceWorker, "advance", stand)
            cluster.clients[0]._link.wake()
            assert drives.wait(PATIENCE_S)
            manager.launch([task_id], [cluster.slots(BLOCKS)])
            assert queued == []
            goes_on.set()
        assert manager.wait([task_id], PATIENCE_S)[task_id].status is KVStatus.SUCCESS


def test_an_interrupted_launch_loses_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        manager = cluster.manager
        cluster.await_copy_thread()
        task_id, _ = manager.put_match(TOKENS)
        queue = DeviceWorker.queue

        def interrupt(worker: DeviceWorker, message: Execute) -> bool:
            assert queue(worker, message)
            raise KeyboardInterrupt

        with standing_rank(monkeypatch, cluster.clients[0]), monkeypatch.context() as patched:
            patched.setattr(DeviceWorker, "queue", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.launch([task_id], [cluster.slots(BLOCKS)])
        assert manager.wait([task_id], PATIENCE_S)[task_id].status is KVStatus.SUCCESS
        expected = cluster.read(BLOCKS)
        assert cluster.get(TOKENS, [8, 9, 10, 11]).mask.all()
        assert cluster.read([8, 9, 10, 11]) == expected


def test_a_client_that_is_closing_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(server_timeout_s=2 * PATIENCE_S) as cluster:
        manager, [client] = cluster.manager, cluster.clients
        cluster.await_copy_thread()
        assert cluster.put(TOKENS, BLOCKS).mask.all()
        task_id, mask = manager.get_match(TOKENS)
        assert mask.all()
        before = cluster.read([8, 9, 10, 11])
        close = Attachment.close

        def close_and_launch(attachment: Attachment, rank: int) -> None:
            manager.launch([task_id], [cluster.slots([8, 9, 10, 11])])
            close(attachment, rank)

        with monkeypatch.context() as patched:
            patched.setattr(Attachment, "close", close_and_launch)
            client.close()
        assert client.state is ClientState.CLOSED
        assert manager.wait([task_id], PATIENCE_S)[task_id].status is KVStatus.FAILED
        assert cluster.read([8, 9, 10, 11]) == before
        manager.check()


def test_an_op_behind_a_gate_that_was_shut_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexcache.client.link._PING_INTERVAL_S", 2 * PATIENCE_S)
    with running_cluster(client_timeout_s=20 * PATIENCE_S) as cluster:
        manager, [client] = cluster.manager, cluster.clients
        task_id, _ = manager.put_match(TOKENS)
        with client._tasks._changed:
            client._tasks._shut[task_id] = None
        manager.launch([task_id], [cluster.slots(BLOCKS)], gated=True)
        response = manager.wait([task_id], PATIENCE_S)[task_id]
        assert response.status is KVStatus.FAILED
        assert response.error == "its gate was never opened"


def test_threads_that_launch_at_once_get_the_right_bytes() -> None:
    with running_cluster(num_cpu_blocks=1024) as cluster:  # none is evicted
        cluster.await_copy_thread()

        def store_and_load_many(first: int) -> None:
            mine, other = [*range(first, first + 4)], [*range(first + 4, first + 8)]
            for turn in range(30):
                tokens = TOKENS + 10_000 * (first + 1) + 100 * turn
                stored, loaded = cluster.put(tokens, mine), cluster.get(tokens, other)
                for answer in (stored, loaded):
                    assert answer.status is KVStatus.SUCCESS
                    assert answer.mask.all()
                assert cluster.read(other) == cluster.read(mine)

        with ThreadPoolExecutor(6) as threads:
            for ended in [threads.submit(store_and_load_many, 8 * n) for n in range(6)]:
                ended.result(PATIENCE_S)
        cluster.manager.check()


def test_an_op_waits_for_its_gate_unless_that_is_open_or_the_engine_waits_for_the_op() -> None:
    with running_cluster() as cluster:
        [client] = cluster.clients
        tasks = client._tasks
        assert tasks.can_wait(op(1, gated=True))
        assert not tasks.can_wait(op(1, gated=False))
        client.open_gates([1])
        assert not tasks.can_wait(op(1, gated=True))
        assert not RankTasks(False, lambda: None).can_wait(op(1, gated=True))
        with tasks._changed:
            tasks._shut[3] = None  # it was to be opened while there was no server
        assert not tasks.can_wait(op(3, gated=True))
        keeping = RankTasks(True, lambda: None)
        keeping.attach(client._worker, 1)
        assert not keeping.can_wait(op(2, gated=True))
