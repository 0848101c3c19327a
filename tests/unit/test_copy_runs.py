"""Joined runs against a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexcache.transfer.copier import Runs

# Small addresses and sizes, so that neighbours are common.
COPIES = st.lists(st.tuples(st.integers(0, 12), st.integers(100, 112), st.integers(1, 4)))
BREAKS = st.lists(st.integers(0, 112), max_size=6)


def as_arrays(copies: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = np.array(copies, np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def joined_one_by_one(
    copies: list[tuple[int, int, int]], breaks: list[int]
) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for to, start, size in copies:
        if joined and not {to, start} & set(breaks):
            last_to, last_start, last_size = joined[-1]
            if (to, start) == (last_to + last_size, last_start + last_size):
                joined[-1] = (last_to, last_start, last_size + size)
                continue
        joined.append((to, start, size))
    return joined


@given(COPIES, BREAKS)
def test_copies_are_joined_wherever_both_sides_are_contiguous_and_no_break_is_between(
    copies: list[tuple[int, int, int]], breaks: list[int]
) -> None:
    merged = Runs(*as_arrays(copies)).joined(np.array(breaks, np.int64))
    assert list(zip(*(a.tolist() for a in merged), strict=True)) == joined_one_by_one(
        copies, breaks
    )


def test_neighbours_on_one_side_only_stay_apart() -> None:
    runs = as_arrays([(0, 100, 4), (4, 200, 4), (50, 204, 4)])
    assert all(a is b for a, b in zip(Runs(*runs).joined(), runs, strict=True))


def test_blocks_in_a_row_on_both_sides_become_one_copy() -> None:
    runs = as_arrays([(i * 64, 1000 + i * 64, 64) for i in range(100)])
    assert [array.tolist() for array in Runs(*runs).joined()] == [[0], [1000], [6400]]
