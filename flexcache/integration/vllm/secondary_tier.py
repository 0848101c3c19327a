"""Secondary tier of vLLM's OffloadingConnector: SSD and remote store below vLLM's own DRAM tier.

vLLM owns the DRAM tier, a memory region of equal chunks, and decides what goes up and down. The
workers of this tier move whole chunks between that region and SSD or the store; no copy is made on
the way. For vLLM 0.32 and later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash
import zmq
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from flexcache.cache.restore import Restoration
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import REMEMBERED_BLOCKS, CacheSizes
from flexcache.config import CacheConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.integration.checkpoint import identify_adapter, identify_now
from flexcache.integration.file_digests import FileDigests
from flexcache.integration.vllm.chunk_tiers import ChunkTiers, Lane, StorePresence
from flexcache.integration.vllm.engine import (
    find_caller,
    locals_of_callers,
    read_key_namespace,
    why_uncached,
)
from flexcache.integration.vllm.groups import refuse_hisparse
from flexcache.integration.vllm.weights import read_model_id
from flexcache.logs import log_event
from flexcache.processes import end_context
from flexcache.protocol.endpoints import EndpointLock, private_endpoint
from flexcache.server.outbox import WorkerInstruction
from flexcache.server.reactor import Reactor
from flexcache.server.store import CacheStore, other_layout
from flexcache.server.workers import WorkerPool
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.remote import check_packages
from flexcache.storage.shards import KVIdentity, Shards
from flexcache.storage.slot_index import Records
from flexcache.tasks.executors import SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_REPLACE_AFTER_S = 1.0
_STOP_TIMEOUT_S = 5.0
_LOADED = "vllm:kv_offload_flexcache_loaded_chunks"
_DROPPED = "vllm:kv_offload_flexcache_dropped_chunks"
_METRICS = {
    _LOADED: OffloadingCounterMetadata("Chunks loaded into vLLM's DRAM tier.", ("worker",)),
    _DROPPED: OffloadingCounterMetadata("Chunks that were not stored.", ("reason",)),
}
_KEEP_WEIGHTS = {
    "compute_weight_checksums", "get_model_inspection", "init_weight_transfer_engine",
    "release_late_interaction_query_cache", "shutdown_weight_transfer_engine",
    "synchronize_device", "update_max_model_len",
}  # fmt: skip
"""Calls of vLLM's to its workers that leave the weights alone. Any other may be an update: what
worker extensions call theirs is not known."""
_RESULTS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


def read_chunk_identity(spec: Any, chunk_bytes: int, settings: CacheConfig) -> KVIdentity:
    """Return the identity of an engine's chunks. Must be called while its connector is constructed.

    vLLM's offloading config names the model but not its revision, quantization and the like.

    Raises:
        ConfigError: The model's KV is of no use to another request, or kept by HiSparse.
    """
    vllm_config = _find_vllm_config()
    refuse_hisparse(vllm_config)
    reason = why_uncached(vllm_config, len(spec.config.groups))
    if reason is not None:  # vLLM does not ask, and would serve the second request of a prompt so
        raise ConfigError(
            f"OffloadingConnector cannot serve {vllm_config.model_config.model}: {reason}; run "
            "without the connector"
        )
    model_id, settings = identify_now(partial(read_model_id, vllm_config), settings)
    parts = [model_id, *read_key_namespace(vllm_config)]
    if settings.model_version is not None:
        parts.append(settings.model_version)
    model = "|".join(parts)
    config, parallel = spec.config, spec.config.parallel
    groups = [
        (group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups
    ]
    ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    layout = "; ".join(
        [
            f"{chunk_bytes} bytes, {config.cache.blocks_per_chunk} blocks of {groups}",
            f"ranks {ranks}, {config.model.dtype}, {config.kv_cache_layout}",
            f"canonical {config.canonical_layout}, replicated {config.replicated_layout}",
        ]
    )
    return KVIdentity.of(f"{model}; offloaded by vLLM", layout)


def _find_vllm_config() -> VllmConfig:
    """Return the engine's config, which only the connector under construction has.

    What vLLM hands to a tier names the model, but not its revision, quantization or overrides: two
    checkpoints of one name would share chunks.
    """
    for names in locals_of_callers():
        for found in names.values():
            if isinstance(found, VllmConfig):
                return found
    raise ConfigError("the model cannot be identified: this vLLM constructs its tiers otherwise")


class TierHost:
    """Runs the tiers below a DRAM cache in existing memory.

    vLLM's scheduler calls under a lock and never waits; the thread carries out what follows.

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
        self._pool = WorkerPool(self._reactor, self.tiers)
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
        end_context(self._context)
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
                self.tiers.worker_down(worker, "the tier has ended", time.monotonic())
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
                root, REMEMBERED_BLOCKS, config.remote_lookup_timeout_s, self._instructions
            )
        if ssd is None and presence is None:
            raise ConfigError(
                "no tier below DRAM: set ssd_cache_gb and ssd_cache_dirs, or remote_url"
            )
        checksums = SlotChecksums(num_slots)
        if ssd is not None and self._store.disk_pool is not None:
            records = self._store.load_slots()
            _restore(ssd, checksums, self._store.disk_pool, records, identity, config)
        store_timeout_s = config.remote_timeout_s + _REPLACE_AFTER_S
        lanes = [
            Lane(worker, timeout_s, memory.stride, checksums, self._instructions)
            for worker, timeout_s in ((DISK, config.op_timeout_s), (REMOTE, store_timeout_s))
        ]
        max_storing = max(1, memory.num_blocks // 2)
        return ChunkTiers(root, ssd, presence, lanes, checksums, max_storing)


def _refuse_limits(config: CacheConfig) -> None:
    for name in ("ssd_write_mb_s", "remote_write_mb_s", "retention_s", "quotas", "store_shards"):
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
    report = Restoration(ssd, records).report
    if report.num_restored:
        log_event(logger, logging.INFO, "ssd_restored", blocks=report.num_restored)


class FlexCacheSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """One entry of ``secondary_tiers``, with the fields of `CacheConfig` beside vLLM's own.

    Called on the scheduler's thread; nothing here waits for I/O but `drain_jobs` and `shutdown`.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        num_chunks, chunk_bytes = primary_kv_view.shape or (0, 0)
        config = CacheConfig.from_env(
            None, {}, "secondary_tiers", **settings, num_cpu_blocks=num_chunks
        )
        memory = HostSegment(os.dup(offloading_spec._scheduler_mmap.fd), chunk_bytes, num_chunks)
        identity = read_chunk_identity(offloading_spec, chunk_bytes, config)
        self._host = TierHost(config, memory, identity, offloading_spec.config.engine_id)
        self._host.start()
        if not self._host.wait_ready(_READY_TIMEOUT_S):
            log_event(logger, logging.WARNING, "workers_late", waited_s=_READY_TIMEOUT_S)
        self._reported = {_LOADED: Counter[str](), _DROPPED: Counter[str]()}
        self._loads: dict[int, dict[BlockKey, bytes]] = {}
        """Chunks of each open promotion, and vLLM's keys of them."""
        self._refused: list[JobResult] = []
        self._digests = FileDigests(waits=False)
        self._epoch = b""
        """Keeps apart what was stored since vLLM was reset, or since a call that may have updated
        its weights. Random: what is stored then is of no use to other engines and later runs."""
        self._watch_updates()

    @property
    def host(self) -> TierHost:
        """The tier's thread, workers and files."""
        return self._host

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        suffix = _suffix(req_context)
        if suffix is None:
            return LookupResult.MISS
        # Windows are looked up from their end, so each group asks by itself.
        asker = f"{req_context.req_id}/{get_offload_group_idx(key)}"
        with self._host.use() as tiers:
            return _RESULTS[tiers.look_up(asker, self._name(key, suffix), time.monotonic())]

    def submit_store(self, job_metadata: TransferJob) -> None:
        job, suffix = job_metadata, _suffix(job_metadata.req_context)
        if suffix is None:
            self._refused.append(JobResult(job_id=job.job_id, success=False))
            return
        keys = [self._name(key, suffix) for key in job.keys]
        with self._host.use() as tiers:
            tiers.store(job.job_id, keys, job.chunk_ids.tolist(), time.monotonic())

    def submit_load(self, job_metadata: TransferJob) -> None:
        job, suffix = job_metadata, _suffix(job_metadata.req_context) or b""
        named = {self._name(key, suffix): key for key in job.keys}
        self._loads[job.job_id] = named
        with self._host.use() as tiers:
            tiers.load(job.job_id, list(named), job.chunk_ids.tolist(), time.monotonic())

    def _name(self, key: bytes, suffix: bytes) -> BlockKey:
        suffix += self._epoch
        return BlockKey(xxhash.xxh3_128_digest(bytes(key) + suffix) if suffix else bytes(key))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._host.use() as tiers:
            ended = tiers.take_ended()
        results, self._refused = self._refused, []
        for end in ended:
            named = self._loads.pop(end.job_id, None)
            is_load = named is not None
            moved = [named[key] for key in end.moved] if named is not None else []
            results.append(
                JobResult(
                    job_id=end.job_id,
                    success=end.is_whole,
                    successful_keys=moved if is_load and not end.is_whole else None,
                    transfer_time=end.seconds,
                    transfer_bytes=len(end.moved) * self.block_size_bytes if is_load else None,
                )
            )
        return results

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Do nothing: a look-up has counted as a use."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note the request's adapter, whose name and path alone are in vLLM's keys."""
        req_context.set_state(_Adapter(self._find_adapter(req_context.req_id)))
        return RequestOffloadingContext()

    def _find_adapter(self, req_id: str) -> bytes | None:
        """Return what tells a request's adapter apart: nothing without one, None if unknown.

        This side cannot see which adapters the ranks have loaded. So one that changed since the
        engine's process began is unknown.
        """
        for names in locals_of_callers():
            request = names.get("request")
            if getattr(request, "request_id", None) == req_id:
                break
        else:
            return None
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        digest = identify_adapter(adapter.lora_path, self._digests)
        return None if digest is None else digest.encode()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self._host.use() as tiers:
            tiers.step_ended(time.monotonic())

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return dict(_METRICS)

    def get_stats(self) -> OffloadingConnectorStats:
        """Return what has happened since the last call."""
        with self._host.use() as tiers:
            counts = {_LOADED: Counter(tiers.hits), _DROPPED: Counter(tiers.dropped)}
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            for label, gain in (count - self._reported[name]).items():
                stats.increase_counter(name, gain, labelvalues=(label,))
        self._reported = counts
        return stats

    def drain_jobs(self) -> None:
        """Wait for open jobs: vLLM's own tier is reset. The weights may have changed."""
        self._host.wait_idle()
        self._epoch = os.urandom(16)

    def _watch_updates(self) -> None:
        """Have updates of the weights begin another epoch. vLLM tells its tiers only of a reset,
        which it does not need to go on: KV of new weights would be kept as that of the old ones.

        The engine core is constructing its scheduler now; this side cannot see the workers.
        """
        core = find_caller("model_executor", "collective_rpc")
        if core is None:
            log_event(
                logger, logging.WARNING, "weights_unwatched",
                reason="this vLLM constructs its tiers otherwise",
                remedy="after each update of the weights reset vLLM's cache with reset_connector",
            )  # fmt: skip
            return
        call = core.collective_rpc

        def watched(method: Any, *arguments: Any, **options: Any) -> Any:
            if method not in _KEEP_WEIGHTS:
                self._epoch = os.urandom(16)
            return call(method, *arguments, **options)

        core.collective_rpc = watched

    def shutdown(self) -> None:
        self._host.close()


@dataclass(frozen=True)
class _Adapter:
    """The state of a request here: what tells its adapter apart, None if nothing does."""

    suffix: bytes | None


def _suffix(req_context: ReqContext) -> bytes | None:
    state = req_context.get_state(_Adapter)
    return None if state is None else state.suffix
