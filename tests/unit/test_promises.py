"""Loads that a step counts on: nothing but the ranks' reports and its own engine ends them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from task_builders import ENGINE, OTHER, World

from flexcache.client.tasks import StepPromises
from flexcache.ids import KVStatus, OpKind, TaskId, TaskKind, TierName
from flexcache.protocol.fence import Fence
from flexcache.transfer.messages import Done

PROMPT = "abcd"

# -- ranks that are counted on -------------------------------------------------------------------


@pytest.fixture
def fence() -> Iterator[Fence]:
    fence = Fence.create()
    yield fence
    fence.close()


@pytest.fixture
def ranks(fence: Fence) -> Iterator[list[Fence]]:
    ranks = [Fence.open(fence.path) for _ in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def test_a_step_counts_on_ranks_that_all_say_that_it_may(fence: Fence, ranks: list[Fence]) -> None:
    promises = StepPromises(2)
    assert not promises.begin(None)
    assert not promises.begin(fence.path)
    ranks[0].offer(0)
    assert not promises.begin(fence.path)
    assert not fence.is_counted_on
    ranks[1].offer(1)
    assert promises.begin(fence.path)
    assert fence.is_counted_on
    promises.end()
    assert not fence.is_counted_on


def test_a_rank_leaves_before_a_step_counts_on_it_or_after_it(
    fence: Fence, ranks: list[Fence]
) -> None:
    promises = StepPromises(2)
    for number, rank in enumerate(ranks):
        rank.offer(number)
    assert promises.begin(fence.path)
    assert not ranks[0].may_leave(0)
    assert not promises.begin(fence.path)  # no further load, but those that were promised
    assert not ranks[0].may_leave(0)
    promises.end()
    assert ranks[0].may_leave(0)
    assert not promises.begin(fence.path)


def test_a_scheduler_that_dies_counts_on_no_rank(fence: Fence) -> None:
    code = (
        "import sys; from flexcache.client.tasks import StepPromises;"
        "promises = StepPromises(0); assert promises.begin(sys.argv[1]);"
        "print('counts', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, fence.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"counts\n"
    assert fence.is_counted_on
    process.kill()
    process.communicate()
    assert not fence.is_counted_on


def test_a_fence_whose_server_is_gone_counts_for_nothing() -> None:
    assert not StepPromises(0).begin("/proc/self/fd/99999")


# -- what the server keeps -----------------------------------------------------------------------


def stored(**options: object) -> World:
    world = World(load_ranks=(0, 1), **options)  # type: ignore[arg-type]
    world.put(PROMPT)
    world.finish_all()
    return world


def promised(world: World) -> TaskId:
    task_id = world.match(TaskKind.GET, PROMPT)
    assert world.promise(task_id)
    return task_id


def dispute(world: World) -> None:
    world.engine.set_disputed(ENGINE, True, world.now)


def update_weights(world: World) -> None:
    world.engine.set_weights(ENGINE, 1, True, world.now)


def end_session(world: World) -> None:
    world.end_session(ENGINE)


def wait_long(world: World) -> None:
    world.tick(1e6)


def clear_all(world: World) -> None:
    world.engine.clear(None)


def close_down(world: World) -> None:
    world.engine.close_down(world.now)


EVENTS: list[Callable[[World], None]] = [
    dispute, update_weights, end_session, wait_long, clear_all, close_down,
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_its_blocks_stay_until_all_ranks_have_reported(event: Callable[[World], None]) -> None:
    world = stored()
    task_id = promised(world)
    info = world.tasks[task_id]
    event(world)
    world.tick()
    for text in ("mnop", "qrst", "uvwx"):  # DRAM has six blocks
        put = world.match(TaskKind.PUT, text, engine=OTHER)
        world.launch(put)
        for run in world.ops():
            if run.task_id != task_id:
                world.finish(run)
    given = world.ops(OpKind.H2D, task_id)
    assert not any(map(world.was_dropped, given))
    for run in given:
        world._move(run, len(PROMPT))
    for (index, slot), rank in itertools.product(enumerate(info.slots.tolist()), (0, 1)):
        assert world.gpu[ENGINE, rank, slot] == info.content(index, world._copy(rank))


def test_it_ends_as_any_get_does_when_all_ranks_have_reported() -> None:
    world = stored()
    task_id = promised(world)
    world.finish_all()
    assert (world.final(task_id).status, world.final(task_id).num_ok) == (KVStatus.SUCCESS, 4)
    world.check_nothing_is_held()


def copied(world: World, task_id: TaskId, seconds: float) -> None:
    """Have all ranks report the load, whose copies took so long."""
    for run in world.ops(OpKind.H2D, task_id):
        size = len(run.op)
        world._move(run, size)
        del world.at_work[run.executor, run.op.op_id]
        world.engine.op_done(run.executor, Done(run.op.op_id, size, seconds=seconds), world.now)


def test_its_time_is_that_of_the_copies() -> None:
    world = stored()
    task_id = promised(world)
    world.tick(3.0)  # of the steps before
    copied(world, task_id, 0.25)
    assert world.stats().totals.ops["H2D"].seconds == pytest.approx(0.25)


def test_time_in_which_several_run_counts_once() -> None:
    world = stored()
    first, second = promised(world), promised(world)
    world.tick(3.0)
    copied(world, first, 0.25)
    world.tick(0.0625)
    copied(world, second, 0.25)
    assert world.stats().totals.ops["H2D"].seconds == pytest.approx(0.25 + 0.0625)


def test_its_engine_cancels_it_as_long_as_no_rank_was_given_it() -> None:
    world = stored()
    task_id = promised(world)
    world.at_work.clear()
    world.tasks[task_id].gated = False  # no rank hears of its end
    world.cancel(task_id)
    assert world.final(task_id).status is KVStatus.CANCELLED
    world.check_nothing_is_held()


def test_it_ends_with_its_session_once_no_step_counts_on_it() -> None:
    world = stored()
    task_id = promised(world)
    session = world.sessions[ENGINE].session
    world.engine.end_session(session, world.now)
    assert world.engine.sessions.uses_gpu_of(ENGINE)
    world.at_work.clear()
    world.engine.end_session(session, world.now, is_counted_on=False)
    world._carry_out()
    assert world.final(task_id).status is KVStatus.CANCELLED
    assert not world.engine.sessions.uses_gpu_of(ENGINE)
    assert world.engine.sessions.num_open == 0


def test_a_rank_that_dies_ends_it() -> None:
    world = stored()
    task_id = promised(world)
    world.down(world.ranks[0])
    world.finish_all()
    assert world.final(task_id).status is KVStatus.FAILED
    world.check_nothing_is_held()


@pytest.mark.parametrize(
    "obstacle", ["below DRAM", "a rank is away", "launched", "cancelled", "nothing found"]
)
def test_what_could_be_lost_is_not_promised(obstacle: str) -> None:
    world = stored()
    if obstacle == "below DRAM":
        world.clear(TierName.CPU)
    task_id = world.match(TaskKind.GET, "zzz" if obstacle == "nothing found" else PROMPT)
    if obstacle == "a rank is away":
        world.down(world.ranks[1])
    if obstacle == "launched":
        world.launch(task_id)
    if obstacle == "cancelled":
        world.cancel(task_id)
    assert not world.promise(task_id)
    world.cancel(task_id)
    world.finish_all()
    world.check_nothing_is_held()
