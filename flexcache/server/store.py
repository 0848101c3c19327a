"""Memory and files of one model's cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexcache.cache.tiered_cache import CacheSizes
from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.server.peer_worker import PeerWorkerConfig
from flexcache.storage.compression import Codec, open_compressor
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.shards import KVIdentity, Shards
from flexcache.storage.slot_index import Records
from flexcache.transfer.disk_worker import DiskWorkerConfig
from flexcache.transfer.remote_worker import RemoteWorkerConfig

logger = logging.getLogger(__name__)

_REMOTE_CONCURRENCY = 16  # requests of one op to a store, or files of a directory


class CacheStore:
    """Host pool and SSD files. Nothing is allocated before `open`.

    Args:
        shards: The parts of a block; the host pool has a segment for each rank that stores some.
        sizes: Capacities of the tiers, in blocks.
        memory: Existing memory to use instead of a host pool of its own.

    Attributes:
        segments: The host pool, rank by rank.
        disk_pool: The SSD tier's files; None without such a tier.
        has_packed_slots: Whether blocks are packed on SSD that `load_slots` has found.
    """

    def __init__(
        self,
        config: CacheConfig,
        shards: Shards,
        sizes: CacheSizes,
        memory: Sequence[HostSegment] = (),
    ) -> None:
        self.config = config
        self._shards = shards
        self._sizes = sizes
        self.segments = list(memory)
        self.disk_pool: DiskPool | None = None
        self.has_packed_slots = False

    def open(self) -> None:
        """Make the host pool and open the SSD files.

        Raises:
            ConfigError: A directory is another process's, cannot be used, or is refused.
        """
        config = self.config
        try:
            # Existing memory is that of the first ranks.
            for num_bytes in self._shards.segment_bytes[len(self.segments) :]:
                segment = HostSegment.create(
                    num_bytes, self._sizes.num_host_blocks, config.hugepages
                )
                self.segments.append(segment)
            if self._sizes.num_slots:
                self.disk_pool = DiskPool(
                    config.ssd_cache_dirs,
                    self._shards.stored_bytes,
                    self._sizes.num_slots,
                    on_mismatch=config.ssd_on_mismatch,
                )
        except BaseException:
            self.close()
            raise

    def load_slots(self) -> Records:
        """Return the records of the SSD tier's slots that can be used.

        Raises:
            ConfigError: An index cannot be read, or slots are packed by an unknown codec.
            MissingDependencyError: Slots are packed by a codec whose library is not installed.
        """
        assert self.disk_pool is not None
        records = self.disk_pool.load()
        is_packed = records["filled"] > 0
        if not is_packed.any():
            return records
        # Ranks cannot unpack: each load of such a block would fail.
        if not self._sizes.keeps_on_host or self.config.ssd_past_dram == "always":
            log_event(
                logger, logging.WARNING, "ssd_packed_blocks_not_used", blocks=int(is_packed.sum()),
                reason="ranks read the SSD past DRAM, and only plain blocks",
            )  # fmt: skip
            return records[~is_packed]
        # Fails at the start, rather than at each load of such a block.
        for codec in np.unique(records["codec"][is_packed]).tolist():
            open_compressor(Codec.numbered(codec))
        self.has_packed_slots = True
        return records

    def segment_of(self, rank: int) -> HostSegment:
        return self.segments[self._shards.of_rank(rank)]

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
            **self._worker_config(endpoint, identity),
            data_fds=pool.data_fds,
            index_fds=pool.index_fds,
            pool_id=pool.pool_id,
            era=pool.era,
            slot_bytes=pool.slot_bytes,
            num_slots=pool.num_slots,
            io_engine=config.io_engine,
            sync=config.ssd_sync,
            compression=config.ssd_compression,
        )

    def remote_worker_config(self, endpoint: str, identity: str) -> RemoteWorkerConfig:
        config = self.config
        assert config.remote_url is not None
        return RemoteWorkerConfig(
            **self._worker_config(endpoint, identity),
            shard_bytes=list(self._shards.sizes),
            url=config.remote_url,
            compression=config.remote_compression,
            timeout_s=config.remote_timeout_s,
            concurrency=_REMOTE_CONCURRENCY,
        )

    def peer_worker_config(self, endpoint: str, listen_fd: int, identity: str) -> PeerWorkerConfig:
        return PeerWorkerConfig(
            **self._worker_config(endpoint, identity),
            shard_bytes=list(self._shards.sizes),
            listen_fd=listen_fd,
            curve_keys=self.config.curve_keys,
            timeout_s=self.config.remote_timeout_s,
            rdma_devices=self.config.rdma_devices,
            room_bytes=int(self.config.transfer_chunk_mb * 1e6),
        )

    def _worker_config(self, endpoint: str, identity: str) -> dict[str, Any]:
        """The fields of `WorkerConfig`."""
        return {
            "endpoint": endpoint,
            "identity": identity,
            "segment_fds": self.segment_fds,
            "segment_strides": [segment.stride for segment in self.segments],
            "num_host_blocks": self._sizes.num_host_blocks,
            "log_level": self.config.log_level,
            "log_format": self.config.log_format,
        }

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        for segment in self.segments:
            segment.close()
        self.segments = []
        if self.disk_pool is not None:
            self.disk_pool.close()
            self.disk_pool = None


def other_layout(
    config: CacheConfig, num_blocks: int, found: KVIdentity, wanted: KVIdentity
) -> ConfigError:
    """Return the error for SSD files that hold a model's KV in another layout."""
    # The roots keep the bytes apart in any case: this says that a setting or an upgrade has made
    # the cache cold. Another model's blocks are left to age, since a changed model id (a new
    # revision) must not prevent a start.
    return ConfigError(
        f"ssd_cache_dirs = {':'.join(config.ssd_cache_dirs)!r}: it holds {num_blocks} blocks of KV "
        f"{found.text}; this engine's KV is {wanted.text}. Use another directory, or "
        "set ssd_on_mismatch = clear to drop them"
    )
