"""A rank of SGLang, and its share of the cache.

SGLang's ranks look up, load and store by themselves, and agree afterwards: a prefix counts as found
if every rank has it. So each rank has a cache of its own, with its share of the configured sizes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexcache.config import CacheConfig
from flexcache.config.values import reject


@dataclass(frozen=True)
class Rank:
    """One of an engine's ranks.

    Attributes:
        part: The part of the model's KV that it holds; empty for all of it.
        name: Distinguishes it from ranks with other KV; empty if there are none.
        index: Its place among them.
        count: How many ranks share the configured sizes.
        num_replicas: How many ranks hold the same KV, and share a cache.
        stores: Whether it stores what they hold; all of them load it.
    """

    part: str = ""
    name: str = ""
    index: int = 0
    count: int = 1
    num_replicas: int = 1
    stores: bool = True

    @property
    def has_peers(self) -> bool:
        """Whether other ranks must decide alike."""
        return self.count > 1 or self.num_replicas > 1


def read_rank(parallel: Any, num_replicas: int, is_replicated: bool) -> Rank:
    """Return the rank that this process is.

    Args:
        parallel: SGLang's ``get_parallel()``.
        num_replicas: Data-parallel schedulers of the engine.
        is_replicated: Whether the tensor-parallel ranks hold the same KV (MLA).
    """
    part = {
        "pp": (parallel.pp_rank, parallel.pp_size),
        "cp": (parallel.attn_cp_rank, parallel.attn_cp_size),
        "tp": (0, 1) if is_replicated else (parallel.attn_tp_rank, parallel.attn_tp_size),
    }
    whole = {
        "dp": (parallel.dp_rank or 0, num_replicas),
        "pp": part["pp"],
        "tp": (0, 1) if is_replicated else (parallel.tp_rank, parallel.tp_size),
    }
    index, count = 0, 1
    for rank, size in whole.values():
        index, count = index * size + rank, count * size
    return Rank(
        " ".join(f"{kind} {rank} of {size}" for kind, (rank, size) in part.items() if size > 1),
        "-".join(f"{kind}{rank}" for kind, (rank, size) in whole.items() if size > 1),
        index,
        count,
        parallel.attn_tp_size if is_replicated else 1,
        not is_replicated or parallel.attn_tp_rank == 0,
    )


def all_agree(params: Any, answer: bool) -> bool:
    """Return whether every rank that looks prompts up alike says yes. Each of them must ask.

    Args:
        params: SGLang's ``CacheInitParams``.
    """
    return bool(_least(int(answer), lookup_groups(params)))


def common_seed(groups: Sequence[Any]) -> str:
    """Return something random that all ranks of these groups have alike. Each of them must ask."""
    return f"{_least(secrets.randbits(62), groups):x}"


def lookup_groups(params: Any) -> list[Any]:
    """Return SGLang's groups of ranks that look prompts up alike."""
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and torch.distributed.get_world_size(group) > 1
    ]
    return groups or [params.tp_cache_group]


def _least(value: int, groups: Sequence[Any]) -> int:
    vote = torch.tensor([value], dtype=torch.int64)
    for group in groups:
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group)
    return int(vote.item())


def read_cache_config(
    extra: dict[str, Any], page_size: int, rank: Rank, kv_events: bool = False
) -> CacheConfig:
    """Read the rank's share of what ``FLEXCACHE_*`` and SGLang's extra config say; the latter wins.

    Args:
        kv_events: Whether KV events are on by default.

    Raises:
        ConfigError: A setting is unknown or wrong.
    """
    if extra.get("tokens_per_block", page_size) != page_size:
        raise reject(
            "tokens_per_block",
            extra["tokens_per_block"],
            f"must be SGLang's page size, {page_size}; leave it unset",
        )
    defaults = {"kv_events": kv_events, "kv_events_hashes": "int_first"}
    config = CacheConfig.from_env(
        None, defaults, "SGLang's extra config", **{**extra, "tokens_per_block": page_size}
    )
    if rank.num_replicas > 1 and config.endpoint is None:
        raise reject(
            "endpoint",
            None,
            "the ranks of an MLA model hold the same KV, of which one rank stores; give them an "
            "endpoint, where they share a cache",
        )
    return config if rank.count == 1 else _share(config, rank)


def _share(config: CacheConfig, rank: Rank) -> CacheConfig:
    """Divide what the ranks of a host would otherwise all claim."""
    addresses: dict[str, Any] = {
        name: None if (address := getattr(config, name)) is None else _own(name, address, rank)
        for name in ("http_endpoint", "kv_events_endpoint", "kv_events_replay_endpoint")
    }
    endpoint = config.endpoint
    if endpoint is not None and not endpoint.startswith("ipc://"):
        raise reject("endpoint", endpoint, "must be ipc:// with several ranks: each has its own")
    sizes: dict[str, Any] = {
        name: None if (size := getattr(config, name)) is None else size / rank.count
        for name in ("cpu_cache_gb", "ssd_cache_gb")
    }
    return replace(
        config,
        **sizes,
        **addresses,
        ssd_cache_dirs=tuple(str(Path(place) / rank.name) for place in config.ssd_cache_dirs),
        endpoint=None if endpoint is None else f"{endpoint}.{rank.name}",
    )


def _own(name: str, address: str, rank: Rank) -> str:
    """Return a rank's own address: the port plus its index, or a socket file of its name."""
    if address.startswith("ipc://"):
        return f"{address}.{rank.name}"
    host, colon, port = address.rpartition(":")
    if not port.isdecimal():
        raise reject(name, address, "must end with a port, to which each rank adds its number")
    return f"{host}{colon}{int(port) + rank.index}"
