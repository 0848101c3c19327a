"""Identifies what the bytes of an offloaded chunk mean."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.config import VllmConfig

from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.integration.identity.late import identify_now
from flexcache.integration.vllm.callers import locals_of_callers
from flexcache.integration.vllm.engine import read_key_namespace, why_uncached
from flexcache.integration.vllm.groups import refuse_hisparse
from flexcache.integration.vllm.identity import read_model_id
from flexcache.storage.kv_identity import KVIdentity


def read_chunk_identity(spec: Any, chunk_bytes: int, settings: CacheConfig) -> KVIdentity:
    """Return the identity of an engine's chunks. Must be called while its connector is constructed.

    vLLM's offloading config names the model but not its revision, quantization and the like.

    Raises:
        ConfigError: The model's KV is of no use to another request, or kept by HiSparse.
    """
    vllm_config = _find_vllm_config()
    refuse_hisparse(vllm_config)
    reason = why_uncached(vllm_config, len(spec.config.groups))
    if reason is not None:  # vLLM does not ask, and would serve the second request of a prompt so
        raise ConfigError(
            f"OffloadingConnector cannot serve {vllm_config.model_config.model}: {reason}; run "
            "without the connector"
        )
    model_id, settings = identify_now(partial(read_model_id, vllm_config), settings)
    parts = [model_id, *read_key_namespace(vllm_config)]
    if settings.model_version is not None:
        parts.append(settings.model_version)
    model = "|".join(parts)
    config, parallel = spec.config, spec.config.parallel
    groups = [
        (group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups
    ]
    ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    layout = "; ".join(
        [
            f"{chunk_bytes} bytes, {config.cache.blocks_per_chunk} blocks of {groups}",
            f"ranks {ranks}, {config.model.dtype}, {config.kv_cache_layout}",
            f"canonical {config.canonical_layout}, replicated {config.replicated_layout}",
        ]
    )
    return KVIdentity.of(f"{model}; offloaded by vLLM", layout)


def _find_vllm_config() -> VllmConfig:
    """Return the engine's config, which only the connector under construction has."""
    for names in locals_of_callers():
        for found in names.values():
            if isinstance(found, VllmConfig):
                return found
    raise ConfigError("the model cannot be identified: this vLLM constructs its tiers otherwise")
