"""Which of the slots given belong to the tokens that match."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.client.arguments import matched_slots

POSITIONS = st.integers(0, 24)


@given(st.integers(0, 20), POSITIONS, POSITIONS, POSITIONS, POSITIONS)
def test_a_range_wants_the_slots_that_its_mask_wants(
    num_tokens: int, start: int, stop: int, matched_from: int, matched_to: int
) -> None:
    wanted = np.zeros(num_tokens, np.bool_)
    wanted[start:stop] = True
    matched = np.zeros(num_tokens, np.bool_)
    matched[matched_from:matched_to] = True
    matched &= wanted
    every = np.arange(100, 100 + num_tokens)
    for slots in (every[wanted], every[matched]):
        by_range = matched_slots(slots, matched, range(start, stop))
        assert by_range.tolist() == every[matched].tolist()
        assert by_range.tolist() == matched_slots(slots, matched, wanted).tolist()


@pytest.mark.parametrize("nothing", [range(0), range(5, 2), range(-3), range(9, 12)])
def test_an_empty_range_wants_none(nothing: range) -> None:
    none = np.zeros(8, np.bool_)
    assert matched_slots(np.arange(0), none, nothing).tolist() == []
    given_too_many = np.arange(5)
    assert matched_slots(given_too_many, none, nothing) is given_too_many


def test_without_a_mask_all_are_wanted() -> None:
    matched = np.array([True, True, False, False])
    assert matched_slots(np.arange(4), matched, None).tolist() == [0, 1]
    assert matched_slots(np.arange(2), matched, None).tolist() == [0, 1]
