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
_encoder = msgspec.msgpack.Encoder()
_NOTHING = type(None)
_TYPES = {
    "request_id": (str,), "lora_id": (int, _NOTHING), "lora_name": (str, _NOTHING),
    "extra_keys": (list, tuple, _NOTHING),
}  # fmt: skip


def check_request_info(info: object) -> None:
    """Raise `ValueError` unless it fits messages, traces and events: observers read it later, when
    no call could be refused any more."""
    if not isinstance(info, RequestInfo):
        raise ValueError(f"request_info must be a RequestInfo, not {type(info).__name__}")
    for name, types in _TYPES.items():
        if type(value := getattr(info, name)) not in types:  # a bool is no number of an adapter
            raise ValueError(f"request_info: {name} is of type {type(value).__name__}")
    try:
        _encoder.encode(info)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"request_info: {error}") from None


class PromptDetail(IntEnum):
    """Amount of a prompt's metadata that its observers need."""

    NOTHING = 0
    INFO = 1
    """Request metadata, for a trace."""
    TOKENS = 2
    """Request metadata and token ids, for KV events."""
