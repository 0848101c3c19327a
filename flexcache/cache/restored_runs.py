"""Lays restorable records out as the runs of an index, those used last first.

    records, by age      a0 b0 a1 b1 c2 a2           c2 builds on a1: a prompt that branches off
    runs                 |a0 a1 c2| |b0 b1| |a2|     each goes on with the first that was written
    last uses            |a0 a1|c2|                  with a2, and with c2

A block was last used when the last block behind it was written, so last uses never rise along a
run: a `staircase`. And no run comes before the one it builds on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.tier import RestoredRun
from flexcache.ids import BlockKey, RootId

Records = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

CHUNK_ROWS = 1 << 12
"""Records handled at once: they stay in the processor's cache."""


class Links(NamedTuple):
    """How records hang together.

    Attributes:
        by_age: Indices of the records in the order in which they were written, which is that of
            the other arrays.
        parents: The one that each builds on; itself at a prompt's start, -1 if it is lost.
        positions: Index of each one's block in its prompt.
    """

    by_age: Indices
    parents: Indices
    positions: Indices


def follow(pointers: Indices) -> Indices:
    """Return where each chain of pointers ends: at one that points to itself.

    O(n), and O(log length) steps for those that do not point to the one before them.
    """
    is_first = pointers != np.arange(-1, len(pointers) - 1)
    stretches = np.cumsum(is_first) - 1  # each but its first points to the one before
    firsts = np.flatnonzero(is_first)
    ends = stretches[pointers[firsts]]
    while not np.array_equal(further := ends[ends], ends):
        ends = further
    found: Indices = firsts[ends][stretches]
    return found


class Layout(NamedTuple):
    """Records as runs, those used last first, and each after the one it builds on.

    Attributes:
        rows: Indices of the records in this order.
        starts: Where each run begins among them, and the end.
        steps: Index of each run's first step, and the end: a step is blocks last used at once.
        ends: Where each step ends in its run.
        ages: How many of these records were written since its last use, and one.
        times: When that was.
    """

    rows: Indices
    starts: Indices
    steps: list[int]
    ends: list[int]
    ages: list[int]
    times: list[float]


def lay_out(
    records: Records, links: Links, found: npt.NDArray[np.bool_], written_s: npt.NDArray[np.float64]
) -> Layout:  # fmt: skip
    """Lay records out as runs. O(1) Python steps per run.

    Args:
        found: Which have all the blocks before them, in the order of age; the others are left out.
        written_s: When the records were written.
    """
    kept = np.flatnonzero(found)
    if not len(kept):
        return Layout(kept, np.zeros(1, np.int64), [0], [], [], [])
    numbers = np.empty(len(records), np.int64)
    numbers[kept] = np.arange(len(kept))
    parents, positions = numbers[links.parents[kept]], links.positions[kept]
    by_age = links.by_age[kept]
    heads = _heads(parents)
    firsts = np.flatnonzero(heads == np.arange(len(kept)))
    firsts = firsts[_order_of_heads(take(records, by_age[firsts]))]
    runs = np.empty(len(kept), np.int64)  # of each record
    runs[firsts] = np.arange(len(firsts))
    runs = runs[heads]
    starts = np.concatenate(([0], np.cumsum(np.bincount(runs))))
    places = starts[runs] + positions - positions[heads]
    laid_out = np.empty(len(kept), np.int64)
    laid_out[places] = np.arange(len(kept))
    befores = np.where(parents[firsts] == firsts, -1, places[parents[firsts]])
    uses = _last_uses(laid_out, starts, befores)
    # Stable: of runs last used at once, which are a chain, the one before the others stays there.
    laid_out, starts, uses = _reordered(
        np.argsort(-uses[starts[:-1]], kind="stable"), starts, laid_out, uses
    )
    steps = np.flatnonzero(np.append(uses[1:] != uses[:-1], True)) + 1
    steps = np.union1d(steps, starts[1:])
    step_runs = np.searchsorted(starts, steps, side="left") - 1
    last = uses[steps - 1]
    return Layout(
        by_age[laid_out], starts,
        np.searchsorted(step_runs, np.arange(len(starts))).tolist(),
        (steps - starts[step_runs]).tolist(), (len(kept) - last).tolist(),
        written_s[by_age[last]].tolist(),
    )  # fmt: skip


