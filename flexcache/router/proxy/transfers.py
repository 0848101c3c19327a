"""Bodies of requests whose KV comes from another engine, or goes to one."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from flexcache.router.chooser import Source
from flexcache.router.listing import bracketed
from flexcache.router.tokens.body import (
    PROMPT_PATHS,
    TRANSFER,
    UNREADABLE,
    are_ours,
    read_fields,
    read_params,
    with_params,
)


def with_kv_source(path: str, body: bytes, source: Source, request_id: str) -> bytes:
    """Return a body that tells an engine where to fetch blocks from.

    A request that says itself what is transferred stays as it is, as does one of a path whose
    prompts are not routed by their tokens. Never raises.

    Args:
        request_id: Names the transfer to both engines; unique.
    """
    if path.partition("?")[0] not in PROMPT_PATHS or source.port is None:
        return body
    values: dict[str, Any] = {}
    if source.transfer == "flexcache":
        values["flexcache_source"] = _address(source)
    elif source.transfer == "offloading":
        values["remote_kv_source"] = _kv_request(source, request_id)
    return with_params(body, values, are_ours)


# -- a request that is divided between two engines -------------------------------------------------
#
#                the engine that computes hears               the one that decodes hears
#     flexcache   that another waits                           where, and how long to wait
#     offloading  the transfer's name                          the name, and where
#     sglang      a room at the bootstrap server               the same
#     nixl        that another decodes                         what the first answers
#
# In all but the last both are asked at once.

_NIXL_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_OF_ANSWERS = (
    "max_completion_tokens", "stream_options", "min_tokens", "best_of", "stop", "stop_sequences",
    "stop_token_ids", "logprobs", "top_logprobs", "response_format", "structured_outputs",
)  # fmt: skip
"""What the engine that computes the prompt need not know. It is left out: some of it makes a
request of one token invalid."""


def prefill_body(body: bytes, source: Source, request_id: str) -> bytes:
    """Return what the engine that computes a prompt is sent.

    Args:
        body: One that `may_be_divided`.
        request_id: Names the transfer to both; unique.
    """
    fields = read_fields(body)
    for name in _OF_ANSWERS:
        fields.pop(name, None)
    if b'"enabled"' in bytes(fields.get("thinking", b"")):  # more tokens than one
        del fields["thinking"]
    fields.update(max_tokens=_raw(1), stream=_raw(False))
    if "n" in fields:
        fields["n"] = _raw(1)
    params: dict[str, Any] = {}
    match source.transfer:
        case "flexcache":
            params = {"flexcache_hands_over": True}
        case "offloading":
            params = {"remote_decoder": {"kv_request_id": request_id}}
        case "nixl":
            params = _NIXL_PREFILL
        case "sglang":
            fields.update(_room(source, request_id))
    return with_params(msgspec.json.encode(fields), params, are_ours)


def decode_body(
    body: bytes, source: Source, request_id: str, wait_s: float, answer: bytes | None = None
) -> bytes:
    """Return what the engine that decodes is sent.

    Args:
        body: One that `may_be_divided`.
        request_id: As for `prefill_body`.
        wait_s: How long it may wait for the other.
        answer: That of the other, if it has answered.
    """
    params: dict[str, Any] = {}
    match source.transfer:
        case "flexcache":
            params["flexcache_wait_s"] = round(wait_s, 3)
            if source.port is not None:
                params["flexcache_source"] = _address(source)
        case "offloading":
            params["remote_prefiller"] = _kv_request(source, request_id)
        case "nixl":
            try:
                params = dict(read_params(read_fields(answer or b"{}")[TRANSFER]) or {})
            except (*UNREADABLE, KeyError):
                pass  # then it computes the prompt itself
        case "sglang":
            fields = read_fields(body)
            return msgspec.json.encode({**fields, **_room(source, request_id)})
    return with_params(body, params, are_ours)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _address(source: Source) -> str:
    return f"{bracketed(source.host)}:{source.port}"


def _kv_request(source: Source, request_id: str) -> dict[str, Any]:
    return {
        "kv_request_id": request_id, "remote_host": source.host, "remote_port": source.port
    }  # fmt: skip


def _room(source: Source, request_id: str) -> dict[str, msgspec.Raw]:
    # Of the id, so that both engines are given the same; below 2^63.
    room = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
    return {
        "bootstrap_host": _raw(source.host), "bootstrap_port": _raw(source.port),
        "bootstrap_room": _raw(room),
    }  # fmt: skip
