"""Keys of blocks: the identity of a prompt's prefix that ends with a block.

A key is the xxh3-64 hash of a block's tokens and extra keys, seeded with the key of the block
before it. The first block's seed is a digest of the `Space`. Keys are hints, not identities of
bytes: two prefixes with equal keys would send a request to the wrong engine, no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

Tokens = Sequence[int] | npt.NDArray[Any]
"""Token ids, each at least 0 and below 2**32."""

_TOKEN_BYTES = 4
_hash = xxhash.xxh3_64_intdigest
_encode = msgspec.msgpack.encode


class Space(NamedTuple):
    """What prompts must have in common to share blocks.

    Attributes:
        block_size: Tokens per block.
        adapter: Name of the LoRA adapter, or its number where the publisher gives no name; None:
            the base model.
    """

    block_size: int
    adapter: str | int | None = None


def pack(tokens: Tokens) -> bytes:
    """Return token ids as integers of four bytes.

    Raises:
        ValueError: A token id is out of range.
    """
    try:
        if not isinstance(tokens, np.ndarray):
            return array("I", tokens).tobytes()
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
            raise ValueError("token ids must be at least 0 and below 2**32")
        return tokens.astype(np.uint32).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not token ids: {error}") from None


def pack_extra_keys(extra_keys: Sequence[Any]) -> list[bytes]:
    """Return what the KV of each block depends on besides its tokens and its space (images, salt,
    embeddings) as bytes; none for a block without such.

    Raises:
        ValueError: An entry cannot be encoded.
    """
    try:
        return [_encode(entry) if entry else b"" for entry in extra_keys]
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not extra keys: {error}") from None


class KeyChain:
    """Computes the keys of one space. Immutable."""

    __slots__ = ("_block", "_root", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self._root = _hash(_encode(space))
        self._block = Struct(f"{_TOKEN_BYTES * space.block_size}s")

    def block_keys(self, tokens: Tokens, *, salt: str | None = None) -> list[int]:
        """Return the keys of a prompt's whole blocks.

        Args:
            tokens: The prompt, or the part of it before the first image.
            salt: vLLM's ``cache_salt``.

        Raises:
            ValueError: A token id is out of range.
        """
        stop = len(tokens) // self.space.block_size * self.space.block_size
        packed = pack(tokens if stop == len(tokens) else tokens[:stop])
        return self.extend(None, packed, pack_extra_keys([[salt]]) if salt else ())

    def extend(
        self, parent: int | None, packed: bytes, extra_keys: Sequence[bytes] = ()
    ) -> list[int]:
        """Return the keys of the blocks after the block ``parent`` (None: a prompt's start).

        Args:
            packed: Tokens of whole blocks, from `pack`.
            extra_keys: From `pack_extra_keys`, one entry per block; may end early.
        """
        key = self._root if parent is None else parent
        blocks = self._block.iter_unpack(packed)
        if not extra_keys:
            return [key := _hash(block, key) for (block,) in blocks]
        keys = []
        for extra, (block,) in zip(extra_keys, blocks, strict=False):
            key = _hash(block + extra, key)
            keys.append(key)
        return keys + [key := _hash(block, key) for (block,) in blocks]


@lru_cache(maxsize=10_000)
def chain_of(space: Space) -> KeyChain:
    """Return the one chain of a space."""
    return KeyChain(space)
