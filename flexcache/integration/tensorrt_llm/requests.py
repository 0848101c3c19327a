"""What keeps the KV of TensorRT-LLM's requests apart, and the get that a request has open."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from flexcache.ids import RequestInfo
from flexcache.integration.checkpoint import LoadedAdapter
from flexcache.integration.file_digests import FileDigests

_MEDIA = ("multimodal_positions", "multimodal_lengths", "multimodal_embedding")
_UNNAMED = ("prompt_embedding_table", "mrope_rotary_cos_sin", "encoder_tokens", "input_embeds")
"""Inputs that change a request's KV and that nothing identifies."""


@dataclass(slots=True)
class Get:
    """A match for a request's blocks ``[first, stop)``, all of them in DRAM.

    Attributes:
        stop: TensorRT-LLM counts on the blocks before it.
        num_found: How many there are: fewer only if a second match had to be made.
        is_parked: Whether the request waits for the load outside of the batch.
        has_computed: Whether a step computed with it.
    """

    task_id: int
    first: int
    stop: int
    num_found: int
    is_parked: bool
    launched: bool = False
    has_computed: bool = False


class Scopes:
    """Names what keeps the KV of an engine's requests apart."""

    def __init__(self) -> None:
        self._digests = FileDigests(waits=False)
        self._adapters: dict[int, LoadedAdapter] = {}
        """By TensorRT-LLM's number, as they were first seen."""

    def read(self, request: Any) -> tuple[str, ...] | None:
        """Return the namespace of a request's tokens: salt, LoRA and media keep prompts apart.

        None if the request has an input besides its tokens that nothing identifies: its KV is
        neither stored nor looked up.
        """
        if any(_has(request, name) for name in _UNNAMED):
            return None
        salt = getattr(request, "cache_salt", None)
        if salt is None:
            salt = getattr(request, "cache_salt_id", None)
        scope = ["tensorrt_llm"]
        if salt is not None:
            scope.append(f"salt={salt}")
        lora = getattr(request, "lora_task_id", None)
        if lora is not None:
            adapter = self._name_adapter(lora, getattr(request, "py_lora_path", None))
            if adapter is None:
                return None
            scope.append(f"lora={adapter}")
        hashes = getattr(request, "multimodal_hashes", None)
        if hashes:
            places = [list(getattr(request, name, None) or ()) for name in _MEDIA[:2]]
            text = repr([[list(item) for item in hashes], *places]).encode()
            scope.append(f"media={hashlib.blake2b(text, digest_size=16).hexdigest()}")
        elif any(_has(request, name) for name in _MEDIA):
            return None
        return tuple(scope)

    def _name_adapter(self, number: int, path: str | None) -> str | None:
        """Name an adapter by its files if they are older than the engine, so that it has loaded
        these; else at random. None if they have changed since: which it has loaded is unknown."""
        now, known = LoadedAdapter(path or ""), self._adapters.get(number)
        if known is None:
            known = self._adapters[number] = now
            known.identify(self._digests)
        return known.name if known.files == now.files else None


def describe(request: Any) -> RequestInfo:
    """Describe a request for KV events and traces."""
    return RequestInfo(
        request_id=str(request.request_id), lora_id=getattr(request, "lora_task_id", None)
    )


def num_computed_tokens(request: Any) -> int:
    """Return how many of a finished request's tokens are certainly computed.

    None of a prompt that was not finished: its last chunk may still be running.
    """
    if getattr(request, "context_remaining_length", 0) > 0:
        return 0
    return max(0, len(request.get_tokens(0)) - 1)  # the last one was sampled, and not computed


def _has(request: Any, name: str) -> bool:
    value = getattr(request, name, None)
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
