"""KVTaskEngine and the tiers that outlive it: look-ups, the breaker, late and repeated writes."""

from __future__ import annotations

import itertools
import random

import pytest
from builders import prompt
from task_builders import ENGINE, ROOT, World, keys_of

from flexcache.cache.control import CacheCall
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiers import ABSENT_TTL_S, UNKNOWN_TTL_S, RemoteTier
from flexcache.ids import KVStatus, OpKind, TaskId, TaskIds, TaskKind, TierName, make_session
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import DISK, REMOTE, EraseDeleted, device
from flexcache.tasks.model import DEFAULT_LIMITS

CPU, SSD = TierName.CPU, TierName.SSD


def with_store(**options: object) -> World:
    return World(remote=True, **options)  # type: ignore[arg-type]


def get_after_asking(world: World, text: str) -> tuple[KVStatus, int]:
    """Ask the store, then match and load, as a caller that waits would."""
    lookup = world.look_up(text)
    if lookup is not None:
        world.answer(lookup)
    task_id = world.get(text)
    world.finish_all()
    result = world.final(task_id)
    return result.status, result.num_ok


# -- what the store has ----------------------------------------------------------------------------


def test_what_another_node_stored_is_loaded_and_promoted() -> None:
    world = with_store()
    world.stored_by_another("abcdef")
    assert get_after_asking(world, "abcdef") == (KVStatus.SUCCESS, 6)
    assert world.cached(CPU, "abcdef") == 6
    assert world.stats().totals.hit_blocks == {"REMOTE": 6}
    world.check_nothing_is_held()


def test_one_prompt_comes_from_all_tiers_in_order() -> None:
    world = with_store(cpu=12)
    world.put("abcd")
    world.finish_all()
    world.clear(CPU)
    world.get("ab")
    world.finish_all()
    world.stored_by_another("abcdef")
    lookup = world.look_up("abcdef")
    assert lookup is not None
    world.answer(lookup)
    task_id = world.get("abcdef")
    assert world.tasks[task_id].plan.sources == {CPU: 2, SSD: 2, TierName.REMOTE: 2}
    world.finish_all()
    assert world.final(task_id).num_ok == 6


def test_a_match_before_the_answer_takes_what_is_known() -> None:
    world = with_store()
    world.stored_by_another("abcdef")
    lookup = world.look_up("abcdef")
    assert lookup is not None
    assert world.is_looking_up(lookup)
    assert world.final(world.get("abcdef")).status is KVStatus.NOT_FOUND


def test_a_pending_look_up_is_not_repeated() -> None:
    world = with_store()
    assert world.look_up("abcdef") == world.look_up("abc")
    assert len(world.asked) == 1


def test_blocks_on_this_machine_are_not_looked_up() -> None:
    world = with_store()
    world.put("abcd")
    world.finish_all()
    world.clear(TierName.REMOTE)
    assert world.look_up("abcd") is None
    assert world.look_up("abcde") is not None


def ask_for(world: World, word: str, seconds: float) -> list[float]:
    """Ask 100 times a second; return when a question went to the store, which answers at once."""
    asked_s = []
    for step in range(round(seconds * 100)):
        if (lookup := world.look_up(word)) is not None:
            asked_s.append(step / 100)
            world.answer(lookup)
        world.tick(0.01)
    return asked_s


def test_blocks_that_stay_absent_are_looked_up_less_and_less_often() -> None:
    world = with_store()
    asked_s = ask_for(world, "abcd", 60)
    gaps = [later - before for before, later in itertools.pairwise(asked_s)]
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[ABSENT_TTL_S] * 10], abs=0.05)


def test_a_store_that_lacks_everything_is_asked_hardly_more_than_with_the_longest_pauses() -> None:
    """At 100 prompts a second, of as many users as make it likely that one asks again."""
    num_asked = {}
    for pause_s in (UNKNOWN_TTL_S, ABSENT_TTL_S):
        remote, draw = RemoteTier(1000), random.Random(1)
        users = [prompt(f"{user:c}") for user in range(97, 122)]
        num_asked[pause_s] = 0
        for step in range(100 * 60):
            keys, now = draw.choice(users), step / 100
            if remote.first_unknown(keys, 1, now) is not None:
                num_asked[pause_s] += 1
                is_usual = pause_s == UNKNOWN_TTL_S
                remote.learn_absent(ROOT, keys.key(0), now, None if is_usual else pause_s)
    assert num_asked[ABSENT_TTL_S] > 25 * 8
    assert num_asked[UNKNOWN_TTL_S] < 2 * num_asked[ABSENT_TTL_S]


def test_what_another_host_stores_is_found_soon_after_it_was_absent() -> None:
    world = with_store()
    ask_for(world, "abcdef", 60)
    world.tick(3 * ABSENT_TTL_S)  # without a question
    assert ask_for(world, "abcdef", 0.05) == [0.0]
    world.stored_by_another("abc")
    world.tick(0.1)
    assert ask_for(world, "abcdef", 0.05) == [0.0]
    assert world.cached(TierName.REMOTE, "abcdef") == 3
    world.stored_by_another("abcdef")
    world.tick(0.1)  # the block after what was found was not absent before
    assert get_after_asking(world, "abcdef") == (KVStatus.SUCCESS, 6)


