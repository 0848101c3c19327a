"""A prompt's tokens, as far as they are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was found of a prompt.

    Attributes:
        ids: Tokens from the start, ``uint32``; not all of them if some are unknown.
        num_tokens: Length of the whole prompt, estimated if ``ids`` are not all.
        remembered: Tokens among ``ids`` that were not made for this request.
    """

    ids: np.ndarray
    num_tokens: int
    remembered: int
