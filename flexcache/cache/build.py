"""Wires a cache from its settings: tiers, eviction, write policies, load cost and journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from flexcache.cache.admission import make_admission
from flexcache.cache.eviction import make_forecaster
from flexcache.cache.eviction_queue import Ranking
from flexcache.cache.load_cost import LoadCost
from flexcache.cache.load_ways import LoadWays
from flexcache.cache.quotas import Quotas
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.reuse_watch import ReuseWatch
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache, number_ops
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_back import DirtyQueue
from flexcache.cache.write_budget import WriteBudget
from flexcache.config import CacheConfig
from flexcache.config.model import UnitShape
from flexcache.config.quotas import blocks_of
from flexcache.ids import OpId, TierName

_UNFED_CHUNKS = 4  # copied by one op if no tier feeds another
_STAGING_CHUNKS = 8  # held by a host tier that only stages


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of a cache, in blocks.

    Attributes:
        num_slots: Slots of the SSD tier; 0 for none.
        chunk_blocks: Blocks that one op moves if one tier feeds another.
        max_store_backlog: Host blocks that may wait to be written below.
        keeps_on_host: Whether the host tier is a cache; else it only stages.
        stored_bytes: Bytes that a block takes in a tier.
        host_quotas: Blocks that each tenant is sure of, by name; empty if all share everything.
        ssd_quotas: Likewise.
    """

    num_host_blocks: int
    num_slots: int
    chunk_blocks: int
    max_store_backlog: int
    keeps_on_host: bool = True
    stored_bytes: int = 1
    host_quotas: Mapping[str, int] = field(default_factory=dict)
    ssd_quotas: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def for_blocks(cls, config: CacheConfig, block_bytes: int, stored_bytes: int) -> CacheSizes:
        """Convert the sizes of a config.

        Args:
            block_bytes: KV bytes of a block, over all ranks.
            stored_bytes: Aligned size of a block in a tier.

        Raises:
            ConfigError: A tier has no room for one block, or for what is promised of it.
        """
        # With no tier to feed, an op must only be short enough that loads do not wait long for it.
        num_chunks = 1 if config.has_workers else _UNFED_CHUNKS
        chunk_bytes = int(config.transfer_chunk_mb * 1e6 * num_chunks)
        chunk_blocks = max(1, chunk_bytes // block_bytes)
        num_host_blocks = config.cpu_blocks_for(stored_bytes)
        num_slots = config.ssd_blocks_for(stored_bytes)
        host_quotas = blocks_of(config.quotas, "dram", num_host_blocks, stored_bytes)
        keeps_on_host = num_host_blocks > 0
        if not keeps_on_host:
            num_host_blocks = _STAGING_CHUNKS * chunk_blocks
        return cls(
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            chunk_blocks=chunk_blocks,
            # Blocks that wait to be written are pinned: an eighth remains for gets to stage in.
            max_store_backlog=max(1, num_host_blocks - num_host_blocks // 8),
            keeps_on_host=keeps_on_host,
            stored_bytes=stored_bytes,
            host_quotas=host_quotas,
            ssd_quotas=blocks_of(config.quotas, "ssd", num_slots, stored_bytes),
        )


def build_cache(
    config: CacheConfig, sizes: CacheSizes, shape: UnitShape | None = None,
    op_ids: Iterator[OpId] | None = None,
) -> TieredCache:  # fmt: skip
    """Build an empty cache with the tiers that the sizes and ``remote_url`` name.

    Args:
        shape: How the blocks of several groups fill the cache's units; None for a single group.
        op_ids: Numbers the ops; those of a cache that this one succeeds may still be reported.
    """
    op_ids = number_ops() if op_ids is None else op_ids
    forecaster = make_forecaster(config.eviction_policy, config.tokens_per_block)

    def ranking(capacity: int) -> Ranking | None:
        return None if forecaster is None else forecaster.ranking(capacity)

    num_host_blocks = sizes.num_host_blocks
    # Blocks pass through the host to the tiers below: it takes them all if there are any.
    keep_s = config.retention_s
    tiers = [
        Tier(
            TierName.CPU, num_host_blocks, ranking(num_host_blocks), not config.has_workers,
            _quotas(num_host_blocks, sizes.host_quotas), keep_s,
        )
    ]  # fmt: skip
    policies: dict[TierName, str] = {}
    if sizes.num_slots:
        refuses = config.ssd_write_policy == "density"
        quotas = _quotas(sizes.num_slots, sizes.ssd_quotas)
        num_slots = sizes.num_slots
        tiers.append(Tier(TierName.SSD, num_slots, ranking(num_slots), refuses, quotas, keep_s))
        policies[TierName.SSD] = config.ssd_write_policy
    if config.remote_url is not None:
        known = config.remote_index_blocks
        refuses = config.remote_write_policy == "density"
        remote_ranking = ranking(known) if refuses else None
        absent_s = config.remote_absent_ttl_s
        tiers.append(RemoteTier(absent_s, known, remote_ranking, refuses, keep_s))
        policies[TierName.REMOTE] = config.remote_write_policy
    capacities = {TierName.SSD: sizes.num_slots}
    limits = {TierName.SSD: config.ssd_write_mb_s, TierName.REMOTE: config.remote_write_mb_s}
    max_dirty = int(config.write_back_max_dirty * sizes.num_host_blocks)
    admissions = {
        name: make_admission(policy, capacities.get(name), config.write_min_sightings)
        for name, policy in policies.items()
        if policy != "write_back"
    }
    ordered, reuse = Tiers(tiers, forecaster), None
    if _skips_useless_writes(config, sizes):
        reuse = ReuseWatch(ordered)
        admissions[TierName.SSD] = reuse
    cache = TieredCache(
        ordered,
        sizes.chunk_blocks,
        sizes.max_store_backlog,
        admissions=admissions,
        write_back={
            name: DirtyQueue(max_dirty)
            for name, policy in policies.items()
            if policy == "write_back"
        },
        ways=LoadWays(config.ssd_past_dram if sizes.keeps_on_host else "always"),
        load_cost=LoadCost() if config.skip_slow_loads else None,
        shape=shape,
        early_load_share=config.early_load_share,
        early_load_ttl_s=config.match_ttl_s,
        keeps_on_host=sizes.keeps_on_host,
        write_budgets={
            name: WriteBudget(rate * 1e6, sizes.stored_bytes)
            for name, rate in limits.items()
            if name in policies and rate is not None
        },
        reuse=reuse,
        op_ids=op_ids,
    )
    cache.remake = partial(build_cache, config, sizes, shape, op_ids)
    if config.records_changes:
        cache.keep_journal(config.tokens_per_block)
    return cache


def _skips_useless_writes(config: CacheConfig, sizes: CacheSizes) -> bool:
    """Whether to judge by `ReuseWatch`: it counts on DRAM for what returns soon, and one tenant's
    prompts must not cost another what it is sure of."""
    applies = config.ssd_write_policy == "write_through" and sizes.keeps_on_host
    return config.skip_useless_ssd_writes and applies and sizes.num_slots > 0 and not config.quotas


def _quotas(capacity: int, quotas: Mapping[str, int]) -> Quotas | None:
    return Quotas(capacity, quotas) if quotas else None
