"""Turns text into token ids in segments that do not influence each other.

A Hugging Face tokenizer first cuts the text at its added tokens, then normalises, splits and
encodes what lies between them, each piece on its own. A *border* is an added token that takes
nothing of its neighbours with it. A segment is the text from one border to the next, with the
first of the two. It is encoded alike wherever it stands, except that only the first segment of a
text can be without a border, and so be treated as the beginning.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Sequence

import numpy as np
import tokenizers


class TextTokenizer:
    """A tokenizer with its borders. Threads may share it.

    Args:
        tokenizer: It is taken over: truncation and padding are switched off.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        # Those that are looked for first, in the text as it is.
        verbatim = [token for token in added if not token.normalized and token.content]
        self._borders = frozenset(
            token.content
            for token in verbatim
            if not (token.lstrip or token.rstrip or token.single_word)
            and not any(char.isspace() for char in token.content)
        )
        self._longest_first = sorted({token.content for token in verbatim}, key=len, reverse=True)
        self._verbatim = re.compile("|".join(map(re.escape, self._longest_first)))
        self._wrapping = self._find_wrapping()

    def _find_wrapping(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Find what the tokenizer puts before and after a prompt; None if it is not that simple."""
        bare = self._tokenizer.encode("a b", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a b", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return _ids(whole[:start]), _ids(whole[start + len(bare) :])
        return None

    def split(self, text: str) -> list[str]:
        """Split a text into segments, which together are the text."""
        if not self._borders:
            return [text]
        borders = self._borders
        starts = [
            match.start() for match in self._verbatim.finditer(text) if match.group() in borders
        ]
        edges = [0, *starts, len(text)]
        return [text[start:end] for start, end in itertools.pairwise(edges) if start < end]

    def up_to_last_border(self, text: str) -> str:
        """Cut off what could be encoded otherwise if the text went on."""
        longest = len(self._longest_first[0]) if self._longest_first else 0
        tail = max(0, len(text) - longest)
        # From here on, an added token may have begun that the end of the text cuts in two.
        doubtful = next(
            (i for i in range(tail, len(text)) if self._begins_longer_token(text[i:])), len(text)
        )
        end = 0
        for match in self._verbatim.finditer(text):
            if match.end() > doubtful:
                break
            if match.group() in self._borders:
                end = match.end()
        return text[:end]

    def _begins_longer_token(self, text: str) -> bool:
        return any(
            len(token) > len(text) and token.startswith(text) for token in self._longest_first
        )

    def encode(self, segments: Sequence[str]) -> list[np.ndarray]:
        """Encode each segment, ``uint32``, in this thread. Slow: a second for 300,000 tokens."""
        encode = self._tokenizer.encode_batch_fast  # of one: many would take all processors
        return [_ids(encode([text], add_special_tokens=False)[0].ids) for text in segments]

    def wrap(
        self, parts: Sequence[np.ndarray], special_tokens: bool, *, ends: bool
    ) -> np.ndarray | None:
        """Join a prompt's parts.

        Args:
            special_tokens: Add what the tokenizer adds to a prompt, its beginning mostly.
            ends: The parts are the whole prompt.

        Returns:
            All ids; None if what is added is unknown.
        """
        before, after = (_NONE, _NONE) if not special_tokens else self._wrapping or (None, None)
        if before is None or after is None:
            return None
        joined: np.ndarray = np.concatenate([before, *parts, after if ends else _NONE])
        return joined


def _ids(numbers: Sequence[int]) -> np.ndarray:
    return np.frombuffer(array("I", numbers), dtype=np.uint32)


_NONE = _ids([])
