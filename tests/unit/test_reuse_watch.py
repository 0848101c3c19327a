"""When writes to SSD end and begin again, by puts and gets as the task engine makes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_builders import World

from flexcache.cache.admission import MIN_MISSED_BLOCKS
from flexcache.ids import TaskKind, TierName

LENGTH = 100
CPU, SSD = 300, 600
ENOUGH = MIN_MISSED_BLOCKS // LENGTH + 10
"""Prompts, none of which returns, after which nothing is written."""
OUT_OF_DRAM = CPU // LENGTH
"""Prompts after which an earlier one has left DRAM."""
REASON = "ssd_nothing_returns"


class Engine:
    """An engine that looks each prompt up and stores what was not found."""

    def __init__(self, length: int = LENGTH, **settings: object) -> None:
        self.length = length
        self.world = World(**{"cpu": CPU, "ssd": SSD, "chunk": length, **settings})  # type: ignore[arg-type]
        self._letters = map(chr, range(1, 128))

    def new_prompt(self) -> str:
        """Return a prompt that shares no block with another."""
        return next(self._letters) + "x" * (self.length - 1)

    def serve(self, text: str, retain_s: float = 0.0) -> int:
        """Return how many blocks of a prompt were cached."""
        get = self.world.match(TaskKind.GET, text)
        found = self.world.tasks[get].plan.stop
        self.world.launch(get)
        self.world.put(text, start=found, retain_s=retain_s)
        self.world.finish_all()
        return found

    def serve_new(self, count: int = 1) -> str:
        """Return the last of ``count`` prompts."""
        for _ in range(count):
            text = self.new_prompt()
            assert self.serve(text) == 0
            assert self.world.cached(TierName.CPU, text) == self.length, "DRAM stores everything"
        return text

    def pause(self) -> None:
        """Serve so many new prompts that nothing is written any more."""
        while not self.is_paused():
            self.serve_new()

    def is_paused(self) -> bool:
        is_paused = self._of_ssd("writes_paused")
        assert is_paused in (0, 1)
        return bool(is_paused)

    def num_regrets(self) -> int:
        return self._of_ssd("refused_returns")

    def _of_ssd(self, name: str) -> int:
        found = getattr(self.world.stats().tiers["SSD"], name)
        assert isinstance(found, int)
        return found

    def is_written(self, text: str) -> bool:
        return self.world.cached(TierName.SSD, text) == self.length

    def num_skipped(self) -> int:
        return self.world.stats().totals.dropped_blocks.get(REASON, 0)


@pytest.fixture
def paused() -> Engine:
    engine = Engine()
    engine.pause()
    return engine


def test_nothing_is_written_once_the_tier_was_replaced_and_nothing_found() -> None:
    engine = Engine()
    for number in range(ENOUGH):
        is_useless = (number + 1) * LENGTH >= MIN_MISSED_BLOCKS
        assert engine.is_written(engine.serve_new()) is not is_useless
    assert engine.num_skipped() == (ENOUGH - MIN_MISSED_BLOCKS // LENGTH) * LENGTH
    engine.world.check_nothing_is_held()


def test_what_was_written_before_is_found_and_then_all_is_written_again() -> None:
    engine = Engine()
    written = [text for _ in range(ENOUGH) if engine.is_written(text := engine.serve_new())]
    assert engine.serve(written[-1]) == LENGTH
    assert not engine.is_paused()
    assert engine.is_written(engine.serve_new())


def test_a_prompt_that_returns_while_dram_has_it_is_found_and_written(paused: Engine) -> None:
    text = paused.serve_new()
    assert not paused.is_written(text)
    assert paused.serve(text + "more") == LENGTH
    assert paused.world.cached(TierName.SSD, text + "more") == LENGTH + len("more")
    assert paused.num_regrets() == 0


def test_a_prompt_that_returns_later_is_computed_once_more(paused: Engine) -> None:
    text = paused.serve_new()
    paused.serve_new(OUT_OF_DRAM)
    assert paused.serve(text) == 0
    assert paused.is_written(text)
    assert paused.is_written(paused.serve_new(OUT_OF_DRAM))
    assert paused.serve(text) == LENGTH
    assert paused.num_regrets() == 1


def test_what_returns_later_than_the_tier_would_keep_it_ends_nothing(paused: Engine) -> None:
    text = paused.serve_new()
    paused.serve_new(SSD // LENGTH)
    assert paused.serve(text) == 0
    assert paused.is_paused()
    assert paused.num_regrets() == 0


def test_each_loss_makes_the_next_pause_take_more_replacements() -> None:
    prompts_kept = 9  # this many need more than the least number of blocks that are asked for
    engine = Engine(MIN_MISSED_BLOCKS // prompts_kept + 1, cpu=2000, ssd=MIN_MISSED_BLOCKS + 9)
    engine.pause()
    text = engine.serve_new()
    engine.serve_new(3)  # it leaves DRAM
    assert engine.serve(text) == 0
    assert engine.num_regrets() == 1
    engine.serve_new(prompts_kept * 4 - 1)
    assert not engine.is_paused()
    engine.serve_new(3)
    assert engine.is_paused()


def test_a_pause_that_a_hit_has_ended_costs_what_comes_back_after_it() -> None:
    engine = Engine(MIN_MISSED_BLOCKS // 9 + 1, cpu=2000, ssd=MIN_MISSED_BLOCKS + 9)
    engine.pause()
    text = engine.serve_new()
    assert engine.serve(engine.serve_new() + "more")
    assert not engine.is_paused()
    engine.serve_new(3)
    assert engine.serve(text) == 0
    assert engine.num_regrets() == 1
    engine.serve_new(4 * 9 - 1)
    assert not engine.is_paused()


def test_after_a_pause_that_cost_nothing_the_next_takes_as_little_as_before_a_loss() -> None:
    engine = Engine(MIN_MISSED_BLOCKS // 9 + 1, cpu=2000, ssd=MIN_MISSED_BLOCKS + 9)
    engine.pause()
    text = engine.serve_new()
    engine.serve_new(3)
    assert engine.serve(text) == 0
    engine.pause()
    assert engine.serve(engine.serve_new() + "more")
    engine.serve_new(9)
    engine.serve_new(2)
    assert engine.is_paused()


def test_a_noted_prompt_is_counted_once_and_not_long_after_the_pause(paused: Engine) -> None:
    first, second = paused.serve_new(), paused.serve_new()
    paused.serve_new(OUT_OF_DRAM)
    for _ in range(3):
        paused.world.match(TaskKind.GET, first)
    assert paused.num_regrets() == 1
    assert not paused.is_paused()
    paused.serve_new(SSD // LENGTH + 1)
    assert paused.serve(second) == 0
    assert paused.num_regrets() == 1


def test_a_look_up_ahead_of_a_match_is_no_return(paused: Engine) -> None:
    paused.world.match(TaskKind.GET, paused.new_prompt(), start=LENGTH)
    assert paused.is_paused()


def test_a_prompt_of_which_the_engine_has_the_beginning_counts_as_one_that_returns(
    paused: Engine,
) -> None:
    paused.world.get(paused.new_prompt(), start=1)
    assert not paused.is_paused()


def test_a_continuation_counts_as_one_that_returns_though_no_tier_has_its_parent(
    paused: Engine,
) -> None:
    paused.world.get(paused.new_prompt(), behind=20)
    assert not paused.is_paused()


def test_a_beginning_that_prompts_share_ends_it_however_short(paused: Engine) -> None:
    paused.serve("shared" + paused.serve_new())
    assert paused.serve("shared" + paused.new_prompt()) == len("shared")
    assert not paused.is_paused()


def test_what_is_to_be_kept_is_written(paused: Engine) -> None:
    text = paused.new_prompt()
    paused.serve(text, retain_s=60.0)
    assert paused.is_written(text)
    assert paused.is_paused()


def test_free_room_is_used(paused: Engine) -> None:
    paused.world.clear(TierName.SSD)
    for _ in range(SSD // LENGTH):
        assert paused.is_written(paused.serve_new())
    assert not paused.is_written(paused.serve_new())


def test_one_prompt_in_a_while_that_is_found_keeps_all_written() -> None:
    engine = Engine()
    popular = engine.new_prompt()
    for number in range(ENOUGH):
        if not number % (SSD // LENGTH - 1):
            engine.serve(popular)
        engine.serve_new()
    assert engine.num_skipped() == 0


def test_a_tier_that_still_holds_old_prompts_keeps_all_written() -> None:
    engine = Engine(ssd=2 * ENOUGH * LENGTH)
    engine.serve_new(ENOUGH)
    assert engine.num_skipped() == 0


def test_what_is_put_without_being_looked_up_is_written() -> None:
    engine = Engine()
    for _ in range(ENOUGH):
        engine.world.put(text := engine.new_prompt())
        engine.world.finish_all()
        assert engine.is_written(text)


def test_a_remote_store_receives_everything() -> None:
    engine = Engine(remote=True)
    engine.pause()
    before = engine.world.stats().tiers["REMOTE"].stored_blocks
    text = engine.serve_new()
    assert engine.world.stats().tiers["REMOTE"].stored_blocks > before
    assert not engine.is_written(text)


@pytest.mark.parametrize("policy", ["selective", "write_back"])
def test_other_policies_decide_for_themselves(policy: str) -> None:
    engine = Engine(policy=policy)
    engine.serve_new(ENOUGH)
    assert engine.world.stats().tiers["SSD"].writes_paused is None
    assert engine.num_skipped() == 0


def test_the_parts_of_a_prompt_that_is_computed_in_parts_are_all_left_out(paused: Engine) -> None:
    text = paused.new_prompt()
    paused.world.match(TaskKind.GET, text)
    for start, stop in pairwise((0, 20, 50, LENGTH)):
        before = paused.num_skipped()
        paused.world.put(text[:stop], start=start)
        assert paused.num_skipped() == before + stop - start
        paused.world.finish_all()
    assert not paused.world.cached(TierName.SSD, text)
    assert paused.serve(text) == LENGTH


@given(st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=10)
def test_conversations_lose_no_more_turns_than_are_counted(order: list[int]) -> None:
    engine = Engine(ssd=800)
    engine.pause()
    turns = [engine.new_prompt() for _ in range(4)]
    seen: set[int] = set()
    for number in order:
        regrets = engine.num_regrets()
        turns[number] += "next turn"
        found = engine.serve(turns[number])
        is_lost = engine.num_regrets() > regrets
        assert (found == 0) is (number not in seen or is_lost)
        seen.add(number)
        engine.world.check()
