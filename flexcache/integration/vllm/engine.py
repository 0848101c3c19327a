"""Reads what FlexCache needs from a vLLM engine's config, and refuses unsupported settings.

Holds no state. The scheduler's side and the workers' side both use it and get the same answer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs

from flexcache.client.connect import local_endpoint
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.integration.vllm.identity import read_model_id
from flexcache.protocol.runtime import private_endpoint


def read_cache_config(vllm_config: Any, block_size: int) -> CacheConfig:
    """Read `CacheConfig` from ``FLEXCACHE_*`` and ``kv_connector_extra_config``; the latter wins.

    KV events are on by default if vLLM publishes its own, with block hashes of the same kind.
    """
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    set_size = extra.get("tokens_per_block", os.environ.get("FLEXCACHE_TOKENS_PER_BLOCK"))
    if set_size is not None and int(set_size) != block_size:
        raise ConfigError(
            f"tokens_per_block = {set_size!r}: must be vLLM's block size, {block_size}; "
            "leave it unset"
        )
    events = vllm_config.kv_events_config
    defaults = {
        "kv_events": events is not None and events.enable_kv_cache_events,
        "kv_events_hashes": "int" if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else "bytes",
    }
    return CacheConfig.from_env(None, defaults, **{**extra, "tokens_per_block": block_size})


@dataclass(frozen=True)
class Place:
    """An engine's name at its cache, and the cache's address.

    ``endpoint`` is None if the cache is in the engine's scheduler process.
    """

    endpoint: str | None
    engine_id: str
    dp_rank: int

    @property
    def client_endpoint(self) -> str:
        """Address that the engine's workers connect to."""
        return self.endpoint or local_endpoint(self.engine_id)


def read_layerwise_setting(extra_config: dict[str, Any]) -> str:
    """Read `layerwise_load` alone, before the rest of the config is known."""
    name = "layerwise_load"
    return str(extra_config.get(name, os.environ.get("FLEXCACHE_LAYERWISE_LOAD", "auto")))


def read_place(vllm_config: Any, cache_config: CacheConfig) -> Place:
    """Return the engine's place, the same for its scheduler and its workers.

    vLLM appends ``_dp<rank>`` to the id of each engine of a data-parallel group. Nothing else
    reveals a group: for dense models every rank is configured as if it were the only one.
    """
    engine_id = vllm_config.kv_transfer_config.engine_id
    in_group = re.fullmatch(r"(.+)_dp(\d+)", engine_id)
    if in_group is None:
        return Place(cache_config.endpoint, engine_id, 0)
    group, rank = in_group.group(1), int(in_group.group(2))
    return Place(cache_config.endpoint or private_endpoint(f"group-{group}"), group, rank)


def read_block_size(kv_cache_config: Any) -> int:
    """Return tokens per KV block. Refuses caches of several groups, and KV other than attention."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups ({kinds}); FlexCache moves one. "
            "Set disable_hybrid_kv_cache_manager=True: all layers then share one group"
        )
    for spec in _layer_specs(kv_cache_config).values():
        if not hasattr(spec, "head_size"):
            raise ConfigError(
                f"{type(spec).__name__}: only attention KV is cached, not recurrent state"
            )
    return int(groups[0].kv_cache_spec.block_size)


def read_model_config(vllm_config: Any, kv_cache_config: Any) -> ModelConfig:
    """Return the shape of the KV cache as vLLM allocates it.

    A page that is not plain K and V of ``num_kv_heads`` heads (padded, quantised with scales,
    different head sizes) is described as opaque bytes of the same size.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    _refuse_unsupported(vllm_config, kv_cache_config)
    specs = list(_layer_specs(kv_cache_config).values())
    block_size = read_block_size(kv_cache_config)
    tp_size = parallel.tensor_parallel_size
    page_bytes = _read_page_bytes(kv_cache_config)
    first = specs[0]
    use_mla = bool(model.use_mla)
    model_id = read_model_id(vllm_config)
    heads = first.num_kv_heads * tp_size
    plain = ModelConfig(
        model_id=model_id, num_layers=len(specs), num_kv_heads=heads,
        head_size=first.head_size, dtype=first.dtype, use_mla=use_mla, tp_size=tp_size,
    )  # fmt: skip
    if plain.token_size_in_bytes_per_rank * block_size == page_bytes:
        return plain
    token_bytes, rest = divmod(page_bytes, block_size)
    if rest or (token_bytes % 2 and not use_mla):
        raise ConfigError(
            f"a KV page of {page_bytes} bytes does not divide into {block_size} tokens"
        )
    return ModelConfig(
        model_id=model_id, num_layers=1, num_kv_heads=tp_size,
        head_size=token_bytes if use_mla else token_bytes // 2,
        dtype=torch.uint8, use_mla=use_mla, tp_size=tp_size,
    )  # fmt: skip


def read_key_namespace(vllm_config: Any) -> tuple[str, ...]:
    """Name what vLLM's block hashes depend on besides tokens, LoRA, salt and images."""
    return ("vllm", str(vllm_config.cache_config.prefix_caching_hash_algo))


def _read_page_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of one rank's block, over all layers, as vLLM allocates it.

    Both sides see the same allocation, but not the same specs: for a group whose layers differ in
    size, vLLM gives its scheduler the spec of one layer only.
    """
    tensors = kv_cache_config.kv_cache_tensors
    # In vLLM 0.28 each entry has its own memory; in later versions all share one allocation.
    sizes = [t.size for t in tensors] if hasattr(tensors[0], "shared_by") else [tensors[0].size]
    return int(sum(sizes)) // int(kv_cache_config.num_blocks)


def _layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    group = kv_cache_config.kv_cache_groups[0]
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is not None:  # layers of one type and different sizes
        return dict(per_layer)
    return dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode = True: sleep() would unmap KV memory that FlexCache may be copying;"
            " leave it off, or run without the connector"
        )
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} = {getattr(parallel, name)}: must be 1 with FlexCache")
    hash_size = getattr(kv_cache_config, "hash_block_size", None)
    block_size = read_block_size(kv_cache_config)
    if hash_size not in (None, block_size):
        raise ConfigError(
            f"vLLM hashes {hash_size} tokens at a time and caches {block_size}: they must agree"
        )
