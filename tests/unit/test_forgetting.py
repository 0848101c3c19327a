"""Errors in the middle of a change: the task engine forgets everything, and never mixes up blocks.

An error is raised once, at each function or line that some histories reach. A world of dictionaries
(`task_builders`) compares every block that can be found, or arrives, with the one that was stored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from failing_calls import Lines, Point
from task_builders import ENGINE, OTHER, TaskInfo, World

from flexcache.cache.block_keys import ENGINE_KEYS, EngineBlockKeys, make_root
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import BlockKey, OpId, TaskId, TaskKind, TierName
from flexcache.tasks.instructions import REMOTE, DropOp, Forgotten, RunLookUp, RunOp, TaskAnswered
from flexcache.transfer.messages import Done, LookedUp

WORLDS: dict[str, dict[str, Any]] = {
    "SSD": {},
    "store": {"remote": True, "load_ranks": (0, 1)},
    "write-back": {"policy": "write_back", "remote": True},
    "past DRAM": {"past_dram": "auto", "skip_slow_loads": True},
    "SSD alone": {"past_dram": "always", "keeps_on_host": False, "load_ranks": (0, 1)},
    "limits": {"write_blocks_per_s": 2.0, "retention_s": 40.0, "remote": True},
}
PROMPTS = ["abcdef", "abcxyz", "abuvw", "mnopqr", "mno"]
SESSIONS = ("one user", "another")
ERRORS = (MemoryError, KeyboardInterrupt)
NUM_STEPS, NUM_STEPS_AFTER = 120, 6
CALLS = (
    "session_hint", "look_up", "awaits_load", "match", "launch", "cancel", "clear", "withhold_free",
    "check", "take_instructions",
)  # fmt: skip
EVENTS = (
    "add_session", "end_session", "set_disputed", "adopt_layout", "catch_up", "executor_up",
    "executor_down", "looked_up", "op_done", "tick", "give_back", "close_down", "record_lookups",
)  # fmt: skip


class FailingWorld(World):
    """A world in which a call of the task engine may fail, once.

    Args:
        reached: Called before each line of a call.
    """

    def __init__(self, reached: Callable[[Point], None], **options: Any) -> None:
        super().__init__(**options)
        self.write_backs = {}  # these models follow counters, which begin again
        for name in CALLS + EVENTS:
            call = getattr(self.engine, name)
            setattr(self.engine, name, self._follow(call, Lines(reached), name in EVENTS))

    def _follow(
        self, call: Callable[..., Any], lines: Lines, has_happened: bool
    ) -> Callable[..., Any]:
        """Follow a call. What has happened is said again if the call may not have begun."""

        @functools.wraps(call)
        def followed(*args: Any, **kwargs: Any) -> Any:
            try:
                with lines:
                    return call(*args, **kwargs)
            except ERRORS:
                if has_happened:
                    call(*args, **kwargs)
                raise

        return followed

    def match(
        self, kind: TaskKind, text: str, start: int = 0, stop: int | None = None,
        engine: str = ENGINE, retain_s: float = 0.0, behind: int = 0,
    ) -> TaskId:  # fmt: skip
        try:
            return super().match(kind, text, start, stop, engine, retain_s, behind)
        except ERRORS:
            ids = self.sessions[engine]
            task_id = TaskId(ids._base + ids._count)
            if task_id not in self.tasks:  # its caller does not know it
                plan = Plan(kind, self.placed(text).root, 0, 0)
                self.abandoned[task_id] = TaskInfo(kind, engine, text, plan, np.zeros(0, np.int64))
            raise

    def launch(self, *task_ids: TaskId, gated: bool = False) -> None:
        try:
            super().launch(*task_ids, gated=gated)
        except ERRORS:
            for task_id in task_ids:
                task = self.engine.sessions.tasks.get(task_id)
                self.tasks[task_id].launched = task is None or task.is_launched
            for left in self.engine._instructions:
                if isinstance(left, TaskAnswered) and left.task_id in task_ids:
                    self.tasks[left.task_id].gated = left.notify_ranks  # if it got that far
            raise

    def _carry_out(self) -> None:
        left = self.engine._instructions
        # An op that is to end early may be the one whose end the engine has failed to take in.
        left[:] = [
            each for each in left
            if not isinstance(each, DropOp) or (each.executor, each.op_id) in self.at_work
        ]  # fmt: skip
        super()._carry_out()


def steps(world: FailingWorld, draws: random.Random) -> Iterator[Callable[[], object]]:
    """Yield what happens to a world, for ever."""

    def match_and_launch() -> None:
        kind = draws.choice([TaskKind.PUT, TaskKind.PUT, TaskKind.GET, TaskKind.PREFETCH])
        behind = draws.choice([0, 0, 0, 3])
        engine = draws.choice([ENGINE, ENGINE, OTHER])
        if engine not in world.sessions:
            return
        asked = Prompt(TaskKind.GET, world.placed(text), 0, len(text), 16 * len(text))
        world.engine.awaits_load(world.sessions[engine].session, asked, world.now)
        task_id = world.match(kind, text, engine=engine, behind=behind)
        if draws.random() < 0.8:
            world.launch(task_id, gated=draws.random() < 0.3)

    def use_session() -> None:
        session_id = draws.choice(SESSIONS)
        prompt = Prompt(TaskKind.GET, world.placed(text), 0, 0, 96, session_id=session_id)
        world.engine.match(world.ids.next(), prompt, world.now)
        world._carry_out()

    def clear() -> None:
        world.engine.clear(draws.choice([None, *(t.name.value for t in world.cache.tiers)]))
        withheld = world.engine.withhold_free(TierName.SSD)
        world.engine.give_back(withheld)
        world._carry_out()

    def sessions() -> None:
        if OTHER in world.sessions:
            world.end_session(OTHER)
        elif not world.engine.sessions.uses_gpu_of(OTHER):
            world.begin_session(OTHER)

    def executors() -> None:
        for executor in [*world.to_replace] or [draws.choice(world.executors)]:
            world.down(executor)
        for executor in world.executors:
            world.up(executor)

    def finish(num_ok: int | None = None, is_bad: bool = False) -> None:
        if world.at_work:
            run = draws.choice(world.ops())
            if is_bad:
                world.finish_bad(run)
            else:
                world.finish(run, num_ok)

    def look_up() -> None:
        if REMOTE in world.executors:
            world.stored_by_another(text)
            world.look_up(text)
            for lookup_id in [*world.asked]:
                world.answer(lookup_id, draws.choice([None, None, "a fault"]))

    def aside() -> None:
        world.engine.catch_up(world.now)
        world.engine.record_lookups()
        world.engine.check()
        world.stats()

    def cancel() -> None:
        world.cancel(*[task_id for task_id in world.tasks if draws.random() < 0.1])

    def hint() -> None:
        is_over, who = draws.random() < 0.5, draws.choice(SESSIONS)
        world.engine.session_hint(who, is_over, None if is_over else 1.0, world.now)

    rare = [
        use_session, clear, sessions, executors, look_up, aside, cancel, hint,
        lambda: world.dispute(OTHER, OTHER not in world.disputed),
        lambda: finish(0), lambda: finish(1), lambda: finish(is_bad=True),
        lambda: world.adopt(draws.choice(["@X", "@Y"])), world.finish_all,
        lambda: world.tick(draws.choice([0.0, 1.0, 3.0, 31.0, 130.0, 700.0])),
    ]  # fmt: skip
    while True:
        text = draws.choice(PROMPTS)
        yield draws.choice([match_and_launch, match_and_launch, finish, finish, *rare])


def histories(world: FailingWorld, seed: int) -> Iterator[None]:
    """Let a history happen, step by step. A call may fail."""
    for step in steps(world, random.Random(seed)):
        try:
            step()
            world._carry_out()
        except ERRORS:
            world._carry_out()
        yield


def reached_points(seed: int, options: dict[str, Any], lines: bool) -> dict[int, Point]:
    """When a history comes to each function, or each line, for the first time."""
    points: list[Point] = []
    world = FailingWorld(points.append, **options)
    for _ in itertools.islice(histories(world, seed), NUM_STEPS):
        pass
    first: dict[Point, int] = {}
    for number, (code, line) in enumerate(points):
        first.setdefault((code, line if lines else 0), number)
    return {number: point for point, number in first.items()}


class Fault:
    """Raises an error at one of the lines that are reached, given by its number."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._left = number
        self._error = error
        self.is_over = False

    def __call__(self, point: Point) -> None:
        if not self._left and not self.is_over:
            self.is_over = True
            raise self._error
        self._left -= 1