def test_what_the_store_has_not_said_is_unknown_not_absent() -> None:
    world = with_store()
    world.stored_by_another("abcd")
    for _ in range(2):  # a third failure would open the circuit
        assert world.look_up("abcd") is not None
        world.tick(DEFAULT_LIMITS.lookup_timeout_s)
        assert world.look_up("abcd") is None, "at once"
        world.tick(0.1)
    assert get_after_asking(world, "abcd") == (KVStatus.SUCCESS, 4)
    assert world.look_up("xyz") is not None
    world.down(REMOTE)
    world.tick(0.1)
    remote = world.cache.tiers.remote
    assert remote is not None
    assert remote.first_unknown(prompt("xyz"), 3, world.now) == 0


def test_blocks_stored_by_this_node_need_no_look_up() -> None:
    world = with_store()
    world.put("abcd")
    world.finish_all()
    assert sorted(key for _, key in world.store) == [b"a", b"ab", b"abc", b"abcd"]
    world.clear(CPU)
    world.clear(SSD)
    assert world.look_up("abcd") is None
    assert get_after_asking(world, "abcd") == (KVStatus.SUCCESS, 4)


def test_a_block_that_the_store_has_lost_costs_the_blocks_behind_it_only() -> None:
    world = with_store()
    world.stored_by_another("abcdef")
    lookup = world.look_up("abcdef")
    assert lookup is not None
    world.answer(lookup)
    del world.store[ROOT, b"abcd"]
    task_id = world.get("abcdef")
    world.finish_all()
    assert (world.final(task_id).status, world.final(task_id).num_ok) == (KVStatus.SUCCESS, 3)
    assert world.cached(TierName.REMOTE, "abcdef") == 3
    assert world.breaker.state == "closed", "a block that is missing is no failure of the store"


def test_a_cleared_store_is_no_longer_read_by_the_server_that_cleared_it() -> None:
    world = with_store()
    world.put("abcd")
    world.finish_all()
    for tier in (CPU, SSD, TierName.REMOTE):
        world.clear(tier)
    assert get_after_asking(world, "abcd") == (KVStatus.NOT_FOUND, 0)
    world.put("abcd")
    world.finish_all()
    world.clear(CPU)
    world.clear(SSD)
    assert get_after_asking(world, "abcd") == (KVStatus.SUCCESS, 4)


# -- a store that is slow or gone ------------------------------------------------------------------


def test_a_look_up_has_a_deadline_after_which_the_match_goes_on() -> None:
    world = with_store()
    lookup = world.look_up("abcd")
    assert lookup is not None
    deadline = world.engine.next_deadline()
    assert deadline is not None
    world.tick(deadline - world.now)
    assert not world.is_looking_up(lookup)
    assert world.num_lookups_ended[lookup] == 1
    assert world.final(world.get("abcd")).status is KVStatus.NOT_FOUND


def late_answers(world: World, count: int) -> None:
    for number in range(count):
        if world.look_up("abcdefghij"[number:]) is not None:
            world.tick(0.26)


def test_a_store_that_answers_too_late_is_avoided_and_tried_again() -> None:
    world = with_store()
    late_answers(world, 6)
    assert world.breaker.state == "open"
    assert world.look_up("zzz") is None
    before = dict(world.store)
    world.put("abcd")
    world.finish_all()
    assert world.store == before
    assert world.stats().totals.dropped_blocks["remote_unavailable"] == 4
    world.asked.clear()
    for _ in range(20):
        world.tick(0.2)
        for lookup in list(world.asked):
            world.answer(lookup)
    assert world.breaker.state == "closed"
    assert world.look_up("zzz") is not None


def test_failing_trials_keep_the_breaker_open_and_delay_no_match() -> None:
    world = with_store()
    late_answers(world, 6)
    world.asked.clear()
    for _ in range(100):
        world.tick(0.1)
        for lookup in list(world.asked):
            assert not world.is_looking_up(lookup) or world.look_up("zzz") is None
            world.answer(lookup, "still down")
    assert world.breaker.state != "closed"
    assert world.breaker.openings > 1
    assert not world.num_lookups_ended.keys() & set(world.asked)


def test_ops_waiting_for_the_store_end_when_its_breaker_opens() -> None:
    world = with_store(cpu=40, ssd=0, chunk=1)
    task_id = world.put("abcdefghijklmnopqrst")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    num_failed = 0
    while world.at_work:
        world.finish(world.ops(OpKind.H2REMOTE)[0], 0, error="HTTP 503")
        num_failed += 1
    assert world.breaker.state == "open"
    assert num_failed < 20, "the others never went to the store"
    assert world.final(task_id).num_ok == 20, "DRAM has it all the same"
    world.check_nothing_is_held()


def test_a_worker_that_dies_opens_the_breaker_and_ends_its_look_ups() -> None:
    world = with_store()
    lookup = world.look_up("abcd")
    assert lookup is not None
    world.down(REMOTE)
    assert not world.is_looking_up(lookup)
    assert world.breaker.state == "open"
    assert world.look_up("xyz") is None
    world.up(REMOTE)
    for _ in range(20):
        world.tick(0.2)
        for trial in list(world.asked):
            world.answer(trial)
    assert world.breaker.state == "closed"
    assert world.look_up("xyz") is not None


