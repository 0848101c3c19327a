"""PageTables: SGLang's slots as the block ids of FlexCache's groups.

A node of SGLang's tree has slots of full attention for all its tokens, slots of sliding windows for
those that some window may still reach, and at its end perhaps one Mamba state. FlexCache stores the
windows and the state behind a node as one *tail*, at which prompts can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from flexcache.config.model import KVGroup

Blocks = npt.NDArray[np.int64]
_POOLS = {"full": PoolName.KV, "window": PoolName.SWA, "state": PoolName.MAMBA}
NO_BLOCKS = np.empty(0, dtype=np.int64)
_NOT_WANTED = -1


class PageTables:
    """Tables of one model.

    Args:
        groups: As in `DevicePages`.
        to_window: Returns the slots of sliding windows behind slots of full attention; none of them
            where a window has passed. Needed for models with windows.

    Attributes:
        has_tails: Whether prompts can be resumed only where a tail is.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        page_size: int,
        to_window: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._groups = groups or (KVGroup("full", page_size),)
        self._page_size = page_size
        self._to_window = to_window
        self.has_tails = bool(groups)

    def to_load(self, transfers: Sequence[PoolTransfer], num_before: int) -> list[Blocks]:
        """Return the blocks that a load fills, for each group; -1 for pages of a window that the
        GPU has.

        Args:
            transfers: SGLang's, for pages behind the first ``num_before`` of a prompt.
        """
        slots = {transfer.name: transfer.device_indices for transfer in transfers}
        end = num_before + len(slots[PoolName.KV]) // self._page_size
        tables = []
        for group in self._groups:
            blocks = self._blocks(group, slots[_POOLS[group.kind]])
            if not group.is_dense:
                num_own = group.num_needed(end * self._page_size) - len(blocks)
                blocks = np.concatenate((np.full(num_own, _NOT_WANTED), blocks))
            tables.append(blocks)
        return tables

    def pages(self, slots: torch.Tensor) -> Blocks:
        """Return the pages of full attention that have these slots."""
        return self._blocks(self._groups[0], slots)

    def tail(
        self, states: Mapping[PoolName, torch.Tensor], slots: torch.Tensor, end: int
    ) -> list[Blocks] | None:
        """Return the blocks of the tail behind a prompt's first ``end`` pages, for each group but
        the first; None if some of it is gone.

        Args:
            states: The slot of the state there, if SGLang has it, under the name of its pool.
            slots: Of full attention, up to there; at least those of the longest window.
        """
        tables = []
        for group in self._groups[1:]:
            count = group.num_needed(end * self._page_size)
            if group.kind == "state":
                found = states.get(PoolName.MAMBA)
            else:
                assert self._to_window is not None
                found = self._to_window(slots[len(slots) - count * self._page_size :])
            if found is None or bool((found <= 0).any()):  # the first slot is never in use
                return None
            tables.append(self._blocks(group, found))
        return tables

    def num_window_pages(self, end: int) -> int:
        """Return how many pages before the end of a prompt's first ``end`` its windows reach."""
        windows = (group for group in self._groups if group.kind == "window")
        return max((group.num_needed(end * self._page_size) for group in windows), default=0)

    def _blocks(self, group: KVGroup, slots: torch.Tensor) -> Blocks:
        rows: Blocks = slots.cpu().numpy().astype(np.int64)
        if group.kind != "state":
            return rows[:: self._page_size] // self._page_size
        parts = group.blocks_per_state
        return (rows[:, None] * parts + np.arange(parts)).ravel()
