"""A prompt's block keys in a trace: eight bytes each, and only those that no line before has.

A request is looked up and then stored, a conversation goes on where it ended, so most prompts begin
like one that was written already: a line names that one and gives the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from flexcache.cache.block_keys import TokenBlockKeys
from flexcache.ids import RootId
from flexcache.tracing.records import KEY_BYTES, Matched

_MAX_BASES = 4096
_ROOT_BYTES = 8


class PackedPrompt(NamedTuple):
    """What `BlockKeys.packed` says of a prompt."""

    root: RootId
    key_bytes: int
    data: bytes


def shorten(keys: Iterable[bytes]) -> bytes:
    """The last bytes of each key, one after the other."""
    return b"".join([key[-KEY_BYTES:].rjust(KEY_BYTES, b"\0") for key in keys])


class KeyWriter:
    """Completes matches by their keys. What it refers to is in the same file."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._bases: OrderedDict[tuple[RootId, bytes], tuple[int, int]] = OrderedDict()
        """Root and last key of a prompt -> a task that was matched with it, number of blocks."""

    def begin_file(self) -> None:
        self._bases.clear()

    def complete(self, match: Matched, prompt: PackedPrompt) -> Matched:
        keys = self._keys(prompt)
        base, base_blocks = self._find_base(match, prompt.root, keys)
        if keys:
            self._bases[prompt.root, keys[-KEY_BYTES:]] = (match.task, len(keys) // KEY_BYTES)
            if len(self._bases) > _MAX_BASES:
                self._bases.popitem(last=False)
        return msgspec.structs.replace(
            match,
            root=prompt.root[:_ROOT_BYTES].hex(),
            base=base,
            base_blocks=base_blocks,
            keys=keys[base_blocks * KEY_BYTES :],
        )

    def _find_base(self, match: Matched, root: RootId, keys: bytes) -> tuple[int, int]:
        """Prompts end where this one does, or where what is cached of it does."""
        for count in (match.stop, match.found_start + match.num_blocks, match.found_start):
            last = keys[(count - 1) * KEY_BYTES : count * KEY_BYTES] if count else b""
            base, num_blocks = self._bases.get((root, last), (0, 0))
            if base and num_blocks == count:
                return base, count
        return 0, 0

    def _keys(self, prompt: PackedPrompt) -> bytes:
        root, key_bytes, data = prompt
        if key_bytes == 0:
            hashed = TokenBlockKeys(root, np.frombuffer(data, dtype="<i8"), self._tokens_per_block)
            return shorten(hashed.slice(0, hashed.num_blocks))
        table = np.frombuffer(data, dtype=np.uint8).reshape(-1, key_bytes)
        if key_bytes < KEY_BYTES:
            table = np.pad(table, ((0, 0), (KEY_BYTES - key_bytes, 0)))
        return table[:, -KEY_BYTES:].tobytes()


class _Keys(NamedTuple):
    base: _Keys | None
    base_blocks: int
    rest: bytes


class KeyReader:
    """Gives the matches of one file all their keys back. Holds no more than the file has."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Keys] = {}

    def complete(self, match: Matched) -> Matched:
        """Raises `ValueError` if a line is missing that this one refers to."""
        if match.base and match.base not in self._prompts:
            raise ValueError(f"task {match.task} begins like task {match.base}, which is not there")
        base = self._prompts.get(match.base)
        self._prompts[match.task] = _Keys(base, match.base_blocks, match.keys)
        pieces, wanted = [match.keys], match.base_blocks
        while base is not None and wanted:
            pieces.append(base.rest[: max(0, wanted - base.base_blocks) * KEY_BYTES])
            wanted = min(wanted, base.base_blocks)
            base = base.base
        keys = b"".join(reversed(pieces))
        return msgspec.structs.replace(match, base=0, base_blocks=0, keys=keys)
