"""Copies between SGLang's device pool and HiCache's host pool (``--hicache-io-backend direct``).

The arguments are those of the compiled functions. Indices name tokens; a page's are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between pools that are both ordered by layer (``layer_first``)."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst.index_copy_(0, dst_indices, src.index_select(0, src_indices))


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from host pages ``[page, layer, token, ...]`` to the device's tokens."""
    pages = _pages(src_indices, page_size)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device.index_copy_(0, dst_indices, host[pages, layer_id].flatten(0, 1))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers, K's before V's, to host pages ``[page, layer, token, ...]``."""
    pages = _pages(dst_indices, page_size)
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, device in enumerate(src_ptrs):
        part, layer = divmod(number, num_layers)
        tokens = device.index_select(0, src_indices)
        dst_ptrs[part][pages, layer] = tokens.unflatten(0, (-1, page_size))


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices[::page_size] // page_size
