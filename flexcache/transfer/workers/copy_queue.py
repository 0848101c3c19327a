"""Copies in host memory, queued for threads of native code that take no interpreter lock.

A thread of Python needs that lock after each copy to begin the next one, and waits a switch
interval (5 ms) for it while another thread is busy: 64 ops of 8 MiB took 1.7 times as long as their
bytes. The native threads (`copy_loop`) find their copies in memory, and stop only where there are
none. The second helps: it is woken when one begins and more wait.

    rank's driver  --entries-->  ring of a lane  -->  native thread    woken by `work`, then `help`
                   <--how they ended---------------------------------  wakes by `landed`
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from flexcache.errors import TaskRevokedError
from flexcache.logs import log_event
from flexcache.processes import ServiceThread
from flexcache.transfer.workers.permit import CopyPermit

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

NUM_LANES = 2
"""Copies of the first lane go first, but after `EAGER_LOADS` the other has its turn; in a lane they
begin in their order."""
NUM_SLOTS = 256
"""Entries of a lane that may be unfinished."""
_MOST_BYTES = 128 << 20  # of a lane: they last while the rank's thread waits for the lock, twice
_POLL_S = 0.0001
NO_HELP = -1

CLOSING, ONE, EVENT, LANES = range(4)
"""Words of the queue; lanes and entries follow."""
GIVEN, TAKEN, LANE_WORDS = range(3)
"""Words of a lane: how many entries it was given so far, and how many of them are taken."""
DESTINATIONS, SOURCES, SIZES, COUNT, TASK, NUM_BYTES, END, ENTRY_WORDS = range(8)
"""Words of an entry: addresses of three tables and their length, the task, and how it ended."""
OPEN, WHOLE, REVOKED = range(3)
"""How an entry has ended."""
ENTRIES = LANES + NUM_LANES * LANE_WORDS
_QUEUE_WORDS = ENTRIES + NUM_LANES * NUM_SLOTS * ENTRY_WORDS


class QueuedCopy:
    """A copy in the queue; a `Fence`.

    Args:
        entry: Words of its entry, until another copy has it.
        runs: Its addresses, which must live until it has ended.
        begin: Bytes queued before it, since its lane was empty.
        end: Those with its own.
    """

    def __init__(self, entry: Words, runs: Addresses, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self._entry = entry
        self._runs = runs
        self._outcome = OPEN

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, in whichever way. To be asked before another gets its entry."""
        if self._outcome == OPEN:
            self._outcome = int(self._entry[END])
        return self._outcome != OPEN

    def query(self) -> bool:
        """Return whether it has ended.

        Raises:
            TaskRevokedError: It ended early.
        """
        if self.has_ended and self._outcome == REVOKED:
            raise TaskRevokedError
        return self._outcome != OPEN

    def wait(self) -> None:
        """Wait until it has ended."""
        while not self.query():
            time.sleep(_POLL_S)


class CopyQueue:
    """Copies for the native threads. Used by one thread at a time.

    Args:
        permit: Checked by the native threads before each piece of a copy, for the copy's task.
        landed: An eventfd that is written when copies have ended.
    """

    def __init__(self, permit: CopyPermit, landed: int) -> None:
        self._permit = permit
        self._landed = landed
        self._words = np.zeros(_QUEUE_WORDS, np.uint64)
        self._words[ONE] = 1
        self._address = self._words.ctypes.data
        self._entries = self._words[ENTRIES:].reshape(NUM_LANES, NUM_SLOTS, ENTRY_WORDS)
        self._num_given = [0] * NUM_LANES
        self._queued: list[dict[int, QueuedCopy]] = [{} for _ in range(NUM_LANES)]
        """Those that are not known to have ended, by number, so that their addresses live."""
        self._work, self._help = (os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2))
        self._thread: ServiceThread | None = None
        self._starts = threading.Lock()
        self._is_closed = False
        self._give: Callable[[int, int, int, int], None] | None = None
        """Once there is compiled code."""

    def is_ready(self) -> bool:
        """Return whether copies may be added. The first call begins to compile the loop, on its
        thread; until that is done, and if it fails, they may not."""
        if self._thread is None:
            self._thread = ServiceThread(self._run, "flexcache-copies")
            try:
                self._thread.start()  # if it is interrupted there may be a thread: not a second one
            except RuntimeError:  # there may be no more threads
                self._thread = None
                return False
        return self._give is not None

    def has_room(self, lane: int) -> bool:
        """Return whether a lane takes one more copy now."""
        queued = self._queued[lane]
        while queued:
            first = next(iter(queued))
            if not queued[first].has_ended:
                num_bytes = self._end_of(lane) - queued[first].begin
                return len(queued) < NUM_SLOTS and num_bytes < _MOST_BYTES
            del queued[first]
        return True

    def _end_of(self, lane: int) -> int:
        """Return how many bytes a lane was given since it was empty."""
        queued = self._queued[lane]
        return queued[next(reversed(queued))].end if queued else 0

    def add(
        self, lane: int, destinations: Addresses, sources: Addresses, sizes: Addresses,
        task_id: int,
    ) -> QueuedCopy:  # fmt: skip
        """Queue a copy. The queue must be ready, and the lane have room."""
        assert self._give is not None
        number, num_bytes = self._num_given[lane], int(sizes.sum())
        runs = np.array((destinations, sources, sizes), np.int64)
        entry = self._entries[lane, number % NUM_SLOTS]
        first, apart = runs.ctypes.data, runs.strides[0]
        tables = first, first + apart, first + 2 * apart
        entry[:] = (*tables, len(sizes), task_id, num_bytes, OPEN)
        begin = self._end_of(lane)
        copy = QueuedCopy(entry, runs, begin, begin + num_bytes)
        self._queued[lane][number] = copy
        self._give(self._address, lane, number + 1, self._work)
        self._num_given[lane] = number + 1
        return copy

    def settle(self) -> None:
        """Wait until all copies have ended. After `add` was interrupted the words tell whether the
        threads were given its copy."""
        for lane, queued in enumerate(self._queued):
            self._num_given[lane] = given = int(self._words[LANES + lane * LANE_WORDS + GIVEN])
            queued.pop(given, None)
            while not all(copy.has_ended for copy in queued.values()):
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Wait until no copy is being made, and end the threads. Those that have not begun end as
        revoked. Idempotent. A thread that still compiles is not waited for: it copies nothing."""
        if self._work < 0:
            return
        with self._starts:
            self._is_closed = True
        self._words[CLOSING] = 1
        os.eventfd_write(self._work, 1)
        if self._thread is not None and self._give is not None:
            self._thread.wait()
        os.close(self._work)
        os.close(self._help)
        self._work = -1

    def _run(self) -> None:
        try:
            from flexcache.transfer.workers.copy_loop import give, make_copies
        except Exception:  # of a compiler, which may raise any class
            log_event(
                logger, logging.WARNING, "copy_thread_failed", exc_info=True,
                effect="several requests at once are copied one after the other",
            )  # fmt: skip
            return
        make = partial(make_copies, self._address, self._permit.address)
        helper = ServiceThread(make, "flexcache-copies-helper", self._help, NO_HELP, self._landed)
        with self._starts:
            if self._is_closed:
                return
            with contextlib.suppress(RuntimeError):  # there may be no more threads: it goes without
                helper.start()
            self._give = give
        try:
            make(self._work, self._help, self._landed)
        finally:
            os.eventfd_write(self._help, 1)
            helper.wait()
