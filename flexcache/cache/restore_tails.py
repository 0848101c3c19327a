"""Restores a tier's tails from the records that outlived the last process.

The record of a tail's unit is like a block's: its position is that of the unit, counted from
`TAIL_FIRST`, and the key before it is that of the unit before, or, for the first, the key of the
block behind which the tail is. The units found behind a block are a tail if their names are those
of a tail of as many units.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.tail_index import TAIL_FIRST, Tail, tail_keys
from flexcache.ids import BlockKey, RootId

Records = npt.NDArray[Any]
"""As in `restore`."""


def are_tails(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records are those of tails' units."""
    mask: npt.NDArray[np.bool_] = records["position"] >= TAIL_FIRST
    return mask


def whole_tails(records: Records, written_s: npt.NDArray[np.float64] | None = None) -> list[Tail]:
    """Return the tails that have all their units, in the order in which they were written.

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
        if found and [keys[n] for n in found] == tail_keys(BlockKey(key), len(found)):
            tail = Tail(RootId(root), BlockKey(key), slots[found].astype(np.int64))
            tail.used = float(written_s[found].max())
            tails.append(tail)
    return tails


def _keys(records: Records, field: str) -> list[bytes]:
    sizes, padded = records[f"{field}_bytes"].tolist(), records[field].tolist()
    return [key[:size] for key, size in zip(padded, sizes, strict=True)]
