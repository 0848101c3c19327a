"""KV cache groups of a vLLM engine, and a request's block tables for them.

Models with sliding windows, chunked attention or states beside full attention have several. vLLM
tells connectors about their blocks from 0.32 on (`TELLS_GROUPS`); before, FlexCache needs
all layers in one group of full attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.sched import output

from flexcache.config.model import KVGroup
from flexcache.errors import ConfigError

TELLS_GROUPS = hasattr(output, "KVConnectorBlockState")

GroupHooks: Any = base.SupportsHMA if TELLS_GROUPS else object
"""Base class by which vLLM knows that a connector moves several groups: it then keeps them."""


def read_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[KVGroup, ...]:
    """Return the groups that are cached, in vLLM's order (`cached_group_ids`), one at least. Empty
    for an engine with a single group of full attention.

    Raises:
        ConfigError: A group is of a kind that cannot be cached.
    """
    refuse_hisparse(vllm_config)
    all_groups = kv_cache_config.kv_cache_groups
    if not TELLS_GROUPS and len(all_groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in all_groups)
        raise ConfigError(
            f"the model has {len(all_groups)} KV cache groups ({kinds}); with this vLLM, FlexCache "
            "moves one. Set disable_hybrid_kv_cache_manager=True: all layers then share one group"
        )
    groups = tuple(
        _read_group(vllm_config, all_groups[number], len(all_groups) == 1)
        for number in cached_group_ids(kv_cache_config)
    )
    if len(all_groups) == 1 and groups[0].is_dense:
        return ()
    if not TELLS_GROUPS:
        raise ConfigError(f"a model with only {groups[0].kind} layers needs vLLM 0.32 or later")
    if not vllm_config.cache_config.enable_prefix_caching and any(
        group.kind == "state" for group in groups
    ):
        raise ConfigError(
            "enable_prefix_caching = False: vLLM then keeps no state that could be stored; set "
            "--enable-prefix-caching, or run without the connector"
        )
    return groups


def refuse_hisparse(vllm_config: Any) -> None:
    """Raise `ConfigError` if vLLM keeps KV in host memory, and defers what it tells of loads."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        raise ConfigError(
            "HiSparse (attention_config.hisparse_config, or HiSparseConnector) keeps KV in host"
            " memory, which cannot be cached; leave it out, or run without FlexCache"
        )


def cached_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the numbers of the groups that are cached: not those of scratch memory."""
    every = tuple(range(len(kv_cache_config.kv_cache_groups)))
    return tuple(getattr(kv_cache_config, "prefix_cacheable_group_ids", every))


def read_layers(kv_cache_config: Any) -> list[list[str]] | None:
    """Return the names of this rank's layers in each group that is cached, maybe none in some. None
    if all layers are in one group."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return None
    return [groups[number].layer_names for number in cached_group_ids(kv_cache_config)]