def test_an_op_of_the_store_has_a_deadline_of_its_own() -> None:
    world = with_store()
    world.stored_by_another("abcd")
    lookup = world.look_up("abcd")
    assert lookup is not None
    world.answer(lookup)
    task_id = world.get("abcd")
    world.tick(4.0)
    assert REMOTE in world.to_replace
    world.down(REMOTE, "killed")
    assert world.final(task_id).status is KVStatus.FAILED
    world.check_nothing_is_held()


def test_an_answered_look_up_does_not_wake_the_server_at_its_deadline() -> None:
    world = with_store()
    assert world.engine.next_deadline() is None
    lookup = world.look_up("abcd")
    assert lookup is not None
    assert world.engine.next_deadline() == world.now + 0.25
    world.answer(lookup)
    assert world.engine.next_deadline() is None


def test_blocks_slower_to_load_than_to_recompute_are_not_loaded() -> None:
    world = with_store(ssd=0, skip_slow_loads=True)
    for number in range(5):
        text = "abcdef"[number] * 3
        world.stored_by_another(text)
        lookup = world.look_up(text)
        assert lookup is not None
        world.answer(lookup)
        task_id = world.get(text)
        for run in world.ops(OpKind.REMOTE2H):
            world.tick(1.0)
            world.finish(run)
        world.finish_all()
        assert world.final(task_id).num_ok == 3
    world.clear(CPU)
    world.engine.report_prefill(world.ids.session, 0.01)
    assert world.tasks[world.get("aaa")].plan.num_blocks == 3
    world.finish_all()
    world.clear(CPU)
    world.engine.report_prefill(world.ids.session, 100.0)
    assert world.final(world.get("aaa")).status is KVStatus.NOT_FOUND
    assert world.stats().totals.skipped_blocks == {"remote_slower_than_recompute": 3}


# -- tiers whose worker is away --------------------------------------------------------------------

AWAY = [pytest.param(SSD, DISK, id="ssd"), pytest.param(TierName.REMOTE, REMOTE, id="remote")]


def below_only(tier: TierName, **options: object) -> World:
    """Make a world with DRAM and one tier below it, which alone holds ``abcd``."""
    is_remote = tier is TierName.REMOTE
    world = World(remote=is_remote, ssd=0 if is_remote else 10, **options)  # type: ignore[arg-type]
    world.put("abcd")
    world.finish_all()
    world.clear(CPU)
    assert world.cached(tier, "abcd") == 4
    return world


def back(world: World, worker: str) -> None:
    """Bring the worker up again, and close the breaker if the tier has one."""
    world.up(worker)
    for _ in range(20):
        world.tick(0.2)
        for trial in list(world.asked):
            world.answer(trial)
    assert not world.away


@pytest.mark.parametrize(("tier", "worker"), AWAY)
def test_a_tier_whose_worker_is_down_misses_until_it_is_back(tier: TierName, worker: str) -> None:
    world = below_only(tier)
    world.down(worker)
    for _ in range(3):
        assert world.final(world.get("abcd")).status is KVStatus.NOT_FOUND
    assert not world.cache.stats()[tier.value].available
    back(world, worker)
    task_id = world.get("abcd")
    world.finish_all()
    assert (world.final(task_id).status, world.final(task_id).num_ok) == (KVStatus.SUCCESS, 4)
    assert world.cache.stats()[tier.value].available


def test_a_tier_misses_until_its_worker_is_up_for_the_first_time() -> None:
    world = below_only(SSD)
    engine = KVTaskEngine(world.cache)
    ids = TaskIds(make_session(0, 9))
    engine.add_session(ids.session, ENGINE)
    engine.executor_up(device(ENGINE, 0))
    prompt = Prompt(TaskKind.GET, keys_of("abcd"), 0, 4, 64)
    assert engine.match(ids.next(), prompt, 0.0).num_blocks == 0
    engine.executor_up(DISK)
    assert engine.match(ids.next(), prompt, 0.0).num_blocks == 4


@pytest.mark.parametrize(("tier", "worker"), AWAY)
def test_a_put_skips_an_unavailable_tier_and_a_later_one_catches_up(
    tier: TierName, worker: str
) -> None:
    world = below_only(tier)
    world.down(worker)
    task_id = world.put("xyz")
    world.finish_all()
    assert world.final(task_id).num_ok == 3
    assert world.stats().totals.dropped_blocks == {f"{tier.value.lower()}_unavailable": 3}
    back(world, worker)
    world.put("xyz")
    world.finish_all()
    assert world.cached(tier, "xyz") == 3


def test_a_get_that_was_matched_before_the_death_keeps_what_dram_has() -> None:
    world = below_only(SSD)
    world.get("ab")
    world.finish_all()
    task_id = world.match(TaskKind.GET, "abcd")
    world.down(DISK)
    world.launch(task_id)
    world.finish_all()
    assert (world.final(task_id).status, world.final(task_id).num_ok) == (KVStatus.SUCCESS, 2)
    world.check_nothing_is_held()


