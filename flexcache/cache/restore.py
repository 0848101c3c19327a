"""Restore: a tier's index from the records that outlived the last process.

A slot's record has the key of its block, the key of the block before it, its position in the
prompt, and when it was written (generation). Blocks may since have been evicted and overwritten in
any order, so some records have lost the blocks they build on, and some keys occur twice.

All is done on whole arrays, up to the runs that the tier takes (`lay_out`). Those take the
longest, so a tier can be used while they are indexed, step by step:

    records --> links (all at once) --> runs, those used last first --> the tier's index
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.prefix_index import RestoredRun
from flexcache.cache.tail_index import TAIL_FIRST, Tail, tail_keys
from flexcache.cache.tier import Tier
from flexcache.ids import BlockKey, RootId

Records = npt.NDArray[Any]
"""Records of type `SLOT_RECORD`: each with its slot."""


def are_tails(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records are those of tails' units."""
    mask: npt.NDArray[np.bool_] = records["position"] >= TAIL_FIRST
    return mask


def whole_tails(records: Records, written_s: npt.NDArray[np.float64] | None = None) -> list[Tail]:
    """Return the tails that have all their units, in the order in which they were written.

    The record of a tail's unit is like a block's: its position is that of the unit, counted from
    `TAIL_FIRST`, and the key before it is that of the unit before, or, for the first, the key of
    the block behind which the tail is. The units found behind a block are a tail if their names are
    those of a tail of as many units.

    Of a unit that occurs twice, the record written last counts. O(1) Python steps per unit.

    Args:
        records: Those of tails only.
        written_s: When they were written, if that matters.
    """
    if written_s is None:
        written_s = np.zeros(len(records))
    by_age = np.argsort(records["generation"])
    records, written_s = records[by_age], written_s[by_age]
    roots, keys = records["root"].tolist(), _keys(records, "key")
    positions, slots = records["position"].tolist(), records["slot"]
    after: dict[tuple[bytes, bytes], int] = {}
    # In the order of age, so that the record written last is the one that is kept.
    for number, behind in enumerate(zip(roots, _keys(records, "parent"), strict=True)):
        after.pop(behind, None)  # the order is that of the records that count
        after[behind] = number
    tails = []
    for (root, key), number in after.items():
        found: list[int] = []
        following: int | None = number
        while following is not None and positions[following] == TAIL_FIRST + len(found):
            found.append(following)
            following = after.get((root, keys[following]))
        # Names have the number of units: part of a longer tail does not pass for a shorter one.
        if found and [keys[n] for n in found] == tail_keys(BlockKey(key), len(found)):
            tail = Tail(RootId(root), BlockKey(key), slots[found].astype(np.int64))
            tail.used = float(written_s[found].max())
            tails.append(tail)
    return tails


def _keys(records: Records, field: str) -> list[bytes]:
    sizes, padded = records[f"{field}_bytes"].tolist(), records[field].tolist()
    return [key[:size] for key, size in zip(padded, sizes, strict=True)]


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
    head_records = take(records, by_age[firsts])  # by root, then each after what it hangs off
    firsts = firsts[np.lexsort((head_records["position"], *words_of(head_records, "root").T))]
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
    """Return what is laid out in runs with the runs in another order; their starts second.

        records, by age      a0 b0 a1 b1 c2 a2          c2 builds on a1: a prompt that branches off
        runs                 |a0 a1 c2| |b0 b1| |a2|    each goes on with the first that was written
        last uses            |a0 a1|c2|                 with a2, and with c2

    A block was last used when the last block behind it was written, so last uses never rise along a
    run: a staircase (`prefix_index.cover`). And no run comes before the one it builds on.
    """
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
        self, tier: Tier, records: Records, written_s: Seconds | None = None, at_once: int = _ALL
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
        # All at once, before any is indexed: a put that came first could be given their slots.
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
