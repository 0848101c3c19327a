"""Keys or tokens of a prompt as one binary array, as messages carry them."""

from __future__ import annotations

import numpy as np

from flexcache.cache.block_keys import PromptKeys, TokenBlockKeys
from flexcache.cache.prompt_content import PromptContent
from flexcache.ids import BlockKey, RootId


class PackedBlockKeys:
    """An engine's own keys, all of one size, concatenated."""

    __slots__ = ("_data", "_size", "content", "num_blocks", "parent_key", "prompt_root", "root")

    def __init__(
        self,
        root: RootId,
        data: memoryview,
        key_bytes: int,
        content: PromptContent | None = None,
        parent_key: BlockKey | None = None,
    ) -> None:
        self.prompt_root = self.root = root
        self.content = content
        self.parent_key = parent_key
        self.num_blocks = len(data) // key_bytes
        self._data = data
        self._size = key_bytes

    def key(self, index: int) -> BlockKey:
        return BlockKey(bytes(self._data[index * self._size : (index + 1) * self._size]))

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        size, data = self._size, bytes(self._data[start * self._size : stop * self._size])
        return [BlockKey(data[i : i + size]) for i in range(0, len(data), size)]

    def packed(self, stop: int) -> tuple[int, memoryview]:
        return self._size, self._data[: stop * self._size]


def unpack_keys(
    root: bytes,
    data: memoryview,
    key_bytes: int,
    tokens_per_block: int,
    content: PromptContent | None = None,
    parent_key: bytes | None = None,
) -> PromptKeys:
    """Read keys of ``key_bytes`` each or, if that is 0, int64 token ids to hash.

    Raises:
        ValueError: The array does not divide into whole keys or tokens, or tokens have a
            ``parent_key``.
    """
    size = key_bytes or 8
    if key_bytes < 0 or len(data) % size:
        raise ValueError(f"{len(data)} bytes are not whole items of {size} bytes")
    if key_bytes:
        parent = None if parent_key is None else BlockKey(parent_key)
        return PackedBlockKeys(RootId(root), data, key_bytes, content, parent)
    if parent_key is not None:
        raise ValueError("a parent_key goes with keys, not with tokens")
    tokens = np.frombuffer(data, dtype="<i8")
    return TokenBlockKeys(RootId(root), tokens, tokens_per_block, content)