def test_the_remote_store_serves_what_an_unavailable_ssd_holds() -> None:
    world = with_store()
    world.put("abcd")
    world.finish_all()
    world.clear(CPU)
    world.clear(TierName.REMOTE)
    assert world.look_up("abcd") is None, "the SSD has it"
    world.down(DISK)
    assert world.look_up("abcd") is not None


@pytest.mark.parametrize(("tier", "worker"), AWAY)
def test_with_write_back_dirty_blocks_stay_dirty_until_the_worker_is_back(
    tier: TierName, worker: str
) -> None:
    is_remote = tier is TierName.REMOTE
    world = World(policy="write_back", cpu=12, remote=is_remote, ssd=0 if is_remote else 12)
    world.down(worker)
    for text in ("ab", "xy", "pq"):
        world.put(text)
        world.finish_all()
    assert world.cache.stores.num_dirty(tier) == 6
    assert world.engine.queries.num_held_up == 6
    world.engine.close_down(world.now)
    assert world.cache.stores.num_dirty(tier) == 6, "the worker may be back in time"
    back(world, worker)
    world.finish_all()
    assert [world.cached(tier, text) for text in ("ab", "xy", "pq")] == [2, 2, 2]
    assert world.engine.queries.num_held_up == 0
    assert not world.stats().totals.dropped_blocks
    world.check_nothing_is_held()


@pytest.mark.parametrize("num_done", range(4))
@pytest.mark.parametrize(("tier", "worker"), AWAY)
def test_with_write_back_blocks_a_dying_worker_did_not_write_are_dirty_again(
    tier: TierName, worker: str, num_done: int
) -> None:
    is_remote = tier is TierName.REMOTE
    world = World(
        policy="write_back", cpu=12, remote=is_remote, ssd=0 if is_remote else 12, chunk=1
    )
    world.put("abcd")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    for _ in range(num_done):
        world.finish(world.ops()[0])
    world.down(worker)
    assert world.cached(tier, "abcd") == num_done
    assert world.cache.stores.num_dirty(tier) == 4 - num_done
    assert not world.stats().totals.dropped_blocks
    back(world, worker)
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(tier, "abcd") == 4
    world.check_nothing_is_held()


@pytest.mark.parametrize(("tier", "worker"), AWAY)
def test_with_write_back_only_blocks_evicted_from_dram_are_forgotten_while_a_tier_is_down(
    tier: TierName, worker: str
) -> None:
    is_remote = tier is TierName.REMOTE
    world = World(policy="write_back", cpu=5, remote=is_remote, ssd=0 if is_remote else 12)
    world.put("ab")
    world.finish_all()
    world.put("cd")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.down(worker)
    world.check()
    for text in ("ef", "gh", "ij"):
        world.put(text)
        world.finish_all()
        world.check()
    in_dram = [text for text in ("ab", "cd", "ef", "gh", "ij") if world.cached(CPU, text)]
    back(world, worker)
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert [world.cached(tier, text) for text in in_dram] == [
        world.cached(CPU, text) for text in in_dram
    ]
    num_lost = 10 - sum(world.cached(tier, text) for text in ("ab", "cd", "ef", "gh", "ij"))
    assert num_lost
    reason = f"{tier.value.lower()}_never_written"
    assert world.stats().totals.dropped_blocks == {reason: num_lost}
    world.check_nothing_is_held()


def test_with_write_back_a_write_is_repeated_if_its_parents_write_was_lost() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("abcd")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    parent = world.ops(OpKind.H2DISK)
    world.put("abcdefg")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    for run in world.ops(OpKind.H2DISK):
        if run not in parent:
            world.finish(run)
    world.finish(parent[0], 0, error="EIO")
    world.finish_all()
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "abcdefg") == 7
    world.check_nothing_is_held()


def test_with_write_back_blocks_loaded_from_the_store_are_dirty_for_the_ssd() -> None:
    world = with_store(policy="write_back", cpu=12)
    world.put("ab")
    world.finish_all()
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "ab") == 2
    world.clear(CPU)
    world.stored_by_another("abcd")
    assert get_after_asking(world, "abcd") == (KVStatus.SUCCESS, 4)
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4
    world.check_nothing_is_held()


def test_with_write_back_a_prompt_longer_than_the_backlog_is_written_in_parts() -> None:
    world = World(policy="write_back", cpu=12, backlog=3)
    world.put("abcdefgh")
    world.finish_all()
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "abcdefgh") == 8
    assert not world.stats().totals.dropped_blocks


def test_blocks_cleared_before_they_were_written_are_not_counted_as_lost() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("ab")
    world.finish_all()
    world.clear(CPU)
    assert world.cache.stores.num_dirty(SSD) == 0
    assert not world.stats().totals.dropped_blocks


# -- writes on the cache's own account -------------------------------------------------------------


def test_a_prompt_in_dram_that_the_ssd_lost_is_written_there_when_it_is_put_again() -> None:
    world = World()
    world.put("abcd")
    world.finish_all()
    world.clear(SSD)
    task_id = world.put("abcd")
    assert world.final(task_id).status is KVStatus.NOT_FOUND, "the GPU has nothing to give"
    assert {run.op.kind for run in world.ops()} == {OpKind.H2DISK}
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4
    world.check_nothing_is_held()


