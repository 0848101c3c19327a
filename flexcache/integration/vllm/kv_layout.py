"""The layout of vLLM's KV tensors: which one FlexCache prefers, and what determines the order of
bytes in a block besides the tensors' shapes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from flexcache.integration.vllm.groups import layer_specs
from flexcache.integration.vllm.siblings import is_among_siblings

_HAS_LAYOUTS = find_spec("vllm.v1.kv_cache_layout") is not None  # since vLLM 0.32
_HEADS_FIRST_ONLY = 10  # FlashInfer's kernels for GPUs of this generation want heads before tokens


def preferred_layout(vllm_config: Any) -> str | None:
    """Return vLLM's name of the layout that keeps all layers of a block in one piece, for one copy
    instead of one for each layer; None to leave the choice to vLLM.

    vLLM drops a preference that the attention backends do not support.
    """
    if not _HAS_LAYOUTS or is_among_siblings() or not _suits(vllm_config):
        return None
    capability = current_platform.get_device_capability()
    has_heads_first = capability is not None and capability.major == _HEADS_FIRST_ONLY
    # The bytes of a block are those of vLLM's default, so that what is stored stays valid.
    return "BLHNC" if has_heads_first else "BLNHC"


def prefers_one_tensor(vllm_config: Any) -> bool:
    """Whether an engine of vLLM before 0.32 shall have one tensor for all layers.

    Not with heads before tokens: its layers would then be between each other.
    """
    if _HAS_LAYOUTS or not _suits(vllm_config):
        return False
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    with set_current_vllm_config(vllm_config):
        return str(get_kv_cache_layout()) == "NHD"


def split_layers(
    kv_cache: torch.Tensor, attn_backend: Any, vllm_config: Any, kv_cache_config: Any
) -> dict[str, torch.Tensor]:
    """Return each layer's view of one tensor for all layers."""
    with set_current_vllm_config(vllm_config):
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    whole = kv_cache.permute([order.index(dim) for dim in range(len(order))])
    layers = zip(kv_cache_config.kv_cache_tensors, whole.unbind(0), strict=True)
    return {name: layer for tensor, layer in layers for name in tensor.shared_by}


def _suits(vllm_config: Any) -> bool:
    """Whether a block's layers can be in one piece for all that is known: not where it could keep
    the engine from starting or break its attention, as for blocks that are padded, that kernels
    divide, or that have scales of their own."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not current_platform.is_cuda_alike() or model is None or model.is_hybrid:
        return False
    return not (
        cache.user_specified_block_size
        or cache.kv_cache_dtype_skip_layers
        or "per_token_head" in cache.cache_dtype
    )


def describe_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the device, the backends that read and write the KV of this rank, and what its states
    consist of.

    Backends order K, V, heads and tokens differently in tensors of equal shape. vLLM's CPU backend
    also tiles a block for the instruction set of its CPU. States of other parts may have as many
    bytes. Decode context parallelism deals tokens out to the ranks in pieces of a set size.
    """
    layers = vllm_config.compilation_config.static_forward_context
    groups = [group for group in kv_cache_config.kv_cache_groups if group.layer_names]
    backends = {
        layers[name].get_attn_backend().get_name() for group in groups for name in group.layer_names
    }
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        has_tiles = torch.cpu._is_amx_tile_supported()
        device += f" {torch.backends.cpu.get_cpu_capability()}{' AMX' if has_tiles else ''}"
    description = f"{device} {'+'.join(sorted(backends))}"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        pieces = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        description += f" dcp={parallel.decode_context_parallel_size}/{pieces}"
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    states = [_describe_state(spec) for spec in specs if hasattr(spec, "shapes")]
    return " ".join([description, *dict.fromkeys(states)])


def _describe_state(spec: Any) -> str:
    parts = zip(spec.dtypes, spec.shapes, strict=True)
    return "+".join(
        f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]"
        for dtype, shape in parts
    )
