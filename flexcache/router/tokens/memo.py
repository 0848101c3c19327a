"""Remembers the token ids of segments of text."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import xxhash

from flexcache.errors import InternalError

_ENTRY_BYTES = 300
"""What an entry takes beside its ids: key, array, place in the table."""


class TokenMemo:
    """Token ids by text, least recently used first out, bounded by bytes.

    Texts are known by a 128-bit hash, so the text itself is not kept.

    Args:
        max_bytes: Bound on the memory of all entries.
        seed: Seed of the hash. A client that does not know it cannot make texts that collide.
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self._max_bytes = max_bytes
        self._seed = seed
        self._entries: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all entries."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, text: str, space: int) -> bytes:
        """Compute the key of a text; texts of different spaces are different.

        Raises:
            UnicodeEncodeError: The text has half a surrogate pair.
        """
        return xxhash.xxh3_128_digest(text.encode(), self._seed ^ space)

    def get(self, key: bytes) -> np.ndarray | None:
        """Return the ids of a text, and note that they were used."""
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: np.ndarray) -> None:
        """Remember the ids of a text."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._bytes -= _size(old)
        self._entries[key] = ids
        self._bytes += _size(ids)
        while self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= _size(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._bytes = 0

    def check(self) -> None:
        """Check the accounts.

        Raises:
            InternalError: They are wrong.
        """
        held = sum(map(_size, self._entries.values()))
        if held != self._bytes or held > self._max_bytes:
            raise InternalError(f"segment memo counts {self._bytes} bytes, holds {held}")


def _size(ids: np.ndarray) -> int:
    return ids.nbytes + _ENTRY_BYTES
