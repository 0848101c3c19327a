"""Scattered copies in host memory, for engines whose KV tensors live on a CPU.

Many small copies must not each take the interpreter lock: next to a busy thread every release and
re-acquisition costs up to a switch interval (5 ms); measured throughput was 0.03 instead of 8 GB/s.
So all copies of an op are one compiled call without the lock (numba) or, without numba, calls that
never release it; and of several ops all are queued for a thread that needs no lock between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexcache.errors import TaskRevokedError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.processes import ServiceThread
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import PIECE_BYTES, Addresses, CopyPermit, Runs

if TYPE_CHECKING:
    from flexcache.transfer.copier import ComputePoint

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Copies in host memory, queued for threads of native code that take no interpreter lock.
#
# A thread of Python needs that lock after each copy to begin the next one, and waits a switch
# interval (5 ms) for it while another thread is busy: 64 ops of 8 MiB took 1.7 times as long as
# their bytes. The native threads (`copy_loop`) find their copies in memory, and stop only where
# there are none. The second helps: it is woken when one begins and more wait.
#
#     rank's driver  --entries-->  ring of a lane  -->  native thread   woken by `work`, then `help`
#                    <--how they ended---------------------------------  wakes by `landed`

Words = npt.NDArray[np.uint64]

NUM_LANES = 2
"""Copies of the first lane go first, but after `EAGER_LOADS` the other has its turn; in a lane they
begin in their order."""
NUM_SLOTS = 256
"""Entries of a lane that may be unfinished."""
# Of a lane: they last while the rank's thread waits for the lock, twice. With 64 MiB the queue was
# empty more often; with more, what was cancelled would take longer to end.
_MOST_BYTES = 128 << 20
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
    """A copy in the queue; a `ComputePoint`.

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
        # Only what has not landed counts. As long as what was not reported did too, the queue of a
        # rank whose thread came seldom was empty for a quarter of the time.
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
            from flexcache.transfer.copy_loop import give, make_copies
        except Exception:  # of a compiler, which may raise any class
            log_event(
                logger, logging.WARNING, "copy_thread_failed", exc_info=True,
                effect="several requests at once are copied one after the other",
            )  # fmt: skip
            return
        make = partial(make_copies, self._address, self._permit.address)
        # Two processors copy 1.35 to 1.45 times as fast as one. The helper has the priority of the
        # first thread: at niceness 5 it was no faster, and what it held while both processors
        # computed kept the reports of others for up to 16 ms.
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


_LANES = {OpKind.H2D: 0, OpKind.D2H: 1}
"""Lanes of the queue: loads go first."""
CopyRuns = Callable[[Addresses, Addresses, Addresses, CopyPermit], None]


class CpuCopier:
    """KV tensors in host memory. A copy is done when `start` returns, if it is urgent or the only
    one; others are queued (`CopyQueue`), once the queue is ready.

    Args:
        permit: Checked before each piece of a copy.
        landed: An eventfd that is written when queued copies have ended; None to queue none.
    """

    def __init__(self, permit: CopyPermit | None = None, landed: int | None = None) -> None:
        self._permit = permit or CopyPermit()
        self._copy = load_copy_runs()
        self._queue: CopyQueue | None = None
        if landed is not None and self._copy is not _copy_with_ctypes:
            self._queue = CopyQueue(self._permit, landed)
        self.numa_node = None
        self.wakes = self._queue is not None

    def attach(
        self, segment: HostSegment, after_each_step: Callable[[], None] = lambda: None
    ) -> None:
        pass

    def fence(self) -> None:
        pass

    def start(
        self, runs: Runs, kind: OpKind, after: object, urgent: bool = False, alone: bool = False
    ) -> ComputePoint | None:
        """Copy or queue everything.

        Raises:
            TaskRevokedError: The permit was revoked during the copy.
        """
        runs = runs.joined()
        # One that comes alone is copied here: that saves waking the thread, and being woken by it.
        if not urgent and not alone and (queue := self.queue(kind)):
            return queue.add(_LANES[kind], *runs, self._permit.task_id)
        self._copy(*runs, self._permit)
        return None

    def may_start(self, kind: OpKind, after: object) -> bool:
        return self._queue is None or self._queue.has_room(_LANES[kind])

    def queue(self, kind: OpKind) -> CopyQueue | None:
        queue = self._queue
        if queue is None or not queue.is_ready() or not queue.has_room(_LANES[kind]):
            return None
        return queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


@cache
def load_copy_runs() -> CopyRuns:
    """Load the fastest available ``copy(destinations, sources, sizes, permit)`` of addresses."""
    try:
        from flexcache.transfer.cpu_kernels import copy_runs
    except Exception as error:  # of a compiler, which may raise any class
        event = "numba_missing" if isinstance(error, ModuleNotFoundError) else "numba_failed"
        log_event(
            logger, logging.INFO if event == "numba_missing" else logging.WARNING, event,
            reason=error, effect="copies hold the interpreter lock", remedy="pip install '.[cpu]'",
        )  # fmt: skip
        return _copy_with_ctypes
    return copy_runs


def _copy_with_ctypes(
    destinations: Addresses, sources: Addresses, sizes: Addresses, permit: CopyPermit
) -> None:
    # Beside a thread busy in Python, in GB/s with 64 KiB pages: this 4.2, compiled code 9.4, and
    # one `memmove` a page that lets go of the lock 0.03. On the memfd `process_vm_readv` reached
    # 4.7, `pwritev` 3.9, `preadv` 1.5.
    until_look = 0
    for destination, source, size in zip(
        destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        done = 0
        while done < size:
            if until_look == 0:
                permit.check()
                until_look = PIECE_BYTES
            length = min(size - done, until_look)
            _memmove(destination + done, source + done, length)
            done += length
            until_look -= length


_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)  # fmt: skip
