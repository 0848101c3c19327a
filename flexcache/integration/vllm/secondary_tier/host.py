"""TierHost: the thread, the worker processes and the files of one engine's `ChunkTiers`.

vLLM's scheduler calls under a lock and never waits; the thread carries out what follows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

import xxhash
import zmq

from flexcache.cache.restore import restore_tier
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import CacheSizes
from flexcache.config import CacheConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.ids import RootId, TierName
from flexcache.integration.vllm.secondary_tier.chunk_tiers import ChunkTiers
from flexcache.integration.vllm.secondary_tier.lanes import Lanes
from flexcache.integration.vllm.secondary_tier.presence import StorePresence
from flexcache.logs import log_event
from flexcache.protocol.endpoints import EndpointLock, private_endpoint
from flexcache.server.outbox import WorkerInstruction
from flexcache.server.reactor import Reactor
from flexcache.server.store import CacheStore, other_layout
from flexcache.server.workers import WorkerPool
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.kv_identity import KVIdentity
from flexcache.storage.remote import check_packages
from flexcache.storage.shards import Shards
from flexcache.storage.slot_index import Records
from flexcache.tasks.checksums import SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE
from flexcache.transfer.messages import Done, LookedUp, unpack_checksums

logger = logging.getLogger(__name__)

_REPLACE_AFTER_S = 1.0
_STOP_TIMEOUT_S = 5.0


class TierHost:
    """Runs the tiers below a DRAM cache in existing memory.

    Args:
        config: Settings of the tiers; those of a DRAM tier have no meaning.
        memory: The DRAM cache, a block per chunk. Closed with the host.
        identity: What the chunks' bytes mean: equal for interchangeable ones.
        engine_id: Distinguishes engines on this machine.

    Raises:
        ConfigError: A directory is another process's, cannot be used, or is refused; or a limit is
            set that such a tier does not keep.
    """

    def __init__(
        self, config: CacheConfig, memory: HostSegment, identity: KVIdentity, engine_id: str
    ) -> None:
        _refuse_limits(config)
        self._config = config
        self._changed = threading.Condition()
        """Its lock is held wherever the tiers are used; notified when jobs end."""
        self._reactor = Reactor()
        self._instructions: list[WorkerInstruction] = []
        num_slots = config.ssd_blocks_for(memory.stride)
        sizes = CacheSizes(memory.num_blocks, num_slots, 1, 1)
        self._store = CacheStore(config, Shards((memory.stride,)), sizes, [memory])
        self._lock = EndpointLock(private_endpoint(f"offload-{engine_id}"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._store.open()
            self.tiers = self._make_tiers(identity, memory, num_slots)
        except BaseException:
            self._store.close()
            self._context.term()
            self._lock.release()
            raise
        self._owner = _Owner(self.tiers)
        self._pool = WorkerPool(self._reactor, self._owner)
        self._thread = threading.Thread(target=self._run, name="flexcache-offload", daemon=True)

    # -- calls -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start workers and thread; returns at once."""
        self._reactor.open()
        self._pool.bind(self._context, self._lock.worker_endpoint)
        self._pool.add_store_workers(self._store, self._lock.worker_endpoint)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the workers; whether all serve."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pool.missing(), timeout_s)

    @contextlib.contextmanager
    def use(self) -> Iterator[ChunkTiers]:
        """Exclusive use of the tiers; what they decide is carried out afterwards."""
        with self._changed:
            yield self.tiers
            if self._instructions:
                self._reactor.wake()

    def wait_idle(self) -> None:
        """Wait until no job is open. Each op has a deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self.tiers.num_open_jobs)

    def pids(self) -> dict[str, int]:
        """Process id of every worker that runs."""
        return self._pool.pids()

    def close(self) -> None:
        """End the open jobs, stop the workers, give everything back. Idempotent."""
        if self._reactor.stopping:
            return
        self.wait_idle()
        self._reactor.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.close()
        self._context.term()
        self._reactor.close()
        self._store.close()
        self._lock.release()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._reactor.stopping:
                self._turn()
            self._pool.stop(_STOP_TIMEOUT_S)
        except Exception:
            log_event(
                logger, logging.ERROR, "secondary_tier_failed", effect="every chunk is missing",
                exc_info=True,
            )  # fmt: skip
            self._pool.close()
        with self._changed:
            for worker in (DISK, REMOTE):
                self._owner.worker_down(worker, "the tier has ended", time.monotonic())
            self._changed.notify_all()

    def _turn(self) -> None:
        self._pool.start_due(time.monotonic())
        ended = self._reactor.wait(self._next_due)
        now = time.monotonic()
        with self._changed:
            for process_ended in ended:
                process_ended(now)
            self._pool.receive(now)
            self.tiers.tick(now)
            instructions = self._instructions.copy()
            self._instructions.clear()
            self._changed.notify_all()
        for instruction in instructions:
            self._pool.carry_out(instruction)

    def _next_due(self, now: float) -> float | None:
        with self._changed:
            if self._instructions:
                return now
            times = [self._pool.next_start(), self.tiers.next_deadline()]
        return min((moment for moment in times if moment is not None), default=None)

    # -- parts -----------------------------------------------------------------------------------

    def _make_tiers(self, identity: KVIdentity, memory: HostSegment, num_slots: int) -> ChunkTiers:
        config = self._config
        root = RootId(xxhash.xxh3_128_digest(identity.model + identity.layout))
        ssd = presence = None
        if num_slots:
            ssd = Tier(TierName.SSD, num_slots)  # its chunks are no prompts: LRU
        if config.remote_url is not None:
            check_packages(config.remote_url, config.remote_compression)
            presence = StorePresence(
                root, config.remote_index_blocks, config.remote_lookup_timeout_s,
                config.remote_absent_ttl_s, self._instructions,
            )  # fmt: skip
        if ssd is None and presence is None:
            raise ConfigError(
                "no tier below DRAM: set ssd_cache_gb and ssd_cache_dirs, or remote_url"
            )
        timeouts = {
            DISK: config.op_timeout_s,
            REMOTE: config.remote_timeout_s + _REPLACE_AFTER_S,
        }
        checksums = SlotChecksums(num_slots)
        if ssd is not None and self._store.disk_pool is not None:
            records = self._store.load_slots()
            _restore(ssd, checksums, self._store.disk_pool, records, identity, config)
        lanes = Lanes(timeouts, memory.stride, checksums, self._instructions)
        max_storing = max(1, memory.num_blocks // 2)
        return ChunkTiers(root, ssd, presence, lanes, checksums, max_storing)


def _refuse_limits(config: CacheConfig) -> None:
    for name in ("ssd_write_mb_s", "remote_write_mb_s", "retention_s", "quotas"):
        if (value := getattr(config, name)) is not None:
            raise reject(name, value, "not available in a secondary tier of vLLM")


def _restore(
    ssd: Tier, checksums: SlotChecksums, pool: DiskPool, records: Records, identity: KVIdentity,
    config: CacheConfig,
) -> None:  # fmt: skip
    """Index what the files hold already.

    Raises:
        ConfigError: They hold chunks of this model in another layout, and ``ssd_on_mismatch`` is
            ``refuse``.
    """
    found = pool.identity
    if found is not None and found.model == identity.model and found != identity and len(records):
        if config.ssd_on_mismatch == "refuse":
            raise other_layout(config, len(records), found, identity)
        pool.erase(records["slot"])
        records = records[:0]
    pool.adopt(identity)
    checksums.restore(records)
    report = restore_tier(ssd, records)
    if report.num_restored:
        log_event(logger, logging.INFO, "ssd_restored", blocks=report.num_restored)


class _Owner:
    """Passes what happens to workers on to the tiers. Implements `WorkerOwner`."""

    def __init__(self, tiers: ChunkTiers) -> None:
        self._tiers = tiers
        self.counters: Counter[str] = Counter()

    def worker_up(self, worker: str) -> None:
        self._tiers.worker_up(worker)

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        self._tiers.worker_down(worker, reason, now)

    def op_done(self, worker: str, done: Done, now: float) -> None:
        self._tiers.op_done(
            worker, done.op_id, done.num_ok, now, error=done.error, bad_block=done.bad_block,
            checksums=unpack_checksums(done.checksums) if done.checksums else None,
        )  # fmt: skip

    def looked_up(self, answer: LookedUp, now: float) -> None:
        self._tiers.looked_up(answer.lookup_id, answer.num_present, answer.error, now)
