"""Lays restorable records out as the runs of an index, with the last use of each block.

    records, by age      a0 b0 a1 b1 c2 a2           c2 builds on a1: a prompt that branches off
    runs                 |a0 a1 c2| |b0 b1| |a2|     each goes on with the first that was written
    last uses            |a0 a1|c2|                  with a2, and with c2

A block was last used when the last block behind it was written, so last uses never rise along a
run: a `staircase`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.tier import RestoredRun
from flexcache.ids import BlockKey, RootId

Records = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

CHUNK_ROWS = 1 << 12
"""Records handled at once: they stay in the processor's cache."""


def follow(pointers: Indices) -> Indices:
    """Return where each chain of pointers ends: at one that points to itself. O(n log length)."""
    while True:
        further = pointers[pointers]
        if np.array_equal(further, pointers):
            return pointers
        pointers = further


def restored_runs(
    records: Records, parents: Indices, found: npt.NDArray[np.bool_],
    written_s: npt.NDArray[np.float64],
) -> Iterator[RestoredRun]:  # fmt: skip
    """Yield the runs of records, each after the one it builds on, and those of a root together.

    O(1) Python steps per run.

    Args:
        records: In the order in which they were written.
        parents: The record that each builds on; itself at a prompt's start.
        found: Which have all the blocks before them; the others are left out.
        written_s: When they were written.
    """
    kept = np.flatnonzero(found)
    if not len(kept):
        return
    numbers = np.empty(len(records), np.int64)
    numbers[kept] = np.arange(len(kept))
    parents, positions = numbers[parents[kept]], records["position"][kept].astype(np.int64)
    heads = _heads(parents)
    firsts = _in_order(records, kept, np.flatnonzero(heads == np.arange(len(kept))))
    runs = np.empty(len(kept), np.int64)  # of each record
    runs[firsts] = np.arange(len(firsts))
    runs = runs[heads]
    starts = np.concatenate(([0], np.cumsum(np.bincount(runs))))
    places = starts[runs] + positions - positions[heads]
    laid_out = np.empty(len(kept), np.int64)
    laid_out[places] = np.arange(len(kept))
    befores = np.where(parents[firsts] == firsts, -1, places[parents[firsts]])
    uses = _last_uses(laid_out, starts, befores)

    steps = np.flatnonzero(np.append(uses[1:] != uses[:-1], True)) + 1
    steps = np.union1d(steps, starts[1:])
    step_runs = np.searchsorted(starts, steps, side="left") - 1
    ends, last = (steps - starts[step_runs]).tolist(), uses[steps - 1]
    step_starts = np.searchsorted(step_runs, np.arange(len(firsts) + 1)).tolist()
    ages, times = (len(kept) - last).tolist(), written_s[kept[last]].tolist()
    keys, slots = keys_of(records, "key", kept[laid_out]), records["slot"][kept[laid_out]]
    first_records = take(records, kept[firsts])
    roots = [RootId(root) for root in first_records["root"].tolist()]
    before_keys = keys_of(first_records, "parent", np.arange(len(firsts)))
    for root, before, (start, stop), (step, end) in zip(
        roots, before_keys, pairwise(starts.tolist()), pairwise(step_starts), strict=True
    ):
        yield RestoredRun(
            root, before or None, keys[start:stop], slots[start:stop],
            ends[step:end], ages[step:end], times[step:end],
        )  # fmt: skip


def _heads(parents: Indices) -> Indices:
    """Return the record that each one's run begins with: a run goes on with the earliest."""
    itself = np.arange(len(parents))
    behind = np.flatnonzero(parents != itself)[::-1]
    following = np.full(len(parents), -1)
    following[parents[behind]] = behind  # the last assignment counts
    return follow(np.where(following[parents] == itself, parents, itself))


def _in_order(records: Records, kept: Indices, firsts: Indices) -> Indices:
    """Order the first records of runs by root, then by position: each after what it hangs off."""
    heads = take(records, kept[firsts])
    order: Indices = np.lexsort((heads["position"], *words_of(heads, "root").T))
    return firsts[order]


def _last_uses(written: Indices, starts: Indices, befores: Indices) -> Indices:
    """Return the latest of the block itself and all behind it, for blocks laid out in runs.

    Args:
        written: When each was written, as numbers from 0 on.
        starts: The place of each run's first block, and the end.
        befores: The place of the block that each run hangs off; -1 at a prompt's start.
    """
    uses = written.copy()
    latest: list[int] = np.maximum.reduceat(written, starts[:-1]).tolist()
    above = (np.searchsorted(starts, befores, side="right") - 1).tolist()
    for run in range(len(above) - 1, -1, -1):  # a run stands before those that hang off it
        if above[run] >= 0 and latest[run] > latest[above[run]]:
            latest[above[run]] = latest[run]
    hanging = np.flatnonzero(befores >= 0)
    np.maximum.at(uses, befores[hanging], np.array(latest)[hanging])
    # Seen from the end, numbers that are higher in each run than in those seen before.
    lifted = np.arange(len(above), 0, -1) * len(written)
    uses += np.repeat(lifted, np.diff(starts))
    uses = np.maximum.accumulate(uses[::-1])[::-1]
    uses -= np.repeat(lifted, np.diff(starts))
    return uses


def keys_of(records: Records, field: str, indices: Indices) -> list[BlockKey]:
    """Return the keys of some records, without their padding."""
    found: list[BlockKey] = []
    for start in range(0, len(indices), CHUNK_ROWS):
        part = take(records, indices[start : start + CHUNK_ROWS])
        padded, sizes = part[field], part[f"{field}_bytes"]
        size = int(sizes[0])
        if size and (sizes == size).all():
            cut = np.ascontiguousarray(padded).view(np.uint8).reshape(len(part), -1)[:, :size]
            found += np.ascontiguousarray(cut).view(f"V{size}").ravel().tolist()
        else:
            every = zip(padded.tolist(), sizes.tolist(), strict=True)
            found += [BlockKey(key[:size]) for key, size in every]
    return found


def take(records: Records, indices: Indices) -> Records:
    """Return some of the records; the first one for -1. Several times as fast as indexing them."""
    words = records.view(np.uint64).reshape(len(records), records.dtype.itemsize // 8)
    taken = np.empty((len(indices), words.shape[1]), np.uint64)
    for start in range(0, len(indices), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        np.take(words, indices[rows], axis=0, out=taken[rows], mode="clip")
    return taken.view(records.dtype).ravel()


def words_of(records: Records, field: str) -> npt.NDArray[np.uint64]:
    """View a field of each record as a row of 64-bit words."""
    words = records.view(np.uint64).reshape(len(records), records.dtype.itemsize // 8)
    assert records.dtype.fields is not None
    kind, offset, *_ = records.dtype.fields[field]
    return words[:, offset // 8 : (offset + kind.itemsize) // 8]