def test_blocks_loaded_from_the_store_go_to_the_ssd_with_the_next_put() -> None:
    world = with_store()
    world.stored_by_another("abcd")
    get_after_asking(world, "abcd")
    assert world.cached(SSD, "abcd") == 0
    world.put("abcdef")
    world.finish_all()
    assert world.cached(SSD, "abcdef") == 6


def test_with_write_back_a_put_writes_nothing_until_too_much_is_dirty() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("ab")
    world.finish_all()
    assert world.cached(SSD, "ab") == 0
    assert world.cache.stores.num_dirty(SSD) == 2
    world.put("xyz")
    world.finish_all()
    assert world.cached(SSD, "ab") == 2, "the oldest goes first"
    assert world.cache.stores.num_dirty(SSD) <= 2
    world.check_nothing_is_held()


def test_with_write_back_all_is_written_at_the_end() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("ab")
    world.finish_all()
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "ab") == 2
    assert world.cache.stores.num_dirty(SSD) == 0


def test_with_write_back_blocks_gone_from_dram_are_forgotten() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("ab")
    world.finish_all()
    world.clear(CPU)
    world.engine.close_down(world.now)
    world.tick()
    assert not world.at_work
    assert world.cache.stores.num_dirty(SSD) == 0


def test_with_selective_a_prompt_is_written_when_it_is_seen_again() -> None:
    world = World(policy="selective", cpu=12)
    world.put("abcd")
    world.finish_all()
    assert world.cached(SSD, "abcd") == 0
    world.put("abxy")
    world.finish_all()
    assert world.cached(SSD, "abxy") == 2
    world.put("abcd")
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4
    world.check_nothing_is_held()


