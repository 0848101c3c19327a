"""Writes a prompt's block keys to a trace: eight bytes each, without those of earlier lines.

A request is looked up and then stored, and a conversation continues where it ended, so most prompts
begin like one that was written already: a line refers to that one and has only the remaining keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from flexcache.cache.block_keys import BlockKeys, unpack_keys
from flexcache.ids import RootId
from flexcache.tracing.records import KEY_BYTES, Matched

_MAX_BASES = 4096
_ROOT_BYTES = 8


class PackedPrompt(NamedTuple):
    """A prompt as `BlockKeys.packed` returns it."""

    root: RootId
    key_bytes: int
    data: bytes


def shorten(keys: Iterable[bytes]) -> bytes:
    """Concatenate the last bytes of each key."""
    return b"".join([key[-KEY_BYTES:].rjust(KEY_BYTES, b"\0") for key in keys])


class KeyWriter:
    """Adds keys to matches. A match only refers to earlier ones of the same file."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._bases: OrderedDict[tuple[RootId, bytes], tuple[int, int]] = OrderedDict()
        """Root and last key of a prompt -> a task that matched it, and its number of blocks."""

    def begin_file(self) -> None:
        self._bases.clear()

    def complete(self, match: Matched, prompt: PackedPrompt) -> Matched:
        keys = unpack_keys(
            prompt.root, memoryview(prompt.data), prompt.key_bytes, self._tokens_per_block
        )
        base, base_blocks = self._find_base(match, keys)
        if match.stop:
            self._bases[_end_of(keys, match.stop)] = (match.task, match.stop)
            if len(self._bases) > _MAX_BASES:
                self._bases.popitem(last=False)
        return msgspec.structs.replace(
            match,
            root=prompt.root[:_ROOT_BYTES].hex(),
            base=base,
            base_blocks=base_blocks,
            keys=_rest(prompt, keys, base_blocks, match.stop),
        )

    def _find_base(self, match: Matched, keys: BlockKeys) -> tuple[int, int]:
        """Return an earlier task whose prompt this one begins with, and its number of blocks.

        Such a prompt ends where this one does, or where the cached part of this one does. A key
        covers everything before it, so these few are the only keys computed for a token prompt.
        """
        for count in (match.stop, match.found_start + match.num_blocks, match.found_start):
            base, num_blocks = self._bases.get(_end_of(keys, count), (0, 0)) if count else (0, 0)
            if base and num_blocks == count:
                return base, count
        return 0, 0


def _end_of(keys: BlockKeys, count: int) -> tuple[RootId, bytes]:
    return keys.root, keys.key(count - 1)[-KEY_BYTES:]


def _rest(prompt: PackedPrompt, keys: BlockKeys, start: int, stop: int) -> bytes:
    if prompt.key_bytes < KEY_BYTES:
        return shorten(keys.slice(start, stop))
    table = np.frombuffer(prompt.data, dtype=np.uint8).reshape(-1, prompt.key_bytes)
    return table[start:stop, -KEY_BYTES:].tobytes()
