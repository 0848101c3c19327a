"""GPU blocks of a model with several groups, each named with its group in one number.

The engine keeps the blocks of all groups in one pool, so the id of a block does not tell whose
bytes it holds. In tasks and ops the upper half of the number is the group, the lower half the id.
Block ids of a model without groups are those of group 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def name_blocks(group: int, blocks: BlockIds) -> BlockIds:
    """Name blocks of a group by their ids; -1, a block not to be copied, stays.

    Raises:
        ValueError: An id is out of range.
    """
    if len(blocks) and (int(blocks.min()) < -1 or int(blocks.max()) > _ID_MASK):
        raise ValueError(f"ids of GPU blocks must be -1 or within [0, {_ID_MASK}]")
    if group == 0:
        return blocks
    return np.where(blocks < 0, blocks, blocks | group << _ID_BITS)


def groups_of(names: BlockIds) -> BlockIds:
    """Return the group of each block; that of -1 is -1."""
    return names >> _ID_BITS


def ids_of(names: BlockIds) -> BlockIds:
    """Return the engine's id of each block."""
    return names & _ID_MASK