def fail_at(seed: int, options: dict[str, Any], number: int, error: type[BaseException]) -> None:
    fault = Fault(number, error)
    world = FailingWorld(fault, **options)
    history = histories(world, seed)
    while not fault.is_over:
        next(history)
    for _ in range(NUM_STEPS_AFTER):
        world.check()
        next(history)
    for executor in world.executors:
        world.up(executor)
    world.drain()
    world.check_nothing_is_held()
    world.check_every_prompt_can_be_stored(PROMPTS[:2])


SEED = 1


def points_of_all_worlds(lines: bool) -> list[tuple[str, int]]:
    """Return each function, or line, once: the first world that comes to it, and when."""
    seen, points = set[Point](), []
    for name, options in WORLDS.items():
        for number, point in reached_points(SEED, options, lines).items():
            if point not in seen:
                seen.add(point)
                points.append((name, number))
    return points


def test_blocks_are_right_or_gone_after_an_error_at_the_entry_of_any_function() -> None:
    points = points_of_all_worlds(lines=False)
    assert len(points) > 300
    for turn, (name, number) in enumerate(points):
        fail_at(SEED, WORLDS[name], number, ERRORS[turn % len(ERRORS)])


@pytest.mark.whole
def test_blocks_are_right_or_gone_after_an_error_at_any_line() -> None:
    for turn, (name, number) in enumerate(points_of_all_worlds(lines=True)):
        fail_at(SEED, WORLDS[name], number, ERRORS[turn % len(ERRORS)])


