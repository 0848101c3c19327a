"""What a server holds for one model: memory, files, and the task engine over them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from flexcache.cache.build import CacheSizes, build_cache
from flexcache.cache.tier import Lease
from flexcache.cache.tiers import Tiers
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError, StorageError
from flexcache.ids import TierName
from flexcache.logs import log_event
from flexcache.storage.alignment import align_up
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.kv_identity import KVIdentity
from flexcache.storage.memory_limit import check_pool_fits
from flexcache.storage.remote import check_packages
from flexcache.tasks.engine import KVTaskEngine
from flexcache.transfer.workers.disk import DiskWorkerConfig
from flexcache.transfer.workers.remote import RemoteWorkerConfig

logger = logging.getLogger(__name__)


_REPLACE_AFTER_S = 1.0  # a remote worker that has not said by then that its store is late


@dataclass(slots=True)
class Clearing:
    """A tier that was cleared, and its records that are still on SSD.

    No task receives its free slots, which may have records of evicted blocks, until the records
    are gone.
    """

    num_dropped: int
    _tiers: Tiers | None = None
    _withheld: Lease | None = None
    _pool: DiskPool | None = None

    @property
    def needs_work(self) -> bool:
        return self._pool is not None

    def work(self) -> None:
        """Erase the records for good: may take seconds, and needs no lock.

        Raises:
            OSError: A restart may bring back what was cleared.
        """
        if self._pool is not None and self._withheld is not None:
            self._pool.erase(self._withheld.blocks)

    def end(self, error: OSError | None) -> int:
        """Return how many blocks were dropped. Call once.

        Raises:
            StorageError: ``work`` failed.
        """
        if self._tiers is not None and self._withheld is not None:
            self._tiers.give_back(TierName.SSD, self._withheld)
        if error is not None:
            raise StorageError(
                "the SSD tier is empty now, but not for good: "
                f"its index cannot be written ({error})"
            )
        return self.num_dropped


class CacheStore:
    """The tiers of one model, sized by the config. Nothing is allocated before `open`.

    Raises:
        ConfigError: A size does not fit the model or the machine.
        MissingDependencyError: The remote store needs a package that is not installed.
    """

    def __init__(self, model: ModelConfig, config: CacheConfig) -> None:
        self.model = model
        self.config = config
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self.block_bytes_per_rank = config.tokens_per_block * model.token_size_in_bytes_per_rank
        self.block_bytes = self.block_bytes_per_rank * model.num_kv_copies
        stored_bytes = align_up(self.block_bytes_per_rank) * model.num_kv_copies
        sizes = CacheSizes.for_blocks(config, self.block_bytes, stored_bytes)
        self._num_host_blocks, self._num_slots = sizes.num_host_blocks, sizes.num_slots
        if config.remote_url is not None:
            check_packages(config.remote_url, config.remote_compression)
        self._check_memory(stored_bytes * self._num_host_blocks)
        try:
            self.engine = self._make_engine(sizes)
        except MemoryError:
            raise ConfigError(
                f"{self._num_host_blocks} blocks in DRAM and {self._num_slots} on SSD: their index "
                "does not fit into memory; lower the sizes"
            ) from None
        self.segments: list[HostSegment] = []
        self.disk_pool: DiskPool | None = None
        self.layout: str | None = None
        """How the ranks lay out the bytes of a block; None until the first has registered."""

    def _check_memory(self, wanted: int) -> None:
        """Control groups do not count reserved huge pages."""
        check_pool_fits(wanted, in_control_group=self.config.hugepages != "reserved")

    def _make_engine(self, sizes: CacheSizes) -> KVTaskEngine:
        config = self.config
        return KVTaskEngine(
            build_cache(config, sizes),
            block_bytes=self.block_bytes,
            load_ranks=range(self.model.tp_size),
            store_ranks=range(self.model.num_kv_copies),
            op_timeout_s=config.op_timeout_s,
            remote_timeout_s=config.remote_timeout_s + _REPLACE_AFTER_S,
            lookup_timeout_s=config.remote_lookup_timeout_s,
            match_ttl_s=config.match_ttl_s,
            max_open_tasks=config.max_open_tasks,
        )

    def open(self) -> None:
        """Make the host pool, open the SSD files and index what they hold already.

        Raises:
            ConfigError: A directory is another process's, cannot be used, or is refused.
        """
        try:
            self.segments = [
                HostSegment.create(
                    self.block_bytes_per_rank, self._num_host_blocks, self.config.hugepages
                )
                for _ in range(self.model.num_kv_copies)
            ]
            if self._num_slots:
                self.disk_pool = DiskPool(
                    self.config.ssd_cache_dirs,
                    sum(segment.stride for segment in self.segments),
                    self._num_slots,
                    self.config.direct_io,
                    self.config.ssd_on_mismatch,
                )
                self._restore(self.disk_pool)
        except BaseException:
            self.close()
            raise

    def _restore(self, pool: DiskPool) -> None:
        started = time.monotonic()
        report = self.engine.restore(pool.load())
        found = pool.identity
        if found is not None and report.num_restored and found.model == self._identity("").model:
            self.engine.adopt_layout(found.layout, started)  # until a rank says otherwise
        if report.num_restored or report.num_dropped:
            log_event(
                logger,
                logging.INFO,
                "ssd_restored",
                blocks=report.num_restored,
                useless_blocks=report.num_dropped,
                seconds=time.monotonic() - started,
            )

    def _identity(self, layout: str) -> KVIdentity:
        return KVIdentity.of(self.fingerprint, layout)

    def adopt_layout(self, layout: str, now: float) -> Clearing | None:
        """Keep blocks of this layout from now on; no rank of another one may be serving.

        Blocks of another layout are not found any more, and found again when their layout is back.

        Returns:
            What is left to be done where the SSD tier was cleared of another layout's blocks.

        Raises:
            ConfigError: The SSD tier holds blocks of this model in another layout, and
                ``ssd_on_mismatch`` is ``refuse``.
        """
        identity, clearing = self._identity(layout), None
        if layout == self.layout:
            return None
        if self.disk_pool is not None and self.disk_pool.identity != identity:
            clearing = self._give_ssd_to(identity, self.disk_pool)
        self.engine.adopt_layout(identity.layout, now)
        self.layout = layout
        return clearing

    def _give_ssd_to(self, identity: KVIdentity, pool: DiskPool) -> Clearing | None:
        former, ssd = pool.identity, self.engine.cache.tiers.by_name[TierName.SSD]
        if former is not None and (former.model != identity.model or not ssd.index.num_blocks):
            former = None  # another model's blocks leave as room is needed
        if former is not None and self.config.ssd_on_mismatch == "refuse":
            directories = ":".join(self.config.ssd_cache_dirs)
            raise ConfigError(
                f"ssd_cache_dirs = {directories!r}: it holds {ssd.index.num_blocks} blocks of KV "
                f"{former.text}; this engine's KV is {identity.text}. Use another directory, or "
                "set ssd_on_mismatch = clear to drop them"
            )
        try:
            pool.adopt(identity)
        except OSError as error:  # the roots keep layouts apart; a restart finds what is recorded
            log_event(
                logger, logging.WARNING, "ssd_layout_not_recorded", error=error,
                effect="a restart may refuse this layout, or look for the former one first",
            )  # fmt: skip
        if former is None:
            return None
        log_event(
            logger, logging.WARNING, "ssd_layout_cleared", found=former.text, now=identity.text
        )
        return self.clear(ssd.name.value)

    def clear(self, tier: str | None) -> Clearing:
        """Drop the unheld blocks of one tier, or of all.

        After a clear of all tiers nothing stored is recorded any more: the model's weights may have
        changed under the same name, and a restart may change them back.

        Raises:
            ValueError: There is no such tier.
        """
        cache, tiers = self.engine.cache, self.engine.cache.tiers
        num_dropped = sum(len(blocks) for blocks in tiers.clear(tier).values())
        log_event(logger, logging.INFO, "tier_cleared", tier=tier or "all", blocks=num_dropped)
        if self.engine.accounts.recorder is not None:
            self.engine.accounts.recorder.cleared(tier, num_dropped)
        if tier is None:
            cache.stores.is_recording = False
        if self.disk_pool is None or tier not in (None, TierName.SSD.value):
            return Clearing(num_dropped)
        return Clearing(num_dropped, tiers, tiers.withhold_free(TierName.SSD), self.disk_pool)

    def segment_of(self, tp_rank: int) -> HostSegment:
        return self.segments[tp_rank if len(self.segments) > 1 else 0]

    @property
    def segment_fds(self) -> list[int]:
        """Descriptors of the host pool, which every worker maps."""
        return [segment.fd for segment in self.segments]

    @property
    def inherited_fds(self) -> list[int]:
        """Descriptors that the disk worker needs."""
        pool = self.disk_pool
        files = [] if pool is None else pool.data_fds + pool.index_fds
        return self.segment_fds + files

    def disk_worker_config(self, endpoint: str, identity: str) -> DiskWorkerConfig:
        pool, config = self.disk_pool, self.config
        assert pool is not None
        return DiskWorkerConfig(
            endpoint=endpoint,
            identity=identity,
            segment_fds=[segment.fd for segment in self.segments],
            segment_stride=self.segments[0].stride,
            num_host_blocks=self._num_host_blocks,
            data_fds=pool.data_fds,
            index_fds=pool.index_fds,
            pool_id=pool.pool_id,
            slot_bytes=pool.slot_bytes,
            num_slots=pool.num_slots,
            io_engine=config.io_engine,
            queue_depth=config.ssd_queue_depth,
            log_level=config.log_level,
            log_format=config.log_format,
            sync=config.ssd_sync,
        )

    def remote_worker_config(self, endpoint: str, identity: str) -> RemoteWorkerConfig:
        config = self.config
        assert config.remote_url is not None
        return RemoteWorkerConfig(
            endpoint=endpoint,
            identity=identity,
            segment_fds=[segment.fd for segment in self.segments],
            segment_stride=self.segments[0].stride,
            num_host_blocks=self._num_host_blocks,
            block_bytes=self.block_bytes_per_rank,
            url=config.remote_url,
            compression=config.remote_compression,
            timeout_s=config.remote_timeout_s,
            concurrency=config.remote_concurrency,
            log_level=config.log_level,
            log_format=config.log_format,
        )

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        for segment in self.segments:
            segment.close()
        self.segments = []
        if self.disk_pool is not None:
            self.disk_pool.close()
            self.disk_pool = None
