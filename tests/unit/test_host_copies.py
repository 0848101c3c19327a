"""Copies in host memory move exactly the bytes of their runs, wherever they begin and end."""

from __future__ import annotations

import logging
import mmap
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.errors import TaskRevokedError
from flexcache.ids import NUM_WORDS
from flexcache.transfer import cpu_copier
from flexcache.transfer.copier import PIECE_BYTES, CopyPermit
from flexcache.transfer.cpu_copier import CopyRuns

_SIZES = st.one_of(st.integers(0, 300), st.integers(2000, 20_000), st.just(65_536))
_GAPS = st.integers(0, 130)


def _implementations() -> list[CopyRuns]:
    pytest.importorskip("flexcache.transfer.cpu_kernels")
    return [cpu_copier.load_copy_runs(), cpu_copier._copy_with_ctypes]


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
            CopyPermit(),
        )
        assert np.array_equal(destination, expected)


@pytest.mark.parametrize("behind", [0, 1, 64, 2047, 2048, 2049, 4032, 4095])
def test_a_run_arrives_in_whichever_direction_it_is_copied(behind: int) -> None:
    """Behind: how far its destination lies behind its source within a page."""
    size, page = 70_000, mmap.PAGESIZE
    with mmap.mmap(-1, size) as memory, mmap.mmap(-1, size + 2 * page) as other:
        source, target = (np.frombuffer(each, np.uint8) for each in (memory, other))
        source[:] = np.random.default_rng(1).integers(1, 256, size, np.uint8)
        for copy in _implementations():
            target[:] = 0
            addresses = target.ctypes.data + behind, source.ctypes.data, size
            copy(*(np.array([number]) for number in addresses), CopyPermit())
            assert np.array_equal(target[behind : behind + size], source)
            assert not target[:behind].any() and not target[behind + size :].any()
        del source, target


@pytest.mark.parametrize("word", range(NUM_WORDS))
def test_a_copy_whose_task_is_revoked_ends_after_its_current_piece(word: int) -> None:
    """What the third piece brings lands on the words, and revokes the copy's own task."""
    sizes = np.array([PIECE_BYTES // 2, PIECE_BYTES, 3 * PIECE_BYTES], np.int64)
    total, task_id = int(sizes.sum()), (0xFFFF << 48) + 7
    for copy in _implementations():
        source = np.full(total, 1, np.uint8)
        target = np.zeros(total, np.uint8)
        place = 2 * PIECE_BYTES + 4096
        words = target[place : place + 8 * NUM_WORDS]
        revoked = np.zeros(NUM_WORDS, np.uint64)
        revoked[word] = task_id
        source[place : place + 8 * NUM_WORDS] = revoked.view(np.uint8)
        permit = CopyPermit(memoryview(words).cast("Q"))
        permit.task_id = task_id
        starts = np.cumsum(sizes) - sizes
        with pytest.raises(TaskRevokedError):
            copy(target.ctypes.data + starts, source.ctypes.data + starts, sizes, permit)
        assert np.array_equal(target[: 3 * PIECE_BYTES], source[: 3 * PIECE_BYTES])
        assert not target[3 * PIECE_BYTES :].any()


def test_a_task_revoked_earlier_moves_nothing_and_a_later_one_moves_all() -> None:
    source, target = np.full(4096, 1, np.uint8), np.zeros(4096, np.uint8)
    words = memoryview(bytearray(8 * NUM_WORDS)).cast("Q")
    words[0] = 41
    permit, runs = CopyPermit(words), (target.ctypes.data, source.ctypes.data, 4096)
    for copy in _implementations():
        target[:] = 0
        for revoked in (40, 41):
            permit.task_id = revoked
            with pytest.raises(TaskRevokedError):
                copy(*(np.array([number]) for number in runs), permit)
        assert not target.any()
        permit.task_id = 42
        copy(*(np.array([number]) for number in runs), permit)
        assert target.all()


def _starts(sizes: np.ndarray, gaps: list[int]) -> np.ndarray:
    """Return where consecutive runs begin, each behind its gap."""
    return np.cumsum(np.array(gaps, np.int64) + np.concatenate(([0], sizes[:-1]))[: len(sizes)])


class BrokenNumba(ModuleType):
    """A package that is installed and does not load."""

    def __getattr__(self, name: str) -> object:
        raise OSError("libllvmlite.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("numba", "event"), [(None, "numba_missing"), (BrokenNumba("numba"), "numba_failed")]
)
def test_without_a_working_numba_copies_are_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, numba: object, event: str
) -> None:
    monkeypatch.delitem(sys.modules, "flexcache.transfer.cpu_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "numba", numba)
    caplog.set_level(logging.INFO, "flexcache")
    cpu_copier.load_copy_runs.cache_clear()
    try:
        assert cpu_copier.load_copy_runs() is cpu_copier._copy_with_ctypes
    finally:
        cpu_copier.load_copy_runs.cache_clear()
    assert event in caplog.text
