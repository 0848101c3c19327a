"""Packed slots: a block compressed into the front of its slot, for fewer bytes to write and read.

    plain     | the block's bytes                              |     codec 0, filled 0
    packed    | length | frame | zeros |    left as it was    |     filled: 256ths of the slot

The length of the frame has 8 bytes, little endian. What is filled is rounded up to whole pages, for
direct I/O. The frame holds the block's even bytes,
then its odd ones: in 16-bit floats the odd bytes are the sign and most of the exponent, which take
few values, while the even ones hardly compress. A slot keeps its size, so packing saves bandwidth
and wear, not space.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexcache.storage.alignment import align_up
from flexcache.storage.compression import Codec, open_compressor

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
