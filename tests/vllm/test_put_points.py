"""Where requests are stored, and which of their GPU blocks that takes. Needs no engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.config.model import KVGroup
from flexcache.integration.vllm.groups import BlockTables
from flexcache.integration.vllm.puts import PutPoints, tail_interval

FULL = KVGroup("full", 4)


def points(rule: PutPoints, num_prompt_tokens: int, stop: int, junction: int = 0) -> list[int]:
    """All points up to ``stop``."""
    found: list[int] = []
    while (point := rule.next(found[-1] if found else 0, num_prompt_tokens, junction)) is not None:
        if point > stop:
            break
        found.append(point)
    return found


def test_a_model_that_resumes_anywhere_is_stored_at_its_prompts_end() -> None:
    assert points(PutPoints(4), 23, 100) == [20]
    assert points(PutPoints(4), 24, 100) == [24]
    assert points(PutPoints(4), 3, 100) == []


def test_tails_are_at_the_prompts_end_at_junctions_and_at_intervals() -> None:
    rule = PutPoints(4, 12)
    assert points(rule, 23, 50) == [12, 20, 24, 36, 48]
    assert points(rule, 23, 30, junction=18) == [12, 16, 20, 24]
    assert points(rule, 23, 30, junction=40) == [12, 20, 24]
    assert rule.next(0, 23, junction=40) == 12


def test_the_tail_at_a_prompts_end_leaves_a_token_to_compute() -> None:
    assert points(PutPoints(4, 100), 24, 50) == [20]
    assert points(PutPoints(4, 100), 25, 50) == [24]


@given(
    position=st.integers(1, 64), factor=st.integers(1, 9), prompt=st.integers(1, 2000),
    junction=st.integers(0, 2000), num_tokens=st.integers(0, 3000),
)  # fmt: skip
def test_points_are_positions_ahead(
    position: int, factor: int, prompt: int, junction: int, num_tokens: int
) -> None:
    point = PutPoints(position, position * factor).next(num_tokens, prompt, junction)
    assert point is not None
    assert num_tokens < point <= num_tokens + position * factor
    assert point % position == 0


@pytest.mark.parametrize(
    ("groups", "position", "setting", "expected"),
    [
        ((), 16, 64, 0),
        ((KVGroup("full", 16), KVGroup("full", 32)), 32, 64, 0),
        ((KVGroup("window", 16, 100), FULL), 16, None, 512),
        ((KVGroup("window", 16, 256), FULL), 48, None, 1056),
        ((KVGroup("chunked", 16, 8192), KVGroup("window", 16, 64)), 16, None, 32768),
        ((KVGroup("state", 16), FULL), 16, None, 512),
        ((KVGroup("window", 16, 256), FULL), 48, 100, 144),
        ((KVGroup("window", 16, 256), FULL), 48, 1, 48),
    ],
)
def test_intervals_are_whole_positions(
    groups: tuple[KVGroup, ...], position: int, setting: int | None, expected: int
) -> None:
    assert tail_interval(groups, position, setting) == expected


def tables_of(*groups: KVGroup, position: int = 4) -> Any:
    return BlockTables(groups, range(max(1, len(groups))), position)


def test_a_load_fills_what_the_engine_lacks() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL, KVGroup("state", 4))
    mine = [[0, 0, 0, 14, 15], [20, 21, 22, 23, 24], [0, 0, 0, 0, 34]]
    assert tables.to_load(mine, 0, 20) == [[14, 15], [20, 21, 22, 23, 24], [34]]
    assert tables.to_load(mine, 16, 20) == [[-1, 15], [24], [34]]
    longer = [[*table, 99] for table in mine]
    assert tables.to_load(longer, 0, 20) == tables.to_load(mine, 0, 20)


def test_a_load_without_a_block_that_it_needs_is_not_started() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL)
    assert tables.to_load([[0, 0, 0, 0, 15], [20, 21, 22, 23, 24]], 0, 20) is None
    assert tables.to_load([[0, 0, 0, 14], [20, 21, 22, 23, 24]], 0, 20) is None


def test_groups_of_different_block_sizes() -> None:
    tables = tables_of(KVGroup("window", 8, 8), FULL, position=8)
    mine = [[0, 11], [20, 21, 22, 23]]
    assert tables.to_load(mine, 0, 16) == [[11], [20, 21, 22, 23]]
    assert tables.tail(mine, 16, {}) == [[11], []]
    assert tables.dense(mine, 8, 16) == [[], [22, 23]]
    assert tables.num_tokens(mine) == 16


def test_a_tail_is_whole_or_none() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL)
    assert tables.tail([[0, 0, 12, 13], [20, 21, 22, 23]], 16, {}) == [[12, 13], []]
    assert tables.tail([[0, 0, 0, 13], [20, 21, 22, 23]], 16, {}) is None


def test_states_are_those_handed_over_never_those_of_the_table() -> None:
    tables = BlockTables((KVGroup("state", 4), FULL), (1, 3), 4)
    mine = tables.select([[1], [0, 12], [2], [20, 21]])
    assert mine == [[0, 12], [20, 21]]
    assert tables.tail(mine, 8, {}) is None
    assert tables.tail(mine, 8, {1: 40}) == [[40], []]


def test_a_chunk_that_begins_at_the_point_needs_no_block() -> None:
    tables = tables_of(KVGroup("chunked", 4, 8), FULL)
    assert tables.tail([[0, 0], [20, 21]], 8, {}) == [[], []]
    assert tables.tail([[0, 0, 12], [20, 21, 22]], 12, {}) == [[12], []]


def test_one_group_of_full_attention() -> None:
    tables = tables_of()
    assert not (tables.has_groups or tables.has_tails or tables.has_states)
    assert tables.to_load([[5, 6, 7]], 4, 8) == [[6]]
