"""CopyQueue: queued copies beside a plain model of them, and what happens to those revoked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from flexcache.errors import TaskRevokedError
from flexcache.transfer.workers import copy_queue
from flexcache.transfer.workers.copy_queue import CopyQueue, QueuedCopy
from flexcache.transfer.workers.permit import PIECE_BYTES, CopyPermit

LOADS, STORES = range(2)
TASK = 1 << 63 | 7  # ids have a server's epoch in their highest bits


class Rig:
    """A queue between two buffers, whose permit the test may take away."""

    def __init__(self, num_bytes: int) -> None:
        self.words = memoryview(bytearray(16)).cast("Q")
        self.landed = os.eventfd(0, os.EFD_NONBLOCK)
        self.queue = CopyQueue(CopyPermit(self.words), self.landed)
        self.source = np.random.default_rng(3).integers(0, 256, num_bytes, np.uint8)
        self.target = np.zeros(num_bytes, np.uint8)

    def add(
        self, runs: list[tuple[int, int, int]], lane: int = STORES, task_id: int = TASK
    ) -> QueuedCopy | None:
        """Queue a copy of runs: destination, source and size."""
        to, start, sizes = (np.array(each, np.int64) for each in zip(*runs, strict=True))
        to, start = to + self.target.ctypes.data, start + self.source.ctypes.data
        return self.queue.add(lane, to, start, sizes, task_id)

    def was_told(self) -> bool:
        """Whether the eventfd was written since the last call."""
        try:
            return os.eventfd_read(self.landed) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.queue.close()
        os.close(self.landed)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(4 * PIECE_BYTES)
    yield made
    made.close()


def wait(copy: QueuedCopy | None) -> None:
    assert copy is not None
    copy.wait()


def test_queued_copies_move_their_bytes(rig: Rig) -> None:
    size = len(rig.source) // 8
    copies = [rig.add([(i * size, i * size, size)], lane=i % 2) for i in range(8)]
    for copy in copies:
        wait(copy)
    assert np.array_equal(rig.source, rig.target)
    assert rig.was_told()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([LOADS, STORES]),
            st.lists(
                st.tuples(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 90)),
                min_size=1, max_size=5,
            ),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_copies_of_a_lane_keep_their_order(
    copies: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    rig = Rig(2 * 4096)
    half = len(rig.target) // 2
    expected = rig.target.copy()
    try:
        queued = []
        for lane, runs in copies:  # each lane has its half of the target
            placed = [(lane * half + to % (half - 90), start, size) for to, start, size in runs]
            for to, start, size in placed:
                expected[to : to + size] = rig.source[start : start + size]
            queued.append(rig.add(placed, lane))
        for copy in queued:
            wait(copy)
        assert np.array_equal(rig.target, expected)
    finally:
        rig.close()


def test_a_copy_of_a_revoked_task_does_not_begin(rig: Rig) -> None:
    rig.words[1] = TASK
    with pytest.raises(TaskRevokedError):
        wait(rig.add([(0, 0, 100)]))
    wait(rig.add([(100, 100, 100)], task_id=TASK + 1))
    assert not rig.target[:100].any()
    assert np.array_equal(rig.target[100:200], rig.source[100:200])


def test_how_a_copy_ended_is_known_after_its_place_was_given_to_another(rig: Rig) -> None:
    rig.words[0] = TASK
    revoked = rig.add([(0, 0, 100)])
    later = [rig.add([(0, 0, 100)], task_id=TASK + 1) for _ in range(copy_queue._SLOTS - 1)]
    wait(later[-1])
    wait(rig.add([(0, 0, 100)], task_id=TASK + 1))  # in the place of the first
    assert revoked is not None
    with pytest.raises(TaskRevokedError):
        revoked.query()
    assert all(copy is not None and copy.query() for copy in later)


def test_a_full_lane_takes_no_more_until_a_copy_has_ended(rig: Rig) -> None:
    size = len(rig.source)
    large = rig.add([(0, 0, size)] * 200)  # takes far longer than to fill the queue
    queued = [rig.add([(0, 0, 1)]) for _ in range(copy_queue._SLOTS)]
    assert queued[-1] is None
    wait(rig.add([(1, 1, 1)], LOADS))  # the other lane has room
    wait(large)
    wait(queued[-2])
    wait(rig.add([(0, 0, 1)]))


def test_closing_waits_for_what_is_queued(rig: Rig) -> None:
    size = len(rig.source)
    copies = [rig.add([(0, 0, size)]) for _ in range(4)]
    rig.queue.close()
    assert all(copy is not None and copy.query() for copy in copies)
    assert np.array_equal(rig.source, rig.target)
    assert not [thread for thread in threading.enumerate() if thread.name == "flexcache-copies"]
    rig.queue.close()


def test_a_queue_without_copies_has_no_thread(rig: Rig) -> None:
    before = threading.active_count()
    assert rig.queue._thread is None
    rig.queue.close()
    assert threading.active_count() == before


_COPY_ONE = """
import os
import subprocess
import sys
import numpy as np
from flexcache.transfer.workers.copy_queue import CopyQueue
from flexcache.transfer.workers.permit import CopyPermit

source, target = np.arange(100_000), np.zeros(100_000, np.int64)
queue = CopyQueue(CopyPermit(), os.eventfd(0))
table = [np.array([each], np.int64) for each in (target.ctypes.data, source.ctypes.data, 800_000)]
queue.add(0, *table, 1).wait()
assert np.array_equal(source, target)
"""


def copy_in_new_process(cache: str) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", _COPY_ONE], env=environment, check=True)


def test_copies_need_no_place_for_compiled_code() -> None:
    copy_in_new_process("/proc/nowhere")


def test_damaged_compiled_code_is_not_used(tmp_path: Path) -> None:
    copy_in_new_process(str(tmp_path))
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    copy_in_new_process(str(tmp_path))
