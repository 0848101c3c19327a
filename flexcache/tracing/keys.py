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

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.packed_keys import unpack_keys
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
        """Prompts end where this one does, or where what is cached of it does. A key says all
        that is before it, so of tokens no more than these few are hashed."""
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


class _Keys:
    """Keys of blocks from ``start`` on; those before are as in ``base``, which starts earlier.

    ``jump`` is a base further back, chosen such that any base is found in O(log n) steps.
    """

    __slots__ = ("base", "depth", "jump", "rest", "start")

    def __init__(self, base: _Keys | None, start: int, rest: bytes) -> None:
        self.start = start
        self.rest = rest
        self.base: _Keys = self if base is None else base
        self.jump: _Keys = self.base
        self.depth: int = 0 if base is None else base.depth + 1
        far = self.base.jump
        if self.base.depth - far.depth == far.depth - far.jump.depth:
            self.jump = far.jump

    def last_before(self, stop: int) -> _Keys:
        """The nearest of this one and its bases that starts before ``stop``."""
        keys = self
        while keys.start >= stop:
            keys = keys.jump if keys.jump.start >= stop else keys.base
        return keys


class KeyReader:
    """Gives the matches of one file all their keys back. Holds no more than the file has.

    A match costs at most as many steps as it has keys, and O(log n) for those it shares.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[_Keys, int]] = {}
        """By task, with the number of blocks."""
        self._last: tuple[_Keys, bytes] = _Keys(None, 0, b""), b""
        """What was completed last, whole: a prompt that grows with each call costs a copy."""

    def complete(self, match: Matched) -> Matched:
        """Raises `ValueError` if a line is missing that this one refers to, or keys are."""
        own, keys = _Keys(None, 0, match.keys), match.keys
        if match.base:
            if match.base not in self._prompts:
                raise ValueError(
                    f"task {match.task} begins like task {match.base}, which is not there"
                )
            base, num_blocks = self._prompts[match.base]
            if match.base_blocks > num_blocks:
                raise ValueError(
                    f"task {match.task} begins with {match.base_blocks} blocks of task "
                    f"{match.base}, which has {num_blocks}"
                )
            if match.base_blocks:
                base = base.last_before(match.base_blocks)
                own = _Keys(base, match.base_blocks, match.keys) if match.keys else base
                keys = self._join(base, match.base_blocks) + match.keys
        if len(keys) != match.stop * KEY_BYTES:
            raise ValueError(f"task {match.task} has {match.stop} blocks and {len(keys)} key bytes")
        self._prompts[match.task] = own, match.stop
        self._last = own, keys
        return msgspec.structs.replace(match, base=0, base_blocks=0, keys=keys)

    def _join(self, keys: _Keys, stop: int) -> bytes:
        """The first ``stop`` keys."""
        last, whole = self._last
        pieces = []
        while stop:
            keys = keys.last_before(stop)
            if keys is last and len(whole) >= stop * KEY_BYTES:
                pieces.append(whole[: stop * KEY_BYTES])
                break
            pieces.append(keys.rest[: (stop - keys.start) * KEY_BYTES])
            stop = keys.start
        return b"".join(reversed(pieces))