# -- retention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("retain_s", "is_kept"), [(0.0, False), (100.0, True), (-100.0, False)])
def test_a_prompt_put_with_a_hint_outlives_prompts_used_later(
    retain_s: float, is_kept: bool
) -> None:
    world = World(cpu=6, ssd=0)
    world.put("abc", retain_s=retain_s)
    world.finish_all()
    world.tick(50.0)
    for text in ("xyz", "pqr"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abc") == (3 if is_kept else 0)
    world.check_nothing_is_held()


def test_a_hint_wears_off() -> None:
    world = World(cpu=6, ssd=0)
    world.put("abc", retain_s=100.0)
    world.finish_all()
    world.tick(150.0)
    for text in ("xyz", "pqr"):
        world.put(text)
        world.finish_all()
    assert world.cached(CPU, "abc") == 0


def test_a_low_priority_goes_first() -> None:
    world = World(cpu=6, ssd=0)
    world.put("abc")
    world.finish_all()
    world.put("xyz", retain_s=-3600.0)
    world.finish_all()
    world.put("p")
    world.finish_all()
    assert (world.cached(CPU, "abc"), world.cached(CPU, "xyz")) == (3, 2)


def test_a_session_may_end_during_its_look_up() -> None:
    world = with_store()
    lookup = world.look_up("abcd")
    assert lookup is not None
    world.end_session(ENGINE)
    world.answer(lookup)
    assert not world.is_looking_up(lookup)


# -- a load that takes longer than a recompute -----------------------------------------------------


def reading_from_store(world: World, text: str = "abcdef") -> TaskId:
    """Start a get whose blocks are on their way from the store."""
    world.stored_by_another(text)
    lookup = world.look_up(text)
    assert lookup is not None
    world.answer(lookup)
    task_id = world.get(text)
    assert world.ops(OpKind.REMOTE2H)
    return task_id


def test_a_get_waits_for_the_store_no_longer_than_recomputing_would_take() -> None:
    world = with_store()
    world.engine.report_prefill(world.ids.session, 6.0)  # a second for the whole prompt
    task_id = reading_from_store(world)
    world.finish(world.ops(OpKind.REMOTE2H)[0])
    world.finish(world.ops(OpKind.H2D)[0])
    world.tick(0.9)
    assert world.result(task_id) is None
    world.tick(0.2)
    result = world.result(task_id)
    assert result is not None
    assert (result.status, result.num_ok) == (KVStatus.SUCCESS, 2)
    world.finish_all()
    assert world.cached(CPU, "abcdef") >= 2, "what was under way is kept"
    world.check_nothing_is_held()


def test_a_get_of_which_nothing_arrived_fails_in_time() -> None:
    world = with_store()
    world.engine.report_prefill(world.ids.session, 1e6)
    task_id = reading_from_store(world)
    world.tick(0.3)
    result = world.result(task_id)
    assert result is not None
    assert result.status is KVStatus.FAILED
    world.finish_all()
    world.check_nothing_is_held()


def test_what_has_arrived_in_dram_still_goes_to_the_gpu() -> None:
    world = with_store()
    world.engine.report_prefill(world.ids.session, 6.0)
    task_id = reading_from_store(world)
    for run in world.ops(OpKind.REMOTE2H):
        world.finish(run)
    world.tick(2.0)
    assert world.result(task_id) is None, "the copies are on their way"
    world.finish_all()
    assert world.final(task_id).num_ok == 6


def test_a_load_that_is_given_up_does_not_count_against_the_store() -> None:
    world = with_store(cpu=40)
    world.engine.report_prefill(world.ids.session, 1e6)
    for text in ("abc", "bcd", "cde", "def", "efg"):
        reading_from_store(world, text)
        world.tick(0.3)
    assert world.breaker.state == "closed", "it may be only slower than the engine"


# -- what a review found ---------------------------------------------------------------------------


def test_a_look_up_may_be_answered_while_its_blocks_are_being_written() -> None:
    world = with_store(cpu=12)
    writing = world.put("ab")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.stored_by_another("abc")
    lookup = world.look_up("abc")
    assert lookup is not None
    behind = world.put("abc")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.answer(lookup)
    for run in world.ops(OpKind.H2REMOTE, behind):
        world.finish(run, 0, error="HTTP 500")
    for run in world.ops(OpKind.H2REMOTE, writing):
        world.finish(run, 0, error="HTTP 500")
    world.finish_all()
    world.check_nothing_is_held()


def test_nothing_but_trials_goes_to_a_store_whose_breaker_is_open() -> None:
    world = with_store(ssd=0)
    world.stored_by_another("xyz")
    lookup = world.look_up("xyz")
    assert lookup is not None
    world.answer(lookup)
    get = world.match(TaskKind.GET, "xyz")
    put = world.put("abc")
    world.down(REMOTE)
    world.up(REMOTE)
    world.tick()
    world.launch(get)
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    assert world.ops() == []
    assert world.final(get).status is KVStatus.FAILED
    assert world.final(put).num_ok == 3
    assert world.stats().totals.dropped_blocks["remote_unavailable"] == 3


def test_an_open_breaker_sets_no_deadline_while_the_worker_is_down() -> None:
    world = with_store()
    world.down(REMOTE)
    world.tick(100.0)
    deadline = world.engine.next_deadline()
    assert deadline is None or deadline > world.now


def test_blocks_that_had_to_wait_for_a_worker_that_died_are_counted() -> None:
    world = with_store(cpu=40, ssd=0, chunk=1)
    world.put("abcdefghijklmnop")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.down(REMOTE)
    dropped = world.stats().totals.dropped_blocks
    assert dropped["remote_unavailable"] + dropped["remote_write_failed"] == 16


def test_a_block_that_cannot_be_read_is_not_looked_up_again_at_once() -> None:
    world = with_store()
    world.stored_by_another("abc")
    lookup = world.look_up("abc")
    assert lookup is not None
    world.answer(lookup)
    task_id = world.get("abc")
    world.finish_bad(world.ops(OpKind.REMOTE2H)[0])
    world.finish_all()
    assert world.final(task_id).status is KVStatus.FAILED
    assert world.look_up("abc") is None
    world.tick(ABSENT_TTL_S + 0.1)
    assert world.look_up("abc") is not None


def test_an_answer_from_before_a_clear_is_ignored() -> None:
    world = with_store()
    world.stored_by_another("abc")
    lookup = world.look_up("abc")
    assert lookup is not None
    world.clear(TierName.REMOTE)
    world.answer(lookup)
    assert world.cached(TierName.REMOTE, "abc") == 0


def test_a_write_from_before_a_clear_is_not_found_afterwards() -> None:
    world = with_store(ssd=0)
    world.put("abc")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.clear(TierName.REMOTE)
    world.finish_all()
    assert world.cached(TierName.REMOTE, "abc") == 0


def test_an_orderly_stop_writes_the_blocks_of_answered_puts() -> None:
    world = World(chunk=1, cpu=40, ssd=40)
    task_id = world.put("abcdefghijklmnop")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "abcdefghijklmnop") == 16
    assert world.final(task_id).status is KVStatus.SUCCESS


def test_write_back_waits_for_an_unavailable_store() -> None:
    world = with_store(policy="write_back", cpu=12, ssd=0)
    world.down(REMOTE)
    world.up(REMOTE)
    world.tick()
    for text in ("ab", "xyz", "pqr"):
        world.put(text)
        world.finish_all()
    assert world.store == {}
    assert world.cache.stores.num_dirty(TierName.REMOTE) == 8
    for _ in range(20):
        world.tick(0.2)
        for trial in list(world.asked):
            world.answer(trial)
    assert world.breaker.state == "closed"
    world.put("uv")
    world.finish_all()
    assert (ROOT, b"ab") in world.store


def test_with_write_back_dirty_blocks_stay_dirty_while_the_tier_is_being_cleared() -> None:
    world = World(policy="write_back", cpu=12)
    clearings = [world.cache.tiers.withhold_free(SSD) for _ in range(2)]
    for text in ("ab", "xyz", "pqr"):
        world.put(text)
        world.finish_all()
    assert world.cache.stores.num_dirty(SSD) == world.engine.queries.num_held_up == 8
    for clearing in clearings:
        assert world.cache.stores.num_dirty(SSD) == 8
        world.cache.tiers.give_back(clearing)
        world.tick()
    world.engine.close_down(world.now)
    world.finish_all()
    assert [world.cached(SSD, text) for text in ("ab", "xyz", "pqr")] == [2, 3, 3]
    assert world.engine.queries.num_held_up == 0
    assert not world.stats().totals.dropped_blocks
    world.check_nothing_is_held()


