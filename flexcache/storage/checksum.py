"""Checksum that verifies that a block's bytes are those that were written."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def checksum(pieces: Iterable[memoryview]) -> int:
    """Return the xxh3-64 of the concatenated pieces."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()
