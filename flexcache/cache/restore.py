"""Restores a tier's index from the records that outlived the last process.

A slot's record has the key of its block, the key of the block before it, its position in the
prompt, and when it was written (generation). Blocks may since have been evicted and overwritten in
any order, so some records have lost the blocks they build on, and some keys occur twice.

All is done on whole arrays, up to the runs that the tier takes (`restored_runs`). Those take the
longest, so a tier can be used while they are indexed, step by step:

    records --> links (all at once) --> runs, those used last first --> the tier's index
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.restore_tails import are_tails, whole_tails
from flexcache.cache.restored_runs import (
    CHUNK_ROWS,
    Links,
    follow,
    lay_out,
    restored_runs,
    take,
    words_of,
)
from flexcache.cache.tier import RestoredRun, Tier

Records = npt.NDArray[Any]
"""As in `SLOT_RECORD`: slot, generation, position, root, key, parent, and the keys' bytes."""
Indices = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_ALL = 1 << 62
_BLOCKS_A_RUN = 16
"""What a run costs beside its blocks, in blocks."""
_ORPHAN = -1
# Odd, so that no bit of a key is lost; more than a root and a key have words.
_FACTORS = np.random.default_rng(0).integers(1 << 64, size=16, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Result of a restore, in blocks."""

    num_restored: int
    num_dropped: int
    """Blocks that lack one before them, and older copies of keys that occur twice."""


class Restoration:
    """Indexes the blocks of ``records`` that can be found from a prompt's start, and whole tails.

    The tier is unused to begin with; it may be used while the blocks that are not indexed at once
    follow. A block was last used when the last block behind it was written, also for the tier's
    retention. O(n log depth) at once.

    Args:
        written_s: When the records were written, for a tier with a retention time; rises with the
            generations.
        at_once: About how many blocks are indexed at once; all of a tier with a retention time,
            which needs all to drop those too old, or with tails, which stand on blocks.

    Attributes:
        report: What comes of it if nothing is stored or dropped meanwhile.
    """

    def __init__(
        self, tier: Tier, records: Records, written_s: Seconds | None, at_once: int
    ) -> None:
        if written_s is None:
            written_s = np.zeros(len(records))
        num_records, tails = len(records), []
        of_tails = are_tails(records)
        if of_tails.any():
            tails = whole_tails(records[of_tails], written_s[of_tails])
            records, written_s = records[~of_tails], written_s[~of_tails]
        links = link(records)
        layout = lay_out(records, links, reaches_start(links), written_s)
        self._tier = tier
        self._runs = restored_runs(records, layout)
        num_restored = len(layout.rows) + sum(len(tail.units) for tail in tails)
        self.report = RestoreReport(num_restored, num_records - num_restored)
        tier.expect(_slots(records, layout.rows))
        with _uncollected():
            self.go_on(_ALL if tails or tier.retention_s is not None else at_once)
        if tails:
            tier.restore_tails(tails)

    @property
    def is_over(self) -> bool:
        return not self._tier.num_expected

    def go_on(self, num_blocks: int) -> None:
        """Index about as many blocks more, and fewer the shorter the runs: each takes time, too."""
        self._tier.restore(self._next(num_blocks))

    def _next(self, num_blocks: int) -> Iterator[RestoredRun]:
        while num_blocks > 0 and not self.is_over:
            run = next(self._runs)
            num_blocks -= len(run.blocks) + _BLOCKS_A_RUN
            yield run


def restore_tier(tier: Tier, records: Records, written_s: Seconds | None = None) -> RestoreReport:
    """Index all at once."""
    return Restoration(tier, records, written_s, _ALL).report


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put garbage collections off: each would look at all the keys that are there already."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def link(records: Records) -> Links:
    """Find the record that each one builds on: itself at a prompt's start, -1 if there is none.

    If a key occurs twice, only the later record counts: the other builds on nothing. A record that
    builds on an orphan is not itself an orphan: see `reaches_start`.
    """
    by_age, count = _order(records["generation"]), len(records)
    digests, positions = np.empty(count, np.uint64), np.empty(count, np.int64)
    follows = np.zeros(count, np.bool_)
    for start in range(0, count, CHUNK_ROWS):
        part = take(records, by_age[max(0, start - 1) : start + CHUNK_ROWS])
        follows[max(1, start) : start + CHUNK_ROWS] = _fit(part[1:], part[:-1])
        part = part[min(1, start) :]
        digests[start : start + CHUNK_ROWS] = _digests(part, "key")
        positions[start : start + CHUNK_ROWS] = part["position"]
    places, itself = _Places(digests), np.arange(count)
    latest = places.latest()
    # Most records follow the one that they build on; the others are looked for.
    parents = itself - 1
    follows[1:] &= latest[:-1] == itself[:-1]
    others = np.flatnonzero(~follows)
    found = places.find(_digests(take(records, by_age[others]), "parent"))
    for start in range(0, len(others), CHUNK_ROWS):
        which = slice(start, start + CHUNK_ROWS)
        part, before = take(records, by_age[others[which]]), take(records, by_age[found[which]])
        found[which] = np.where(_fit(part, before), found[which], _ORPHAN)
    parents[others] = found
    starts = positions == 0
    parents[starts] = itself[starts]
    parents[latest != itself] = _ORPHAN
    return Links(by_age, parents, positions)


def reaches_start(links: Links) -> npt.NDArray[np.bool_]:
    """Whether each record, in the order of age, has all the blocks before it."""
    parents = links.parents
    itself = np.arange(len(parents))
    first = follow(np.where(parents == _ORPHAN, itself, parents))
    is_start: npt.NDArray[np.bool_] = parents == itself
    return is_start[first]


def _slots(records: Records, rows: Indices) -> Indices:
    """Return the slots of some records."""
    slots = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), CHUNK_ROWS):
        which = slice(start, start + CHUNK_ROWS)
        slots[which] = records["slot"][rows[which]]
    return slots


def _digests(records: Records, field: str) -> _Words:
    """Return a digest of each record's root and of one of its keys.

    What it finds is compared in full; of two keys with one digest, the older is dropped. It is made
    for keys that are hashes themselves: of others, some that differ little have one digest.
    """
    root, key = words_of(records, "root"), words_of(records, field)
    num_words = root.shape[1] + key.shape[1]
    digests: _Words = root @ _FACTORS[: root.shape[1]]
    digests += key @ _FACTORS[root.shape[1] : num_words]
    digests += records[f"{field}_bytes"] * _FACTORS[num_words]
    return digests


def _order(values: _Words) -> Indices:
    """Return the indices that sort the values. Values and indices in one word sort much faster."""
    if not len(values):
        return np.empty(0, np.int64)
    bits, lowest = len(values).bit_length(), values.min()
    if int(values.max() - lowest) >> (64 - bits):
        return np.asarray(np.argsort(values), np.int64)
    packed = (values - lowest) << np.uint64(bits) | np.arange(len(values), dtype=np.uint64)
    packed.sort()
    in_order: Indices = (packed & np.uint64((1 << bits) - 1)).astype(np.int64)
    return in_order


class _Places:
    """Finds records by their digests.

    They are kept in order: the digest's upper bits with the record's index behind them. So of those
    with the same upper bits, the latest record comes last.
    """

    def __init__(self, digests: _Words) -> None:
        self._digests = digests
        self._bits = np.uint64(len(digests).bit_length())
        self._low = np.uint64((1 << int(self._bits)) - 1)
        self._sorted = digests & ~self._low | np.arange(len(digests), dtype=np.uint64)
        self._sorted.sort()

    def latest(self) -> Indices:
        """Return the index of the last record with the same digest as each."""
        latest = np.arange(len(self._digests))
        upper = self._sorted >> self._bits
        alike = np.append(False, upper[1:] == upper[:-1])[: len(upper)]
        alike[:-1] |= alike[1:]
        if alike.any():
            few = np.sort((self._sorted[alike] & self._low).astype(np.int64))
            latest[few] = few[_latest(self._digests[few])]
        return latest

    def find(self, wanted: _Words) -> Indices:
        """Return the index of the last record that has each of the digests; -1 for none."""
        order = np.argsort(wanted)  # neighbours are found close to each other
        places = np.empty(len(wanted), np.int64)
        places[order] = np.searchsorted(self._sorted, wanted[order] | self._low, side="right") - 1
        while len(self._digests):
            nearest = self._sorted[places]
            found = (nearest & self._low).astype(np.int64)
            missing = places < 0
            missing |= (nearest ^ wanted) > self._low
            missed = ~missing & (self._digests[found] != wanted)
            if not missed.any():
                return np.where(missing, _ORPHAN, found)
            places[missed] -= 1
        return places  # there are none


def _latest(digests: _Words) -> Indices:
    """Return the index of the last record with the same digest as each."""
    order = np.argsort(digests)
    in_order = digests[order]
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1])[: len(order)])
    latest = np.empty(len(order), np.int64)
    if len(order):
        last = np.maximum.reduceat(order, starts)
        latest[order] = np.repeat(last, np.diff(starts, append=len(order)))
    return latest


def _fit(records: Records, before: Records) -> npt.NDArray[np.bool_]:
    """Return which records build on those that are thought to be before them. Exact."""
    fit: npt.NDArray[np.bool_] = records["position"] == before["position"] + 1
    fit &= records["parent_bytes"] == before["key_bytes"]
    for ours, theirs in (("root", "root"), ("parent", "key")):
        for own, other in zip(words_of(records, ours).T, words_of(before, theirs).T, strict=True):
            fit &= own == other
    return fit