def test_a_delete_of_many_prompts_leaves_one_erasure_and_none_if_that_is_made_at_once() -> None:
    for erases_at_once in (False, True):
        world = World(cpu=60, ssd=60)
        for letter in "abcdefgh":
            world.put(letter * 3)
            world.finish_all()
        call = CacheCall(name="delete", roots=[ROOT])
        assert world.engine.control(call, world.now).blocks[SSD] == 24
        if erases_at_once:
            world.engine.give_back(world.engine.withhold_deleted(SSD), are_erased=True)
        left = [EraseDeleted()] * (not erases_at_once)
        assert world.engine.take_instructions() == left
        assert not world.engine.take_instructions()
        assert len(world.engine.withhold_deleted(SSD)) == 24 * (not erases_at_once)


@pytest.mark.parametrize("num_ok", [0, 1])
def test_with_write_back_blocks_a_failing_store_does_not_take_stay_dirty(num_ok: int) -> None:
    texts = [letter * 3 for letter in "klmnop"]
    world = with_store(policy="write_back", cpu=20, ssd=0)
    for text in texts:
        world.put(text)
        for run in world.ops(OpKind.D2H):
            world.finish(run)
        for run in world.ops(OpKind.H2REMOTE):
            world.finish(run, min(num_ok, len(run.op) - 1), error="connection refused")
    assert world.breaker.state != "closed", "it bounds the retries"
    assert not world.ops()
    assert not world.stats().totals.dropped_blocks
    back(world, REMOTE)
    world.finish_all()
    world.engine.close_down(world.now)
    world.finish_all()
    assert [world.cached(TierName.REMOTE, text) for text in texts] == [3] * 6
    assert not world.stats().totals.dropped_blocks
    world.check_nothing_is_held()


def test_write_back_writes_what_dram_still_has_of_a_prompt() -> None:
    world = World(policy="write_back", cpu=6)
    world.put("ab")
    world.finish_all()
    world.cache.tiers.host.pool.give_back(world.cache.tiers.host.index.evict(1))
    assert world.cached(CPU, "ab") == 1
    world.engine.close_down(world.now)
    world.tick()
    world.finish_all()
    assert world.cached(SSD, "ab") == 1


def test_with_write_back_a_failed_write_is_tried_again_when_its_blocks_are_put_again() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("abcd")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    for run in world.ops(OpKind.H2DISK):
        world.finish(run, 0, error="EIO")
    assert world.cached(SSD, "abcd") == 0
    world.put("abcd")
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4


def test_with_write_back_blocks_loaded_from_the_ssd_are_not_dirty() -> None:
    world = World(policy="write_back", cpu=12)
    world.put("abcd")
    world.finish_all()
    assert world.cached(SSD, "abcd") == 4
    world.clear(CPU)
    world.get("abcd")
    world.finish_all()
    assert world.cache.stores.num_dirty(SSD) == 0


def test_what_is_stored_after_a_reset_is_recorded_as_such() -> None:
    world = World()
    world.cache.stores.era = 3
    world.put("abc")
    for run in world.ops(OpKind.D2H):
        world.finish(run)
    names = [run.op.names for run in world.ops(OpKind.H2DISK)]
    assert [each.era for each in names if each is not None] == [3, 3]


# -- two ways from SSD -----------------------------------------------------------------------------


def load_from_ssd(world: World, seconds: dict[OpKind, float]) -> OpKind:
    """Load a prompt that only SSD has; return the kind of its first op, which takes so long."""
    world.clear(CPU)
    task_id = world.get("abcdef")
    kind = world.ops(task_id=task_id)[0].op.kind
    world.tick(seconds[kind])
    world.finish_all()
    assert world.final(task_id).num_ok == 6
    return kind


@pytest.mark.parametrize(
    ("direct_s", "faster"), [(0.1, OpKind.DISK2D), (0.9, OpKind.DISK2H), (5.0, OpKind.DISK2H)]
)
def test_loads_from_ssd_take_the_way_that_was_clearly_faster(
    direct_s: float, faster: OpKind
) -> None:
    world = World(cpu=12, past_dram="auto")
    world.put("abcdef")
    world.finish_all()
    seconds = {OpKind.DISK2H: 1.0, OpKind.DISK2D: direct_s}
    taken = [load_from_ssd(world, seconds) for _ in range(8)]
    assert taken == [OpKind.DISK2H] * 4 + [OpKind.DISK2D] * 4
    assert [load_from_ssd(world, seconds) for _ in range(5)] == [faster] * 5
    world.check_nothing_is_held()


def test_a_load_past_dram_that_is_cut_short_is_not_timed() -> None:
    world = World(cpu=12, past_dram="auto")
    world.put("abcdef")
    world.finish_all()
    for _ in range(6):
        world.clear(CPU)
        task_id = world.get("abcdef")
        world.cancel(task_id)
        world.finish_all()
    assert load_from_ssd(world, {OpKind.DISK2H: 1.0}) is OpKind.DISK2H


