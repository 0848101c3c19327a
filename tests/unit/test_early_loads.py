"""Loads ahead of their requests: what they may take, how long they are kept, how they count."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from task_builders import World

from flexcache.cache.early_loads import EarlyLoads
from flexcache.cache.prompt import Prompt
from flexcache.cache.prompt_sessions import SessionReturns
from flexcache.ids import KVStatus, OpKind, TaskId, TaskKind, TierName
from flexcache.stats import EarlyLoadStats

TTL_S = 120.0
CPU, SSD = TierName.CPU, TierName.SSD


def world_with(*texts: str, cpu: int = 12, ssd: int = 40, **options: object) -> World:
    """A world in which SSD has some prompts, and DRAM nothing."""
    world = World(cpu=cpu, ssd=ssd, match_ttl_s=TTL_S, **options)  # type: ignore[arg-type]
    for text in texts:
        world.put(text)
        world.finish_all()
    world.clear(CPU)
    return world


def counters(world: World) -> EarlyLoadStats:
    return world.cache.early.counters


def awaits(world: World, text: str) -> bool:
    session = world.ids.session
    return world.engine.awaits_load(
        session, Prompt(TaskKind.GET, world.placed(text), 0, len(text), 16 * len(text)), world.now
    )


def prefetched(world: World, text: str) -> TaskId:
    task_id = world.prefetch(text)
    world.finish_all()
    return task_id


# -- what is kept ---------------------------------------------------------------------------------


def test_what_was_loaded_early_is_kept_until_its_request_asks() -> None:
    world = world_with("abcd")
    prefetched(world, "abcd")
    for text in ("ghijkl", "mnopqr", "stuvwx"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abcd") == 4
    task_id = world.get("abcdz")
    assert world.tasks[task_id].plan.sources == {CPU: 4}
    assert counters(world) == EarlyLoadStats(early=4)
    world.finish_all()
    for text in ("ghijkl!", "mnopqr!"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abcd") == 0
    assert world.cache.early.num_blocks == 0


def test_a_get_that_is_not_launched_does_not_use_it() -> None:
    world = world_with("abcd")
    prefetched(world, "abcd")
    world.cancel(world.match(TaskKind.GET, "abcd"))
    assert counters(world) == EarlyLoadStats()
    assert world.cache.early.num_blocks == 4
    world.get("abcd")
    assert counters(world) == EarlyLoadStats(early=4)


def test_nothing_is_kept_for_a_request_that_does_not_come() -> None:
    world = world_with("abcd")
    prefetched(world, "abcd")
    deadline = world.engine.next_deadline()
    assert deadline is not None
    assert deadline <= world.now + TTL_S, "or it would be kept for ever"
    world.tick(TTL_S - 1)
    assert world.cache.early.num_blocks == 4
    world.tick(1)
    assert counters(world) == EarlyLoadStats(wasted=4)
    assert len(world.cache.tiers.clear(CPU.value)[CPU]) == 4, "it is pinned no longer"


def test_a_tier_that_is_cleared_keeps_nothing() -> None:
    world = world_with("abcd")
    prefetched(world, "abcd")
    world.cache.early.forget()
    assert world.clear(CPU) == 4
    assert counters(world) == EarlyLoadStats(wasted=4)


def test_a_cancelled_load_is_no_longer_moved_nor_kept() -> None:
    world = world_with("abcdef", chunk=1)
    task_id = world.prefetch("abcdef")
    world.finish(world.ops(OpKind.DISK2H)[0])
    world.cancel(task_id)
    world.finish_all()
    assert world.final(task_id).status is KVStatus.CANCELLED
    assert world.cache.early.num_open == 0
    assert counters(world).wasted >= 1
    world.check_nothing_is_held()
    for text in ("ghijkl", "mnopqr"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abcdef") == 0


def test_what_has_landed_for_a_request_that_is_gone_is_kept_no_longer() -> None:
    world = world_with("abcd")
    task_id = prefetched(world, "abcd")
    world.cancel(task_id)
    assert counters(world) == EarlyLoadStats(wasted=4)
    world.check_nothing_is_held()
    world.cancel(task_id)
    assert counters(world) == EarlyLoadStats(wasted=4)


def test_a_load_that_was_asked_for_and_fails_is_counted_once() -> None:
    world = world_with("abcd", chunk=1)
    task_id = world.prefetch("abcd")
    first, second, *_ = world.ops(OpKind.DISK2H, task_id)
    world.get("abcd")
    world.finish(second)
    world.finish(first, 0, "broken")
    world.finish_all()
    assert world.final(task_id).num_ok == 0
    assert counters(world) == EarlyLoadStats(late=4)


# -- what it may take -----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_one_prompt_may_not_take_all_of_dram(share: float) -> None:
    world = world_with("abcdefghijkl", cpu=12)
    world.cache.early = EarlyLoads(world.cache.tiers.host, share, TTL_S)
    prefetched(world, "abcdefghijkl")
    most = 12 * (share or 0.5)
    assert world.cached(CPU, "abcdefghijkl") == world.cache.early.num_blocks == most
    world.put("mnopqr")
    world.finish_all()
    assert world.cached(CPU, "mnopqr") == 6, "the rest of DRAM is free for others"


def test_early_loads_take_half_of_dram_together() -> None:
    world = world_with("abcdefgh", "ijkl", "mnop", cpu=12)
    prefetched(world, "abcdefgh")
    assert world.cached(CPU, "abcdefgh") == 6
    prefetched(world, "ijkl")
    assert world.cached(CPU, "ijkl") == 0
    world.get("abcdefgh")
    world.finish_all()
    world.tick(10)
    prefetched(world, "ijkl")
    prefetched(world, "mnop")
    assert (world.cached(CPU, "ijkl"), world.cached(CPU, "mnop")) == (4, 2)
    task_id = world.get("mnop")
    assert world.tasks[task_id].plan.sources == {CPU: 2, SSD: 2}


def test_what_the_engine_computes_faster_is_not_loaded_early() -> None:
    world = world_with("abcd", "ijkl", skip_slow_loads=True)
    for _ in range(3):
        world.get("abcd")
        for run in world.ops(OpKind.DISK2H):
            world.tick(1.0)
            world.finish(run)
        world.finish_all()
        world.clear(CPU)
    world.engine.report_prefill(world.ids.session, 1000.0)
    task_id = world.prefetch("ijkl")
    assert world.result(task_id) is not None
    assert not world.ops()
    world.engine.report_prefill(world.ids.session, 0.001)
    world.prefetch("ijkl")
    assert world.ops(OpKind.DISK2H)


def test_two_requests_of_one_prompt_are_loaded_for_once() -> None:
    world = world_with("abcdef")
    world.prefetch("abcd")
    first = world.ops(OpKind.DISK2H)
    second = world.prefetch("abcdef")
    assert sum(len(run.op) for run in world.ops(OpKind.DISK2H)) == 6
    assert len(first) < len(world.ops(OpKind.DISK2H))
    world.finish_all()
    assert world.cached(CPU, "abcdef") == 6
    assert world.final(second).num_ok == 2


def test_nothing_that_is_likely_to_be_used_sooner_is_evicted_for_it() -> None:
    world = world_with("abcd", cpu=12)
    for text in ("ghijkl", "mnopqr"):
        world.put(text)
        world.finish_all()
    task_id = prefetched(world, "abcd")
    assert world.tasks[task_id].plan.is_empty
    assert world.cached(CPU, "abcd") == 0, "all in DRAM was used a moment ago"
    assert world.stats().totals.skipped_blocks == {"host_worth_less": 4}
    world.tick(10)
    world.get("mnopqr")
    world.finish_all()
    prefetched(world, "abcd")
    assert world.cached(CPU, "abcd") == 4
    assert world.cached(CPU, "ghijkl") == 2


def test_the_longer_loads_are_held_in_vain_the_less_they_may_evict() -> None:
    world = world_with("abcd", "wxyz", cpu=12)
    first = world.cache.early.terms(world.now)
    prefetched(world, "abcd")
    world.get("abcd")
    used_soon = world.cache.early.terms(world.now).hold_s
    assert used_soon < first.hold_s
    for _ in range(3):
        prefetched(world, "wxyz")
        world.tick(TTL_S)
        world.clear(CPU)
    wasted = world.cache.early.terms(world.now)
    assert wasted.hold_s > 10 * used_soon
    assert wasted.wait_s == 0.0, "of requests that did ask"
    for text in ("ghijkl", "mnopqr"):
        world.put(text)
        world.finish_all()
    world.tick(10)
    assert world.tasks[prefetched(world, "abcd")].plan.is_empty


def test_loads_that_were_held_in_vain_are_forgotten_with_time() -> None:
    world = world_with("abcd", "wxyz", cpu=12)
    for _ in range(5):
        prefetched(world, "wxyz")
        world.tick(TTL_S)
        world.clear(CPU)
    for may_load in (False, True):
        for text in ("ghijkl", "mnopqr"):
            world.put(text)
            world.finish_all()
            world.get(text)
            world.finish_all()
        world.tick(10)
        prefetched(world, "abcd")
        assert world.cached(CPU, "abcd") == 4 * may_load
        world.tick(600)


def test_what_dram_has_of_a_prompt_is_kept_until_its_request_asks() -> None:
    world = World(cpu=8, ssd=40)
    for text in ("abcd", "wxyz"):
        world.put(text)
        world.finish_all()
    world.tick(10)
    prefetched(world, "abcd")
    world.tick(0.5)
    world.get("wxyz")
    world.finish_all()
    world.put("ghij")
    world.finish_all()
    assert (world.cached(CPU, "abcd"), world.cached(CPU, "wxyz")) == (4, 0)
    world.check_nothing_is_held()


# -- what goes first ------------------------------------------------------------------------------


def reads_at_work(world: World) -> list[TaskId]:
    return [run.task_id for run in world.ops(OpKind.DISK2H)]


def test_reads_that_requests_wait_for_go_before_early_ones() -> None:
    long, short = "abcdefghijkl", "xyz"
    world = world_with(long, short, cpu=40, ssd=60, chunk=1)
    early = world.prefetch(long)
    needed = world.get(short)
    at_work = reads_at_work(world)
    assert set(at_work) == {early}, "the worker was given some before"
    assert len(at_work) < len(long)
    for _ in short:
        world.finish(world.ops(OpKind.DISK2H)[0])
    assert reads_at_work(world)[-3:] == [needed] * 3
    world.finish_all()
    assert world.final(early).num_ok == len(long)


def test_a_request_that_comes_loads_what_has_not_begun() -> None:
    text = "abcdefghijkl"
    world = world_with(text, cpu=40, ssd=60, chunk=1)
    early = world.prefetch(text)
    at_work = world.ops(OpKind.DISK2H)
    assert awaits(world, text + "z")
    assert awaits(world, text + "z")
    for run in at_work:
        world.finish(run)
    assert not world.ops(OpKind.DISK2H), "the rest is not read early any more"
    assert world.final(early).num_ok == len(at_work) < len(text)
    assert not awaits(world, text + "z")
    task_id = world.get(text)
    sources = {CPU: len(at_work), SSD: len(text) - len(at_work)}
    assert world.tasks[task_id].plan.sources == sources
    assert counters(world) == EarlyLoadStats(late=len(at_work))
    world.finish_all()
    assert world.cached(CPU, text) == len(text)


def test_a_request_does_not_wait_for_what_has_not_begun_at_all() -> None:
    world = world_with("abcdefgh", "xyz", cpu=40, ssd=60, chunk=1)
    world.prefetch("abcdefgh")
    behind = world.prefetch("xyz")
    assert not world.ops(OpKind.DISK2H, behind), "the worker has enough to do"
    assert not awaits(world, "xyz")
    world.tick()
    assert world.final(behind).num_ok == 0
    assert world.final(behind).status is KVStatus.CANCELLED, "nothing has failed"
    assert world.tasks[world.get("xyz")].plan.sources == {SSD: 3}
    world.finish_all()
    world.check_nothing_is_held()


def test_a_load_that_has_no_turn_at_a_busy_disk_gives_its_room_back() -> None:
    world = world_with("abcdefgh", "xyz", cpu=40, ssd=60, chunk=1, op_timeout_s=1e4)
    reading = world.prefetch("abcdefgh")
    world.tick(1.0)
    waiting = world.prefetch("xyz")
    for due in (TTL_S - 1.0, 1.0):
        deadline = world.engine.next_deadline()
        assert deadline is not None
        world.tick(due)
        assert deadline == world.now
    assert world.final(waiting).status is KVStatus.CANCELLED
    assert world.stats().tiers["CPU"].leased == 8, "what is being read goes on"
    world.finish_all()
    assert world.final(reading).num_ok == 8
    assert world.cached(CPU, "xyz") == 0
    assert counters(world) == EarlyLoadStats()
    world.engine.check()


# -- loads behind other loads ---------------------------------------------------------------------


def test_a_load_that_continues_another_counts_when_both_have_landed() -> None:
    world = world_with("abcdef", cpu=20)
    world.prefetch("abcdxy")
    behind = world.prefetch("abcdef")
    (run,) = world.ops(OpKind.DISK2H, behind)
    world.finish(run)
    assert world.final(behind).num_ok == 2
    assert world.cached(CPU, "abcdef") == 0
    assert awaits(world, "abcdef"), "it has been read, and cannot be found"
    assert world.cache.early.num_blocks == 6
    world.finish_all()
    assert not awaits(world, "abcdef")
    for text in ("ghijkl", "mnopqr", "stuvwx", "GHIJKL"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abcdef") == 6, "both are kept for their requests"
    world.get("abcdef")
    assert counters(world) == EarlyLoadStats(late=6), "it had asked before"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_load_behind_one_that_fails_is_wasted(is_cancelled: bool) -> None:
    world = world_with("abcdef", cpu=20)
    before = world.prefetch("abcdxy")
    behind = world.prefetch("abcdef")
    (run,) = world.ops(OpKind.DISK2H, behind)
    world.finish(run)
    if is_cancelled:
        world.cancel(behind)
        assert counters(world) == EarlyLoadStats(wasted=2)
    else:
        for run in world.ops(OpKind.DISK2H, before):
            world.finish(run, 0, "broken")
        assert counters(world) == EarlyLoadStats(wasted=2)
        assert world.cache.early.num_open == 0
    world.finish_all()
    world.engine.check()


def test_a_reset_leaves_no_load_that_waits_for_what_never_comes() -> None:
    world = world_with("abcdef", cpu=20)
    world.prefetch("abcdxy")
    (run,) = world.ops(OpKind.DISK2H, world.prefetch("abcdef"))
    world.finish(run)
    world.cache.clear(None)
    world.engine.check()
    assert not world.cache.early._behind
    world.finish_all()
    world.engine.check()
    assert world.cache.early.num_open == 0
    assert world.cached(CPU, "abcdef") == world.cached(SSD, "abcdef") == 0


# -- sessions that return -------------------------------------------------------------------------


def returning(world: World, returns_in_s: float) -> None:
    """Have a session say that it goes on, all of whose blocks have left DRAM."""
    keys = world.placed("abcd")
    put = world.put("abcd")
    world.cache.sessions.used("a", keys, world.tasks[put].plan)
    world.finish_all()
    world.clear(CPU)
    assert world.cache.sessions.hint("a", False, returns_in_s, world.now)


def test_what_a_session_needs_is_in_dram_when_it_returns() -> None:
    world = World(cpu=20, ssd=40, match_ttl_s=TTL_S)
    returning(world, 20.0)
    world.tick(16.0)
    assert not world.ops()
    deadline = world.engine.next_deadline()
    assert deadline is not None
    assert deadline <= world.now + 1.0, "nothing else need happen meanwhile"
    world.tick(1.5)
    assert sum(len(run.op) for run in world.ops(OpKind.DISK2H)) == 4
    world.finish_all()
    assert world.cached(CPU, "abcd") == 4
    assert world.cache.sessions.counters.fetched_blocks == 4
    world.tick(3.0)
    world.get("abcdef")
    assert counters(world) == EarlyLoadStats(early=4)
    world.finish_all()
    world.check_nothing_is_held()


def test_many_sessions_that_return_at_once_are_loaded_for_a_few_at_a_time() -> None:
    world = World(cpu=100, ssd=100, match_ttl_s=TTL_S)
    for text in "abcdefghijklmnopqrst":
        put = world.put(text)
        world.cache.sessions.used(text, world.placed(text), world.tasks[put].plan)
        world.finish_all()
    world.clear(CPU)
    for text in "abcdefghijklmnopqrst":
        world.cache.sessions.hint(text, False, 20.0, world.now)
    world.now += 20.0
    open_after = []
    while (deadline := world.engine.next_deadline()) is not None and deadline <= world.now:
        world.tick()
        open_after.append(world.cache.early.num_open)
    assert open_after == [8, 16, 20]
    world.finish_all()
    assert world.cache.sessions.counters.fetched_blocks == 20


def test_large_prompts_are_fetched_earlier() -> None:
    world = world_with("uvwxyz", cpu=20, ssd=40, chunk=1, skip_slow_loads=True)
    world.get("uvwxyz")
    while runs := world.ops(OpKind.DISK2H):
        world.tick(2.0)
        world.finish(runs[0])
    world.finish_all()
    returning(world, 20.0)  # 4 blocks, 2 s each
    world.tick(3.9)
    assert not world.ops()
    world.tick(0.5)
    assert world.ops(OpKind.DISK2H)
    world.finish_all()


@pytest.mark.parametrize("what", ["came back", "is over", "returns later", "cleared"])
def test_nothing_is_fetched_for_a_session_that_has_said_something_else(what: str) -> None:
    world = World(cpu=20, ssd=40)
    returning(world, 20.0)
    sessions = world.cache.sessions
    if what == "came back":
        task_id = world.match(TaskKind.GET, "abcd")
        sessions.used("a", world.placed("abcd"), world.tasks[task_id].plan)
        world.cancel(task_id)
    elif what == "cleared":
        world.clear(SSD)
    else:
        over = what == "is over"
        sessions.hint("a", over, None if over else 1000.0, world.now)
    world.tick(30.0)
    assert not world.ops()
    world.check_nothing_is_held()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab!"), st.sampled_from("xyz"), st.floats(0, 9)), max_size=99
    )
)
def test_sessions_are_fetched_for_at_the_last_time_that_was_set(steps: list) -> None:
    returns, times, now = SessionReturns(), dict[str, float](), 0.0
    for act, session_id, seconds in steps:
        if act == "a":
            returns.expect(session_id, now + seconds)
            times[session_id] = now + seconds
        elif act == "!":
            returns.forget(session_id)
            times.pop(session_id, None)
        else:
            now += seconds
            due = {name for name, time in times.items() if time <= now}
            taken = set(iter(partial(returns.take_due, now), None))
            assert taken == due
            times = {name: time for name, time in times.items() if name not in due}
        returns.check()
        deadline = returns.next_deadline()
        assert not times or (deadline is not None and deadline <= min(times.values()))
        assert len(returns._heap) <= 2 * len(times) + 64


# -- requests that ask too soon -------------------------------------------------------------------


def test_a_request_waits_for_what_is_on_its_way() -> None:
    world = world_with("abcd")
    assert not awaits(world, "abcd")
    world.prefetch("abcd")
    assert awaits(world, "abcdz")
    assert not awaits(world, "abc"), "it is for a longer prompt"
    world.finish_all()
    assert not awaits(world, "abcdz")
    world.get("abcdz")
    assert counters(world) == EarlyLoadStats(late=4)


def test_a_request_waits_no_longer_than_computing_would_take() -> None:
    world = world_with("abcd")
    world.engine.report_prefill(world.ids.session, 2.0)
    world.prefetch("abcd")
    assert awaits(world, "abcd")
    world.tick(1.9)
    assert awaits(world, "abcd")
    world.tick(0.2)
    assert not awaits(world, "abcd")
    task_id = world.get("abcd")
    assert world.tasks[task_id].plan.is_empty, "computing is faster than reading it once more"
    world.finish_all()
    assert world.cached(CPU, "abcd") == 4
    world.check_nothing_is_held()


# -- any order ------------------------------------------------------------------------------------

PROMPTS = ["abcd", "abxy", "pqr", "uvwxyz"]


class EarlyHistories(RuleBasedStateMachine):
    """Whatever else is stored, what has landed stays in DRAM until it is used or given up."""

    def __init__(self) -> None:
        super().__init__()
        self.world = world_with(*PROMPTS, cpu=10, chunk=1)
        self.kept: dict[TaskId, tuple[str, float]] = {}
        """Prefetches that have brought something: what, and until when it is kept."""
        self.moving: dict[TaskId, str] = {}
        self.asked: set[TaskId] = set()
        """Those of which a get has begun since."""

    @rule(text=st.sampled_from(PROMPTS), more=st.sampled_from(["", "!"]))
    def prefetch(self, text: str, more: str) -> None:
        task_id = self.world.prefetch(text + more)
        plan = self.world.tasks[task_id].plan
        if plan.graph.ops:
            self.moving[task_id] = text[: plan.stop]
        self._note_ends()

    @precondition(lambda self: self.world.at_work)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_an_op(self, data: st.DataObject, fails: bool) -> None:
        run = data.draw(st.sampled_from(self.world.ops()))
        self.world.finish(run, 0 if fails else None, "broken" if fails else None)
        self._note_ends()

    def _note_ends(self) -> None:
        for task_id, text in list(self.moving.items()):
            result = self.world.result(task_id)
            if result is None:
                continue
            del self.moving[task_id]
            plan = self.world.tasks[task_id].plan
            stop = result.start + result.num_ok
            has_come = result.status is KVStatus.SUCCESS and stop > plan.load_start
            # What builds on blocks that are still on their way can be found only with them.
            is_there = self.world.cached(CPU, text[:stop]) == stop
            if has_come and is_there and task_id not in self.asked:
                self.kept[task_id] = text[:stop], self.world.now + TTL_S

    @rule(text=st.sampled_from(PROMPTS), at_once=st.booleans())
    def get(self, text: str, at_once: bool) -> None:
        task_id = self.world.match(TaskKind.GET, text + "!")
        if not at_once:
            self.world.cancel(task_id)
            return
        self.world.launch(task_id)
        if self.world.tasks[task_id].plan.is_empty:
            return
        self.kept = {t: kept for t, kept in self.kept.items() if not text.startswith(kept[0])}
        self.asked |= {
            task_id for task_id, moving in self.moving.items() if text.startswith(moving)
        }

    @rule(text=st.text("jklmno", min_size=1, max_size=6))
    def put(self, text: str) -> None:
        self.world.put(text)
        self.world.finish_all()
        self._note_ends()

    @precondition(lambda self: self.moving or self.kept)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from([*self.moving, *self.kept]))
        self.world.cancel(task_id)
        self.kept.pop(task_id, None)
        self._note_ends()

    @rule(seconds=st.sampled_from([1.0, 50.0, 130.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)
        now = self.world.now
        self.kept = {task_id: kept for task_id, kept in self.kept.items() if kept[1] > now}
        self._note_ends()

    @invariant()
    def what_has_landed_stays(self) -> None:
        for text, _ in self.kept.values():
            assert self.world.cached(CPU, text) == len(text)

    @invariant()
    def all_is_consistent(self) -> None:
        self.world.engine.check()
        early = self.world.cache.early
        assert early.num_open or not early.num_blocks

    def teardown(self) -> None:
        self.world.finish_all()
        self.world.tick(TTL_S)
        assert self.world.cache.early.num_open == 0
        self.world.check_nothing_is_held()


TestEarlyHistories = EarlyHistories.TestCase
TestEarlyHistories.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
