"""Pieces of memory: page alignment, checksums of a block's bytes, copies to and from its parts."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import xxhash

PAGE_BYTES = 4096
"""Alignment that direct I/O and page tables require."""

Parts = Sequence[memoryview]
"""One object's bytes, each part contiguous and of type uint8."""

STEP_BYTES = 512 << 10
"""Size of a copy or read that, with its checksum, stays within a core's cache."""


def align_up(size: int, alignment: int = PAGE_BYTES) -> int:
    return -(-size // alignment) * alignment


def checksum(pieces: Iterable[memoryview]) -> int:
    """Return the xxh3-64 of the concatenated pieces."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return where memory that is contiguous begins."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def num_bytes_of(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


def first_bytes(parts: Parts, num_bytes: int) -> list[memoryview]:
    """Return the front of the parts."""
    front = []
    for part in parts:
        if num_bytes:
            front.append(part[:num_bytes])
            num_bytes -= len(front[-1])
    return front


def cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Cut pieces of these sizes from the front of the memory.

    Raises:
        ValueError: It is smaller than their sum.
    """
    ends = list(accumulate(sizes))
    if sum(sizes) > len(memory):
        raise ValueError(f"{sum(sizes)} bytes in one call, of at most {len(memory)}")
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def scatter(data: memoryview, parts: Parts) -> list[memoryview]:
    """Copy the bytes into the parts, in order; return the room that is left. There must be room for
    all of them."""
    left = []
    for part in parts:
        count = min(len(part), len(data))
        part[:count] = data[:count]
        data = data[count:]
        if count < len(part):
            left.append(part[count:])
    return left


def scatter_checked(data: memoryview, parts: Parts) -> int:
    """Copy the bytes as `scatter`; return the `checksum` of the copies behind the first part."""
    digest = xxhash.xxh3_64()
    for number, part in enumerate(first_bytes(parts, len(data))):
        for start in range(0, len(part), STEP_BYTES):
            copy = part[start : start + STEP_BYTES]
            _copy(copy, data[: len(copy)])
            data = data[len(copy) :]
            if number > 0:
                digest.update(copy)
    return digest.intdigest()


def gather(parts: Parts, room: memoryview) -> memoryview:
    """Copy the parts to the front of the memory, in order; return what they fill."""
    filled = cut(room, [num_bytes_of(parts)])[0]
    for part, target in zip(parts, cut(filled, [len(part) for part in parts]), strict=True):
        _copy(target, part)
    return filled


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy, but for memoryviews' own assignment without the interpreter lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
