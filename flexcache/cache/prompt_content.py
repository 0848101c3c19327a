"""What a prompt's block keys stand for, for observers of the cache. Never affects lookups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.ids import NO_INFO, RequestInfo


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The known tokens of a prompt, and the request that it belongs to.

    ``token_ids`` and the info's ``extra_keys`` begin with block ``first`` of the prompt. A negative
    token id stands for an unknown token, and so do those after it.
    """

    token_ids: Sequence[int] | npt.NDArray[np.int64] = ()
    info: RequestInfo = NO_INFO
    first: int = 0

    def tokens_of(self, start: int, stop: int, tokens_per_block: int) -> list[int]:
        """Return the token ids of blocks ``[start, stop)``; none unless all are known."""
        begin = (start - self.first) * tokens_per_block
        end = (stop - self.first) * tokens_per_block
        if begin < 0 or len(self.token_ids) < end:
            return []
        piece = self.token_ids[begin:end]
        if len(piece) and piece[-1] < 0:
            return []
        return piece.tolist() if isinstance(piece, np.ndarray) else list(piece)

    def extra_keys_of(self, start: int, stop: int) -> list[Any] | None:
        """Return one entry per block; None unless all are known."""
        keys, begin, end = self.info.extra_keys, start - self.first, stop - self.first
        return None if keys is None or begin < 0 or len(keys) < end else keys[begin:end]

    def part(self, start: int, stop: int, tokens_per_block: int) -> PromptContent:
        """Copy what concerns blocks ``[start, stop)``, so that it can outlive the prompt."""
        tokens = np.array(self.tokens_of(start, stop, tokens_per_block), dtype=np.int64)
        extra_keys = self.extra_keys_of(start, stop)
        info = msgspec.structs.replace(self.info, extra_keys=extra_keys)
        return PromptContent(tokens, info, start)
