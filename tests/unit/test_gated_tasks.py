"""What a rank knows of gated tasks."""

from __future__ import annotations

from flexcache.client.rank_tasks import GatedTasks
from flexcache.ids import TaskIds, make_session

EPOCH = 7


def registered() -> tuple[GatedTasks, TaskIds]:
    gates = GatedTasks()
    gates.epoch = EPOCH
    return gates, TaskIds(make_session(EPOCH, 3))


def test_a_task_is_over_once_reported_and_is_returned_once() -> None:
    gates, ids = registered()
    first, second = ids.next(), ids.next()
    assert gates.take_over([first, second]) == {}
    gates.end(second, 4)
    assert gates.has_ended
    assert gates.not_ended([first, second]) == [first]
    assert gates.take_over([first, second]) == {second: 4}
    assert not gates.has_ended
    assert gates.take_over([second]) == {}


def test_without_its_server_every_task_is_over_with_nothing_loaded() -> None:
    gates, ids = registered()
    task_id = ids.next()
    gates.epoch = 0
    assert gates.take_over([task_id]) == {task_id: 0}
    gates.epoch = EPOCH + 1
    assert gates.is_over(task_id)


def test_the_end_of_a_session_ends_its_tasks_only() -> None:
    gates, ids = registered()
    mine, other = ids.next(), TaskIds(make_session(EPOCH, 4)).next()
    gates.end_session(ids.session)
    assert gates.is_over(mine)
    assert not gates.is_over(other)


def test_a_gate_shut_without_a_server_ends_its_task() -> None:
    gates, ids = registered()
    task_id = ids.next()
    gates.shut([task_id])
    assert gates.is_shut(task_id)
    assert gates.take_over([task_id]) == {task_id: 0}
    assert gates.is_over(task_id)


def test_old_results_are_forgotten() -> None:
    gates, ids = registered()
    task_ids = [ids.next() for _ in range(20_000)]
    for task_id in task_ids:
        gates.end(task_id, 1)
    taken = gates.take_over(task_ids)
    assert task_ids[-1] in taken
    assert task_ids[0] not in taken
