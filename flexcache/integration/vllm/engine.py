"""Reads what FlexCache needs from a vLLM engine's config, and refuses unsupported settings.

Holds no state. The scheduler's side and the workers' side both use it and get the same answer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexcache.client.connect import local_endpoint
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.sources import Layer, read_environment, require_block_size
from flexcache.errors import ConfigError
from flexcache.integration.vllm.groups import layer_specs, read_groups
from flexcache.protocol.endpoints import private_endpoint

_EXTRA = "kv_connector_extra_config"
UNREAD = "unread"
"""Id of a model whose files may take a while to hash."""


def read_cache_config(vllm_config: Any, block_size: int) -> CacheConfig:
    """Read `CacheConfig` from ``FLEXCACHE_*`` and ``kv_connector_extra_config``; the latter wins.

    KV events are on by default if vLLM publishes its own, with block hashes of the same kind.
    """
    extra = Layer(vllm_config.kv_transfer_config.kv_connector_extra_config, _EXTRA)
    require_block_size("vLLM's", block_size, read_environment(os.environ), extra)
    events = vllm_config.kv_events_config
    defaults = {
        "kv_events": events is not None and events.enable_kv_cache_events,
        "kv_events_hashes": "int" if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else "bytes",
    }
    return CacheConfig.from_env(None, defaults, _EXTRA, **{**extra, "tokens_per_block": block_size})


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


def why_uncached(vllm_config: Any, num_groups: int) -> str | None:
    """Return why the KV of this engine's model is of no use to another request; None if it is.

    The model decides, not ``enable_prefix_caching``: one who turned vLLM's own caching off may want
    ours. Generative models are left to that setting, as vLLM leaves them.

    Args:
        num_groups: KV cache groups that can be cached.
    """
    model = vllm_config.model_config
    if num_groups == 0:
        return "the model keeps no KV between steps"
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        kinds = (model.pooler_config.seq_pooling_type, model.pooler_config.tok_pooling_type)
        pooling = "/".join(str(kind) for kind in kinds if kind is not None)
        return (
            f"vLLM supports no prefix caching for its pooling ({pooling}) and attention "
            f"({model.attn_type})"
        )
    return None


def read_model_config(vllm_config: Any, kv_cache_config: Any) -> ModelConfig:
    """Return the model, whose id is yet to be read, and how the engine's ranks divide its KV.

    The sizes of blocks are the ranks' to tell: each knows its own layers' tensors, the scheduler
    only the names of rank 0's.
    """
    _refuse_before_033(vllm_config)
    _refuse_lookahead_hashes(vllm_config)
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return ModelConfig(
        model_id=UNREAD,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=max(1, model.get_total_num_kv_heads()),
        head_size=model.get_head_size(),
        dtype=_read_dtype(kv_cache_config),
        use_mla=bool(model.use_mla),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        cp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        kv_replicas=_read_replicas(vllm_config, kv_cache_config),
        sized_by_ranks=True,
        groups=read_groups(vllm_config, kv_cache_config),
    )


def _read_dtype(kv_cache_config: Any) -> Any:
    """Return the type of the KV's elements; of the states' first if there is no attention."""
    groups = kv_cache_config.kv_cache_groups
    every = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    with_dtype = [spec.dtype for spec in every if hasattr(spec, "dtype")]
    return with_dtype[0] if with_dtype else every[0].dtypes[0]


def _read_replicas(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return how many neighbouring ranks hold the same KV; None to follow the number of heads.

    vLLM tells the scheduler what is true of rank 0's layers. A draft model's are on the last stage,
    so with both none share; a rank of another stage that differs nevertheless is refused.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        return 1
    if parallel.decode_context_parallel_size > 1 and not hasattr(kv_cache_config, "kv_tp_replicas"):
        return 1
    return getattr(kv_cache_config, "kv_tp_replicas", None)


def read_key_namespace(vllm_config: Any) -> tuple[str, ...]:
    """Name what vLLM's block hashes depend on besides tokens, LoRA, salt and images."""
    return ("vllm", str(vllm_config.cache_config.prefix_caching_hash_algo))


def _refuse_before_033(vllm_config: Any) -> None:
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    remedy = "use vLLM 0.33 or later, leave it off, or run without the connector"
    model = vllm_config.model_config
    if model.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode = True: sleep() would unmap KV memory that FlexCache may be copying;"
            f" {remedy}"
        )
    name = "enable_return_routed_experts"
    if getattr(getattr(vllm_config, "aux_output_config", model), name, False):
        raise ConfigError(
            f"{name} = True: vLLM has no experts of tokens that are loaded, and would end at a hit;"
            f" {remedy}"
        )


def _refuse_lookahead_hashes(vllm_config: Any) -> None:
    num_tokens = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    if num_tokens:  # vLLM 0.33 has none beside a connector
        raise ConfigError(
            f"vLLM's block hashes cover {num_tokens} tokens after each block, and would not name"
            " what is in it; set disable_lookahead_block_hashes in speculative_config"
        )
