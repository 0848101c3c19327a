"""What a prompt's block keys stand for. Nothing is found by it; who follows the cache is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.request_info import NO_INFO, RequestInfo


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The tokens of a prompt, as many as are known from its start on, and whose it is."""

    token_ids: Sequence[int] | npt.NDArray[np.int64] = ()
    info: RequestInfo = NO_INFO

    def tokens_of(self, start: int, stop: int, tokens_per_block: int) -> list[int]:
        """Token ids of blocks ``[start, stop)``; none at all unless all are known."""
        first, last = start * tokens_per_block, stop * tokens_per_block
        if len(self.token_ids) < last:
            return []
        piece = self.token_ids[first:last]
        return piece.tolist() if isinstance(piece, np.ndarray) else list(piece)

    def extra_keys_of(self, start: int, stop: int) -> list[Any] | None:
        """One entry per block; None where nothing is known."""
        keys = self.info.extra_keys
        return None if keys is None or len(keys) < stop else keys[start:stop]
