"""Optional request metadata for KV events and traces; never affects lookups."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec


class RequestInfo(msgspec.Struct, frozen=True):
    """Metadata of one request.

    Attributes:
        request_id: The engine's id of the request.
        lora_id: The adapter's number, for older readers of KV events.
        lora_name: The adapter's name.
        extra_keys: Per block of the prompt, what the engine hashed besides tokens (adapter, images,
            salt), as published; None if nothing.
    """

    request_id: str = ""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


NO_INFO = RequestInfo()
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RequestInfo)


def check_request_info(info: object) -> None:
    """Raise `ValueError` unless it fits messages, traces and events: observers read it later, when
    no call could be refused any more."""
    if not isinstance(info, RequestInfo):
        raise ValueError(f"request_info must be a RequestInfo, not {type(info).__name__}")
    try:
        _decoder.decode(_encoder.encode(info))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"request_info: {error}") from None


class PromptDetail(IntEnum):
    """Amount of a prompt's metadata that its observers need."""

    NOTHING = 0
    INFO = 1
    """Request metadata, for a trace."""
    TOKENS = 2
    """Request metadata and token ids, for KV events."""
