"""What a prompt's block keys stand for. Nothing is found by it; who follows the cache is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.request_info import NO_INFO, RequestInfo


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The tokens of a prompt, as many as are known, and whose it is.

    ``token_ids`` and the info's ``extra_keys`` begin with block ``first`` of the prompt.
    """

    token_ids: Sequence[int] | npt.NDArray[np.int64] = ()
    info: RequestInfo = NO_INFO
    first: int = 0

    def tokens_of(self, start: int, stop: int, tokens_per_block: int) -> list[int]:
        """Token ids of blocks ``[start, stop)``; none at all unless all are known."""
        begin = (start - self.first) * tokens_per_block
        end = (stop - self.first) * tokens_per_block
        if begin < 0 or len(self.token_ids) < end:
            return []
        piece = self.token_ids[begin:end]
        return piece.tolist() if isinstance(piece, np.ndarray) else list(piece)

    def extra_keys_of(self, start: int, stop: int) -> list[Any] | None:
        """One entry per block; None where not all are known."""
        keys, begin, end = self.info.extra_keys, start - self.first, stop - self.first
        return None if keys is None or begin < 0 or len(keys) < end else keys[begin:end]

    def part(self, start: int, stop: int, tokens_per_block: int) -> PromptContent:
        """Of blocks ``[start, stop)`` alone, to be kept for longer than the prompt is around."""
        tokens = np.array(self.tokens_of(start, stop, tokens_per_block), dtype=np.int64)
        extra_keys = self.extra_keys_of(start, stop)
        info = msgspec.structs.replace(self.info, extra_keys=extra_keys)
        return PromptContent(tokens, info, start)
