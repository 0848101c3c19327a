"""Shards: how the bytes of a block are divided over an engine's ranks, and what identifies them.

A *shard* is what one rank stores of a block. Ranks are numbered over the whole engine, pipeline
stage by stage, tensor-parallel neighbours side by side. Neighbours that hold the same KV are
*replicas*: they share one shard, which the first of them stores and all of them load.

    rank      0   1 | 2   3         two replicas of each shard
    shard       0   |   1           shards may differ in size: a stage has its own layers

With `CacheConfig.store_shards` a rank may store several: some of its KV heads each. So the shards
of a block are the same for other numbers of ranks, and their bytes too, one after the other. In
DRAM and on SSD each begins at a page.

    rank        0     |     1       four shards, two ranks
    shard     0    1  |  2     3
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from flexcache.config.model import ModelConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import align_up

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Digests of model and layout, 16 bytes each; equal digests mean interchangeable bytes.

    Attributes:
        text: Readable form of both, for display. May be truncated if it was read from a record.
    """

    model: bytes
    layout: bytes
    text: str = field(default="", compare=False)

    @classmethod
    def of(cls, fingerprint: str, layout: str) -> KVIdentity:
        """Digest a `ModelConfig.fingerprint` and a `BlockLayout.signature`."""
        return cls(digest(fingerprint), digest(layout), f"{fingerprint} as {layout}")


def digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a block.

    Attributes:
        sizes: Bytes of each shard.
        num_replicas: Neighbouring ranks that share a shard.
        per_rank: Shards of one rank, of one size.
    """

    sizes: tuple[int, ...]
    num_replicas: int = 1
    per_rank: int = 1

    @classmethod
    def of_model(cls, model: ModelConfig, tokens_per_block: int) -> Shards:
        """Divide a block as the model's shape says. Raises `ConfigError` if only ranks know."""
        per_rank = model.shards_per_rank
        size = tokens_per_block * model.token_size_in_bytes_per_rank // per_rank
        return cls((size,) * model.num_shards, model.num_replicas, per_rank)

    @classmethod
    def of_ranks(cls, model: ModelConfig, rank_bytes: Sequence[int]) -> Shards:
        """Divide a block as the ranks say.

        Args:
            rank_bytes: Bytes of a block on each rank of an engine.

        Raises:
            ConfigError: A rank holds nothing, replicas differ, or a rank's bytes are not whole
                shards.
        """
        step, per_rank = model.num_replicas, model.shards_per_rank
        for first in range(0, len(rank_bytes), step):
            sizes = set(rank_bytes[first : first + step])
            if len(sizes) > 1 or min(sizes) < 1:
                raise ConfigError(
                    f"ranks {first} to {first + step - 1} hold the same KV, but their blocks have "
                    f"{', '.join(map(str, sorted(sizes)))} bytes"
                )
        for rank, size in enumerate(rank_bytes):
            if size % per_rank:
                raise reject(
                    "store_shards",
                    model.store_shards,
                    f"rank {rank} holds {size} bytes of a block, which are not {per_rank} shards",
                )
        of_ranks = (size // per_rank for size in rank_bytes[::step] for _ in range(per_rank))
        return cls(tuple(of_ranks), step, per_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.sizes) // self.per_rank * self.num_replicas

    @property
    def storing_ranks(self) -> range:
        """One of the ranks that hold the same KV."""
        return range(0, self.num_ranks, self.num_replicas)

    @property
    def rank_bytes(self) -> list[int]:
        """KV bytes of a block on each of the ranks that store."""
        return [self.per_rank * size for size in self.sizes[:: self.per_rank]]

    @property
    def segment_bytes(self) -> list[int]:
        """Room of a block in the memory of each of the ranks that store."""
        return [self.per_rank * align_up(size) for size in self.sizes[:: self.per_rank]]

    @property
    def block_bytes(self) -> int:
        """KV bytes of a block over all shards."""
        return sum(self.sizes)

    @property
    def stored_bytes(self) -> int:
        """Size of a block in a tier: each shard starts at a page."""
        return sum(map(align_up, self.sizes))

    def of_rank(self, rank: int) -> int:
        """Return the place of a rank among those that store, or of the one that stores for it."""
        return rank // self.num_replicas


def shards_of_block(
    segments: Sequence[HostSegment], sizes: Sequence[int], block: int
) -> list[memoryview]:
    """Return the bytes of a block in the host pool, shard by shard, without padding.

    Args:
        segments: Mapped, of each of the ranks that store.
        sizes: Bytes of each shard.
    """
    per_rank, parts = len(sizes) // len(segments), []
    for number, size in enumerate(sizes):
        whole = segments[number // per_rank].block(block)
        start = number % per_rank * (len(whole) // per_rank)
        parts.append(whole[start : start + size])
    return parts


class ShardLayouts:
    """Signatures of `BlockLayout`, one for each rank that stores, as ranks register: together they
    are the layout of a block.

    Shards may be laid out differently: a pipeline stage has other layers than the next. What is
    stored belongs to all of their layouts, in order, so that each rank reads what a rank of the
    same place and layout has stored.
    """

    def __init__(self, num_ranks: int, per_rank: int = 1) -> None:
        self._signatures: list[str | None] = [None] * num_ranks
        self._per_rank = per_rank

    def set(self, rank: int, signature: str, is_first: bool) -> None:
        """A rank registers; of those that share shards, any.

        Args:
            is_first: No other rank serves: what ranks that have left had told may be over.
        """
        if is_first and self._signatures[rank] != signature:
            self._signatures = [None] * len(self._signatures)
        self._signatures[rank] = signature

    def forget(self, rank: int) -> None:
        """The rank that told it was refused."""
        self._signatures[rank] = None

    @property
    def whole(self) -> str | None:
        """The layout of a block: that of all shards if it is the same, or else the list of them.

        None until it is known of every shard.
        """
        signatures = [s for s in self._signatures if s is not None for _ in range(self._per_rank)]
        if None in self._signatures:
            return None
        return signatures[0] if len(set(signatures)) == 1 else json.dumps(signatures)
