"""Block keys: what names the blocks of a prompt, and what the keys stand for.

A key is the xxh3-128 digest of the *flat* token prefix that ends with the block. One streaming pass
yields all keys of a prompt, and the key of any single block can be computed without those before
it, which makes a match a bisection: see `prefix_index`.

Model fingerprint, version of the weights, adapter, namespace and kind of key are digested once into
a root. The hash of tokens starts from the root; the engine's own keys are used as they are, in a
directory per root. The layout of a block's bytes is mixed into the root under which it is kept
(`LayoutRoots`).

The first part of a namespace is its *tenant*. The end of a root tells it, so that whatever has a
block, also after a restart, knows whose quota it counts against (`block_pool.Quotas`).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from flexcache.config.model import EngineKeys
from flexcache.ids import NO_INFO, BlockKey, RequestInfo, RootId


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The known tokens of a prompt, and the request that it belongs to.

    ``token_ids`` and the info's ``extra_keys`` begin with block ``first`` of the prompt. A negative
    token id stands for an unknown token, and so do those after it.
    """

    token_ids: Sequence[int] | npt.NDArray[np.int64] = ()
    info: RequestInfo = NO_INFO
    first: int = 0

    def tokens_of(self, start: int, stop: int, tokens_per_block: int) -> list[int]:
        """Return the token ids of blocks ``[start, stop)``; none unless all are known."""
        begin = (start - self.first) * tokens_per_block
        end = (stop - self.first) * tokens_per_block
        if begin < 0 or len(self.token_ids) < end:
            return []
        piece = self.token_ids[begin:end]
        # The last tells for all: those after an unknown token are unknown.
        if len(piece) and piece[-1] < 0:
            return []
        return piece.tolist() if isinstance(piece, np.ndarray) else list(piece)

    def extra_keys_of(self, start: int, stop: int) -> list[Any] | None:
        """Return one entry per block; None unless all are known."""
        keys, begin, end = self.info.extra_keys, start - self.first, stop - self.first
        return None if keys is None or begin < 0 or len(keys) < end else keys[begin:end]

    def part(self, start: int, stop: int, tokens_per_block: int) -> PromptContent:
        """Copy what concerns blocks ``[start, stop)``, so that it can outlive the prompt."""
        tokens = np.array(self.tokens_of(start, stop, tokens_per_block), dtype=np.int64)
        extra_keys = self.extra_keys_of(start, stop)
        info = msgspec.structs.replace(self.info, extra_keys=extra_keys)
        return PromptContent(tokens, info, start)


TOKEN_KEYS = "tokens/xxh3-128"
ENGINE_KEYS = "engine"
_TAG_BYTES = 6


def make_root(
    fingerprint: str, namespace: Sequence[str], kind: str, version: str = "", adapter: str = ""
) -> RootId:
    """Digest everything besides the tokens that a key's identity depends on. 16 bytes.

    The last six are the tag of the tenant, if there is one.

    Args:
        version: What the model's weights are called now, where that was said (`new_weights`).
        adapter: Digest of the adapter's bytes, where there is one.
    """
    parts: tuple[object, ...] = (fingerprint, list(namespace), kind)
    if version or adapter:  # else a root as it always was: what is on SSD stays
        parts = (*parts, version, adapter)
    encoded = msgspec.msgpack.encode(parts)
    digest = xxhash.xxh3_128_digest(encoded)
    return with_tenant(digest, tag_of(namespace[0]) if namespace else digest[-_TAG_BYTES:])


def tag_of(tenant: str) -> bytes:
    """Return what the roots of a tenant end with. 6 bytes."""
    return xxhash.xxh3_128_digest(tenant.encode(errors="surrogatepass"))[:_TAG_BYTES]


def tenant_of(root: RootId) -> bytes:
    """Return the tag of a root's tenant; that of no tenant where there is none."""
    return root[-_TAG_BYTES:]


def with_tenant(digest: bytes, tag: bytes) -> RootId:
    """Make a root of a digest of 16 bytes and a tenant's tag."""
    return RootId(digest[:-_TAG_BYTES] + tag)


class BlockKeys(Protocol):
    """The keys of one prompt's whole blocks, computed on demand."""

    root: RootId
    """Root under which the blocks are kept."""
    num_blocks: int
    content: PromptContent | None
    """What the keys stand for, if an observer needs it."""

    def key(self, index: int) -> BlockKey:
        """Return the key of block ``index``, for a probe."""

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        """Return the keys of blocks ``[start, stop)``, for storing."""


