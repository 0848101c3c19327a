"""Finds the pools of an SGLang engine: SGLang's own description of them for linkers.

SGLang assembles one (`DevicePoolGroup`) for the models that its own linkers can store: sparse
attention (DSA), Mamba beside MLA, Mamba beside sliding windows. For the others, its parts are put
together here: one pool of full attention, and beside it sliding windows or Mamba states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler, linker_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MLATokenToKVPool

from flexcache.config.values import reject

_NOT_STORED = ("DeepSeekV4", "FP4", "HiSparse", "LayerSplit", "PageInterleave")
"""In names of classes: pools whose rows do not make up pages, or that have scales apart."""


def resolve_pool_group(params: Any, components: set[Any]) -> Any:
    """Return the engine's pools as SGLang's `DevicePoolGroup`.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: What its tree keeps of a prompt.

    Raises:
        ConfigError: A pool is not supported; names it.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    names = [type(each).__name__ for each in (pool, *_drafts(params))]
    name = " with a draft's ".join(names)
    if any(part in name for part in _NOT_STORED):
        raise reject("model", name, "is a pool that is not supported")
    try:
        return _assemble(pool, params, {component.name for component in components})
    except (ValueError, AttributeError) as error:
        raise reject("model", name, f"is a pool that is not supported: {error}") from error


def _assemble(pool: Any, params: Any, kinds: set[str]) -> Any:
    size = params.page_size
    if kinds == {"FULL"} and not isinstance(pool, DSATokenToKVPool):
        entries = [_full_entry(pool, {layer: layer for layer in range(pool.layer_num)}, size)]
    elif kinds == {"FULL", "SWA"}:
        full, window = hybrid_pool_assembler._swa_layer_mappings(pool)
        window_entry = linker_pool_assembler._mha_device_pool_entry(
            PoolName.SWA, pool.swa_kv_pool, window, size
        )
        entries = [_full_entry(pool.full_kv_pool, full, size), window_entry]
    elif kinds == {"FULL", "MAMBA"} and type(pool) is HybridLinearKVPool:
        full = hybrid_pool_assembler._stage_local_layer_mapping(
            pool.full_attention_layer_id_mapping, pool.start_layer
        )
        state_entry = linker_pool_assembler._mamba_device_pool_entry(
            params.req_to_token_pool, pool.start_layer
        )
        entries = [_full_entry(pool.full_kv_pool, full, size), state_entry]
    else:
        if kinds != {"FULL"} and params.mtp_draft_device_pools:
            raise ValueError("a draft beside states")  # SGLang would leave it out
        return linker_pool_assembler.resolve_hybrid_device_pool_group(
            kvcache=pool, page_size=size, params=params, components=_components(kinds)
        )
    last = max(layer for entry in entries for layer in entry.layer_mapping)
    drafts = _drafts(params)
    if drafts:
        entries.append(_draft_entry(drafts, params, last))
    is_replicated = kinds == {"FULL"} and all(
        isinstance(each, MLATokenToKVPool) for each in (pool, *drafts)
    )
    return DevicePoolGroup(entries, last + 1, size, rank_replicated=is_replicated)


def _drafts(params: Any) -> list[Any]:
    """Return the pools of draft models, which have the slots of full attention."""
    pools = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    return [p.full_kv_pool if type(p) is HybridLinearKVPool else p for p in pools]


def _draft_entry(drafts: Sequence[Any], params: Any, last_layer: int) -> Any:
    """Describe the pools of drafts, which are read only when the model's last layer has been.

    A draft takes the model's hidden states, so it cannot compute what a hit leaves out: without
    its KV nothing that it proposes is accepted.
    """
    if params.mtp_draft_mamba_pools:
        raise ValueError("a draft with states of its own")
    if any(pool.page_size != params.page_size for pool in drafts):
        raise ValueError("a draft with pages of another size")
    parts = [_full_entry(pool, {}, params.page_size).components[0] for pool in drafts]
    buffers = [buffer for part in parts for buffer in part]
    return DevicePoolEntry(
        name=PoolName.DRAFT,
        indices_from_pool=PoolName.KV,
        device_pool=drafts[0],
        components=[buffers],
        layer_mapping={last_layer: range(len(buffers))},
        page_size=params.page_size,
        rows_are_pages=False,
    )


def _full_entry(pool: Any, layer_mapping: dict[int, int], page_size: int) -> Any:
    """Describe a pool of full attention: K and V, or the latent vectors of MLA."""
    if not isinstance(pool, MLATokenToKVPool):
        return linker_pool_assembler._mha_device_pool_entry(
            PoolName.KV, pool, layer_mapping, page_size
        )
    if isinstance(pool, DSATokenToKVPool):
        raise ValueError(f"{type(pool).__name__} beside other pools")
    return DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=pool,
        components=[pool.kv_buffer],
        layer_mapping=layer_mapping,
        page_size=page_size,
        rows_are_pages=False,
    )


def _components(kinds: set[str]) -> set[Any]:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return {ComponentType[kind] for kind in kinds}
