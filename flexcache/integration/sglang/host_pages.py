"""HiCache's host pool as tensors of pages, read off the pointers that it hands out.

A page has one or several pieces, which may lie anywhere in the pool:

    page_first_direct   page 0: K, V     of all layers
    layer_first         page 0: K, V     of layer 0, of layer 1, ...
    MLA                 page 0: the latent vectors of all layers

Whatever the layout, a piece of the next page is a fixed distance further on. So each piece becomes
a tensor ``[page, byte]`` over the pool's own memory, and nothing is copied on the way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from flexcache.errors import UnsupportedLayoutError


def page_tensors(pool: Any) -> dict[str, torch.Tensor]:
    """Return the pool's pieces of pages by name; page ``n`` has the slots from ``n * page_size``.

    Raises:
        UnsupportedLayoutError: Pages do not lie at fixed distances.
    """
    num_pages = pool.size // pool.page_size
    starts, sizes = _pieces(pool, 0)
    seconds, _ = _pieces(pool, 1) if num_pages > 1 else (starts, sizes)
    lasts, _ = _pieces(pool, num_pages - 1)
    strides = [second - start for start, second in zip(starts, seconds, strict=True)]
    expected = [
        start + stride * (num_pages - 1) for start, stride in zip(starts, strides, strict=True)
    ]
    if expected != lasts or (num_pages > 1 and any(map(int.__lt__, strides, sizes))):
        raise UnsupportedLayoutError(
            f"{type(pool).__name__} with layout {pool.layout!r}: its pages do not lie at fixed "
            "distances"
        )
    return {
        f"piece {number}": _view(start, num_pages, stride, size)
        for number, (start, stride, size) in enumerate(zip(starts, strides, sizes, strict=True))
    }


def describe_pool(pool: Any) -> str:
    """Name what determines the order of a page's bytes."""
    return f"{type(pool).__name__} {pool.layout} {pool.dtype}"


def _pieces(pool: Any, page: int) -> tuple[list[int], list[int]]:
    """Return the addresses and sizes of a page's pieces."""
    first = page * pool.page_size
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(first, first + pool.page_size))
    return [int(address) for address in addresses], [int(size) for size in sizes]


def _view(start: int, num_pages: int, stride: int, size: int) -> torch.Tensor:
    """Return memory that the pool keeps mapped as ``[page, byte]``."""
    length = stride * (num_pages - 1) + size
    memory = (ctypes.c_uint8 * length).from_address(start)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((num_pages, size), (stride, 1))