class PromptKeys(BlockKeys, Protocol):
    """Keys of an engine's prompt, which can be sent as a whole."""

    prompt_root: RootId
    """Digest of model, namespace and kind of key; for tokens, the start of the hash. `root` also
    includes the layout of the blocks' bytes (`LayoutRoots`)."""

    @property
    def parent_key(self) -> BlockKey | None:
        """Key of the block that these continue (`tiers.find_chain`); None at a prompt's start."""

    def packed(self, stop: int) -> tuple[int, bytes | memoryview]:
        """Return what the keys of the first ``stop`` blocks are made from, as one binary array.

        Returns:
            The size of a key and the keys; or 0 and the token ids.
        """


class EngineBlockKeys:
    """Keys that the engine has already computed, one per whole block."""

    __slots__ = ("_keys", "content", "num_blocks", "parent_key", "prompt_root", "root")

    def __init__(
        self,
        root: RootId,
        keys: Sequence[bytes],
        num_blocks: int,
        content: PromptContent | None = None,
        parent_key: BlockKey | None = None,
    ) -> None:
        self.prompt_root = self.root = root
        self.content = content
        self.parent_key = parent_key
        self.num_blocks = min(num_blocks, len(keys))
        self._keys = keys

    def key(self, index: int) -> BlockKey:
        return BlockKey(self._keys[index])

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        return list(self._keys[start:stop])  # type: ignore[arg-type]

    def packed(self, stop: int) -> tuple[int, bytes]:
        """
        Raises:
            ValueError: The keys differ in size.
        """
        size = len(self._keys[0]) if stop else 1
        data = b"".join(self._keys if stop == len(self._keys) else self._keys[:stop])
        # Their sum and a sample: to look at each of 8,192 takes longer than to join them.
        if len(data) != size * stop or any(len(key) != size for key in self._keys[:stop:97]):
            raise ValueError("block_keys must all have the same size to be sent to a server")
        return size, data


def hash_as_engine(tokens: Sequence[int], how: EngineKeys, tokens_per_block: int) -> list[BlockKey]:
    """Return the keys that an engine makes of a prompt's whole blocks.

    Those of a request without images and without the engine's own salt; its adapter is not in them.
    As in vLLM 0.28 to 0.33 (``vllm/v1/core/kv_cache_utils.py``: ``hash_block_tokens``) and SGLang
    0.5.23 (``srt/mem_cache/utils.py``: ``get_hash_str``).

    Raises:
        ValueError: A token is none of the engine's, or the hash needs a package that is not here.
    """
    link = _link(how.algorithm)
    size = how.tokens_per_key
    keys, key = [], how.root
    stop = len(tokens) // tokens_per_block * tokens_per_block
    for start in range(0, stop, size):
        key = link(key, tokens[start : start + size])
        if (start + size) % tokens_per_block == 0:
            keys.append(BlockKey(key))
    return keys


def _link(algorithm: str) -> Callable[[bytes, Sequence[int]], bytes]:
    """Return what makes a hash of the one before and of the next tokens."""
    if algorithm == "sglang":
        return _sglang_link
    digest = xxhash.xxh3_128_digest if algorithm.startswith("xxhash") else _sha256
    if not algorithm.endswith("cbor"):
        return lambda key, tokens: digest(pickle.dumps((key, tuple(tokens), None), _PICKLE))
    try:
        import cbor2
    except ImportError:
        raise ValueError(
            f"token_ids: the engine hashes by {algorithm}, for which cbor2 is not installed here; "
            "give block_keys"
        ) from None
    return lambda key, tokens: digest(cbor2.dumps((key, tuple(tokens), None), canonical=True))


_PICKLE = 5  # HIGHEST_PROTOCOL of supported Pythons, as vLLM takes: hashed, never read


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _sglang_link(key: bytes, tokens: Sequence[int]) -> bytes:
    try:
        return _sha256(key + np.array(tokens, "<u4").tobytes())
    except OverflowError as error:
        raise ValueError(f"token_ids: {error}") from None


