"""Masks over a prompt's tokens, the form in which callers get answers.

Nearly every answer is True from the first token on, or nowhere. Writing 131,072 of them takes a
quarter of a look-up that is given keys, with what that evicts from the processor's cache. So these
masks are views of one array: as many True as the longest prompt has tokens, then as many False.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

_FIRST_LENGTH = 4096


class TokenMasks:
    """Makes masks, which are read-only. Thread-safe."""

    def __init__(self) -> None:
        self._trues_then_falses = _trues_then_falses(_FIRST_LENGTH)

    def make(self, num_tokens: int, first: int, last: int) -> Mask:
        """Return a mask over ``num_tokens``, True at positions ``first <= position < last``.

        Args:
            last: At most ``num_tokens``.
        """
        if first < last and first:
            mask = np.empty(num_tokens, dtype=np.bool_)  # each byte is written once
            mask[:first] = False
            mask[first:last] = True
            mask[last:] = False
            mask.flags.writeable = False
            return mask
        shared = self._trues_then_falses
        if num_tokens > len(shared) // 2:
            shared = self._trues_then_falses = _trues_then_falses(2 * num_tokens)
        start = len(shared) // 2
        if first < last:
            start -= last
        return shared[start : start + num_tokens]


def _trues_then_falses(length: int) -> Mask:
    both = np.zeros(2 * length, dtype=np.bool_)
    both[:length] = True
    both.flags.writeable = False
    return both
