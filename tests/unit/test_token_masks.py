"""Masks over tokens are what a plain loop makes of the same range, and cannot be written to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.prompt import TokenMasks

_POSITIONS = st.integers(0, 20_000)
_SPANS = st.tuples(st.just(0) | _POSITIONS, _POSITIONS, _POSITIONS).map(sorted)


@given(st.lists(_SPANS, min_size=1, max_size=8))
def test_a_mask_is_true_within_its_range_only(spans: list[list[int]]) -> None:
    masks = TokenMasks()
    made = [masks.make(num_tokens, first, last) for first, last, num_tokens in spans]
    for mask, (first, last, num_tokens) in zip(made, spans, strict=True):
        assert mask.dtype == np.bool_
        assert mask.tolist() == [first <= token < last for token in range(num_tokens)]


@pytest.mark.parametrize(("first", "last"), [(0, 16), (16, 32), (0, 0), (16, 16), (0, 40)])
def test_a_mask_is_read_only(first: int, last: int) -> None:
    mask = TokenMasks().make(40, first, last)
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True
    own = mask.copy()
    own[0] = not own[0]  # a copy is the caller's


def test_a_mask_stays_as_it_is_when_longer_prompts_follow() -> None:
    masks = TokenMasks()
    short = masks.make(100, 0, 48)
    longer = masks.make(1_000_000, 0, 999_984)
    assert int(short.sum()) == 48 and short[:48].all()
    assert int(longer.sum()) == 999_984 and longer[:999_984].all()
