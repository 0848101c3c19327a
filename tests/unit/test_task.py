"""KVTaskEngine: random histories in a world of dictionaries, and the cases that have a name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from task_builders import ENGINE, GATE_PATIENCE_S, OTHER, SESSION, World, keys_of

from flexcache.cache.early_loads import EarlyLoads
from flexcache.cache.prompt import Prompt
from flexcache.errors import InternalError
from flexcache.ids import (
    KVStatus,
    OpId,
    OpKind,
    TaskId,
    TaskIds,
    TaskKind,
    TaskState,
    TierName,
    make_session,
)
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import (
    DISK,
    PEER,
    REMOTE,
    ReplaceExecutor,
    RunOp,
    TaskAnswered,
    TaskResult,
    device,
)
from flexcache.tasks.model import Task, TaskLimits
from flexcache.transfer.messages import Done

STATES = ("created", "ready", "running")
PROMPTS = ["abcdef", "abcxy", "ab", "apq", "z"]
WORLDS: dict[str, dict[str, Any]] = {
    "one rank": {"load_ranks": (0,), "store_ranks": (0,)},
    "two ranks": {"load_ranks": (0, 1), "store_ranks": (0, 1)},
    "two ranks, one copy (MLA)": {"load_ranks": (0, 1), "store_ranks": (0,)},
    "no SSD": {"ssd": 0},
    "a small SSD": {"ssd": 4},
    "a short backlog": {"backlog": 3},
    "a remote store": {"remote": True},
    "two ranks and a remote store": {"load_ranks": (0, 1), "store_ranks": (0, 1), "remote": True},
    "a remote store, no SSD": {"remote": True, "ssd": 0},
    "write-back": {"remote": True, "policy": "write_back"},
    "write-back to SSD alone": {"policy": "write_back", "chunk": 1},
    "write-back to a small SSD": {"policy": "write_back", "ssd": 4},
    "write-back with a short backlog": {"policy": "write_back", "backlog": 3, "remote": True},
    "selective": {"remote": True, "policy": "selective"},
    "loads past DRAM": {"past_dram": "always"},
    "loads past DRAM where it is faster, two ranks": {
        "past_dram": "auto",
        "load_ranks": (0, 1),
        "store_ranks": (0,),
        "remote": True,
    },
    "SSD alone": {"past_dram": "always", "keeps_on_host": False},
    "a small SSD alone": {"past_dram": "always", "keeps_on_host": False, "ssd": 6, "chunk": 1},
    "SSD alone, staged": {"keeps_on_host": False},
    "peers": {"peers": True, "cpu": 16},
    "peers and a remote store": {"peers": True, "remote": True, "ssd": 0, "cpu": 16},
}


class TaskHistories(RuleBasedStateMachine):
    """Random histories. The world checks each instruction, and all of itself after each step."""

    @initialize(name=st.sampled_from(list(WORLDS)), known=st.sampled_from(["", "abc", "abcdef"]))
    def begin(self, name: str, known: str) -> None:
        self.world = World(**WORLDS[name])
        self.deleted: set[str] = set()
        self.world.put(known)
        self.world.finish_all()
        if TierName.SSD in self.world.cache.tiers.by_name:
            self.world.clear(TierName.CPU)

    @rule(
        text=st.sampled_from(PROMPTS),
        stop=st.sampled_from([6, 6, 3]),
        at_once=st.sampled_from([True, True, False]),
        clear=st.sampled_from([False, False, True]),
        engine=st.sampled_from([ENGINE, ENGINE, OTHER]),
        behind=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def put(
        self, text: str, stop: int, at_once: bool, clear: bool, engine: str, behind: int
    ) -> None:
        if engine not in self.world.sessions:
            return
        self.may_bring(text)
        task_id = self.world.match(TaskKind.PUT, text, 0, stop, engine, behind=behind)
        if at_once:
            self.world.launch(task_id)
        if clear:
            self.clear_every_tier()

    @rule(
        kind=st.sampled_from([TaskKind.GET, TaskKind.GET, TaskKind.PREFETCH]),
        text=st.sampled_from(PROMPTS),
        start=st.sampled_from([0, 0, 0, 1, 2, 5]),
        at_once=st.sampled_from([True, True, False]),
        clear=st.sampled_from([False, False, True]),
        engine=st.sampled_from([ENGINE, OTHER]),
        behind=st.sampled_from([0, 0, 1, 3]),
    )
    def load(
        self, kind: TaskKind, text: str, start: int, at_once: bool, clear: bool, engine: str,
        behind: int,
    ) -> None:  # fmt: skip
        if engine not in self.world.sessions:
            return
        task_id = self.world.match(kind, text, start, None, engine, behind=behind)
        if at_once:
            self.world.launch(task_id)
        if clear:
            self.clear_every_tier()

    @rule(engine=st.sampled_from([ENGINE, OTHER]))
    def a_session_ends_or_begins(self, engine: str) -> None:
        if engine in self.world.sessions:
            self.world.end_session(engine)
        elif not self.world.engine.sessions.uses_gpu_of(engine):
            self.world.begin_session(engine)

    def clear_every_tier(self) -> None:
        """Clear every tier; what the task needs must stay."""
        for tier in self.world.cache.tiers:
            self.world.clear(tier.name)

    def unlaunched(self) -> list[TaskId]:
        return [task_id for task_id, info in self.world.tasks.items() if not info.launched]

    @precondition(lambda self: self.unlaunched())
    @rule(data=st.data(), gated=st.booleans())
    def launch(self, data: st.DataObject, gated: bool) -> None:
        some = st.lists(st.sampled_from(self.unlaunched()), min_size=1, max_size=3, unique=True)
        self.world.launch(*data.draw(some), gated=gated)

    @precondition(lambda self: self.world.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        recent = list(self.world.tasks)[-4:]
        self.world.cancel(*data.draw(st.lists(st.sampled_from(recent), min_size=1, max_size=2)))

    @precondition(lambda self: self.world.at_work)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.ops())))

    @precondition(lambda self: self.world.at_work)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5]))
    def finish_in_part(self, data: st.DataObject, share: float) -> None:
        run = data.draw(st.sampled_from(self.world.ops()))
        self.world.finish(run, int(share * len(run.op)), error="a fault")

    @precondition(lambda self: self.world.at_work)
    @rule()
    def finish_all(self) -> None:
        self.world.finish_all()

    @precondition(lambda self: len(self.world.alive) == len(self.world.executors))
    @rule(data=st.data())
    def lose_an_executor(self, data: st.DataObject) -> None:
        self.world.down(data.draw(st.sampled_from(self.world.executors)))

    @precondition(lambda self: self.world.gone)
    @rule(data=st.data())
    def report_after_death(self, data: st.DataObject) -> None:
        self.world.report_after_death(data.draw(st.sampled_from(self.world.gone)))

    @precondition(lambda self: len(self.world.alive) < len(self.world.executors))
    @rule()
    def regain_all_executors(self) -> None:
        for executor in self.world.executors:
            self.world.up(executor)

    @precondition(lambda self: self.world.to_replace)
    @rule()
    def replace_a_worker(self) -> None:
        for executor in list(self.world.to_replace):
            self.world.down(executor, "killed")
            self.world.up(executor)

    @rule(layout=st.sampled_from(["@X", "@Y"]))
    def ranks_of_another_layout_come(self, layout: str) -> None:
        self.deleted = set()  # under the other layout it may be there
        self.world.adopt(layout)

    @rule(engine=st.sampled_from([ENGINE, OTHER]))
    def a_name_is_disputed_or_settled(self, engine: str) -> None:
        self.world.dispute(engine, engine not in self.world.disputed)

    @rule(seconds=st.sampled_from([0.0, 1.0, 31.0, 31.0, 121.0, 700.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(
        damage=st.sampled_from(["clear CPU", "clear CPU", "clear SSD", "rot", "rot"]),
        text=st.sampled_from(["a", "ab", "abcd", "abcx", "z"]),
    )
    def lose_blocks(self, damage: str, text: str) -> None:
        if damage == "clear CPU":
            self.world.clear(TierName.CPU)
        elif TierName.SSD in self.world.cache.tiers.by_name:
            if damage == "clear SSD":
                self.world.clear(TierName.SSD)
            elif self.world.cached(TierName.SSD, text) == len(text):
                self.world.rot(text)

    @rule(
        text=st.sampled_from(PROMPTS),
        kind=st.sampled_from([TaskKind.GET, TaskKind.PREFETCH]),
        behind=st.sampled_from([0, 0, 1, 3]),
    )
    def look_up(self, text: str, kind: TaskKind, behind: int) -> None:
        self.may_bring(text)
        self.world.look_up(text, kind, min(behind, len(text)))

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data(), error=st.sampled_from([None, None, None, "a fault"]))
    def answer(self, data: st.DataObject, error: str | None) -> None:
        self.world.answer(data.draw(st.sampled_from(list(self.world.asked))), error)

    @precondition(lambda self: self.world.store)
    @rule(data=st.data())
    def the_store_loses_a_block(self, data: st.DataObject) -> None:
        del self.world.store[data.draw(st.sampled_from(list(self.world.store)))]

    @precondition(lambda self: PEER in self.world.executors)
    @rule(text=st.sampled_from(PROMPTS), peer=st.sampled_from(["A", "B"]), on_ssd=st.booleans())
    def a_peer_computes(self, text: str, peer: str, on_ssd: bool) -> None:
        self.may_bring(text)
        self.world.stored_by_another(text, peer, on_ssd)

    @precondition(lambda self: self.world.asked_to_stage)
    @rule()
    def a_peer_stages(self) -> None:
        self.world.stage_at_peer()

    @precondition(lambda self: PEER in self.world.executors)
    @rule(text=st.sampled_from(PROMPTS))
    def a_peer_asks_for_what_is_on_ssd(self, text: str) -> None:
        self.world.stage(text)

    @precondition(lambda self: PEER in self.world.executors)
    @rule(data=st.data(), peer=st.sampled_from(["A", "B"]))
    def a_peer_evicts(self, data: st.DataObject, peer: str) -> None:
        blocks = self.world.at_peers[peer]
        if blocks:
            del blocks[data.draw(st.sampled_from(list(blocks)))]

    @precondition(lambda self: PEER in self.world.alive)
    @rule(text=st.sampled_from(PROMPTS), start=st.integers(0, 5), count=st.integers(1, 2))
    def a_peer_reads_here(self, text: str, start: int, count: int) -> None:
        self.world.lend(text, start, min(start + count, len(text)))

    @precondition(lambda self: PEER in self.world.executors)
    @rule(text=st.sampled_from(PROMPTS), peer=st.sampled_from(["A", "B"]),
          age_s=st.sampled_from([0.0, 1.0, 1e6]), most=st.sampled_from([1, 2, 9]))  # fmt: skip
    def a_peer_goes(self, text: str, peer: str, age_s: float, most: int) -> None:
        self.may_bring(text)
        self.world.take_over(text, peer, age_s, most)

    @precondition(lambda self: self.world.lent)
    @rule(data=st.data())
    def a_peer_has_read(self, data: st.DataObject) -> None:
        self.world.give_back(data.draw(st.sampled_from(list(self.world.lent))))

    @precondition(lambda self: REMOTE in self.world.executors)
    @rule(text=st.sampled_from(PROMPTS))
    def another_node_stores(self, text: str) -> None:
        self.world.stored_by_another(text)

    @rule(text=st.sampled_from(PROMPTS), ttl_s=st.sampled_from([0.5, 60.0]))
    def pin(self, text: str, ttl_s: float) -> None:
        self.world.control("pin", text, ttl_s)

    @rule(text=st.sampled_from(PROMPTS))
    def delete(self, text: str) -> None:
        self.world.control("delete", text)
        self.deleted.add(text)
        tiers = self.world.cache.tiers
        pinned = any(tier.pinned.num_blocks for tier in tiers)
        if pinned and any(self.world.cached(t.name, text) == len(text) for t in tiers):
            self.deleted.discard(text)  # a pin of what continues it holds

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    @invariant()
    def what_was_deleted_is_not_found(self) -> None:
        """Until it may have come back."""
        for text in self.deleted:
            for tier in self.world.cache.tiers:
                assert self.world.cached(tier.name, text) < len(text)

    def may_bring(self, text: str) -> None:
        self.deleted = {deleted for deleted in self.deleted if deleted[0] != text[0]}

    def teardown(self) -> None:
        self.world.tick(61.0)  # pins end
        self.world.drain()
        self.world.check_nothing_is_held()
        self.world.check_every_prompt_can_be_stored(PROMPTS)


TaskHistories.TestCase.settings = settings(stateful_step_count=40)
TestTaskHistories = TaskHistories.TestCase


# -- builders ------------------------------------------------------------------------------------

CPU, SSD = TierName.CPU, TierName.SSD


def world_with(text: str, on: Sequence[TierName], **options: Any) -> World:
    """Make a world in which a prompt is cached on these tiers only."""
    world = World(**options)
    world.put(text)
    world.finish_all()
    for tier in world.cache.tiers:
        if tier.name not in on:
            world.clear(tier.name)
        assert world.cached(tier.name, text) == (len(text) if tier.name in on else 0)
    return world


def status(world: World, task_id: TaskId) -> tuple[KVStatus, int]:
    result = world.final(task_id)
    return result.status, result.num_ok


# -- cancelling at every point -------------------------------------------------------------------


def a_put(**options: Any) -> tuple[World, TaskId]:
    world = World(**options)
    return world, world.match(TaskKind.PUT, "abcde")


def a_get_from_dram(**options: Any) -> tuple[World, TaskId]:
    world = world_with("abcde", on=[CPU], **options)
    return world, world.match(TaskKind.GET, "abcde")


def a_get_from_ssd(**options: Any) -> tuple[World, TaskId]:
    world = world_with("abcde", on=[SSD], **options)
    return world, world.match(TaskKind.GET, "abcde")


def a_get_from_both(**options: Any) -> tuple[World, TaskId]:
    world = world_with("abcde", on=[SSD], **options)
    world.get("ab")
    world.finish_all()
    return world, world.match(TaskKind.GET, "abcde")


def a_prefetch(**options: Any) -> tuple[World, TaskId]:
    world = world_with("abcde", on=[SSD], **options)
    world.cache.early = EarlyLoads(world.cache.tiers.host, share=1.0, ttl_s=120.0)
    return world, world.match(TaskKind.PREFETCH, "abcde")


def oldest(runs: list[RunOp]) -> RunOp:
    return runs[0]


def newest(runs: list[RunOp]) -> RunOp:
    return runs[-1]


def loads_first(runs: list[RunOp]) -> RunOp:
    return next((run for run in runs if run.op.kind is OpKind.DISK2H), runs[-1])


Scene = Callable[..., tuple[World, TaskId]]
EVERY_SCENE = [a_put, a_get_from_dram, a_get_from_ssd, a_get_from_both, a_prefetch]
RANKS = [
    pytest.param({"load_ranks": (0,), "store_ranks": (0,)}, id="one-rank"),
    pytest.param({"load_ranks": (0, 1), "store_ranks": (0, 1)}, id="two-ranks"),
    pytest.param({"load_ranks": (0, 1), "store_ranks": (0,)}, id="two-ranks-one-copy"),
]


@pytest.mark.parametrize("scene", EVERY_SCENE)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_task_cancelled_before_its_launch_ends_at_once_and_leaves_nothing_behind(
    scene: Scene, ranks: dict[str, Sequence[int]]
) -> None:
    world, task_id = scene(**ranks)
    world.cancel(task_id)
    assert status(world, task_id) == (KVStatus.CANCELLED, 0)
    world.launch(task_id)  # the engine may not know yet
    assert not world.at_work
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde", "abx"])


@pytest.mark.parametrize("scene", EVERY_SCENE)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("pick", [oldest, newest, loads_first])
def test_a_task_can_be_cancelled_after_any_number_of_its_ops(
    scene: Scene, ranks: dict[str, Sequence[int]], pick: Callable[[list[RunOp]], RunOp]
) -> None:
    for num_done in itertools.count():
        world, task_id = scene(**ranks)
        cached_before = {tier: world.cached(tier, "abcde") for tier in (CPU, SSD)}
        world.launch(task_id)
        landed = finish_some(world, num_done, pick)
        is_over = not world.at_work
        answer = world.result(task_id)

        world.cancel(task_id)
        world.cancel(task_id)

        assert all(world.was_dropped(run) for run in world.ops())
        while world.at_work:
            world.check()
            assert world.result(task_id, completely=True) is None
            if answer is None and any(run.op.kind.touches_gpu for run in world.ops()):
                assert world.result(task_id) is None
            world.finish(pick(world.ops()))
        if is_over:
            assert world.final(task_id) == answer
        else:
            assert status(world, task_id) == (KVStatus.CANCELLED, 0)
        if world.tasks[task_id].kind is TaskKind.PUT:
            assert world.cached(CPU, "abcde") <= landed[OpKind.D2H]
            assert world.cached(SSD, "abcde") <= landed[OpKind.H2DISK]
        else:
            assert world.cached(CPU, "abcde") <= cached_before[CPU] + landed[OpKind.DISK2H]
            assert world.cached(SSD, "abcde") == cached_before[SSD]
        world.check_nothing_is_held()
        world.check_every_prompt_can_be_stored(["abcde", "abx"])
        if is_over:
            break


def finish_some(
    world: World, count: int, pick: Callable[[list[RunOp]], RunOp]
) -> dict[OpKind, int]:
    """Finish this many ops; return how many blocks each kind moved on every rank without a gap."""
    reports: Counter[OpId] = Counter()
    ranges: dict[OpKind, dict[int, int]] = {kind: {} for kind in OpKind}
    for _ in range(count):
        if not world.at_work:
            break
        run = pick(world.ops())
        world.finish(run)
        reports[run.op.op_id] += 1
        if not any(other.op is run.op for other in world.ops()):
            ranges[run.op.kind][run.op.first] = len(run.op)
    landed = {}
    for kind, moved in ranges.items():
        position = first = min(moved, default=0)
        while position in moved:
            position += moved[position]
        landed[kind] = position - first
    return landed


def test_a_cancelled_put_keeps_what_had_landed_and_publishes_nothing_that_was_moving() -> None:
    world = World()
    task_id = world.put("abcdef")
    first, second, third = world.ops(OpKind.D2H)
    world.finish(first)
    world.cancel(task_id)
    world.finish(second)
    world.finish(third)
    world.finish_all()
    assert world.cached(CPU, "abcdef") == 2
    assert world.cached(SSD, "abcdef") == 0
    assert status(world, task_id) == (KVStatus.CANCELLED, 0)
    world.check_nothing_is_held()


def test_a_cancel_waits_for_every_rank_that_moves_bytes() -> None:
    world, task_id = a_get_from_dram(load_ranks=(0, 1), store_ranks=(0, 1))
    world.launch(task_id)
    on_rank_0, on_rank_1 = world.ops(OpKind.H2D)
    world.cancel(task_id)
    world.finish(on_rank_0, 0, error="dropped before it started")
    assert world.result(task_id) is None
    world.finish(on_rank_1)
    assert status(world, task_id) == (KVStatus.CANCELLED, 0)


def test_ops_that_wait_for_a_turn_at_the_disk_end_with_the_cancel() -> None:
    world = World(cpu=40, ssd=40, chunk=1)
    task_id = world.put("abcdefghijkl")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    at_the_disk = world.ops(OpKind.H2DISK)
    assert len(at_the_disk) < 12
    world.cancel(task_id)
    for run in at_the_disk:
        world.finish(run)
    assert not world.at_work
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcdefghijkl"])


def test_a_cancel_of_an_answered_put_stops_its_write_through() -> None:
    world = World()
    task_id = world.put("abcdef")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    result = world.result(task_id)
    assert result is not None
    assert (result.status, result.num_ok, result.is_final) == (KVStatus.SUCCESS, 6, False)
    world.cancel(task_id)
    world.finish_all()
    assert status(world, task_id) == (KVStatus.CANCELLED, 0)
    assert world.cached(CPU, "abcdef") == 6
    assert world.cached(SSD, "abcdef") == 0
    assert world.tasks[task_id].answered


def test_cancelling_everything_ends_every_task() -> None:
    world = World()
    ids = [world.put("abc"), world.match(TaskKind.PUT, "z"), world.match(TaskKind.GET, "q")]
    world.cancel_all()
    world.finish_all()
    assert [status(world, task_id)[0] for task_id in ids] == [
        KVStatus.CANCELLED, KVStatus.CANCELLED, KVStatus.NOT_FOUND,
    ]  # fmt: skip


# -- calls that are refused ----------------------------------------------------------------------


def test_an_empty_match_ends_at_once_as_not_found() -> None:
    world = World()
    for kind in TaskKind:
        for text, stop in (("", None), ("abc", 0)):
            task_id = world.match(kind, text, 0, stop)
            assert status(world, task_id) == (KVStatus.NOT_FOUND, 0)
    task_id = world.get("abc")
    assert status(world, task_id) == (KVStatus.NOT_FOUND, 0)
    world.cancel(task_id)
    assert status(world, task_id) == (KVStatus.NOT_FOUND, 0)
    assert world.engine.sessions.num_open == 0
    assert not any(info.answered for info in world.tasks.values())


@pytest.mark.parametrize("unknown", [0, -1, 2, 10**9])
def test_an_id_that_was_never_given_out_is_a_key_error(unknown: int) -> None:
    world = World()
    known = world.match(TaskKind.PUT, "abc")
    with pytest.raises(KeyError, match=str(unknown)):
        world.engine.cancel([known, TaskId(unknown)], world.now)
    with pytest.raises(KeyError, match=str(unknown)):
        world.engine.launch([known, TaskId(unknown)], [np.arange(3), np.arange(3)], world.now)
    assert world.result(known) is None
    assert world.engine.take_instructions() == []
    assert world.stats().tasks["created"] == 1


def test_a_second_launch_is_refused_while_the_task_runs_and_does_nothing_after_it() -> None:
    world = World()
    task_id = world.put("abc")
    at_work = world.ops()
    with pytest.raises(ValueError, match="launched before"):
        world.launch(task_id)
    assert world.ops() == at_work
    world.finish_all()
    world.launch(task_id)
    assert world.ops() == []
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_a_second_launch_of_a_task_that_failed_does_nothing() -> None:
    world = World()
    task_id = world.match(TaskKind.PUT, "abc")
    world.down(device(ENGINE, 0))
    world.launch(task_id)
    assert status(world, task_id)[0] is KVStatus.FAILED
    world.up(device(ENGINE, 0))
    world.launch(task_id)
    assert world.ops() == []
    assert status(world, task_id)[0] is KVStatus.FAILED


def test_a_task_twice_in_one_launch_is_refused() -> None:
    world = World()
    task_id = world.match(TaskKind.PUT, "abc")
    with pytest.raises(ValueError, match="twice"):
        world.engine.launch([task_id, task_id], [np.arange(3), np.arange(3)], world.now)
    assert world.result(task_id) is None
    assert world.engine.take_instructions() == []


@pytest.mark.parametrize("num_given", [0, 2, 4])
def test_a_launch_with_another_number_of_blocks_is_refused_and_changes_nothing(
    num_given: int,
) -> None:
    world = World()
    right = world.match(TaskKind.PUT, "z")
    wrong = world.match(TaskKind.PUT, "abc")
    blocks = [world.tasks[right].slots, np.arange(num_given, dtype=np.int64)]
    with pytest.raises(ValueError, match=f"task {wrong} needs slots for 3 blocks, {num_given} "):
        world.engine.launch([right, wrong], blocks, world.now)
    with pytest.raises(ValueError, match="slot mappings"):
        world.engine.launch([right, wrong], blocks[:1], world.now)
    assert world.engine.take_instructions() == []
    assert world.stats().tasks["created"] == 2
    world.check()
    world.launch(right, wrong)
    world.finish_all()
    assert status(world, right) == (KVStatus.SUCCESS, 1)
    assert status(world, wrong) == (KVStatus.SUCCESS, 3)


def test_launching_a_batch_skips_only_the_task_that_was_cancelled() -> None:
    world = World()
    gone, alive = world.match(TaskKind.PUT, "z"), world.match(TaskKind.PUT, "abc")
    world.cancel(gone)
    world.launch(gone, alive)
    world.finish_all()
    assert status(world, gone) == (KVStatus.CANCELLED, 0)
    assert status(world, alive) == (KVStatus.SUCCESS, 3)


# -- answers -------------------------------------------------------------------------------------


def test_a_put_is_answered_when_the_gpu_side_is_done_and_complete_after_the_write_through() -> None:
    world = World()
    task_id = world.put("abc")
    for run in world.ops(OpKind.D2H):
        assert world.result(task_id) is None
        world.finish(run)
    result = world.result(task_id)
    assert result is not None
    assert (result.status, result.num_ok, result.is_final) == (KVStatus.SUCCESS, 3, False)
    assert world.result(task_id, completely=True) is None
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)
    assert world.tasks[task_id].answered


def test_blocks_are_found_only_after_their_bytes_arrived_and_a_second_put_moves_nothing() -> None:
    world = World()
    first = world.put("abc")
    assert status(world, world.put("abc")) == (KVStatus.NOT_FOUND, 0)
    assert status(world, world.get("abc")) == (KVStatus.NOT_FOUND, 0)
    world.finish_all()
    assert status(world, first) == (KVStatus.SUCCESS, 3)
    assert status(world, world.put("abc")) == (KVStatus.NOT_FOUND, 0)
    task_id = world.get("abc")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_a_put_writes_nothing_through_behind_blocks_that_are_still_on_their_way_to_dram() -> None:
    world = world_with("wxyz", on=[SSD], cpu=12, ssd=4)
    reader = world.get("wxyz")
    before = world.put("abcd")  # the SSD is full of what is being read
    for run in world.ops(task_id=reader):
        world.finish(run)
    for run in world.ops(task_id=reader):
        world.finish(run)
    behind = world.put("abcdef")
    assert {run.op.kind for run in world.ops()} == {OpKind.D2H}
    world.finish_all()
    assert [status(world, t)[1] for t in (reader, before, behind)] == [4, 4, 2]
    assert (world.cached(CPU, "abcdef"), world.cached(SSD, "abcdef")) == (6, 0)
    assert world.cached(SSD, "wxyz") == 4  # nothing was evicted for blocks that could not be found
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcdef"])


def test_blocks_in_dram_go_to_the_gpu_while_the_ssd_is_read() -> None:
    world, task_id = a_get_from_both()
    world.launch(task_id)
    assert [run.op.first for run in world.ops(OpKind.H2D)] == [0]
    assert [run.op.first for run in world.ops(OpKind.DISK2H)] == [2, 4]
    world.finish(world.ops(OpKind.DISK2H)[0])
    assert [run.op.first for run in world.ops(OpKind.H2D)] == [0, 2]  # chunk by chunk


@pytest.mark.parametrize("scene", EVERY_SCENE)
def test_what_a_task_needs_is_neither_cleared_nor_evicted_for_another(scene: Scene) -> None:
    world, task_id = scene()
    for tier in world.cache.tiers:
        world.clear(tier.name)
    other = world.put("uvwxyz")
    world.launch(task_id)
    while world.at_work:
        for tier in world.cache.tiers:
            world.clear(tier.name)
        world.put("UVWXYZ")
        world.check()
        world.finish(world.ops()[0])
    assert status(world, task_id) == (KVStatus.SUCCESS, 5)
    assert world.final(other).num_ok <= 1  # for it there was hardly any room
    world.check_nothing_is_held()


def test_one_task_of_a_batch_does_not_wait_for_the_other() -> None:
    world = World(cpu=12)
    one, other = world.match(TaskKind.PUT, "abc"), world.match(TaskKind.PUT, "xyz")
    world.launch(one, other)
    for run in world.ops(OpKind.D2H, other):
        world.finish(run)
    assert world.result(one) is None
    assert world.result(other) is not None


def test_a_prefetch_brings_blocks_to_dram_and_leaves_the_gpu_alone() -> None:
    world, task_id = a_prefetch()
    world.launch(task_id)
    assert {run.op.kind for run in world.ops()} == {OpKind.DISK2H}
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 5)
    assert world.cached(CPU, "abcde") == 5
    again = world.prefetch("abcde")
    assert status(world, again) == (KVStatus.SUCCESS, 5)
    assert world.tasks[again].answered
    world.check_nothing_is_held()


def test_only_ops_at_the_gpu_wait_for_a_gate() -> None:
    world, task_id = a_get_from_both()
    world.launch(task_id, gated=True)
    assert {(run.op.kind, run.gated) for run in world.ops()} == {
        (OpKind.H2D, True), (OpKind.DISK2H, False),
    }  # fmt: skip
    world.finish_all()
    assert world.tasks[task_id].answered  # and the ranks were notified


def test_open_tasks_are_counted_by_state_and_ended_ones_by_how_they_ended() -> None:
    world = World(cpu=20, ssd=20)
    world.match(TaskKind.PUT, "a")
    world.put("bcd")
    done, cancelled = world.put("efg"), world.match(TaskKind.PUT, "h")
    world.cancel(cancelled)
    for _ in range(2):
        for run in world.ops(task_id=done):
            world.finish(run)
    late = world.match(TaskKind.PUT, "ijk")
    world.down(device(ENGINE, 0))
    world.launch(late)
    assert world.stats().tasks == dict.fromkeys(STATES, 0) | {"created": 1}
    assert world.stats().totals.ended_tasks == {
        "put_success": 1,
        "put_cancelled": 1,
        "put_failed": 2,
    }


def test_blocks_and_bytes_are_counted_where_they_went() -> None:
    world, task_id = a_get_from_ssd()
    world.launch(task_id)
    world.finish_all()
    host, ssd = world.stats().tiers.values()
    assert (host.written_bytes, host.read_bytes) == (5 + 5, 5 + 5)
    assert (ssd.written_bytes, ssd.read_bytes) == (5, 5)
    totals = world.stats().totals.ops
    assert {kind: (t.ops, t.failed_ops, t.blocks) for kind, t in totals.items() if t.ops} == {
        "D2H": (3, 0, 5), "H2DISK": (3, 0, 5),
        "DISK2H": (3, 0, 5), "H2D": (3, 0, 5),
    }  # fmt: skip


# -- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", EVERY_SCENE)
def test_a_match_that_is_never_launched_is_cancelled_in_time(scene: Scene) -> None:
    world, task_id = scene()
    world.tick(119.0)
    assert world.result(task_id) is None
    world.tick(1.0)
    result = world.final(task_id)
    assert result.status is KVStatus.CANCELLED
    assert result.error == "not launched within 120 s"
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde"])


def test_a_launched_task_has_no_time_to_live() -> None:
    world = World(op_timeout_s=1000.0)
    task_id = world.put("abc")
    world.tick(500.0)
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_the_next_deadline_is_the_earliest_of_matches_and_ops() -> None:
    world = World(match_ttl_s=20.0, op_timeout_s=30.0)
    assert world.engine.next_deadline() is None
    world.put("abc")
    world.now += 2
    world.match(TaskKind.PUT, "z")
    world.tick(18.0)
    assert world.engine.next_deadline() == 1000.0 + 22.0
    world.tick(2.0)
    assert world.engine.next_deadline() == pytest.approx(1000.0 + 30.0)


@pytest.mark.parametrize("scene", [a_get_from_ssd, a_get_from_both, a_prefetch])
def test_a_disk_worker_that_misses_a_deadline_is_replaced_and_the_prefix_before_it_kept(
    scene: Scene,
) -> None:
    world, task_id = scene()
    num_in_dram = world.cached(CPU, "abcde")
    world.launch(task_id)
    for run in world.ops(OpKind.H2D):
        world.finish(run)
    world.tick(29.0)
    assert not world.to_replace
    world.tick(2.0)
    assert "missed its deadline" in world.to_replace[DISK]
    assert world.result(task_id) is None  # its bytes may still be on their way
    world.down(DISK, "killed")
    expected = KVStatus.SUCCESS if num_in_dram else KVStatus.FAILED
    assert status(world, task_id) == (expected, num_in_dram)
    assert "missed its deadline" in str(world.final(task_id).error)
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde"])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scene", [a_put, a_get_from_dram])
def test_a_late_device_op_is_answered_and_its_blocks_stay_leased_until_it_ends(
    scene: Scene, gated: bool
) -> None:
    world, task_id = scene()
    leased_before = world.cache.tiers.host.num_leased
    world.launch(task_id, gated=gated)
    num_at_work = len(world.at_work)
    if gated:
        world.tick(GATE_PATIENCE_S)
        assert world.result(task_id) is None
    world.tick(31.0)
    result = world.result(task_id)
    assert result is not None
    assert (result.status, result.num_ok, result.is_final) == (KVStatus.FAILED, 0, True)
    assert "missed its deadline" in str(result.error)
    assert world.result(task_id, completely=True) == result
    assert world.tasks[task_id].answered  # the waiting caller is woken
    assert len(world.at_work) == num_at_work  # nothing more is started
    assert all(world.was_dropped(run) for run in world.ops())  # nor may start any more
    world.check()
    assert world.cache.tiers.host.num_leased == leased_before
    world.finish_all()
    assert status(world, task_id) == (KVStatus.FAILED, 0)
    assert world.tasks[task_id].answered
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde"])


def test_copies_that_land_after_the_answer_are_not_published() -> None:
    world = World()
    task_id = world.put("abcdef")
    first, second, third = world.ops(OpKind.D2H)
    world.finish(first)
    world.finish(world.ops(OpKind.H2DISK)[0])
    world.tick(31.0)
    result = world.result(task_id)
    assert result is not None
    assert (result.status, result.num_ok) == (KVStatus.SUCCESS, 2)
    world.finish(second)  # it reads slots that hold something else by now
    world.finish(third)
    assert status(world, task_id) == (KVStatus.SUCCESS, 2)
    assert world.cached(CPU, "abcdef") == world.cached(SSD, "abcdef") == 2
    world.check_nothing_is_held()


def test_a_late_device_op_ends_with_its_rank() -> None:
    world = World(load_ranks=(0, 1), store_ranks=(0, 1))
    task_id = world.put("abc")
    for run in world.ops():
        if run.executor == device(ENGINE, 0):
            world.finish(run)
    world.tick(31.0)
    assert world.result(task_id) is not None
    world.down(device(ENGINE, 1))
    assert status(world, task_id) == (KVStatus.FAILED, 0)
    world.check_nothing_is_held()


def test_a_large_op_gets_more_time() -> None:
    world = World()
    engine = KVTaskEngine(world.cache, TaskLimits(10**10, op_timeout_s=30.0))
    engine.executor_up(device(ENGINE, 0))
    engine.add_session(SESSION, ENGINE)
    task_id = world.ids.next()
    plan = engine.match(task_id, Prompt(TaskKind.PUT, keys_of("ab"), 0, 2, 32), 0.0)
    engine.launch([task_id], [np.arange(plan.num_blocks)], 0.0)
    engine.take_instructions()
    engine.tick(30.0 + 199.0)
    assert engine.take_instructions() == []
    engine.tick(30.0 + 200.0)
    assert isinstance(engine.take_instructions()[0], ReplaceExecutor)


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(6))
def test_a_get_keeps_the_prefix_before_a_lost_block_which_is_dropped_from_its_tier(
    position: int,
) -> None:
    world = world_with("abcdef", on=[SSD])
    world.rot("abcdef"[: position + 1])
    task_id = world.get("abcdef")
    world.finish_all()
    expected = KVStatus.SUCCESS if position else KVStatus.FAILED
    assert status(world, task_id) == (expected, position)
    assert world.final(task_id).error == "checksum mismatch"
    assert world.cached(SSD, "abcdef") == position
    assert world.stats().totals.dropped_blocks["ssd_bad_block"] == 1
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcdef"])
    assert world.cached(SSD, "abcdef") == 6


def test_a_block_that_another_get_reads_too_is_dropped_once_and_freed_after_both() -> None:
    world = world_with("abcdef", on=[SSD], cpu=12)
    world.rot("abcd")
    tasks = [world.get("abcdef"), world.get("abcdef")]
    world.finish_all()
    assert [status(world, task_id) for task_id in tasks] == [(KVStatus.SUCCESS, 3)] * 2
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcdef"])


def test_a_read_that_fails_for_another_reason_leaves_the_block_in_its_tier() -> None:
    world, task_id = a_get_from_ssd()
    world.launch(task_id)
    world.finish(world.ops(OpKind.DISK2H)[1], 1, error="no memory")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)
    assert world.cached(SSD, "abcde") == 5


def test_a_write_that_fails_keeps_the_prefix_before_it_on_the_ssd_and_all_in_dram() -> None:
    world = World()
    task_id = world.put("abcdef")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.finish(world.ops(OpKind.H2DISK)[1], 1, error="No space left on device")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 6)
    assert world.final(task_id).error == "No space left on device"
    assert (world.cached(CPU, "abcdef"), world.cached(SSD, "abcdef")) == (6, 3)
    assert world.stats().totals.dropped_blocks["ssd_write_failed"] == 1
    assert world.stats().failing == {"H2DISK": "No space left on device"}
    world.now += 61.0
    assert world.stats().failing == {}
    world.check_nothing_is_held()


@pytest.mark.parametrize("num_moved", range(6))
@pytest.mark.parametrize("scene", [a_put, a_get_from_dram, a_get_from_ssd])
def test_a_device_op_that_ends_early_leaves_the_contiguous_prefix(
    scene: Scene, num_moved: int
) -> None:
    world, task_id = scene()
    world.launch(task_id)
    while world.at_work:
        run = world.ops()[0]
        num_ok = max(0, min(len(run.op), num_moved - run.op.first))
        world.finish(run, num_ok if run.op.kind.touches_gpu else None)
    expected = KVStatus.SUCCESS if num_moved else KVStatus.FAILED
    assert status(world, task_id) == (expected, min(num_moved, 5))
    world.check_nothing_is_held()


@pytest.mark.parametrize("scene", [a_put, a_get_from_dram])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_task_fails_at_its_launch_while_a_rank_is_down(scene: Scene, lost: int) -> None:
    world, task_id = scene(load_ranks=(0, 1), store_ranks=(0, 1))
    world.down(device(ENGINE, lost))
    world.launch(task_id)
    assert not world.at_work
    assert status(world, task_id) == (KVStatus.FAILED, 0)
    assert world.final(task_id).error == f"device:{ENGINE}:{lost} not connected"
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde"])


@pytest.mark.parametrize("scene", [a_put, a_get_from_dram])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_task_fails_when_a_rank_dies_once_the_other_ranks_have_ended(
    scene: Scene, lost: int
) -> None:
    world, task_id = scene(load_ranks=(0, 1), store_ranks=(0, 1))
    world.launch(task_id)
    world.down(device(ENGINE, lost), "its process died")
    assert world.result(task_id) is None
    world.finish_all()
    assert status(world, task_id) == (KVStatus.FAILED, 0)
    assert world.final(task_id).error == f"device:{ENGINE}:{lost}: its process died"
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcde"])


def test_a_rank_that_shares_anothers_copy_is_not_needed_for_a_put() -> None:
    world = World(load_ranks=(0, 1), store_ranks=(0,))
    world.down(device(ENGINE, 1))
    task_id = world.put("abc")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_without_a_disk_worker_a_put_stays_in_dram_and_a_get_keeps_what_is_there() -> None:
    world = World()
    world.down(DISK)
    task_id = world.put("abc")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)
    assert world.stats().totals.dropped_blocks["ssd_unavailable"] == 3
    assert (world.cached(CPU, "abc"), world.cached(SSD, "abc")) == (3, 0)
    world.check_nothing_is_held()


def test_the_death_of_the_disk_worker_ends_its_ops_and_those_waiting_for_it() -> None:
    world = World(cpu=40, ssd=40, chunk=1)
    task_id = world.put("abcdefghijkl")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.finish(world.ops(OpKind.H2DISK)[0])
    world.down(DISK, "was killed")
    assert status(world, task_id) == (KVStatus.SUCCESS, 12)
    assert world.final(task_id).error == "disk: was killed"
    assert world.cached(SSD, "abcdefghijkl") == 1
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(["abcdefghijkl"])


def test_reports_of_an_executor_that_was_declared_gone_are_ignored() -> None:
    world = World()
    task_id = world.put("ab")
    world.down(device(ENGINE, 0))
    world.up(device(ENGINE, 0))
    world.report_after_death(world.gone[0])
    world.engine.op_done(DISK, Done(10**6, 2), world.now)
    assert status(world, task_id) == (KVStatus.FAILED, 0)
    assert world.cached(CPU, "ab") == 0


@pytest.mark.parametrize(("claimed", "counted"), [(-1, 0), (-(10**9), 0), (3, 2), (10**9, 2)])
def test_a_reported_count_is_clamped_to_its_op(claimed: int, counted: int) -> None:
    world = World(ssd=0)
    task_id = world.put("ab")
    world.finish(world.ops()[0], claimed)
    assert status(world, task_id)[1] == world.cached(CPU, "ab") == counted
    world.check_nothing_is_held()


# -- turns at the disk ---------------------------------------------------------------------------


def test_a_read_overtakes_writes_that_wait_for_the_disk_but_not_forever() -> None:
    world = world_with("ABCDEFGHIJKL", on=[SSD], cpu=40, ssd=40, chunk=1)
    world.put("abcdefghijkl")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    num_at_the_disk = len(world.ops(OpKind.H2DISK))
    assert num_at_the_disk < 12
    world.get("ABCDEFGHIJKL")
    assert not world.ops(OpKind.DISK2H)
    started = []
    for run in world.ops(OpKind.H2DISK):
        world.finish(run)
        started.append(world.ops()[-1].op.kind)
    read, write = OpKind.DISK2H, OpKind.H2DISK
    assert started == [read, read, read, write, read, read, read, write]
    world.finish_all()
    world.check_nothing_is_held()


def test_the_disk_worker_is_never_given_more_than_a_few_ops() -> None:
    world = World(cpu=40, ssd=40, chunk=1)
    world.put("abcdefghijklmnopqrst")
    while world.at_work:
        assert len(world.ops(OpKind.H2DISK)) <= 8
        world.finish(world.ops()[0])
    assert world.cached(SSD, "abcdefghijklmnopqrst") == 20


# -- several engines -----------------------------------------------------------------------------


def test_one_engine_loads_what_another_stored() -> None:
    world = World()
    world.put("abc")
    world.finish_all()
    task_id = world.match(TaskKind.GET, "abcd", engine=OTHER)
    world.launch(task_id)
    assert {run.executor for run in world.ops()} == {device(OTHER, 0)}
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_a_lost_rank_affects_only_its_own_engine() -> None:
    world = World()
    world.down(device(OTHER, 0))
    task_id = world.put("abc")
    world.finish_all()
    assert status(world, task_id) == (KVStatus.SUCCESS, 3)


def test_a_launch_and_a_cancel_return_the_tasks_that_did_not_run() -> None:
    world = World()
    unlaunched, launched = world.match(TaskKind.PUT, "abc"), world.put("xyz")
    cancelled = world.engine.cancel([unlaunched, launched], world.now)
    assert cancelled == [unlaunched]
    assert world.engine.cancel([unlaunched, launched], world.now) == []
    slots = world.tasks[unlaunched].slots
    assert world.engine.launch([unlaunched], [slots], world.now) == [unlaunched]
    later = world.match(TaskKind.PUT, "uv")
    assert world.engine.launch([later], [world.tasks[later].slots], world.now) == []


def test_the_deadlines_of_ended_ops_are_not_kept() -> None:
    world = World(ssd=0)
    world.put("abc")
    world.finish_all()
    for _ in range(100):
        task_id = world.match(TaskKind.GET, "abc")
        world.launch(task_id, gated=True)
        world.finish_all()
        world.check()  # the deadlines are in proportion to the running ops


def test_when_an_engine_dies_its_copies_end_and_its_write_through_goes_on() -> None:
    world = World(cpu=20, ssd=20)
    copied, copying = world.put("abc"), world.put("xyz")
    for run in world.ops(OpKind.D2H, copied):
        world.finish(run)
    assert world.ops(OpKind.H2DISK, copied)
    world.end_session(ENGINE)
    assert world.engine.sessions.uses_gpu_of(ENGINE)
    for run in world.ops(OpKind.D2H, copying):
        world.finish(run)
    assert not world.engine.sessions.uses_gpu_of(ENGINE)
    world.begin_session(ENGINE)
    world.finish_all()
    assert world.cached(SSD, "abc") == 3
    assert world.cached(TierName.CPU, "xyz") == 0
    world.check_nothing_is_held()


def test_each_session_has_its_own_task_limit() -> None:
    world = World(cpu=20, ssd=0)
    engine = KVTaskEngine(world.cache, TaskLimits(max_open_tasks=2))
    sessions = [TaskIds(make_session(9, number)) for number in (1, 2)]
    for number, ids in enumerate(sessions):
        engine.add_session(ids.session, str(number))
        engine.executor_up(device(str(number), 0))
    plans = [
        engine.match(sessions[0].next(), Prompt(TaskKind.PUT, keys_of(text), 0, 1, 16), 0.0)
        for text in "abc"
    ]
    assert [plan.num_blocks for plan in plans] == [1, 1, 0]
    limited = engine.queries.totals_of(sessions[0].session)
    assert limited.dropped_blocks == {"session_task_limit": 1}
    other = engine.match(sessions[1].next(), Prompt(TaskKind.PUT, keys_of("c"), 0, 1, 16), 0.0)
    assert other.num_blocks == 1
    assert engine.queries.totals_of(sessions[1].session).dropped_blocks == {}


def test_an_engine_without_all_its_ranks_hits_and_stores_nothing() -> None:
    world = World()
    world.put("abc")
    world.finish_all()
    world.down(device(ENGINE, 0))
    get, put = world.match(TaskKind.GET, "abc"), world.match(TaskKind.PUT, "xyz")
    assert [status(world, task)[0] for task in (get, put)] == [KVStatus.NOT_FOUND] * 2
    assert world.stats().totals.dropped_blocks == {"ranks_missing": 3}
    world.up(device(ENGINE, 0))
    assert world.tasks[world.match(TaskKind.GET, "abc")].plan.num_blocks == 3


def test_engines_that_write_share_the_room_for_what_waits_for_the_disk() -> None:
    world = World(cpu=30, ssd=30, backlog=8)
    world.put("abcdef")  # alone it may use all of it
    world.match(TaskKind.PUT, "xyz", engine=OTHER)
    task_id = world.match(TaskKind.PUT, "uvwxyz", engine=OTHER)
    plan = world.tasks[task_id].plan
    assert plan.num_blocks == 6  # DRAM takes all
    assert plan.dropped == {"ssd_write_backlog": 6}
    world.drain()


def test_an_id_is_used_once_and_only_in_a_session() -> None:
    world = World()
    task_id = world.put("abc")
    for known in (task_id, TaskId(task_id - 1)):
        with pytest.raises(ValueError, match="given out before"):
            world.engine.match(known, Prompt(TaskKind.PUT, keys_of("z"), 0, 1, 16), world.now)
    with pytest.raises(KeyError, match="never given out"):
        world.engine.match(
            TaskIds(make_session(3, 3)).next(),
            Prompt(TaskKind.PUT, keys_of("z"), 0, 1, 16),
            world.now,
        )


# -- the checker ---------------------------------------------------------------------------------


def the_open_task(world: World) -> Task:
    (task,) = world.engine.sessions.tasks.values()
    return task


def run_an_op_without_executors(world: World) -> None:
    next(iter(the_open_task(world).running.values())).waiting_for.clear()


def forget_a_task_that_runs(world: World) -> None:
    world.engine.sessions.close(the_open_task(world))


def end_a_task_that_goes_on(world: World) -> None:
    the_open_task(world).state = TaskState.COMPLETED


def forget_the_launch(world: World) -> None:
    the_open_task(world).launched_s = None


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (run_an_op_without_executors, "runs without an executor"),
        (forget_a_task_that_runs, "runs for a task that has ended"),
        (end_a_task_that_goes_on, "task 1 has ended and is still kept open"),
        (forget_the_launch, "open ops without a launch"),
    ],
)
def test_the_checker_notices_a_broken_state(
    damage: Callable[[World], None], complaint: str
) -> None:
    world = World()
    world.put("abc")
    world.engine.check()
    damage(world)
    with pytest.raises(InternalError, match=complaint):
        world.engine.check()


def test_tasks_are_answered_in_the_order_they_end() -> None:
    world = World(ssd=0)
    engine = world.engine
    tasks = [world.ids.next(), world.ids.next()]
    for task_id, text in zip(tasks, "ab", strict=True):
        engine.match(task_id, Prompt(TaskKind.PUT, keys_of(text), 0, 1, 16), 0.0)
    engine.launch(tasks, [np.array([0]), np.array([1])], 0.0)
    first, second = [i for i in engine.take_instructions() if isinstance(i, RunOp)]
    engine.op_done(device(ENGINE, 0), Done(second.op.op_id, 1), 0.0)
    engine.op_done(device(ENGINE, 0), Done(first.op.op_id, 1), 0.0)
    told = engine.take_instructions()
    result = TaskResult(KVStatus.SUCCESS, 0, 1, 16)
    assert [i for i in told if isinstance(i, TaskAnswered)] == [
        TaskAnswered(tasks[1], ENGINE, result, notify_ranks=False),
        TaskAnswered(tasks[0], ENGINE, result, notify_ranks=False),
    ]
    assert engine.take_instructions() == []
