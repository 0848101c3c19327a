"""Conversion to KV events of vLLM's own classes, and the request metadata in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils

from flexcache.cache.journal import Change, Removed, Stored
from flexcache.ids import RequestInfo

_hash = kv_cache_utils.maybe_convert_block_hash
_MAX_HASHES = 1 << 20
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
"""vLLM 0.32 hashes tagged extra keys and publishes them without their tags."""


def read_request_info(request: Any, block_size: int) -> RequestInfo:
    """Read the request metadata that vLLM would publish with its own blocks."""
    lora = request.lora_request
    return RequestInfo(
        request_id=request.request_id,
        lora_id=None if lora is None else lora.adapter_id,
        lora_name=None if lora is None else lora.name,
        extra_keys=_extra_keys(request, block_size),
    )


def _extra_keys(request: Any, block_size: int) -> list[Any] | None:
    """Read the extra keys of each whole block; None if the request has only tokens."""
    has_more = (
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or getattr(request, "prompt_embeds", None) is not None
    )
    if not has_more or not request.block_hashes:
        return None
    extra_keys, image = [], 0
    for index in range(min(len(request.block_hashes), request.num_tokens // block_size)):
        start = index * block_size
        keys, image = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_size, image
        )
        extra_keys.append(keys)
    return list(_untagged(extra_keys))


class EventHashes:
    """vLLM's hashes of blocks that are cached under others: those of requests with adapters, as
    vLLM hashes the adapter's name and path, and the cache its content.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def learn(self, keys: Sequence[bytes], hashes: Sequence[bytes], stop: int) -> None:
        """Note the hashes of the first ``stop`` blocks."""
        self._hashes.update(zip(keys[:stop], hashes[:stop], strict=False))
        while len(self._hashes) > _MAX_HASHES:
            self._hashes.popitem(last=False)

    def of(self, key: bytes) -> Any:
        """Return a block's hash as vLLM publishes it."""
        return _hash(self._hashes.get(key, key))


def to_vllm_events(changes: Iterable[Change], hashes: EventHashes) -> Iterator[KVCacheEvent]:
    """Convert changes for vLLM's own publisher, whose stream also has its GPU's blocks."""
    for change in changes:
        if isinstance(change, Stored):
            yield BlockStored(
                block_hashes=[hashes.of(key) for key in change.keys],
                parent_block_hash=None if change.parent is None else hashes.of(change.parent),
                token_ids=list(change.token_ids),
                block_size=change.block_size,
                lora_id=change.info.lora_id,
                medium=change.medium.value,
                lora_name=change.info.lora_name,
                extra_keys=change.extra_keys,
            )
        elif isinstance(change, Removed):
            yield BlockRemoved(
                block_hashes=[hashes.of(key) for key in change.keys], medium=change.medium.value
            )
        else:  # readers would apply "all cleared" to the GPU's blocks too
            yield from to_vllm_events(change.removed, hashes)
