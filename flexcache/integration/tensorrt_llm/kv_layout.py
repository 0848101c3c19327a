"""The KV tensors of TensorRT-LLM's cache managers, layer by layer.

The first manager (V1) has one tensor ``[blocks, layers, K and V, elements of a block]``. The second
(V2) describes regions of memory: `size` bytes for each block, `stride` apart, that hold the buffers
of several layers one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexcache.errors import UnsupportedLayoutError


@dataclass(frozen=True)
class LayerTensors:
    """KV tensors by name, blocks first, and which of them belong to each layer of the model."""

    tensors: Mapping[str, torch.Tensor]
    of_layer: Mapping[int, list[str]]
    description: str


def split_pool(pool: torch.Tensor) -> LayerTensors:
    """Split V1's tensor into layers.

    Raises:
        UnsupportedLayoutError: It has another number of dimensions.
    """
    if pool.dim() != 4:
        raise UnsupportedLayoutError(
            f"the KV pool has shape {tuple(pool.shape)}, not [blocks, layers, K and V, elements]"
        )
    tensors = {f"layer.{index}": pool[:, index] for index in range(pool.shape[1])}
    of_layer = {index: [name] for index, name in enumerate(tensors)}
    return LayerTensors(tensors, of_layer, f"one pool, K and V: {pool.shape[2]}")


def split_regions(layout: Any) -> LayerTensors:
    """Split V2's regions into the buffers of layers.

    Raises:
        UnsupportedLayoutError: There are several groups of layers, or a window: their blocks
            cannot be told apart by position, or are gone when they would be stored.
    """
    if len(layout.groups) != 1 or layout.groups[0].window_size is not None:
        windows = [group.window_size for group in layout.groups]
        raise UnsupportedLayoutError(
            f"the KV cache has layer groups with windows {windows}: only one group of full "
            "attention is supported"
        )
    (group,) = layout.groups
    tensors: dict[str, torch.Tensor] = {}
    of_layer: dict[int, list[str]] = {}
    roles: dict[str, None] = {}
    for region in (*group.regions, *getattr(group, "replicated_regions", ())):
        memory = region.as_tensor()
        size, rest = divmod(memory.shape[1], len(region.buffers))
        if rest or any(getattr(buffer, "expansion", 1) != 1 for buffer in region.buffers):
            raise UnsupportedLayoutError(
                f"a region of {memory.shape[1]} bytes has {len(region.buffers)} buffers of "
                "different size"
            )
        for number, buffer in enumerate(region.buffers):
            name = f"layer.{buffer.layer_id}.{buffer.role}"
            tensors[name] = memory[:, number * size : (number + 1) * size]
            of_layer.setdefault(buffer.layer_id, []).append(name)
            roles[str(buffer.role)] = None
    return LayerTensors(tensors, of_layer, f"regions: {'+'.join(roles)}")