def test_a_get_whose_blocks_on_ssd_find_no_room_in_dram_is_answered_with_the_others() -> None:
    world = World(cpu=6, past_dram="auto")
    world.put("abcdef")
    world.finish_all()
    world.clear(CPU)
    world.put("ab")
    world.finish_all()
    world.put("wxyz")
    task_id = world.get("abcdef")
    assert world.ops(OpKind.D2H), "the rest of DRAM is still leased"
    world.finish_all()
    assert world.final(task_id).num_ok == 2
    world.check_nothing_is_held()


def test_a_way_past_dram_that_fails_is_left_and_costs_no_block() -> None:
    world = World(cpu=12, past_dram="auto")
    world.put("abcdef")
    world.finish_all()
    for _ in range(4):
        assert load_from_ssd(world, {OpKind.DISK2H: 1.0}) is OpKind.DISK2H
    world.clear(CPU)
    task_id = world.get("abcdef")
    for run in world.ops(OpKind.DISK2D, task_id):
        world.finish(run, 0, error="cuFileRead failed")
    assert world.final(task_id).status is KVStatus.FAILED
    assert world.cached(SSD, "abcdef") == 6
    assert not world.stats().totals.dropped_blocks
    for _ in range(31):
        assert load_from_ssd(world, {OpKind.DISK2H: 1.0}) is OpKind.DISK2H
    assert load_from_ssd(world, {OpKind.DISK2D: 0.1}) is OpKind.DISK2D
    assert load_from_ssd(world, {OpKind.DISK2D: 0.1}) is OpKind.DISK2D
    world.check_nothing_is_held()


def test_a_way_past_dram_that_hangs_is_left() -> None:
    world = World(cpu=12, past_dram="auto", op_timeout_s=30.0)
    world.put("abcdef")
    world.finish_all()
    for _ in range(4):
        load_from_ssd(world, {OpKind.DISK2H: 1.0})
    world.clear(CPU)
    hanging = world.get("abcdef")
    world.tick(31.0)
    assert world.final(hanging).status is KVStatus.FAILED
    task_id = world.get("abcdef")
    assert {run.op.kind for run in world.ops(task_id=task_id)} == {OpKind.DISK2H}
    world.finish_all()


@pytest.mark.parametrize("is_first_bad", [True, False])
def test_the_block_that_is_dropped_is_the_one_that_a_rank_calls_bad(is_first_bad: bool) -> None:
    """One of two ranks fails at the first block; the other finds the third one bad."""
    world = World(past_dram="always", chunk=6, load_ranks=(0, 1), store_ranks=(0, 1))
    world.put("abcdef")
    world.finish_all()
    world.clear(CPU)
    task_id = world.get("abcdef")
    runs = world.ops(OpKind.DISK2D, task_id)
    for is_bad in (is_first_bad, not is_first_bad):
        if is_bad:
            world.finish_bad(runs.pop(), num_ok=2)
        else:
            world.finish(runs.pop(), 0, error="cuFileRead failed")
    assert world.final(task_id).status is KVStatus.FAILED
    assert world.cached(SSD, "abcdef") == 6


def load_slowly(world: World, kind: OpKind, count: int) -> None:
    """Let SSD alone have a prompt, and load it again and again; each op takes a second."""
    world.put("abcdef")
    world.finish_all()
    for _ in range(count):
        world.clear(CPU)
        task_id = world.get("abcdef")
        while loads := world.ops(kind, task_id):
            world.tick(1.0)
            world.finish(loads[0])
        world.finish_all()
        assert world.final(task_id).num_ok == 6
    world.clear(CPU)
    world.engine.report_prefill(world.ids.session, 100.0)


def test_loads_past_dram_that_are_slower_than_computing_are_not_made() -> None:
    world = World(past_dram="always", keeps_on_host=False, skip_slow_loads=True)
    load_slowly(world, OpKind.DISK2D, 4)
    assert world.final(world.get("abcdef")).status is KVStatus.NOT_FOUND
    assert world.stats().totals.skipped_blocks == {"ssd_slower_than_recompute": 6}


def test_slow_loads_through_dram_do_not_speak_against_those_past_it() -> None:
    world = World(cpu=12, past_dram="auto", skip_slow_loads=True)
    load_slowly(world, OpKind.DISK2H, 2)
    task_id = world.get("abcdef")
    assert {run.op.kind for run in world.ops(task_id=task_id)} == {OpKind.DISK2D}
    world.finish_all()


def test_a_late_match_of_former_weights_does_not_undo_a_clear() -> None:
    """It would call its root at the store what it was called before."""
    world = with_store()
    root, remote = world.placed("ab").root, world.cache.tiers.remote
    assert remote is not None
    world.engine.clear(None)
    world.engine.set_weights(ENGINE, 1, True, world.now)
    session = world.ids.session
    assert (
        world.engine.look_up(Prompt(TaskKind.GET, keys_of("ab"), 0, 2, 32), world.now, session)
        == []
    )
    assert remote.root_at_store(root) != root
    world.match(TaskKind.GET, "ab")
    assert remote.root_at_store(root) != root
    world.check()
