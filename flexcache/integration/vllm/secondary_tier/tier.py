"""FlexCacheSecondaryTier: SSD and remote store below the DRAM tier of vLLM's OffloadingConnector.

vLLM owns the DRAM tier, a memory region of equal chunks, and decides what goes up and down. The
workers of this tier move whole chunks between that region and SSD or the store; no copy is made on
the way. For vLLM 0.32 and later.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import xxhash
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

from flexcache.config import CacheConfig
from flexcache.ids import BlockKey
from flexcache.integration.identity.checkpoint import identify_adapter
from flexcache.integration.identity.files import FileDigests
from flexcache.integration.vllm.callers import find_caller, locals_of_callers
from flexcache.integration.vllm.secondary_tier.host import TierHost
from flexcache.integration.vllm.secondary_tier.identity import read_chunk_identity
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
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
