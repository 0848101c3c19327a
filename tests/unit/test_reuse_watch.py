"""When stores end and begin again, by puts and gets of a cache as the task engine makes them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from task_builders import World

from flexcache.cache.reuse_watch import MIN_MISSED_BLOCKS
from flexcache.ids import TaskKind, TierName

LENGTH = 100
CPU = 300
ENOUGH = MIN_MISSED_BLOCKS // LENGTH + 10
"""Prompts, none of which returns, after which nothing is stored."""


class Engine:
    """An engine that looks each prompt up and stores what was not found."""

    def __init__(self, **settings: object) -> None:
        self.world = World(**{"cpu": CPU, "ssd": 0, "chunk": LENGTH, **settings})  # type: ignore[arg-type]
        self._letters = map(chr, range(1, 128))

    def new_prompt(self) -> str:
        """Return a prompt that shares no block with another."""
        return next(self._letters) + "x" * (LENGTH - 1)

    def serve(self, text: str) -> int:
        """Return how many blocks of a prompt were cached."""
        get = self.world.match(TaskKind.GET, text)
        found = self.world.tasks[get].plan.stop
        self.world.launch(get)
        self.world.put(text, start=found)
        self.world.finish_all()
        return found

    def serve_new(self) -> str:
        text = self.new_prompt()
        assert self.serve(text) == 0
        return text

    def serve_many_new(self) -> None:
        """Serve so many that nothing is stored any more."""
        for _ in range(ENOUGH):
            self.serve_new()
        assert self.num_skipped()

    def is_stored(self, text: str) -> bool:
        return self.world.cached(TierName.CPU, text) == LENGTH

    def num_skipped(self) -> int:
        return self.world.stats().totals.dropped_blocks.get("nothing_returns", 0)


def test_nothing_is_stored_once_every_tier_was_replaced_and_nothing_found() -> None:
    engine = Engine()
    for number in range(ENOUGH):
        is_useless = (number + 1) * LENGTH >= MIN_MISSED_BLOCKS
        assert engine.is_stored(engine.serve_new()) is not is_useless
    assert engine.num_skipped() == (ENOUGH - MIN_MISSED_BLOCKS // LENGTH) * LENGTH
    engine.world.check_nothing_is_held()


def test_what_was_stored_before_is_found_and_then_all_is_stored_again() -> None:
    engine = Engine()
    stored = [text for _ in range(ENOUGH) if engine.is_stored(text := engine.serve_new())]
    assert engine.serve(stored[-1]) == LENGTH
    assert engine.is_stored(engine.serve_new())


def test_a_prompt_that_comes_back_is_stored_and_so_is_all_after_it() -> None:
    engine = Engine()
    engine.serve_many_new()
    text = engine.serve_new()
    assert not engine.is_stored(text)
    assert engine.serve(text) == 0
    assert engine.is_stored(text)
    assert engine.is_stored(engine.serve_new())
    assert engine.serve(text) == LENGTH


def test_a_prompt_of_which_the_engine_has_the_beginning_counts_as_one_that_returns() -> None:
    engine = Engine()
    engine.serve_many_new()
    engine.world.get(engine.new_prompt(), start=1)
    assert engine.is_stored(engine.serve_new())


def test_one_prompt_in_a_while_that_is_found_keeps_all_stored() -> None:
    engine = Engine()
    popular = engine.new_prompt()
    for number in range(ENOUGH):
        if not number % (CPU // LENGTH - 1):
            engine.serve(popular)
        engine.serve_new()
    assert engine.num_skipped() == 0


def test_a_tier_that_still_holds_old_prompts_keeps_all_stored() -> None:
    engine = Engine(ssd=2 * ENOUGH * LENGTH)
    for _ in range(ENOUGH):
        engine.serve_new()
    assert engine.num_skipped() == 0


def test_what_is_put_without_being_looked_up_is_stored() -> None:
    engine = Engine()
    for _ in range(ENOUGH):
        engine.world.put(text := engine.new_prompt())
        engine.world.finish_all()
        assert engine.is_stored(text)


def test_what_others_read_from_a_remote_store_is_stored() -> None:
    engine = Engine(remote=True)
    for _ in range(ENOUGH):
        engine.serve_new()
    assert engine.num_skipped() == 0


def test_a_look_up_or_put_that_is_repeated_is_no_prompt_that_comes_back() -> None:
    engine = Engine()
    engine.serve_many_new()
    text = engine.new_prompt()
    engine.world.match(TaskKind.GET, text)
    engine.world.match(TaskKind.GET, text)
    for stop in (20, 50, LENGTH):
        before = engine.num_skipped()
        engine.world.put(text[:stop])
        assert engine.num_skipped() == before + stop


def test_the_parts_of_a_prompt_that_is_computed_in_parts_are_all_left_out() -> None:
    engine = Engine()
    engine.serve_many_new()
    text = engine.new_prompt()
    engine.world.match(TaskKind.GET, text)
    for start, stop in pairwise((0, 20, 50, LENGTH)):
        before = engine.num_skipped()
        engine.world.put(text[:stop], start=start)
        assert engine.num_skipped() == before + stop - start
    engine.world.finish_all()
    assert engine.serve(text) == 0
    assert engine.is_stored(text)


@given(st.lists(st.integers(0, 7), max_size=30))
@settings(max_examples=20)
def test_whatever_order_prompts_come_in_only_the_first_of_each_can_be_left_out(
    order: list[int],
) -> None:
    engine = Engine()
    engine.serve_many_new()
    texts = [engine.new_prompt() for _ in range(8)]
    seen: set[int] = set()
    stores_all = False
    for number in order:
        engine.serve(texts[number])
        stores_all |= number in seen
        seen.add(number)
        assert engine.is_stored(texts[number]) is stores_all
        engine.world.check()
