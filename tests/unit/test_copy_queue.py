"""CopyQueue: queued copies beside a plain model of them, and what happens to those revoked."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import int64, njit

from flexcache.errors import TaskRevokedError
from flexcache.transfer import copy_loop, cpu_copier
from flexcache.transfer.copier import EAGER_LOADS, PIECE_BYTES, CopyPermit
from flexcache.transfer.cpu_copier import NO_HELP, CopyQueue, QueuedCopy
from flexcache.transfer.cpu_kernels import shared_word

LOADS, STORES = range(2)
TASK = 1 << 63 | 7  # ids have a server's epoch in their highest bits
WAIT_S = 60.0
Run = tuple[int, int, int]
"""Destination, source and size."""


class Rig:
    """A queue between two buffers, whose permit the test may take away."""

    def __init__(self, num_bytes: int) -> None:
        self.words = memoryview(bytearray(16)).cast("Q")
        self.landed = os.eventfd(0, os.EFD_NONBLOCK)
        self.queue = CopyQueue(CopyPermit(self.words), self.landed)
        self.source = np.random.default_rng(3).integers(0, 256, num_bytes, np.uint8)
        self.target = np.zeros(num_bytes, np.uint8)

    def add(self, runs: list[Run], lane: int = STORES, task_id: int = TASK) -> QueuedCopy:
        """Queue a copy of runs."""
        wait_until(self.queue.is_ready)
        assert self.queue.has_room(lane)
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


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(4 * PIECE_BYTES)
    yield made
    made.close()


def hold_first_thread(monkeypatch: pytest.MonkeyPatch, helps: bool) -> threading.Event:
    """Have the first thread make no copy before the event is set, and the helper none at all unless
    it helps."""
    may_begin, make_copies = threading.Event(), copy_loop.make_copies

    def make_copies_later(queue: int, permit: int, work: int, help: int, landed: int) -> None:
        if help != NO_HELP:
            assert may_begin.wait(WAIT_S)
        elif not helps:
            return
        make_copies(queue, permit, work, help, landed)

    monkeypatch.setattr(copy_loop, "make_copies", make_copies_later)
    return may_begin


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    return hold_first_thread(monkeypatch, helps=False)


@pytest.fixture
def busy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    may_go_on = hold_first_thread(monkeypatch, helps=True)
    yield may_go_on
    may_go_on.set()


def test_queued_copies_move_their_bytes(rig: Rig) -> None:
    size = len(rig.source) // 8
    copies = [rig.add([(i * size, i * size, size)], lane=i % 2) for i in range(8)]
    for copy in copies:
        copy.wait()
    assert np.array_equal(rig.source, rig.target)
    wait_until(rig.was_told)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([LOADS, STORES]), st.lists(st.integers(0, 90), max_size=5)),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_every_byte_is_moved_whichever_thread_does_it(
    copies: list[tuple[int, list[int]]], random: Random
) -> None:
    rig = Rig(1 << 14)
    try:
        queued, at = [], 0
        for lane, sizes in copies:
            runs = []
            for size in sizes:
                runs.append((at, random.randrange(1 << 13), size))
                at += size
            queued.append((rig.add(runs, lane), runs) if runs else (None, runs))
        for copy, runs in queued:
            if copy is not None:
                copy.wait()
            for to, start, size in runs:
                assert np.array_equal(rig.target[to : to + size], rig.source[start : start + size])
        assert not rig.target[at:].any()
    finally:
        rig.close()


def test_two_threads_share_a_long_queue(rig: Rig) -> None:
    size, count = 512, len(rig.source) // 512
    for i in range(count):  # many times as many as there are slots
        lane = i % 2
        wait_until(lambda lane=lane: rig.queue.is_ready() and rig.queue.has_room(lane))  # type: ignore[misc]
        copy = rig.add([(i * size, i * size, size)], lane)
    copy.wait()
    wait_until(lambda: np.array_equal(rig.source, rig.target))


def test_the_helper_copies_what_waits_while_the_first_thread_is_busy(
    busy: threading.Event, rig: Rig
) -> None:
    copies = [rig.add([(i * 100, i * 100, 100)], i % 2) for i in range(6)]
    os.eventfd_write(rig.queue._help, 1)
    for copy in copies:
        copy.wait()
    assert not busy.is_set()
    assert np.array_equal(rig.target[:600], rig.source[:600])
    wait_until(rig.was_told)


@pytest.mark.parametrize("count", [1, 2])
def test_help_is_called_if_more_than_one_copy_waits(
    gate: threading.Event, rig: Rig, count: int
) -> None:
    copies = [rig.add([(0, 0, 100)]) for _ in range(count)]
    gate.set()
    for copy in copies:
        copy.wait()
    called, _, _ = select.select([rig.queue._help], [], [], 0)
    assert bool(called) == (count > 1)


def test_copies_are_made_without_a_helper(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_no_helper(thread: threading.Thread) -> None:
        if thread.name.endswith("helper"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_helper)
    for copy in [rig.add([(i * 100, i * 100, 100)]) for i in range(6)]:
        copy.wait()
    assert np.array_equal(rig.target[:600], rig.source[:600])


def test_no_two_threads_take_the_same_entry() -> None:
    count, word = 500_000, np.zeros(1, np.int64)

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def take(address: int, count: int) -> None:
        taken = 0
        while taken < count:
            number = int64(shared_word(address))
            taken += copy_loop._replace(address, number, number + 1)

    take(word.ctypes.data, 0)  # compiled
    threads = [threading.Thread(target=take, args=(word.ctypes.data, count)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert word[0] == 2 * count


@pytest.mark.parametrize("is_given", [False, True])
def test_after_an_interrupted_addition_all_has_ended_and_more_may_be_added(
    gate: threading.Event, rig: Rig, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    first = rig.add([(0, 0, 100)])
    give = rig.queue._give
    assert give is not None

    def be_interrupted(*arguments: int) -> None:
        if is_given:
            give(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rig.queue, "_give", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.add([(100, 100, 100)])
    gate.set()
    rig.queue.settle()
    assert first.has_ended
    assert rig.target[100:200].any() == is_given
    for at in (200, 300):
        rig.add([(at, at, 100)]).wait()
    assert np.array_equal(rig.target[200:400], rig.source[200:400])
    assert rig.queue.has_room(STORES)
    assert rig.queue._end_of(STORES) == 0


def test_loads_come_before_stores_that_were_queued_earlier(gate: threading.Event, rig: Rig) -> None:
    store = rig.add([(0, 0, 100)], STORES)
    load = rig.add([(0, 200, 100)], LOADS)
    gate.set()
    store.wait()
    assert load.query()
    assert np.array_equal(rig.target[:100], rig.source[:100])  # the store's bytes are on top


def test_a_store_gets_a_turn_before_all_loads_are_made(gate: threading.Event, rig: Rig) -> None:
    store = rig.add([(0, 0, 100)], STORES)
    loads = [rig.add([(0, 200, 100)], LOADS) for _ in range(EAGER_LOADS)]
    last = rig.add([(0, 400, 100)], LOADS)
    gate.set()
    last.wait()
    assert store.query()
    assert all(load.query() for load in loads)
    assert np.array_equal(rig.target[:100], rig.source[400:500])  # the last load's are on top


def test_a_copy_of_a_revoked_task_does_not_begin(rig: Rig) -> None:
    rig.words[1] = TASK
    revoked = rig.add([(0, 0, 100)])
    with pytest.raises(TaskRevokedError):
        revoked.wait()
    rig.add([(100, 100, 100)], task_id=TASK + 1).wait()
    assert not rig.target[:100].any()
    assert np.array_equal(rig.target[100:200], rig.source[100:200])


def test_how_a_copy_ended_is_known_after_its_entry_was_given_to_another(rig: Rig) -> None:
    rig.words[0] = TASK
    revoked = rig.add([(0, 0, 100)])
    for _ in range(cpu_copier.NUM_SLOTS):
        rig.add([(0, 0, 100)], task_id=TASK + 1).wait()
    with pytest.raises(TaskRevokedError):
        revoked.query()


@pytest.mark.parametrize("size", [1, PIECE_BYTES])
def test_a_full_lane_takes_no_more_until_a_copy_has_ended(
    gate: threading.Event, rig: Rig, size: int
) -> None:
    copies = []
    wait_until(rig.queue.is_ready)
    while rig.queue.has_room(STORES):
        copies.append(rig.add([(0, 0, size)]))
    limit = cpu_copier.NUM_SLOTS if size == 1 else cpu_copier._MOST_BYTES // size
    assert len(copies) == limit
    assert rig.queue.has_room(LOADS)
    gate.set()
    copies[0].wait()
    wait_until(lambda: rig.queue.has_room(STORES))
    rig.add([(0, 0, size)]).wait()


def test_what_has_not_begun_is_not_copied_after_the_end(gate: threading.Event, rig: Rig) -> None:
    copies = [rig.add([(0, 0, 100)], lane) for lane in (LOADS, STORES) for _ in range(4)]
    closing = threading.Thread(target=rig.queue.close)
    closing.start()
    wait_until(lambda: bool(rig.queue._words[cpu_copier.CLOSING]))
    gate.set()
    closing.join(WAIT_S)
    for copy in copies:
        with pytest.raises(TaskRevokedError):
            copy.query()
    assert not rig.target.any()
    rig.queue.close()


def test_a_queue_that_was_not_asked_for_has_no_thread(rig: Rig) -> None:
    before = threading.active_count()
    assert rig.queue._thread is None
    rig.queue.close()
    assert threading.active_count() == before


def test_a_thread_that_cannot_start_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert not rig.queue.is_ready()
    rig.add([(0, 0, 100)]).wait()


class _Compiling(types.ModuleType):
    """A module whose functions take their time."""

    may_end = threading.Event()

    def __getattr__(self, name: str) -> object:
        assert self.may_end.wait(WAIT_S)
        return getattr(copy_loop, name)


def test_the_end_does_not_wait_for_a_compilation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Compiling(copy_loop.__name__)
    monkeypatch.setitem(sys.modules, copy_loop.__name__, module)
    assert not rig.queue.is_ready()
    thread = rig.queue._thread
    assert thread is not None
    rig.queue.close()
    assert thread.is_alive()
    module.may_end.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not rig.queue.is_ready(), "it is over"


def test_without_compiled_code_nothing_is_queued(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, copy_loop.__name__, None)
    assert not rig.queue.is_ready()
    thread = rig.queue._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not rig.queue.is_ready()
    assert "copy_thread_failed" in caplog.text


def test_addresses_are_whole_numbers_in_compiled_code() -> None:
    for function in (copy_loop._make_copies, copy_loop._give):
        assert "double" not in function.inspect_llvm()
