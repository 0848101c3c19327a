"""What a rank knows of gated tasks."""

from __future__ import annotations

from flexcache.client.rank_ops import RankTasks
from flexcache.ids import TaskIds, make_session

EPOCH = 7


def registered() -> tuple[RankTasks, TaskIds]:
    tasks = RankTasks(keeps_loads=False, wake=lambda: None)
    tasks.attach(None, EPOCH)
    return tasks, TaskIds(make_session(EPOCH, 3))


def test_a_task_is_over_once_reported_and_is_returned_once() -> None:
    tasks, ids = registered()
    first, second = ids.next(), ids.next()
    assert tasks.take_ended([first, second]) == {}
    tasks.ended(second, 4)
    assert tasks.wait_ended(0.0)
    assert not tasks.wait_ended(0.0, [first])
    assert tasks.take_ended([first, second]) == {second: 4}
    assert not tasks.wait_ended(0.0)
    assert tasks.take_ended([second]) == {}


def test_without_its_server_every_task_is_over_with_nothing_loaded() -> None:
    tasks, ids = registered()
    task_id = ids.next()
    tasks.attach(None, 0)
    assert tasks.take_ended([task_id]) == {task_id: 0}
    tasks.attach(None, EPOCH + 1)
    assert tasks.wait_ended(0.0, [task_id])


def test_the_end_of_a_session_ends_its_tasks_only() -> None:
    tasks, ids = registered()
    mine, other = ids.next(), TaskIds(make_session(EPOCH, 4)).next()
    tasks.session_over(ids.session)
    assert tasks.wait_ended(0.0, [mine])
    assert not tasks.wait_ended(0.0, [other])


def test_a_gate_shut_without_a_server_ends_its_task() -> None:
    tasks, ids = registered()
    task_id = ids.next()
    assert not tasks.open_gates([task_id])
    assert tasks.take_ended([task_id]) == {task_id: 0}
    assert tasks.wait_ended(0.0, [task_id])


def test_what_had_arrived_before_the_weights_changed_is_lost() -> None:
    tasks, ids = registered()
    task_id = ids.next()
    tasks.ended(task_id, 4)
    tasks.weights_changed()
    assert tasks.take_ended([task_id]) == {task_id: 0}


def test_old_results_are_forgotten() -> None:
    tasks, ids = registered()
    task_ids = [ids.next() for _ in range(20_000)]
    for task_id in task_ids:
        tasks.ended(task_id, 1)
    taken = tasks.take_ended(task_ids)
    assert task_ids[-1] in taken
    assert task_ids[0] not in taken
