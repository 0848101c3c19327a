"""GPU blocks from the slot mappings that an engine gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.prompt import Mask, Span

Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
BlockIds = npt.NDArray[np.int64]
NO_BLOCKS: BlockIds = np.empty(0, np.int64)


def as_slots(slot_mapping: Slots, name: str) -> npt.NDArray[np.int64]:
    """Raises `ValueError`, under the argument's ``name``, for anything but a list of integers."""
    try:
        slots = np.asarray(slot_mapping)
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"{name}: {error}") from None
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and len(slots)):
        raise ValueError(
            f"{name} must be a 1-D array of integers, not {slots.ndim}-D of {slots.dtype}"
        )
    return slots.astype(np.int64, copy=False)


def matched_slots(
    slots: npt.NDArray[np.int64], mask: Mask, token_mask: Span | None
) -> npt.NDArray[np.int64]:
    """The slots of the tokens in ``mask``.

    ``slots`` has one for each token wanted (in ``token_mask``, or all), or just these already.
    """
    if token_mask is None:
        token_mask = range(len(mask))
    if isinstance(token_mask, range):
        wanted = mask[token_mask.start : max(0, token_mask.stop)]
        return slots[wanted] if len(slots) == len(wanted) else slots
    num_wanted = int(np.count_nonzero(token_mask))
    if len(slots) != num_wanted:
        return slots
    return slots[mask[token_mask]]


def gpu_blocks(slots: npt.NDArray[np.int64], tokens_per_block: int, name: str) -> BlockIds:
    """The GPU blocks that slots, given as the argument ``name``, make up.

    Raises:
        ValueError: They are not whole blocks of consecutive slots.
    """
    size = tokens_per_block
    if len(slots) % size:
        raise ValueError(f"{name}: {len(slots)} slots are not whole blocks of {size} tokens")
    grid = slots.reshape(-1, size)
    blocks = grid[:, 0] // size
    if not np.array_equal(grid, (blocks * size)[:, None] + np.arange(size)):
        raise ValueError(f"{name} must be whole GPU blocks of {size} consecutive slots each")
    if len(blocks) and int(blocks.min()) < 0:
        raise ValueError(f"{name} must not be negative")
    return blocks
