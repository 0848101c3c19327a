"""Describes what determines the order of bytes in a block besides the shape of vLLM's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def describe_layout(vllm_config: Any, layer_names: Iterable[str]) -> str:
    """Return the device and the attention backends that read and write these layers' KV.

    Backends order K, V, heads and tokens differently in tensors of equal shape. vLLM's CPU backend
    also tiles a block for the instruction set of its CPU. Decode context parallelism deals tokens
    out to the ranks in pieces of a set size.
    """
    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend().get_name() for name in layer_names}
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        has_tiles = torch.cpu._is_amx_tile_supported()
        device += f" {torch.backends.cpu.get_cpu_capability()}{' AMX' if has_tiles else ''}"
    description = f"{device} {'+'.join(sorted(backends))}"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        pieces = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        description += f" dcp={parallel.decode_context_parallel_size}/{pieces}"
    return description