class SampledKeys:
    """Some of a prompt's keys, as a prompt of its own: those at ``positions``."""

    __slots__ = ("_keys", "content", "num_blocks", "positions", "root")

    def __init__(self, keys: BlockKeys, positions: range) -> None:
        self._keys = keys
        self.positions = positions
        self.root = keys.root
        self.content: PromptContent | None = None
        self.num_blocks = len(positions)

    def key(self, index: int) -> BlockKey:
        return self._keys.key(self.positions[index])

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        # One pass of the hash, where key by key would copy a hasher for each.
        if self.positions.step == 1:
            first = self.positions.start
            return self._keys.slice(first + start, first + stop)
        return list(map(self._keys.key, self.positions[start:stop]))


class TokenBlockKeys:
    """Keys hashed from tokens, lazily.

    Each answered probe leaves a copied hasher to continue from, so a bisection hashes each token
    about once more, not once per probe.
    """

    parent_key = None  # a hash of tokens covers the whole prompt
    __slots__ = (
        "_bytes_per_block", "_checkpoints", "_data", "_probed", "content", "num_blocks",
        "prompt_root", "root",
    )  # fmt: skip

    def __init__(
        self,
        root: RootId,
        tokens: npt.NDArray[np.int64],
        tokens_per_block: int,
        content: PromptContent | None = None,
    ) -> None:
        self.prompt_root = self.root = root
        self.content = content
        self.num_blocks = len(tokens) // tokens_per_block
        self._bytes_per_block = 8 * tokens_per_block
        self._data = memoryview(np.ascontiguousarray(tokens, dtype="<i8").view(np.uint8).data)
        self._checkpoints = [(0, xxhash.xxh3_128(root))]  # (blocks hashed, hasher), ascending
        self._probed: dict[int, BlockKey] = {}

    def key(self, index: int) -> BlockKey:
        # Several tiers and the history probe the same few blocks.
        known = self._probed.get(index)
        if known is not None:
            return known
        end = index + 1
        position = len(self._checkpoints) - 1
        while self._checkpoints[position][0] > end:
            position -= 1
        done, hasher = self._checkpoints[position]
        hasher = hasher.copy()
        hasher.update(self._data[done * self._bytes_per_block : end * self._bytes_per_block])
        self._checkpoints.insert(position + 1, (end, hasher))
        key = BlockKey(hasher.digest())
        self._probed[index] = key
        return key

    @property
    def is_borrowed(self) -> bool:
        """Whether the tokens are the caller's, whose array may hold another prompt afterwards."""
        return not self._data.readonly

    def packed(self, stop: int) -> tuple[int, memoryview]:
        return 0, self._data[: stop * self._bytes_per_block]

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        if start >= stop:
            return []
        keys: list[Any] = [self.key(start)]  # plain bytes are keys; a NewType call each costs
        hasher = next(h for done, h in self._checkpoints if done == start + 1).copy()
        update, digest, data, step = hasher.update, hasher.digest, self._data, self._bytes_per_block
        append = keys.append
        for offset in range((start + 1) * step, stop * step, step):
            update(data[offset : offset + step])
            append(digest())
        return keys


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


_MAX_ROOTS = 4096


class LayoutRoots:
    """Places prompts under one layout.

    A prompt's root depends on what an engine's scheduler knows: model, block size, namespace and
    kind of key. Only the ranks that move a block know how its bytes are laid out, so the layout is
    mixed in here, once the first rank has registered. Blocks of another layout are under other
    roots, in every tier, and are not found.

    Args:
        layout: Digest of the layout; empty while no rank has registered, which leaves roots alone:
            nothing can have been stored under them.
    """

    def __init__(self, layout: bytes = b"") -> None:
        self.layout = layout
        self._roots: dict[RootId, RootId] = {}

    def place(self, keys: PromptKeys) -> None:
        """Set the root of ``keys`` to that of the layout. Idempotent. O(1)."""
        if not self.layout:
            keys.root = keys.prompt_root
            return
        root = self._roots.get(keys.prompt_root)
        keys.root = self.placed(keys.prompt_root) if root is None else root

    def placed(self, prompt_root: RootId) -> RootId:
        """Return the root under which prompts of this one are kept."""
        if not self.layout:
            return prompt_root
        # Namespaces come from requests, so the table needs a bound.
        if len(self._roots) >= _MAX_ROOTS:
            self._roots.clear()
        digest = xxhash.xxh3_128_digest(prompt_root + self.layout)
        root = self._roots[prompt_root] = with_tenant(digest, tenant_of(prompt_root))
        return root
