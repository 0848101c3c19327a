"""Reads an engine's KV cache groups: layers whose blocks vLLM keeps in one table per request.

Models with sliding windows, chunked attention or states beside full attention have several. vLLM
tells connectors about their blocks from 0.32 on (`TELLS_GROUPS`); before, FlexCache needs
all layers in one group of full attention.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.sched import output

from flexcache.config.model import KVGroup
from flexcache.errors import ConfigError

TELLS_GROUPS = hasattr(output, "KVConnectorBlockState")

GroupHooks: Any = base.SupportsHMA if TELLS_GROUPS else object
"""Base class by which vLLM knows that a connector moves several groups: it then keeps them."""


def read_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[KVGroup, ...]:
    """Return the groups that are cached, in vLLM's order (`cached_group_ids`), one at least. Empty
    for an engine with a single group of full attention.

    Raises:
        ConfigError: A group is of a kind that cannot be cached.
    """
    refuse_hisparse(vllm_config)
    all_groups = kv_cache_config.kv_cache_groups
    if not TELLS_GROUPS and len(all_groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in all_groups)
        raise ConfigError(
            f"the model has {len(all_groups)} KV cache groups ({kinds}); with this vLLM, FlexCache "
            "moves one. Set disable_hybrid_kv_cache_manager=True: all layers then share one group"
        )
    groups = tuple(
        _read_group(vllm_config, all_groups[number], len(all_groups) == 1)
        for number in cached_group_ids(kv_cache_config)
    )
    if len(all_groups) == 1 and groups[0].is_dense:
        return ()
    if not TELLS_GROUPS:
        raise ConfigError(f"a model with only {groups[0].kind} layers needs vLLM 0.32 or later")
    if not vllm_config.cache_config.enable_prefix_caching and any(
        group.kind == "state" for group in groups
    ):
        raise ConfigError(
            "enable_prefix_caching = False: vLLM then keeps no state that could be stored; set "
            "--enable-prefix-caching, or run without the connector"
        )
    return groups


def refuse_hisparse(vllm_config: Any) -> None:
    """Raise `ConfigError` if vLLM keeps KV in host memory, and defers what it tells of loads."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        raise ConfigError(
            "HiSparse (attention_config.hisparse_config, or HiSparseConnector) keeps KV in host"
            " memory, which cannot be cached; leave it out, or run without FlexCache"
        )


def cached_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the numbers of the groups that are cached: not those of scratch memory."""
    every = tuple(range(len(kv_cache_config.kv_cache_groups)))
    return tuple(getattr(kv_cache_config, "prefix_cacheable_group_ids", every))


def read_layers(kv_cache_config: Any) -> list[list[str]] | None:
    """Return the names of this rank's layers in each group that is cached, maybe none in some. None
    if all layers are in one group."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return None
    return [groups[number].layer_names for number in cached_group_ids(kv_cache_config)]


def read_position(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the tokens between the positions where prefixes can end: the least common multiple of
    the groups' block sizes, as vLLM's scheduler has it."""
    return math.lcm(
        *(
            _block_size(vllm_config, group.kv_cache_spec)
            for group in kv_cache_config.kv_cache_groups
        )
    )


def read_keys_per_position(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many of vLLM's block hashes make up a position.

    Raises:
        ConfigError: vLLM hashes in units that positions are not made of.
    """
    position = read_position(vllm_config, kv_cache_config)
    hash_size = getattr(kv_cache_config, "hash_block_size", None) or position
    has_one = len(kv_cache_config.kv_cache_groups) == 1
    if position % hash_size or (has_one and hash_size != position):
        raise ConfigError(
            f"vLLM hashes {hash_size} tokens at a time and caches {position}: they must agree"
        )
    return int(position // hash_size)


def layer_specs(group_spec: Any) -> list[Any]:
    """Return the specs of a group's layers; one for all unless their pages differ in size."""
    per_layer = getattr(group_spec, "kv_cache_specs", None)
    return [group_spec] if per_layer is None else list(per_layer.values())


def _read_group(vllm_config: Any, group: Any, is_only_one: bool) -> KVGroup:
    spec = layer_specs(group.kv_cache_spec)[0]
    size, layers = _block_size(vllm_config, group.kv_cache_spec), tuple(group.layer_names)
    if isinstance(spec, specs.SlidingWindowSpec):
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return KVGroup("window", size, window, layers)
    if isinstance(spec, specs.ChunkedLocalAttentionSpec):
        return KVGroup("chunked", size, spec.attention_chunk_size, layers)
    if isinstance(spec, specs.MambaSpec):
        return KVGroup("state", size, 0, layers)
    if isinstance(spec, specs.FullAttentionSpec) or (is_only_one and hasattr(spec, "head_size")):
        return KVGroup("full", size, 0, layers)
    raise ConfigError(f"{type(spec).__name__}: KV of this kind cannot be cached")


def _block_size(vllm_config: Any, group_spec: Any) -> int:
    """Return tokens per block of a group, over all context-parallel ranks."""
    is_sharded = getattr(group_spec, "dcp_sharded", True)  # absent before vLLM 0.32
    parallel = vllm_config.parallel_config
    dcp_size = parallel.decode_context_parallel_size if is_sharded else 1
    return int(group_spec.block_size) * int(dcp_size)
