"""What says whether a block's bytes are the ones that were written."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def checksum(pieces: Iterable[memoryview]) -> int:
    """xxh3-64 over the pieces one after the other."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()