def _reordered(
    runs: Indices, starts: Indices, laid_out: Indices, uses: Indices
) -> tuple[Indices, Indices, Indices]:
    """Return what is laid out in runs with the runs in another order; their starts second."""
    lengths = np.diff(starts)[runs]
    new_starts = np.concatenate(([0], np.cumsum(lengths)))
    places = np.arange(len(laid_out)) + np.repeat(starts[runs] - new_starts[:-1], lengths)
    return laid_out[places], new_starts, uses[places]


def restored_runs(records: Records, layout: Layout) -> Iterator[RestoredRun]:
    """Yield the runs; their keys and slots are made some thousands at a time."""
    starts = layout.starts.tolist()
    marks = np.searchsorted(layout.starts, np.arange(0, starts[-1], CHUNK_ROWS))
    for first, stop in pairwise([*np.unique(marks).tolist(), len(starts) - 1]):
        begin = starts[first]
        rows = layout.rows[begin : starts[stop]]
        keys, slots = _keys_and_slots(records, rows)
        heads = take(records, layout.rows[layout.starts[first:stop]])
        roots, parents = heads["root"].tolist(), _keys_of(heads, "parent")
        for run, root, parent in zip(range(first, stop), roots, parents, strict=True):
            blocks = slice(starts[run] - begin, starts[run + 1] - begin)
            steps = slice(layout.steps[run], layout.steps[run + 1])
            yield RestoredRun(
                RootId(root), parent or None, keys[blocks], slots[blocks], layout.ends[steps],
                layout.ages[steps], layout.times[steps],
            )  # fmt: skip


def _heads(parents: Indices) -> Indices:
    """Return the record that each one's run begins with: a run goes on with the earliest."""
    itself = np.arange(len(parents))
    following = np.where(np.append(parents[1:] == itself[:-1], False), itself + 1, -1)
    behind = np.flatnonzero((parents != itself) & (parents != itself - 1))[::-1]
    befores = parents[behind]
    behind = behind[(following[befores] < 0) | (behind < befores)]
    following[parents[behind]] = behind  # the last assignment counts
    return follow(np.where(following[parents] == itself, parents, itself))


def _order_of_heads(heads: Records) -> Indices:
    """Order the first records of runs by root, then by position: each after what it hangs off."""
    order: Indices = np.lexsort((heads["position"], *words_of(heads, "root").T))
    return order


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


def _keys_and_slots(records: Records, indices: Indices) -> tuple[list[BlockKey], Indices]:
    """Return the keys and slots of some records."""
    keys: list[BlockKey] = []
    slots = np.empty(len(indices), np.int64)
    for start in range(0, len(indices), CHUNK_ROWS):
        part = take(records, indices[start : start + CHUNK_ROWS])
        keys += _keys_of(part, "key")
        slots[start : start + CHUNK_ROWS] = part["slot"]
    return keys, slots


def _keys_of(records: Records, field: str) -> list[BlockKey]:
    """Return the keys of records, without their padding."""
    padded, sizes = np.ascontiguousarray(records[field]), records[f"{field}_bytes"]
    size = int(sizes.max(initial=0))
    if size and (sizes == size).all():
        cut = padded.view(np.uint8).reshape(len(records), -1)[:, :size]
        keys: list[BlockKey] = np.ascontiguousarray(cut).view(f"V{size}").ravel().tolist()
        return keys
    every = zip(padded.tolist(), sizes.tolist(), strict=True)
    return [BlockKey(key[:size]) for key, size in every]


def take(records: Records, indices: Indices) -> Records:
    """Return some of the records; no index may be negative. Several times as fast as indexing them:
    with `clip` numpy writes to ``out`` itself, not to a buffer."""
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
