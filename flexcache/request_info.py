"""What an engine may tell of a request besides its tokens. Nothing is found or lost by it: it goes
into KV events and traces, for those who read them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec


class RequestInfo(msgspec.Struct, frozen=True):
    """Of one request.

    Attributes:
        request_id: What the engine calls it.
        lora_id: The adapter's number, as old readers of KV events want it.
        lora_name: The adapter's name.
        extra_keys: Per block of the prompt what the engine hashed besides tokens (adapter, images,
            salt), as it is to be published; None if there is nothing.
    """

    request_id: str = ""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


NO_INFO = RequestInfo()


class Wanted(IntEnum):
    """How much of what prompts are about somebody is to be told."""

    NOTHING = 0
    INFO = 1
    """Whose request it is: for a trace."""
    TOKENS = 2
    """And its token ids: for KV events."""
