"""Pieces of memory: page alignment, and the checksum of a block's bytes."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

PAGE_BYTES = 4096


def align_up(size: int, alignment: int = PAGE_BYTES) -> int:
    return -(-size // alignment) * alignment


def checksum(pieces: Iterable[memoryview]) -> int:
    """Return the xxh3-64 of the concatenated pieces."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()
