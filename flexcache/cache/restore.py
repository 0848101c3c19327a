"""Restores a tier's index from the records that outlived the last process.

A slot's record has the key of its block, the key of the block before it, its position in the
prompt, and when it was written (generation). Blocks may since have been evicted and overwritten in
any order, so some records have lost the blocks they build on, and some keys occur twice.

The work is done on whole arrays, with one Python step per part of a prompt that was written without
a break.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.restore_tails import are_tails, whole_tails
from flexcache.cache.tier import RestoredRun, Tier
from flexcache.ids import BlockKey, RootId

Records = npt.NDArray[Any]
"""Structured: slot, generation, position, root, key and key_bytes, parent and parent_bytes."""
Indices = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

_ORPHAN = -1


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Result of a restore, in blocks."""

    num_restored: int
    num_dropped: int
    """Blocks that lack one before them, and older copies of keys that occur twice."""


def restore_tier(tier: Tier, records: Records, written_s: Seconds | None = None) -> RestoreReport:
    """Index the blocks of ``records`` that can be found from a prompt's start, and whole tails.

    O(n log depth).

    The tier must be unused. Blocks count as used when they were written.

    Args:
        written_s: When they were, as far as that is known, for a tier that keeps nothing for long.
    """
    if written_s is None:
        written_s = np.zeros(len(records))
    num_records, tails = len(records), []
    of_tails = are_tails(records)
    if of_tails.any():
        tails = whole_tails(records[of_tails], written_s[of_tails])
        records, written_s = records[~of_tails], written_s[~of_tails]
    by_age = np.argsort(records["generation"])
    records, written_s = records[by_age], written_s[by_age]
    parents = link(records)
    order, parents = _order(records, parents)
    tier.restore(_runs(records[order], parents, written_s[order]))
    if tails:
        tier.restore_tails(tails)
    num_restored = len(order) + sum(len(tail.units) for tail in tails)
    return RestoreReport(num_restored, num_records - num_restored)


def link(records: Records) -> Indices:
    """Return the index of the record that each one builds on: itself at a prompt's start, -1 if
    there is none.

    If a key occurs twice, only the later record counts: the other builds on nothing. A record that
    builds on an orphan is not itself an orphan: see `reaches_start`.
    """
    count = len(records)
    keys = _identities(records, "key")
    latest = dict(zip(keys, range(count), strict=True))
    before = map(latest.get, _identities(records, "parent"), repeat(_ORPHAN))
    parents = np.fromiter(before, np.int64, count)
    position = records["position"].astype(np.int64)
    parents[(parents != _ORPHAN) & (position[parents] != position - 1)] = _ORPHAN
    starts = position == 0
    parents[starts] = np.flatnonzero(starts)
    superseded = np.ones(count, np.bool_)
    superseded[np.fromiter(latest.values(), np.int64, len(latest))] = False
    parents[superseded] = _ORPHAN
    return parents


def _identities(records: Records, field: str) -> list[bytes]:
    """Return root, length and key of each record as one byte string."""
    layout = [("root", records.dtype["root"]), ("size", "<u2"), ("key", records.dtype[field])]
    joined = np.empty(len(records), layout)
    joined["root"], joined["size"] = records["root"], records[f"{field}_bytes"]
    joined["key"] = records[field]
    identities: list[bytes] = joined.view(f"V{joined.itemsize}").tolist()
    return identities


def reaches_start(records: Records, parents: Indices) -> npt.NDArray[np.bool_]:
    """Whether each record has all the blocks before it."""
    return _walk(records, parents)[0]


def _walk(
    records: Records, parents: Indices
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
    """Walk from all records towards their prompts' starts at once, doubling the step each time.

    Returns:
        Whether the start was reached; the highest generation on the way.
    """
    count = len(records)
    ancestors = np.where(parents == _ORPHAN, np.arange(count), parents)
    is_start = ancestors == np.arange(count)
    is_start &= parents != _ORPHAN
    newest = records["generation"].copy()
    for _ in range(int(records["position"].max(initial=0)).bit_length()):
        newest = np.maximum(newest, newest[ancestors])
        ancestors = ancestors[ancestors]
    return is_start[ancestors], newest


def _order(records: Records, parents: Indices) -> tuple[Indices, Indices]:
    """Order the restorable records as they were written, each after the one it builds on.

    A block older than the one it builds on (which was evicted and written again) follows it
    directly.

    Returns:
        The records' indices; for each, the place of its parent among them.
    """
    whole, newest = _walk(records, parents)
    kept = np.flatnonzero(whole)
    order = kept[np.lexsort((records["position"][kept], newest[kept]))]
    places = np.empty(len(records), np.int64)
    places[order] = np.arange(len(order))
    return order, places[parents[order]]


def _runs(records: Records, parents: Indices, written_s: Seconds) -> Iterator[RestoredRun]:
    """Cut ordered records wherever one does not build on the one before it."""
    count = len(records)
    if not count:
        return
    starts = [0, *(np.flatnonzero(parents[1:] != np.arange(count - 1)) + 1).tolist()]
    keys, slots = _keys(records, "key"), np.ascontiguousarray(records["slot"])
    firsts = records[starts]
    roots, befores = firsts["root"].tolist(), _keys(firsts, "parent")
    for root, before, (start, stop) in zip(roots, befores, pairwise([*starts, count]), strict=True):
        yield RestoredRun(
            RootId(root), before or None, keys[start:stop], slots[start:stop], written_s[start:stop]
        )


def _keys(records: Records, field: str) -> list[BlockKey]:
    sizes = records[f"{field}_bytes"].tolist()
    padded = records[field].tolist()
    return [BlockKey(key[:size]) for key, size in zip(padded, sizes, strict=True)]
