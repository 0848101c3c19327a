"""Pools of SGLang on the GPU as tensors of pages in FlexCache's groups, and slots as block ids.

SGLang assembles a `DevicePoolGroup` for the models that its own linkers can store: sparse attention
(DSA), Mamba beside MLA, Mamba beside sliding windows. For the others, its parts are put together
here: one pool of full attention, and beside it sliding windows or Mamba states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler, linker_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MLATokenToKVPool

from flexcache.config.model import KVGroup
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


_GROUPS = ((PoolName.KV, "full"), (PoolName.SWA, "window"), (PoolName.MAMBA, "state"))
"""SGLang's name for whose slots a pool is addressed by, and the kind of group that it is."""


class DevicePages:
    """The pools' tensors by name, in the order in which the model reads them.

    SGLang's pool    rows                              group      a block of it is
    KV, INDEXER      a slot per token, or pages        full       a page
    SWA              a slot per token, other slots     window     a page
    MAMBA            a slot per state                  state      a part of a state (`split_states`)

    A pool has tensors ``[row, ...]`` for each layer. Page ``n`` has the slots from ``n *
    page_size``, so a tensor ``[page, ...]`` is the same memory.

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


Blocks = npt.NDArray[np.int64]
_POOLS = {"full": PoolName.KV, "window": PoolName.SWA, "state": PoolName.MAMBA}
NO_BLOCKS = np.empty(0, dtype=np.int64)
_NOT_WANTED = -1


class PageTables:
    """Tables of one model.

    A node of SGLang's tree has slots of full attention for all its tokens, slots of sliding windows
    for those that some window may still reach, and at its end perhaps one Mamba state. FlexCache
    stores the windows and the state behind a node as one *tail*, at which prompts can be resumed.

    Args:
        groups: As in `DevicePages`.
        to_window: Returns the slots of sliding windows behind slots of full attention; none of them
            where a window has passed. Needed for models with windows.

    Attributes:
        has_tails: Whether prompts can be resumed only where a tail is.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        page_size: int,
        to_window: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._groups = groups or (KVGroup("full", page_size),)
        self._page_size = page_size
        self._to_window = to_window
        self.has_tails = bool(groups)

    def to_load(self, transfers: Sequence[PoolTransfer], num_before: int) -> list[Blocks]:
        """Return the blocks that a load fills, for each group; -1 for pages of a window that the
        GPU has.

        Args:
            transfers: SGLang's, for pages behind the first ``num_before`` of a prompt.
        """
        slots = {transfer.name: transfer.device_indices for transfer in transfers}
        end = num_before + len(slots[PoolName.KV]) // self._page_size
        tables = []
        for group in self._groups:
            blocks = self._blocks(group, slots[_POOLS[group.kind]])
            if not group.is_dense:
                num_own = group.num_needed(end * self._page_size) - len(blocks)
                blocks = np.concatenate((np.full(num_own, _NOT_WANTED), blocks))
            tables.append(blocks)
        return tables

    def pages(self, slots: torch.Tensor) -> Blocks:
        """Return the pages of full attention that have these slots."""
        return self._blocks(self._groups[0], slots)

    def tail(
        self, states: Mapping[PoolName, torch.Tensor], slots: torch.Tensor, end: int
    ) -> list[Blocks] | None:
        """Return the blocks of the tail behind a prompt's first ``end`` pages, for each group but
        the first; None if some of it is gone.

        Args:
            states: The slot of the state there, if SGLang has it, under the name of its pool.
            slots: Of full attention, up to there; at least those of the longest window.
        """
        tables = []
        for group in self._groups[1:]:
            count = group.num_needed(end * self._page_size)
            if group.kind == "state":
                found = states.get(PoolName.MAMBA)
            else:
                assert self._to_window is not None
                found = self._to_window(slots[len(slots) - count * self._page_size :])
            if found is None or bool((found <= 0).any()):  # the first slot is never in use
                return None
            tables.append(self._blocks(group, found))
        return tables

    def num_window_pages(self, end: int) -> int:
        """Return how many pages before the end of a prompt's first ``end`` its windows reach."""
        windows = (group for group in self._groups if group.kind == "window")
        return max((group.num_needed(end * self._page_size) for group in windows), default=0)

    def _blocks(self, group: KVGroup, slots: torch.Tensor) -> Blocks:
        rows: Blocks = slots.cpu().numpy().astype(np.int64)
        if group.kind != "state":
            return rows[:: self._page_size] // self._page_size
        parts = group.blocks_per_state
        return (rows[:, None] * parts + np.arange(parts)).ravel()
