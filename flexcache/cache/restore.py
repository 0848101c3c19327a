"""Restores a tier's index from the records that outlived the last process.

A slot's record has the key of its block, the key of the block before it, its position in the
prompt, and when it was written (generation). Blocks may since have been evicted and overwritten in
any order, so some records have lost the blocks they build on, and some keys occur twice.

All is done on whole arrays, up to the runs that the tier takes (`restored_runs`).
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
from flexcache.cache.restored_runs import follow, restored_runs, take, words_of
from flexcache.cache.tier import Tier
from flexcache.storage.slot_index import stir

Records = npt.NDArray[Any]
"""As in `SLOT_RECORD`: slot, generation, position, root, key, parent, and the keys' bytes."""
Indices = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_ORPHAN = -1
_CHUNK_ROWS = 1 << 12  # their words stay in the processor's cache


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Result of a restore, in blocks."""

    num_restored: int
    num_dropped: int
    """Blocks that lack one before them, and older copies of keys that occur twice."""


def restore_tier(tier: Tier, records: Records, written_s: Seconds | None = None) -> RestoreReport:
    """Index the blocks of ``records`` that can be found from a prompt's start, and whole tails.

    O(n log depth).

    The tier must be unused. A block was last used when the last block behind it was written, also
    for the tier's retention.

    Args:
        written_s: When they were, for a tier with a retention time; rises with the generations.
    """
    if written_s is None:
        written_s = np.zeros(len(records))
    num_records, tails = len(records), []
    of_tails = are_tails(records)
    if of_tails.any():
        tails = whole_tails(records[of_tails], written_s[of_tails])
        records, written_s = records[~of_tails], written_s[~of_tails]
    by_age = np.argsort(records["generation"])
    records, written_s = take(records, by_age), written_s[by_age]
    parents = link(records)
    found = reaches_start(records, parents)
    with _uncollected():
        tier.restore(restored_runs(records, parents, found, written_s))
    if tails:
        tier.restore_tails(tails)
    num_restored = int(found.sum()) + sum(len(tail.units) for tail in tails)
    return RestoreReport(num_restored, num_records - num_restored)


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


def link(records: Records) -> Indices:
    """Return the index of the record that each one builds on: itself at a prompt's start, -1 if
    there is none.

    If a key occurs twice, only the later record counts: the other builds on nothing. A record that
    builds on an orphan is not itself an orphan: see `reaches_start`.
    """
    count = len(records)
    itself = np.arange(count)
    own = _digests(records, "key")
    latest = _latest(own)
    # Most records follow the one that they build on; the others are looked for.
    parents = itself - 1
    follows = _fit(records, parents)
    follows[1:] &= latest[:-1] == itself[:-1]
    others = np.flatnonzero(~follows)
    wanted = _digests(take(records, others), "parent")
    parents[others] = _find(wanted, own, np.flatnonzero(latest == itself))
    parents[others[~_fit(records, parents[others], others)]] = _ORPHAN
    starts = records["position"] == 0
    parents[starts] = itself[starts]
    parents[latest != itself] = _ORPHAN
    return parents


def reaches_start(records: Records, parents: Indices) -> npt.NDArray[np.bool_]:
    """Whether each record has all the blocks before it."""
    itself = np.arange(len(records))
    first = follow(np.where(parents == _ORPHAN, itself, parents))
    is_start: npt.NDArray[np.bool_] = parents == itself
    return is_start[first]


def _digests(records: Records, field: str) -> _Words:
    """Return a digest of each record's root and of one of its keys.

    What it finds is compared in full; of two keys with one digest, the older is dropped.
    """
    digests = np.empty(len(records), np.uint64)
    for start in range(0, len(records), _CHUNK_ROWS):
        part = records[start : start + _CHUNK_ROWS]
        of_part = part[f"{field}_bytes"].astype(np.uint64)
        for words in (*words_of(part, "root").T, *words_of(part, field).T):
            of_part = stir(of_part ^ words)
        digests[start : start + _CHUNK_ROWS] = of_part
    return digests


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


def _find(wanted: _Words, digests: _Words, among: Indices) -> Indices:
    """Return the index of the record among these that has each of the digests; -1 for none."""
    if not len(wanted) or not len(among):
        return np.full(len(wanted), _ORPHAN)
    among = among[np.argsort(digests[among])]
    in_order = digests[among]
    order = np.argsort(wanted)  # neighbours are found close to each other
    places = np.empty(len(wanted), np.int64)
    places[order] = np.searchsorted(in_order, wanted[order])
    places = np.minimum(places, len(among) - 1)
    return np.where(in_order[places] == wanted, among[places], _ORPHAN)


def _fit(records: Records, parents: Indices, which: Indices | None = None) -> npt.NDArray[np.bool_]:
    """Return which records, of all or of some, build on those that are thought to be before them.

    Exact; -1 fits none.
    """
    fit: npt.NDArray[np.bool_] = parents != _ORPHAN
    for start in range(0, len(parents), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        part = records[rows] if which is None else take(records, which[rows])
        before = take(records, parents[rows])
        fit[rows] &= part["position"] == before["position"] + 1
        fit[rows] &= part["parent_bytes"] == before["key_bytes"]
        for ours, theirs in (("root", "root"), ("parent", "key")):
            for own, other in zip(words_of(part, ours).T, words_of(before, theirs).T, strict=True):
                fit[rows] &= own == other
    return fit
