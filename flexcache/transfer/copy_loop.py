"""Loop of the threads that make queued copies, compiled by numba: they take no interpreter lock.

All that it shares with `cpu_copier` are words at an address:

    | is closing | one | event | given, taken | given, taken | entries of a lane | of the other |

An entry belongs to the queue until it is counted as given, then to the thread that counts it as
taken, until it has ended.
Importing this module requires numba, and compiles the functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from flexcache.ids import WORD_BYTES
from flexcache.transfer.copier import EAGER_LOADS
from flexcache.transfer.cpu_copier import (
    CLOSING,
    COUNT,
    DESTINATIONS,
    END,
    ENTRIES,
    ENTRY_WORDS,
    EVENT,
    GIVEN,
    LANE_WORDS,
    LANES,
    NO_HELP,
    NUM_BYTES,
    NUM_LANES,
    NUM_SLOTS,
    ONE,
    REVOKED,
    SIZES,
    SOURCES,
    TAKEN,
    TASK,
    WHOLE,
)
from flexcache.transfer.cpu_kernels import copy_table, shared_word

_TOGETHER_BYTES = 16 << 20  # made before the rank's thread is woken, while there are more

_libc = ctypes.CDLL(None)
_read, _write = _libc.read, _libc.write
for _call in (_read, _write):
    _call.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
    _call.restype = ctypes.c_ssize_t


@intrinsic  # type: ignore[untyped-decorator]
def _publish(typing: Any, address: Any, value: Any) -> Any:
    """Store a word that other threads read, after everything before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _replace(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace a word unless another thread was faster; return whether it was replaced."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        both = builder.cmpxchg(pointer, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(both, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@cfunc(types.void(types.int64, types.int64, types.int64, types.int32))  # type: ignore[untyped-decorator]
def _give(queue: int, lane: int, given: int, work: int) -> None:
    _publish(queue + (LANES + lane * LANE_WORDS + GIVEN) * WORD_BYTES, given)
    _write(work, queue + ONE * WORD_BYTES, WORD_BYTES)


@njit  # type: ignore[untyped-decorator]
def _num_left(queue: int) -> int:
    """Return how many entries no thread has taken."""
    left = 0
    for lane in range(NUM_LANES):
        words = queue + (LANES + lane * LANE_WORDS) * WORD_BYTES
        left -= types.int64(shared_word(words + TAKEN * WORD_BYTES))
        left += types.int64(shared_word(words + GIVEN * WORD_BYTES))
    return left


@cfunc(  # type: ignore[untyped-decorator]
    types.void(types.int64, types.int64, types.int32, types.int32, types.int32)
)
def _make_copies(queue: int, permit: int, work: int, help: int, landed: int) -> None:
    unreported, in_a_row = 0, 0
    while True:
        is_closing = shared_word(queue + CLOSING * WORD_BYTES)
        lane, number, num_looked, has_entry = 0, 0, 0, False
        while num_looked < NUM_LANES and not has_entry:
            # Loads first; after some of them in a row a store has its turn.
            lane = (num_looked + (in_a_row >= EAGER_LOADS)) % NUM_LANES
            words = queue + (LANES + lane * LANE_WORDS) * WORD_BYTES
            number = types.int64(shared_word(words + TAKEN * WORD_BYTES))
            if number == types.int64(shared_word(words + GIVEN * WORD_BYTES)):
                num_looked += 1
            else:
                # The other thread may be faster.
                has_entry = _replace(words + TAKEN * WORD_BYTES, number, number + 1)
        if unreported and (not has_entry or unreported >= _TOGETHER_BYTES):
            unreported = 0
            _write(landed, queue + ONE * WORD_BYTES, WORD_BYTES)
        if has_entry:
            # Waking the other thread costs something: only for what this one would leave lying.
            if help != NO_HELP and _num_left(queue) > 0:
                _write(help, queue + ONE * WORD_BYTES, WORD_BYTES)
            in_a_row = in_a_row + 1 if lane == 0 else 0
            slot = lane * NUM_SLOTS + number % NUM_SLOTS
            entry = queue + (ENTRIES + slot * ENTRY_WORDS) * WORD_BYTES
            is_whole = not is_closing and copy_table(
                types.int64(shared_word(entry + DESTINATIONS * WORD_BYTES)),
                types.int64(shared_word(entry + SOURCES * WORD_BYTES)),
                types.int64(shared_word(entry + SIZES * WORD_BYTES)),
                types.int64(shared_word(entry + COUNT * WORD_BYTES)),
                permit,
                shared_word(entry + TASK * WORD_BYTES),
            )
            unreported += 1 + types.int64(shared_word(entry + NUM_BYTES * WORD_BYTES))
            _publish(entry + END * WORD_BYTES, WHOLE if is_whole else REVOKED)
        elif is_closing:
            return
        else:
            _read(work, queue + EVENT * WORD_BYTES, WORD_BYTES)


# Not cached on disk by numba: it takes compiled code for current by the date of one source file, so
# after a change to another a rank would have copied for revoked tasks.
make_copies = _make_copies.ctypes
"""Make the copies of the queue whose words are at ``queue``, for as long as the words at ``permit``
(`copier`) allow it, until the queue is closed; then what has not begun ends as revoked. ``work`` is
written when there may be entries; ``help`` is when a copy begins and more wait, unless it is
`NO_HELP`; ``landed`` is when some have ended."""
give = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)(
    _give.address
)
"""Show the loop ``given`` entries of a lane, and wake it by ``work``. Keeps the interpreter lock:
to let go of it for a call that does not wait would be to wait for it."""
