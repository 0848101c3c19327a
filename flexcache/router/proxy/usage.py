"""Reads the token counts that an engine reports at the end of its answer, without holding it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from flexcache.router.chooser import UNKNOWN, Usage

_KEY = b'"usage"'
_MAX_COUNT = 1 << 31
_KEPT_CHUNKS = 16  # pieces as they come from the engine; the last event spans one or two
_decode_first = json.JSONDecoder().raw_decode


class UsageReader:
    """Keeps the last pieces of an answer: usage is the end of a JSON answer, and in one of the last
    events of a stream.

    Attributes:
        feed: Takes the next bytes of the answer, in a fraction of a microsecond.
    """

    __slots__ = ("_chunks", "feed")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=_KEPT_CHUNKS)
        self.feed: Callable[[bytes], None] = self._chunks.append

    def read(self) -> Usage:
        """Return the last usage that the answer reports."""
        tail = b"".join(self._chunks)
        end = len(tail)
        while (start := tail.rfind(_KEY, 0, end)) >= 0:
            usage = _read_at(tail, start + len(_KEY))
            if usage is not None:
                return usage
            end = start
        return UNKNOWN


def _read_at(tail: bytes, position: int) -> Usage | None:
    """Return the usage behind the key; None if there is none: ``null``, or text of the model."""
    text = tail[position:].decode(errors="replace").lstrip()
    if not text.startswith(":"):
        return None
    try:
        usage, _ = _decode_first(text[1:].lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(cached if cached is not None else usage.get("cache_read_input_tokens")),
        _count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        _count(usage.get("completion_tokens", usage.get("output_tokens"))),
    )


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value <= _MAX_COUNT else None
