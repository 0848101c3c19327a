"""How much of a prompt each worker has in which tier, in tokens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.router.holders import Holder, Holders
from flexcache.router.index import KVIndexer
from flexcache.router.keys import Space, Tokens, chain_of
from flexcache.router.workers import Tier, WorkerSpec

TokenCounts = npt.NDArray[np.int64]


class Matched(NamedTuple):
    """Tokens that each tier supplies, by worker. A token counts for the fastest tier that has it;
    their sum is the prefix that need not be computed."""

    gpu: TokenCounts
    dram: TokenCounts
    disk: TokenCounts


class WorkerTable:
    """Which holders supply each worker.

    A worker uses all tiers of its sources. If a source publishes for several data-parallel ranks, a
    worker with a rank uses those of its own and those without any.

    Args:
        holders: The index's.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._workers: list[tuple[frozenset[str], int | None]] = []
        self._version = -1
        self._columns: dict[Tier, npt.NDArray[np.intp]] = {}

    def set_workers(
        self, workers: Sequence[WorkerSpec], further: Sequence[str] | None = None
    ) -> None:
        """Replace all workers.

        Args:
            further: One more source per worker, in the same order: the router's own notes, say.
        """
        self._workers = [
            (
                frozenset(source.endpoint for source in worker.sources)
                | ({further[at]} if further else set()),
                worker.data_parallel_rank,
            )
            for at, worker in enumerate(workers)
        ]
        self._version = -1

    def matched(self, depths: TokenCounts) -> Matched:
        """Return what each worker has, in the order of the workers.

        Args:
            depths: Tokens of each holder, by position of its bit; the last entry is 0.
        """
        if self._version != self._holders.version:
            self._refresh()
        gpu, dram, disk = (depths[self._columns[tier]].max(axis=1) for tier in Tier)
        dram = np.maximum(gpu, dram)
        disk = np.maximum(dram, disk)
        return Matched(gpu, dram - gpu, disk - dram)

    def _refresh(self) -> None:
        """Find the holders of each worker."""
        holders = self._holders
        self._version = holders.version
        by_source: dict[str, list[Holder]] = {}
        for holder in holders:
            by_source.setdefault(holder.source, []).append(holder)
        rows: dict[Tier, list[list[int]]] = {tier: [] for tier in Tier}
        for sources, rank in self._workers:
            row: dict[Tier, list[int]] = {tier: [] for tier in Tier}
            for source in sources:
                for holder in holders_of_rank(by_source.get(source, []), rank):
                    bit = holders.bit(holder)
                    assert bit is not None
                    row[holder.tier].append(bit)
            for tier in Tier:
                rows[tier].append(row[tier])
        self._columns = {tier: _padded(rows[tier]) for tier in Tier}


def holders_of_rank(holders: Collection[Holder], rank: int | None) -> Collection[Holder]:
    """Return those holders of a source that supply a data-parallel rank."""
    ranks = {holder.rank for holder in holders} - {None}
    if rank is None or len(ranks) < 2:
        return holders
    return [holder for holder in holders if holder.rank in (None, rank)]


def _padded(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.intp]:
    """Return a table with -1, the position of the entry that is always 0, where rows end."""
    width = max(map(len, rows), default=0) or 1
    table = np.full((len(rows), width), -1, np.intp)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return table


class Found(NamedTuple):
    """What the index knows of a prompt.

    Attributes:
        tokens: Tokens that each holder has, for `WorkerTable.matched`.
        keys: Keys of the prompt's blocks, by block size.
    """

    tokens: TokenCounts
    keys: dict[int, list[int]]


def find(
    index: KVIndexer,
    block_sizes: Iterable[int],
    tokens: Tokens,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    limit: int | None = None,
) -> Found:
    """Look a prompt up.

    Args:
        block_sizes: Sizes of the blocks that may be found.
        limit: Tokens at most that an engine takes from a cache: one less than the prompt has,
            because the last one must be computed.

    Raises:
        ValueError: A token id is out of range.
    """
    known = np.zeros(index.holders.num_bits + 1, np.int64)
    by_size = {}
    for size in block_sizes:
        keys = chain_of(Space(size, adapter)).block_keys(tokens, salt=salt)
        by_size[size] = keys
        usable = keys if limit is None else keys[: limit // size]
        np.maximum(known, index.depths(index.match(usable)) * size, out=known)
    return Found(known, by_size)
