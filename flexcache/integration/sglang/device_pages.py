"""DevicePages: SGLang's pools on the GPU as tensors of pages, in FlexCache's groups.

    SGLang's pool    rows                              group      a block of it is
    KV, INDEXER      a slot per token, or pages        full       a page
    SWA              a slot per token, other slots     window     a page
    MAMBA            a slot per state                  state      a part of a state (`split_states`)

A pool has tensors ``[row, ...]`` for each layer. Page ``n`` has the slots from ``n * page_size``,
so a tensor ``[page, ...]`` is the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from flexcache.config.model import KVGroup
from flexcache.integration.sglang.pool_groups import resolve_pool_group

_GROUPS = ((PoolName.KV, "full"), (PoolName.SWA, "window"), (PoolName.MAMBA, "state"))
"""SGLang's name for whose slots a pool is addressed by, and the kind of group that it is."""


class DevicePages:
    """The pools' tensors by name, in the order in which the model reads them.

    Attributes:
        groups: FlexCache's groups, in the order of `group_names`; empty for full attention alone.
        group_names: Names of the tensors in each of them.
        num_blocks: Blocks of each of them.
        names_by_layer: The tensors that each layer reads.
        pools: SGLang's pools, by SGLang's names.
        is_replicated: Whether the tensor-parallel ranks hold the same KV.

    Raises:
        ConfigError: The model has pools that are not supported, which it names.
    """

    def __init__(self, params: Any, components: set[Any]) -> None:
        pool_group = resolve_pool_group(params, components)
        self.pools: dict[PoolName, Any] = dict(pool_group.entry_map)
        self.is_replicated: bool = pool_group.rank_replicated
        self.tensors: dict[str, torch.Tensor] = {}
        self.names_by_layer: dict[int, list[str]] = {}
        self.group_names: list[list[str]] = []
        self.num_blocks: list[int] = []
        kinds: list[str] = []
        for source, kind in _GROUPS:
            entries = [e for e in pool_group.entries if e.indices_from_pool is source]
            if entries:
                self._add_group(entries)
                kinds.append(kind)
        blocks_per_state = self._split_states(kinds.index("state")) if "state" in kinds else 1
        self.groups = _groups(kinds, params, blocks_per_state) if len(kinds) > 1 else ()
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.num_layers = len(self.names_by_layer)
        self.dtype: torch.dtype = pool.dtype
        self.bytes_per_token = self._block_bytes(0) // params.page_size
        names = " ".join(type(entry.device_pool).__name__ for entry in pool_group.entries)
        self.description = f"{names} {pool.dtype}"

    def _add_group(self, entries: Sequence[Any]) -> None:
        """Add the tensors of pools that are addressed by the same slots."""
        pages = [named for entry in entries for named in _pages_of(entry)]
        num_pages = min(tensor.shape[0] for _, _, tensor in pages)
        pages.sort(key=lambda named: named[0])  # by layer
        for layer, name, tensor in pages:
            self.tensors[name] = tensor[:num_pages]
            self.names_by_layer.setdefault(layer, []).append(name)
        self.group_names.append([name for _, name, _ in pages])
        self.num_blocks.append(num_pages)

    def _split_states(self, number: int) -> int:
        """Let a state be several blocks, none larger than a page of KV; return how many."""
        names = self.group_names[number]
        parts = split_states([self.tensors[name] for name in names], self._block_bytes(0))
        for name in names:
            state = self.tensors[name]
            self.tensors[name] = state.view(state.shape[0] * parts, -1)
        self.num_blocks[number] *= parts
        return parts

    def _block_bytes(self, number: int) -> int:
        return sum(self.tensors[name][0].nbytes for name in self.group_names[number])


def split_states(states: Sequence[torch.Tensor], page_bytes: int) -> int:
    """Return into how many equal parts states ``[slot, ...]`` are split, so that a part of all of
    them is no larger than a page; as many as possible if none are enough."""
    possible = math.gcd(*(state[0].numel() for state in states))
    wanted = -(-sum(state[0].nbytes for state in states) // page_bytes)
    parts = range(wanted, possible + 1)
    return next((count for count in parts if possible % count == 0), possible)


def _pages_of(entry: Any) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield a pool's tensors ``[page, ...]``: the layer that reads it, a name, the tensor."""
    for layer, mapped in entry.layer_mapping.items():
        numbers = [mapped] if isinstance(mapped, int) else mapped
        for place, (component, meta) in enumerate(
            zip(entry.components, entry.buffer_meta, strict=True)
        ):
            for number in numbers:
                buffer, (_, _, page_bytes) = component[number], meta[number]
                name = f"{layer}.{entry.name.value}.{place}.{number}"
                yield layer, name, _as_pages(buffer, page_bytes // buffer[0].nbytes)


def _as_pages(buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    num_pages = buffer.shape[0] // rows_per_page
    return buffer[: num_pages * rows_per_page].unflatten(0, (num_pages, rows_per_page))


def _groups(kinds: Sequence[str], params: Any, blocks_per_state: int) -> tuple[KVGroup, ...]:
    size = params.page_size
    by_kind = {
        "full": KVGroup("full", size),
        "window": KVGroup("window", size, (params.swa_retain_window or 0) + 1),
        "state": KVGroup("state", size, blocks_per_state=blocks_per_state),
    }
    return tuple(by_kind[kind] for kind in kinds)