class LyingKeys(EngineBlockKeys):
    """Keys in memory that their client changes while they are read."""

    def __init__(self, draws: random.Random, num_blocks: int, parent: BlockKey | None) -> None:
        super().__init__(ROOT, (), 0, None, parent)
        self.num_blocks = num_blocks
        self._draws = draws

    def key(self, index: int) -> BlockKey:
        return BlockKey(self._draws.choice(SOME_KEYS))

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        return [self.key(index) for index in range(start, stop)]


ROOT = make_root("a model", [], ENGINE_KEYS)
SOME_KEYS = [bytes([number]) for number in range(12)]
HUGE = (1 << 63) - 1


def test_an_error_in_what_no_answer_waits_for_costs_the_blocks_and_does_not_get_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, errors = World(), [MemoryError()]
    world.put("ab")
    world.finish_all()

    def fail_once(*_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(TieredCache, "catch_up", fail_once)
    world.engine.catch_up(world.now)
    world._carry_out()
    assert world.cached(TierName.CPU, "ab") == 0
    world.check_every_prompt_can_be_stored(["ab"])


@pytest.mark.parametrize("name", WORLDS)
def test_no_request_or_report_makes_the_engine_forget(name: str) -> None:
    """Whatever a client sends that has passed the checks of a message's form."""
    draws = random.Random(5)
    world = World(**WORLDS[name])
    engine, now, given = world.engine, world.now, dict[OpId, str]()
    for turn in range(3000):
        now += draws.choice([0.0, 0.0, 0.1, 5.0])
        num_blocks = draws.randrange(0, 9)
        stop = draws.randint(0, num_blocks)
        parent = BlockKey(draws.choice(SOME_KEYS)) if draws.random() < 0.2 else None
        keys = LyingKeys(draws, num_blocks, parent)
        kind, session = draws.choice(list(TaskKind)), draws.choice([None, "", "\0", "x"])
        retain_s = draws.choice([0.0, 0.0, 1e308, -1e308, 5.0])
        task_id = world.ids.next()
        prompt = Prompt(
            kind, keys, draws.randint(0, stop), stop, draws.choice([0, -1, HUGE]), retain_s,
            draws.randint(0, stop), session,
        )  # fmt: skip
        engine.look_up(prompt, now)
        engine.awaits_load(world.ids.session, prompt, now)
        plan = engine.match(task_id, prompt, now)
        count = draws.choice([plan.num_gpu_blocks, plan.num_gpu_blocks, 1, 0])
        with contextlib.suppress(ValueError, KeyError):
            engine.launch(
                [task_id], [np.full(count, draws.choice([-1, 0, HUGE]))], now, turn % 3 == 0
            )
        with contextlib.suppress(KeyError):
            engine.cancel([TaskId(draws.choice([task_id, task_id - 1, HUGE]))], now)
        with contextlib.suppress(ValueError):
            engine.match(task_id, Prompt(kind, keys, 0, stop, 0), now)
        engine.session_hint(
            draws.choice(["", "x", "y"]), turn % 2 == 0, draws.choice([None, 0.0]), now
        )
        for left in engine.take_instructions():
            assert not isinstance(left, Forgotten), left.error
            if isinstance(left, RunOp):
                given[left.op.op_id] = left.executor
            elif isinstance(left, RunLookUp):
                count = draws.choice([0, 3, HUGE, -1])
                engine.looked_up(LookedUp(left.lookup_id, count, None, turn), now)
        for op_id, executor in list(given.items()):
            if draws.random() < 0.5:
                checksums = bytes(8 * draws.randrange(9))
                done = Done(
                    draws.choice([op_id, OpId(HUGE)]), draws.choice([0, 1, 9, -1, HUGE]),
                    draws.choice([None, "?"]), draws.random() < 0.3,
                    draws.choice([b"", checksums]), device_bytes=HUGE,
                )  # fmt: skip
                engine.op_done(executor, done, now)
                del given[op_id]
        engine.tick(now)
        engine.catch_up(now)
        if turn % 100 == 0:
            engine.check()
    assert not any(isinstance(left, Forgotten) for left in engine.take_instructions())
