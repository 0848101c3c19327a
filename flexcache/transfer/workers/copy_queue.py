"""A thread of native code that makes queued copies, and never takes the interpreter lock.

A thread of Python needs that lock after each copy to begin the next one, and waits a switch
interval (5 ms) for it while another thread is busy: 64 ops of 8 MiB took 1.6 times as long as their
bytes. This thread finds its copies in memory, and stops only where there are none.

    rank's thread  --entries-->  ring of a lane  -->  native thread    woken by `work`
                   <--number of entries made, and how they ended--     wakes by `landed`

Importing this module requires numba, and compiles the functions.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexcache.errors import TaskRevokedError
from flexcache.transfer.workers.compiled import compiled
from flexcache.transfer.workers.copy_streams import copy_table, shared_word
from flexcache.transfer.workers.permit import WORD_BYTES, CopyPermit

Addresses = npt.NDArray[np.int64]

NUM_LANES = 2
"""Copies of the first lane go first; within a lane they keep their order."""
_SLOTS = 256  # entries of a lane that may be unfinished
_TOGETHER_BYTES = 16 << 20  # made before the rank's thread is woken, while there are more
_POLL_S = 0.0001

_GIVEN, _MADE = 0, 1  # words of a lane: entries so far
_LANE_WORDS = 2
_TO, _FROM, _SIZES, _COUNT, _TASK, _BYTES, _REVOKED = range(7)  # words of an entry
_ENTRY_WORDS = 7
_CLOSING, _ONE, _EVENT, _LANES = range(4)  # words of the queue
_ENTRIES = _LANES + NUM_LANES * _LANE_WORDS
_QUEUE_WORDS = _ENTRIES + NUM_LANES * _SLOTS * _ENTRY_WORDS

_read, _write = (
    types.ExternalFunction(name, types.int64(types.int32, types.int64, types.int64))
    for name in ("read", "write")
)


@intrinsic  # type: ignore[untyped-decorator]
def _publish(typing: Any, address: Any, value: Any) -> Any:
    """Store a word that other threads read, after everything before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(
    typing: Any, function: Any, to: Any, start: Any, sizes: Any, count: Any, words: Any, task: Any
) -> Any:
    """Call `copy_table` at its address, so that it is not compiled again as a part of others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        form = ir.FunctionType(ir.IntType(8), [word] * 6)
        pointer = builder.inttoptr(arguments[0], form.as_pointer())
        whole = builder.call(pointer, arguments[1:])
        return builder.icmp_unsigned("!=", whole, ir.IntType(8)(0))

    return types.boolean(*[types.int64] * 5, types.int64, types.int64), generate


@compiled(types.void(types.int64, types.int64, types.int64, types.int32))
def _give(queue: int, lane: int, given: int, work: int) -> None:
    """Show the native thread ``given`` entries of a lane, and wake it."""
    _publish(queue + (_LANES + lane * _LANE_WORDS + _GIVEN) * WORD_BYTES, given)
    _write(work, queue + _ONE * WORD_BYTES, WORD_BYTES)


@compiled(types.void(types.int64, types.int64, types.int64, types.int32, types.int32))
def _make_copies(queue: int, permit: int, copy_table: int, work: int, landed: int) -> None:
    """Make copies until the queue is closed and empty.

    Args:
        copy_table: Address of the function.
    """
    unreported = 0
    while True:
        lane, number = 0, 0
        while lane < NUM_LANES:
            words = queue + (_LANES + lane * _LANE_WORDS) * WORD_BYTES
            number = shared_word(words + _MADE * WORD_BYTES)
            if number != shared_word(words + _GIVEN * WORD_BYTES):
                break
            lane += 1
        if unreported and (lane == NUM_LANES or unreported >= _TOGETHER_BYTES):
            unreported = 0
            _write(landed, queue + _ONE * WORD_BYTES, WORD_BYTES)
        if lane < NUM_LANES:
            slot = lane * _SLOTS + number % _SLOTS
            entry = queue + (_ENTRIES + slot * _ENTRY_WORDS) * WORD_BYTES
            is_whole = _call(
                copy_table,
                shared_word(entry + _TO * WORD_BYTES),
                shared_word(entry + _FROM * WORD_BYTES),
                shared_word(entry + _SIZES * WORD_BYTES),
                shared_word(entry + _COUNT * WORD_BYTES),
                permit,
                shared_word(entry + _TASK * WORD_BYTES),
            )
            _publish(entry + _REVOKED * WORD_BYTES, 0 if is_whole else 1)
            unreported += 1 + shared_word(entry + _BYTES * WORD_BYTES)
            words = queue + (_LANES + lane * _LANE_WORDS) * WORD_BYTES
            _publish(words + _MADE * WORD_BYTES, number + 1)
        elif shared_word(queue + _CLOSING * WORD_BYTES):
            return
        else:
            _read(work, queue + _EVENT * WORD_BYTES, WORD_BYTES)


# Keeps the interpreter lock: to let go of it for a call that does not wait would be to wait for it.
_give_locked = ctypes.PYFUNCTYPE(
    None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32
)(_give.address)  # fmt: skip


class QueuedCopy:
    """A copy in the queue; a `Fence`.

    Args:
        lane: Words of its lane.
        entry: Words of its entry, until another copy has it.
        runs: Its addresses, which must live until it has ended.
    """

    def __init__(
        self, lane: Addresses, number: int, entry: Addresses, runs: Sequence[Addresses]
    ) -> None:
        self._lane = lane
        self._number = number
        self._entry = entry
        self._runs = runs
        self._was_revoked: bool | None = None
        """None: it is not known to have ended."""

    def look(self) -> None:
        """Note whether it has ended, and how."""
        if self._was_revoked is None and self._lane[_MADE] > self._number:
            self._was_revoked = bool(self._entry[_REVOKED])

    def query(self) -> bool:
        """Return whether it has ended.

        Raises:
            TaskRevokedError: It ended early.
        """
        self.look()
        if self._was_revoked:
            raise TaskRevokedError
        return self._was_revoked is not None

    def wait(self) -> None:
        """Wait until it has ended."""
        while not self.query():
            time.sleep(_POLL_S)


class CopyQueue:
    """Copies for the native thread, which begins with the first. Used by one thread.

    Args:
        permit: Checked by the native thread before each piece of a copy, for the copy's task.
        landed: An eventfd that is written when copies have ended.
    """

    def __init__(self, permit: CopyPermit, landed: int) -> None:
        self._permit = permit
        self._landed = landed
        self._words = np.zeros(_QUEUE_WORDS, np.uint64)
        self._words[_ONE] = 1
        self._lanes = self._words[_LANES:_ENTRIES].reshape(NUM_LANES, _LANE_WORDS)
        self._entries = self._words[_ENTRIES:].reshape(NUM_LANES, _SLOTS, _ENTRY_WORDS)
        self._queued: dict[tuple[int, int], QueuedCopy] = {}
        """The copy of each entry, so that its addresses live."""
        self._work = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def add(
        self, lane: int, destinations: Addresses, sources: Addresses, sizes: Addresses,
        task_id: int,
    ) -> QueuedCopy | None:  # fmt: skip
        """Queue a copy; None if there is no room."""
        number = int(self._lanes[lane, _GIVEN])
        if number - int(self._lanes[lane, _MADE]) == _SLOTS:
            return None
        if self._thread is None:
            self._thread = threading.Thread(
                target=_make_copies.ctypes,
                args=(
                    self._words.ctypes.data,
                    self._permit.address,
                    copy_table.address,
                    self._work,
                    self._landed,
                ),
                name="flexcache-copies",
                daemon=True,
            )
            self._thread.start()
        if (last := self._queued.get((lane, number % _SLOTS))) is not None:
            last.look()
        runs = (destinations, sources, sizes)
        entry = self._entries[lane, number % _SLOTS]
        tables = [each.ctypes.data for each in runs]
        entry[:] = np.array([*tables, len(sizes), task_id, int(sizes.sum()), 0], np.uint64)
        copy = QueuedCopy(self._lanes[lane], number, entry, runs)
        self._queued[lane, number % _SLOTS] = copy
        _give_locked(self._words.ctypes.data, lane, number + 1, self._work)
        return copy

    def close(self) -> None:
        """Wait until all copies have ended, and end the thread. Idempotent."""
        if self._work < 0:
            return
        self._words[_CLOSING] = 1
        os.eventfd_write(self._work, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._work)
        self._work = -1
