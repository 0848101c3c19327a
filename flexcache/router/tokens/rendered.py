"""Remembers what engines rendered, by the messages of the request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from flexcache.router.tokens.body import ChatBody, CompletionBody
from flexcache.router.tokens.memo import TokenMemo

_LOOK_BACK = 64
"""Messages by which a chat may have grown since it was rendered."""


class RenderedMemo:
    """Tokens of whole chats, found again by a chat that begins with the same messages.

    Args:
        memo: Where they are kept.
    """

    def __init__(self, memo: TokenMemo) -> None:
        self._memo = memo

    def keys(self, body: ChatBody | CompletionBody, model: str) -> list[bytes]:
        """Compute a key for each number of messages, beginning with one.

        All else that shapes the prompt is in each key. A completion's prompt is one message.
        """
        if isinstance(body, CompletionBody):
            return [_digest(b"", (model, bytes(body.prompt), body.add_special_tokens))]
        settings = (
            model,
            body.tools,
            body.documents,
            body.reasoning_effort,
            body.chat_template,
            body.chat_template_kwargs,
            body.add_generation_prompt,
            body.continue_final_message,
            body.add_special_tokens,
        )
        key = _digest(b"", settings)
        return [key := _digest(key, message) for message in body.messages]

    def longest(self, keys: Sequence[bytes]) -> tuple[np.ndarray, int] | None:
        """Find the longest beginning of a chat that is known.

        Returns:
            Its tokens and its number of messages. They end with the beginning of the answer, as
            the chat goes on in most templates.
        """
        for count in range(len(keys), max(0, len(keys) - _LOOK_BACK), -1):
            ids = self._memo.get(keys[count - 1])
            if ids is not None:
                return ids, count
        return None

    def put(self, keys: Sequence[bytes], ids: np.ndarray) -> None:
        """Remember the tokens of a whole chat."""
        self._memo.put(keys[-1], ids)


def _digest(before: bytes, what: object) -> bytes:
    return xxhash.xxh3_128_digest(before + msgspec.msgpack.encode(what))
