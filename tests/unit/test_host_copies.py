"""Copies in host memory move exactly the bytes of their runs, wherever these begin and end."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.transfer.workers import copy_cpu
from flexcache.transfer.workers.copy_cpu import CopyRuns

_SIZES = st.one_of(st.integers(0, 300), st.integers(2000, 20_000), st.just(65_536))
_GAPS = st.integers(0, 130)


def _implementations() -> list[CopyRuns]:
    copy_streams = pytest.importorskip("flexcache.transfer.workers.copy_streams")
    return [copy_streams.copy_runs, copy_cpu._copy_with_ctypes]


@given(runs=st.lists(st.tuples(_SIZES, _GAPS, _GAPS), max_size=8), seed=st.integers(0, 9))
def test_every_run_arrives_and_nothing_else_changes(
    runs: list[tuple[int, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array([size for size, _, _ in runs], np.int64)
    starts = [_starts(sizes, [run[side] for run in runs]) for side in (1, 2)]
    source = rng.integers(0, 256, int(sizes.sum()) + 2000, np.uint8)
    order = rng.permutation(len(runs))
    for copy in _implementations():
        destination = rng.integers(0, 256, len(source), np.uint8)
        expected = destination.copy()
        for at, come_from, size in zip(starts[0], starts[1], sizes, strict=True):
            expected[at : at + size] = source[come_from : come_from + size]
        copy(
            destination.ctypes.data + starts[0][order],
            source.ctypes.data + starts[1][order],
            sizes[order],
        )
        assert np.array_equal(destination, expected)


def _starts(sizes: np.ndarray, gaps: list[int]) -> np.ndarray:
    """Where runs begin that stand one after the other, each behind its gap."""
    return np.cumsum(np.array(gaps, np.int64) + np.concatenate(([0], sizes[:-1]))[: len(sizes)])


def test_a_missing_numba_leaves_the_slower_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flexcache.transfer.workers.copy_streams", None)
    copy_cpu.load_copy_runs.cache_clear()
    try:
        assert copy_cpu.load_copy_runs() is copy_cpu._copy_with_ctypes
    finally:
        copy_cpu.load_copy_runs.cache_clear()
