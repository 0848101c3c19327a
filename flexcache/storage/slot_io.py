"""I/O on slots: whole blocks in the caller's memory, plain or packed on the device.

Packing takes longer than the device does, so it runs on threads. Unpacking has its own: no read
waits for what is being packed.

    write    pieces --pack--> room --I/O--> front of the slot
    read     pieces <-unpack- room <--I/O-- front of the slot
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.storage.block_io import BlockIO, Direction, Request
from flexcache.storage.compression import Codec, open_compressor
from flexcache.storage.pieces import align_up
from flexcache.storage.slot_index import SlotForms, SlotIds

# ------------------------------------------------------------------------------------------------
# Packed slots: a block compressed into the front of its slot, for fewer bytes to write and read.
#
#     plain     | the block's bytes                              |     codec 0, filled 0
#     packed    | length | frame | zeros |    left as it was    |     filled: 256ths of the slot
#
# The length of the frame has 8 bytes, little endian. What is filled is rounded up to whole pages,
# for direct I/O. The frame holds the block's even bytes, then its odd ones: in 16-bit floats the
# odd bytes are the sign and most of the exponent, which take few values, while the even ones hardly
# compress. A slot keeps its size, so packing saves bandwidth and wear, not space.

FULL = 256
"""Parts of a slot, by which a record says how much of it is filled."""

_LENGTH = struct.Struct("<Q")
Planes = npt.NDArray[np.uint8]


def filled_bytes(filled: int, slot_bytes: int) -> int:
    """Return how many bytes at the front of a packed slot are written and read."""
    return min(slot_bytes, align_up(-(-slot_bytes * filled // FULL)))


class SlotPacker:
    """Packs and unpacks blocks with one codec. Not thread-safe.

    Args:
        slot_bytes: Size of a block. Its pieces have even sizes.

    Raises:
        MissingDependencyError: The codec's library is not installed.
    """

    def __init__(self, codec: Codec, slot_bytes: int) -> None:
        self._compressor = open_compressor(codec)
        self._slot_bytes = slot_bytes

    def pack(self, pieces: Sequence[memoryview], room: memoryview) -> int:
        """Pack a block into ``room``, which has the size of a slot.

        Returns:
            How many 256ths of the slot are filled; 0 if the block does not become smaller.
        """
        frame = self._compressor.compress([self._split(pieces).data.cast("B")])
        num_bytes = _LENGTH.size + len(frame)
        filled = -(-num_bytes * FULL // self._slot_bytes)
        end = filled_bytes(filled, self._slot_bytes)
        if end == self._slot_bytes:
            return 0
        room[:end] = (_LENGTH.pack(len(frame)) + frame).ljust(end, b"\0")
        return filled

    def unpack(self, packed: memoryview, pieces: Sequence[memoryview]) -> None:
        """Restore a block from the filled part of its slot.

        Raises:
            ValueError: It holds no block of this size; the pieces hold nothing useful.
        """
        if len(packed) < _LENGTH.size:
            raise ValueError(f"{len(packed)} bytes are not even a length")
        (length,) = _LENGTH.unpack_from(packed)
        frame = bytes(packed[_LENGTH.size :][:length])
        planes = np.empty((2, self._slot_bytes // 2), np.uint8)
        self._compressor.decompress(frame, [planes.data.cast("B")])
        start = 0
        for words in _words(pieces):
            low, high = planes[:, start : start + len(words)]
            np.left_shift(high, 8, out=words, dtype=words.dtype, casting="unsafe")
            np.bitwise_or(words, low, out=words)
            start += len(words)

    def _split(self, pieces: Sequence[memoryview]) -> Planes:
        """Return the block's even and odd bytes, as rows."""
        planes = np.empty((2, self._slot_bytes // 2), np.uint8)
        start = 0
        for words in _words(pieces):
            low, high = planes[:, start : start + len(words)]
            np.bitwise_and(words, 0xFF, out=low, casting="unsafe")
            np.right_shift(words, 8, out=high, casting="unsafe")
            start += len(words)
        return planes


def _words(pieces: Sequence[memoryview]) -> list[npt.NDArray[np.uint16]]:
    return [np.frombuffer(piece, "<u2") for piece in pieces]


_MOST_THREADS = 8
_MOST_ROOM_BYTES = 256 << 20  # of all packed blocks on their way


@dataclass(slots=True, eq=False)
class SlotMove:
    """A block to be read or written; on its way, and how it ended.

    Attributes:
        token: What the caller knows it by.
        pieces: As those of a `Request`.
        may_pack: Whether it may be written packed.
        codec: Form that its slot has or gets, with ``filled``.
        room: Memory for the packed block, if it may be packed.
        num_bytes: What its I/O had to move.
        problem: What failed, if anything did.
    """

    token: Any
    direction: Direction
    slot: int
    pieces: Sequence[memoryview]
    may_pack: bool = True
    codec: int = Codec.NONE
    filled: int = 0
    room: memoryview | None = None
    num_bytes: int = 0
    problem: str | None = None


class SlotIO:
    """Reads slots of every form, and writes them packed by one codec. Not thread-safe.

    Args:
        io: Moves the bytes. Closed with this object.
        locate: Returns the data file and offset of a slot.
        slot_bytes: Size of a slot.
        forms: Form of each slot, which is kept up to date. None: all are plain, and stay so.
        codec: Packs what is written. Needs ``forms``.
        packing: Packs, instead of threads.

    Attributes:
        depth: Requests that may be unfinished at a time.

    Raises:
        MissingDependencyError: The codec's library is not installed.
    """

    def __init__(
        self,
        io: BlockIO,
        locate: Callable[[int], tuple[int, int]],
        slot_bytes: int,
        forms: SlotForms | None = None,
        codec: Codec = Codec.NONE,
        packing: Executor | None = None,
    ) -> None:
        if codec is not Codec.NONE:
            SlotPacker(codec, slot_bytes)  # refused now rather than on a thread
        self._io = io
        self._locate = locate
        self._slot_bytes = slot_bytes
        self._forms = forms
        self._codec = codec
        self._rooms: list[memoryview] = []
        self._packers = threading.local()
        self._worked: deque[SlotMove] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        num_threads = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
        self._packing = packing or ThreadPoolExecutor(
            num_threads, thread_name_prefix="flexcache-pack"
        )
        self._unpacking = ThreadPoolExecutor(num_threads, thread_name_prefix="flexcache-unpack")
        self.depth = io.depth
        if codec is not Codec.NONE or (forms is not None and forms["filled"].any()):
            self.depth = min(io.depth, max(2 * num_threads, _MOST_ROOM_BYTES // slot_bytes))

    def check(self, slots: SlotIds) -> None:
        """Raise `ValueError` unless there are such slots, as far as their number is known."""
        if self._forms is not None and (slots >= len(self._forms)).any():
            raise ValueError(f"a slot is not one of {len(self._forms)}")

    def forms_of(self, slots: SlotIds) -> SlotForms | None:
        """Return the forms of slots; None: all slots are plain."""
        return None if self._forms is None else self._forms[slots]

    def make_plain(self, slots: SlotIds) -> None:
        """Note that a rank has written these slots, plain."""
        if self._forms is not None:
            self._forms[slots] = (Codec.NONE, 0)

    def submit(self, moves: Sequence[SlotMove]) -> None:
        """Start moves. The caller keeps no more than ``depth`` unfinished."""
        ready = []
        for move in moves:
            if move.direction is Direction.READ:
                self._look_up_form(move)
            elif self._codec is not Codec.NONE and move.may_pack:
                move.room = self._take_room()
                self._packing.submit(self._work, self._pack, move)
                continue
            ready.append(self._io_of(move))
        self._io.submit(ready)

    def reap(self) -> list[SlotMove]:
        """Return what has ended since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        ended, packed = [], []
        while self._worked:
            move = self._worked.popleft()
            if move.direction is Direction.READ:
                ended.append(move)
            else:
                packed.append(self._io_of(move))
        self._io.submit(packed)
        for completion in self._io.reap():
            move = completion.token
            move.problem = completion.problem(move.num_bytes)
            if move.direction is Direction.READ and move.filled and not move.problem:
                self._unpacking.submit(self._work, self._unpack, move)
            else:
                ended.append(move)
        for move in ended:
            if move.room is not None:
                self._rooms.append(move.room)
                move.room = None
        return ended

    def filenos(self) -> list[int]:
        """Return descriptors, one of which is readable when `reap` has something to do."""
        return [self._io.fileno(), self._event]

    def close(self) -> None:
        """Wait for what is unfinished and release all resources. Idempotent."""
        if self._event >= 0:
            for executor in (self._packing, self._unpacking):
                executor.shutdown(wait=True)
            self._io.close()
            os.close(self._event)
            self._event = -1

    def _look_up_form(self, move: SlotMove) -> None:
        if self._forms is None:
            return
        codec, filled = self._forms[move.slot].tolist()
        if filled:
            move.codec, move.filled, move.room = codec, filled, self._take_room()

    def _io_of(self, move: SlotMove) -> Request:
        """Make the I/O of a move; a slot that is written has its new form from here on."""
        if self._forms is not None and move.direction is Direction.WRITE:
            self._forms[move.slot] = (move.codec, move.filled)
        pieces, move.num_bytes = move.pieces, self._slot_bytes
        if move.filled:
            assert move.room is not None
            move.num_bytes = filled_bytes(move.filled, self._slot_bytes)
            pieces = [move.room[: move.num_bytes]]
        return Request(move, move.direction, *self._locate(move.slot), pieces)

    def _take_room(self) -> memoryview:
        return self._rooms.pop() if self._rooms else memoryview(mmap.mmap(-1, self._slot_bytes))

    # -- on the threads --------------------------------------------------------------------------

    def _work(self, job: Callable[[SlotMove], None], move: SlotMove) -> None:
        try:
            job(move)
        except Exception as error:  # whatever it is, it belongs to one block
            move.problem = str(error) or type(error).__name__
        self._worked.append(move)
        os.eventfd_write(self._event, 1)

    def _pack(self, move: SlotMove) -> None:
        assert move.room is not None
        filled = self._packer(self._codec).pack(move.pieces, move.room)
        if filled:
            move.codec, move.filled = self._codec, filled

    def _unpack(self, move: SlotMove) -> None:
        assert move.room is not None
        self._packer(Codec(move.codec)).unpack(move.room[: move.num_bytes], move.pieces)

    def _packer(self, codec: Codec) -> SlotPacker:
        """Return this thread's packer of a codec."""
        mine: dict[Any, SlotPacker] = self._packers.__dict__
        if codec not in mine:
            mine[codec] = SlotPacker(codec, self._slot_bytes)
        return mine[codec]
