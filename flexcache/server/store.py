"""What a server holds for one model: memory, files, and the task engine over them."""

from __future__ import annotations

import os

from flexcache.cache.planner import GlobalCacheEngine
from flexcache.cache.tier import Tier
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.ids import TierName
from flexcache.storage.alignment import align_up
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.task import KVTaskEngine
from flexcache.transfer.workers.disk import DiskWorkerConfig


class CacheStore:
    """The tiers of one model, sized by the config. Nothing is allocated before `open`.

    Raises:
        ConfigError: A size does not fit the model or the machine.
    """

    def __init__(self, model: ModelConfig, config: CacheConfig) -> None:
        self.model = model
        self.config = config
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self.block_bytes_per_rank = config.tokens_per_block * model.token_size_in_bytes_per_rank
        self.block_bytes = self.block_bytes_per_rank * model.num_kv_copies
        stored_bytes = align_up(self.block_bytes_per_rank) * model.num_kv_copies
        self._num_host_blocks = config.cpu_blocks_for(stored_bytes)
        self._num_slots = config.ssd_blocks_for(stored_bytes)
        self._check_memory(stored_bytes * self._num_host_blocks)
        self.engine = self._make_engine()
        self.segments: list[HostSegment] = []
        self.disk_pool: DiskPool | None = None

    def _check_memory(self, wanted: int) -> None:
        """A pool beyond the machine's memory would end some process without a word."""
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > installed:
            raise ConfigError(
                f"the DRAM tier of {wanted / 1e9:.1f} GB is larger than this machine's memory, "
                f"{installed / 1e9:.1f} GB: lower cpu_cache_gb or num_cpu_blocks"
            )

    def _make_engine(self) -> KVTaskEngine:
        tiers = [Tier(TierName.CPU, self._num_host_blocks)]
        if self._num_slots:
            tiers.append(Tier(TierName.SSD, self._num_slots))
        config = self.config
        chunk_blocks = max(1, int(config.transfer_chunk_mb * 1e6) // self.block_bytes)
        # Blocks that wait to be written below are pinned: an eighth stays for gets to stage in.
        max_store_backlog = max(1, self._num_host_blocks - self._num_host_blocks // 8)
        return KVTaskEngine(
            GlobalCacheEngine(tiers, chunk_blocks, max_store_backlog),
            block_bytes=self.block_bytes,
            load_ranks=range(self.model.tp_size),
            store_ranks=range(self.model.num_kv_copies),
            op_timeout_s=config.op_timeout_s,
            match_ttl_s=config.match_ttl_s,
            max_open_tasks=config.max_open_tasks,
        )

    def open(self) -> None:
        """Make the host pool and open the SSD files.

        Raises:
            ConfigError: A directory is another process's, or cannot be used.
        """
        try:
            self.segments = [
                HostSegment.create(self.block_bytes_per_rank, self._num_host_blocks)
                for _ in range(self.model.num_kv_copies)
            ]
            if self._num_slots:
                self.disk_pool = DiskPool(
                    self.config.ssd_cache_dirs,
                    sum(segment.stride for segment in self.segments),
                    self._num_slots,
                    self.config.direct_io,
                )
        except BaseException:
            self.close()
            raise

    def segment_of(self, tp_rank: int) -> HostSegment:
        return self.segments[tp_rank if len(self.segments) > 1 else 0]

    @property
    def inherited_fds(self) -> list[int]:
        """Descriptors that the disk worker needs."""
        files = self.disk_pool.fds if self.disk_pool is not None else []
        return [segment.fd for segment in self.segments] + files

    def disk_worker_config(self, endpoint: str, identity: str) -> DiskWorkerConfig:
        pool, config = self.disk_pool, self.config
        assert pool is not None
        return DiskWorkerConfig(
            endpoint=endpoint,
            identity=identity,
            segment_fds=[segment.fd for segment in self.segments],
            segment_stride=self.segments[0].stride,
            num_host_blocks=self._num_host_blocks,
            file_fds=pool.fds,
            file_bytes=-(-self._num_slots // len(pool.fds)) * pool.slot_bytes,
            slot_bytes=pool.slot_bytes,
            io_engine=config.io_engine,
            queue_depth=config.ssd_queue_depth,
            log_level=config.log_level,
        )

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        for segment in self.segments:
            segment.close()
        self.segments = []
        if self.disk_pool is not None:
            self.disk_pool.close()
            self.disk_pool = None
