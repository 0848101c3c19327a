"""An engine whose thread drives its rank between its steps, in the process of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cluster import PATIENCE_S, Cluster, running_cluster, until
from test_local_lines import BLOCKS, TOKENS, standing_rank, store_and_load

from flexcache import KVStatus
from flexcache.client.rank import KVTPClient
from flexcache.server.server import KVServer
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(server_timeout_s=2 * PATIENCE_S, engine_polls=True) as cluster:
        cluster.await_copy_thread()
        yield cluster


def launch_put(cluster: Cluster) -> int:
    task_id, mask = cluster.manager.put_match(TOKENS)
    assert mask.all()
    cluster.manager.launch([task_id], [cluster.slots(BLOCKS)], gated=True)
    return task_id


def take_ended(client: KVTPClient, task_id: int) -> int:
    """Poll until a task has ended; return how many blocks were moved."""
    ended: dict[int, int] = {}

    def poll() -> bool:
        ended.update(client.take_ended([task_id]))
        return bool(ended)

    until(poll)
    return ended[task_id]


def test_copies_between_steps_do_not_need_the_ranks_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client], expected = cluster.clients, cluster.read(BLOCKS)
    with standing_rank(monkeypatch, client):
        put = launch_put(cluster)
        client.open_gates([put])
        assert take_ended(client, put) == len(BLOCKS)
        get, _ = cluster.manager.get_match(TOKENS)
        cluster.manager.launch([get], [cluster.slots([8, 9, 10, 11])], gated=True)
        client.open_gates([get])
        assert take_ended(client, get) == len(BLOCKS)
        assert cluster.read([8, 9, 10, 11]) == expected
        ended = cluster.manager.try_wait([put, get])
        assert [answer.status for answer in ended.values()] == [KVStatus.SUCCESS] * 2
    cluster.manager.check()


def test_an_engine_that_does_not_poll_is_not_waited_for(cluster: Cluster) -> None:
    put = launch_put(cluster)
    cluster.clients[0].open_gates([put])
    assert cluster.manager.wait([put], PATIENCE_S)[put].status is KVStatus.SUCCESS
    assert cluster.clients[0].take_ended([put]) == {put: len(BLOCKS)}


def test_an_engine_that_waits_is_woken_by_the_ranks_thread(cluster: Cluster) -> None:
    for _ in range(20):
        store_and_load(cluster, gated=True)
        cluster.manager.clear("CPU")
    cluster.manager.check()


def test_what_follows_from_a_report_is_not_left_lying(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client], manager, followers = cluster.clients, cluster.manager, list[int]()
    take_reports, other = KVServer.take_reports, TOKENS + 100

    def launch_another(server: KVServer, identity: bytes, reports: list[Done]) -> None:
        take_reports(server, identity, reports)
        if not followers:
            task_id, _ = manager.put_match(other)
            followers.append(task_id)
            client._tasks.open_gates([task_id])
            manager.launch([task_id], [cluster.slots([4, 5, 6, 7])], gated=True)

    woken, wake = list[int](), client._link.wake

    def note_and_wake() -> None:
        woken.extend(followers)
        wake()

    monkeypatch.setattr(KVServer, "take_reports", launch_another)
    with standing_rank(monkeypatch, client):
        monkeypatch.setattr(client._link, "wake", note_and_wake)
        put = launch_put(cluster)
        client.open_gates([put])
        assert take_ended(client, put) == len(BLOCKS)
        assert woken == followers  # for its copy; this thread may not come back
    answer = manager.wait(followers, PATIENCE_S)
    assert [each.status for each in answer.values()] == [KVStatus.SUCCESS]


def test_a_load_by_layer_is_not_copied_by_the_engines_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client], expected = cluster.clients, cluster.read(BLOCKS)
    assert cluster.put(TOKENS, BLOCKS).mask.all()
    get, _ = cluster.manager.get_match(TOKENS)
    cluster.manager.launch([get], [cluster.slots([8, 9, 10, 11])], gated=True)
    with standing_rank(monkeypatch, client):
        layers = client.load_by_layer(get, len(BLOCKS))
        before = cluster.read([8, 9, 10, 11])
        assert client.take_ended([get]) == {}
        assert cluster.read([8, 9, 10, 11]) == before
    assert layers.wait_all(PATIENCE_S)
    assert cluster.read([8, 9, 10, 11]) == expected


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_rank_whose_turn_was_interrupted_registers_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    [client], advance = cluster.clients, DeviceWorker.advance

    def interrupt(worker: DeviceWorker, may_copy: bool = True) -> list[Done]:
        if not may_copy and is_begun:
            advance(worker, may_copy)
        if not may_copy:
            raise KeyboardInterrupt
        return advance(worker)

    put, torn = launch_put(cluster), client._attachment
    with monkeypatch.context() as patched:
        patched.setattr(DeviceWorker, "advance", interrupt)
        # Not beside a turn of its own thread, which would be left to that.
        with standing_rank(monkeypatch, client), pytest.raises(KeyboardInterrupt):
            client.open_gates([put])
        response = cluster.manager.wait([put], PATIENCE_S)[put]
        assert response.status is KVStatus.FAILED
    until(lambda: client._attachment not in (None, torn))
    client.wait_registered(PATIENCE_S)
    store_and_load(cluster, gated=True)
    cluster.manager.check()


def test_a_client_that_closes_meanwhile_is_not_driven_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client], take_reports = cluster.clients, KVServer.take_reports
    put, other, advance = launch_put(cluster), TOKENS + 100, DeviceWorker.advance
    is_closing = threading.Event()

    def close_first(server: KVServer, identity: bytes, reports: list[Done]) -> None:
        is_closing.set()
        client.close()
        until(lambda: identity not in server.hub.outbox.lines)  # the server knows, too
        take_reports(server, identity, reports)

    def leave_it_to_the_engine(worker: DeviceWorker, may_copy: bool = True) -> list[Done]:
        """The rank's own thread, which may copy, would report if this one took long."""
        return [] if may_copy and not is_closing.is_set() else advance(worker, may_copy)

    with monkeypatch.context() as patched:
        patched.setattr(KVServer, "take_reports", close_first)
        patched.setattr(DeviceWorker, "advance", leave_it_to_the_engine)
        client.open_gates([put])
        until(lambda: bool(client.take_ended([put])))
        patched.setattr(DeviceWorker, "advance", None)  # to call it raises
        task_id, _ = cluster.manager.put_match(other)
        client.open_gates([task_id])
        client.take_ended([task_id])
    assert cluster.manager.wait([put], PATIENCE_S)[put].status is KVStatus.FAILED
    cluster.manager.check()
