"""Describes what determines the order of bytes in a block besides the shape of vLLM's tensors."""

from __future__ import annotations

from typing import Any

import torch

from flexcache.integration.vllm.groups import layer_specs


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