def read_head_dim(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> int | None:
    """Return which dimension of all tensors counts KV heads; None if that is not certain, as where
    a backend packs K, V or scales in places of their own."""
    every = {
        name: spec
        for group in kv_cache_config.kv_cache_groups
        for name, spec in _specs_by_layer(group).items()
    }
    heads = {name: getattr(spec, "num_kv_heads", None) for name, spec in every.items()}
    # vLLM's tensors are [block, head, token, content], in whichever order they lie in memory.
    is_certain = all(
        tensor.dim() == 4 and tensor.shape[1] == heads.get(name, tensor.shape[1])
        for name, tensor in kv_caches.items()
    )
    return 1 if is_certain else None


def _specs_by_layer(group: Any) -> Mapping[str, Any]:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict.fromkeys(group.layer_names, group.kv_cache_spec) if per_layer is None else per_layer


def read_position(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the tokens between the positions where prefixes can end: the least common multiple of
    the groups' block sizes, as vLLM's scheduler has it."""
    return math.lcm(
        *(
            _block_size(vllm_config, group.kv_cache_spec)
            for group in kv_cache_config.kv_cache_groups
        )
    )


def read_keys_per_position(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many of vLLM's block hashes make up a position.

    Raises:
        ConfigError: vLLM hashes in units that positions are not made of.
    """
    position = read_position(vllm_config, kv_cache_config)
    hash_size = getattr(kv_cache_config, "hash_block_size", None) or position
    has_one = len(kv_cache_config.kv_cache_groups) == 1
    if position % hash_size or (has_one and hash_size != position):
        raise ConfigError(
            f"vLLM hashes {hash_size} tokens at a time and caches {position}: they must agree"
        )
    return int(position // hash_size)


def layer_specs(group_spec: Any) -> list[Any]:
    """Return the specs of a group's layers; one for all unless their pages differ in size."""
    per_layer = getattr(group_spec, "kv_cache_specs", None)
    return [group_spec] if per_layer is None else list(per_layer.values())


def _read_group(vllm_config: Any, group: Any, is_only_one: bool) -> KVGroup:
    spec = layer_specs(group.kv_cache_spec)[0]
    size, layers = _block_size(vllm_config, group.kv_cache_spec), tuple(group.layer_names)
    if isinstance(spec, specs.SlidingWindowSpec):
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return KVGroup("window", size, window, layers)
    if isinstance(spec, specs.ChunkedLocalAttentionSpec):
        return KVGroup("chunked", size, spec.attention_chunk_size, layers)
    if isinstance(spec, specs.MambaSpec):
        return KVGroup("state", size, 0, layers)
    if isinstance(spec, specs.FullAttentionSpec) or (is_only_one and hasattr(spec, "head_size")):
        return KVGroup("full", size, 0, layers)
    raise ConfigError(f"{type(spec).__name__}: KV of this kind cannot be cached")


def _block_size(vllm_config: Any, group_spec: Any) -> int:
    """Return tokens per block of a group, over all context-parallel ranks."""
    is_sharded = getattr(group_spec, "dcp_sharded", True)  # absent before vLLM 0.32
    parallel = vllm_config.parallel_config
    dcp_size = parallel.decode_context_parallel_size if is_sharded else 1
    return int(group_spec.block_size) * int(dcp_size)


NULL_BLOCK = 0
NOT_WANTED = -1
Tables = Sequence[Sequence[int]]
"""Block ids of one request, per group that vLLM has or, where it says so, that is cached."""


class BlockTables:
    """Reads the tables of one engine.

    vLLM keeps a table of block ids per group. Where a group no longer needs a block (it slid out of
    the window, its state was replaced) the table has the null block.

    Args:
        groups: The cached groups; empty for a single one of full attention.
        group_ids: Their numbers in vLLM.
        tokens_per_position: Tokens between the positions where prefixes can end.

    Attributes:
        has_tails: Whether a prompt can be resumed only where its tail was stored.
        has_states: Whether tails hold states, which only vLLM's hand-off locates.
        has_windows: Whether they hold what windows or chunks need.
    """

    def __init__(
        self, groups: Sequence[KVGroup], group_ids: Sequence[int], tokens_per_position: int
    ) -> None:
        self._groups = groups or (KVGroup("full", tokens_per_position),)
        self._ids = group_ids
        self.has_tails = any(not group.is_dense for group in groups)
        self.has_states = any(group.kind == "state" for group in groups)
        self.has_windows = any(group.kind in ("window", "chunked") for group in groups)
        self.has_groups = bool(groups)

    def select(self, tables: Tables) -> Tables:
        """Return the tables of the cached groups."""
        return [tables[number] for number in self._ids]

    def num_tokens(self, tables: Tables) -> int:
        """Return how many tokens the tables have room for."""
        pairs = zip(self._groups, tables, strict=True)
        return min(len(table) * group.tokens_per_block for group, table in pairs)

    def to_load(self, tables: Tables, start: int, stop: int) -> list[list[int]] | None:
        """Return the blocks for a load of tokens ``[start, stop)``, -1 for those that the engine
        has; None if vLLM has not allocated one that is needed. Here and below, the tables are those
        of the cached groups."""
        wanted = []
        for group, table in zip(self._groups, tables, strict=True):
            size = group.tokens_per_block
            if group.is_dense:
                wanted.append(list(table[start // size : stop // size]))
                continue
            first = group.first_needed(stop)
            blocks = list(table[first : stop // size])
            num_own = min(max(0, start // size - first), len(blocks))
            blocks[:num_own] = [NOT_WANTED] * num_own
            if len(blocks) != group.num_needed(stop) or NULL_BLOCK in blocks:
                return None
            wanted.append(blocks)
        return wanted

    def tail(
        self, tables: Tables, num_tokens: int, states: Mapping[int, int]
    ) -> list[list[int]] | None:
        """Return the blocks of the tail behind ``num_tokens``, none for groups of full attention;
        None if one is gone.

        Args:
            states: Blocks with the states behind so many tokens, by vLLM's number of the group.
        """
        tail: list[list[int]] = []
        for number, group, table in zip(self._ids, self._groups, tables, strict=True):
            if group.is_dense:
                tail.append([])
                continue
            blocks = [states.get(number, NULL_BLOCK)]
            if group.kind != "state":
                size = group.tokens_per_block
                blocks = list(table[group.first_needed(num_tokens) : num_tokens // size])
            if len(blocks) != group.num_needed(num_tokens) or NULL_BLOCK in blocks:
                return None
            tail.append(blocks)
        return tail

    def dense(self, tables: Tables, start: int, stop: int) -> list[list[int]]:
        """Return the blocks of tokens ``[start, stop)``, none for groups with tails."""
        return [
            list(table[start // group.tokens_per_block : stop // group.tokens_per_block])
            if group.is_dense
            else []
            for group, table in zip(self._groups, tables, strict=True)
        ]
