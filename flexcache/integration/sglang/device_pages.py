"""DevicePages: SGLang's KV pool on the GPU as tensors of pages.

A pool has a tensor ``[slot, ...]`` per layer for K and for V, or one for the latents of MLA. Page
``n`` has the slots from ``n * page_size``, so a tensor ``[page, ...]`` is the same memory.
"""

from __future__ import annotations

from typing import Any

import torch

from flexcache.config.values import reject


class DevicePages:
    """The pool's tensors by name, in the order in which the model reads them.

    Attributes:
        names_by_layer: The tensors that each layer reads.

    Raises:
        ConfigError: The model has pools that are not supported, which it names.
    """

    def __init__(self, params: Any, components: set[Any]) -> None:
        others = sorted(part.name for part in components if part.name != "FULL")
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        if others:
            raise reject("model", " + ".join(others), "has state pools: not supported yet")
        self.tensors: dict[str, torch.Tensor] = {}
        self.names_by_layer: dict[int, list[str]] = {}
        for kind, buffers in _buffers(pool):
            for layer, buffer in enumerate(buffers):
                num_pages = buffer.shape[0] // params.page_size
                slots = buffer[: num_pages * params.page_size]
                name = f"{layer}.{kind}"
                self.tensors[name] = slots.unflatten(0, (num_pages, params.page_size))
                self.names_by_layer.setdefault(layer, []).append(name)
        ordered = [name for names in self.names_by_layer.values() for name in names]
        self.tensors = {name: self.tensors[name] for name in ordered}
        first = next(iter(self.tensors.values()))
        self.num_layers = len(self.names_by_layer)
        self.dtype = pool.dtype
        self.bytes_per_token = first[0, 0].nbytes
        self.description = f"{type(pool).__name__} {pool.dtype}"


def _buffers(pool: Any) -> list[tuple[str, list[torch.Tensor]]]:
    if hasattr(pool, "k_buffer") and hasattr(pool, "v_buffer"):
        if getattr(pool, "k_scale_buffer", None) is not None:
            raise reject("kv_cache_dtype", type(pool).__name__, "has scales: not supported")
        return [("k", list(pool.k_buffer)), ("v", list(pool.v_buffer))]
    if hasattr(pool, "kv_buffer") and isinstance(pool.kv_buffer, list):
        return [("latent", list(pool.kv_buffer))]
    raise reject("model", type(pool).__name__, "is a pool that is not supported")
