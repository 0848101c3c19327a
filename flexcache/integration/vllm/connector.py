"""FlexCacheConnectorV1: implements vLLM's KV connector interface, for vLLM 0.28 to 0.33.

Loads run between steps, or layer by layer within one. Puts store a prompt once it is computed, and
generated tokens at intervals and at the end. Set ``kv_load_failure_policy="recompute"``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from flexcache.ids import TierName
from flexcache.integration.vllm.engine import (
    check_no_twin,
    preferred_layout,
    prefers_one_tensor,
    read_layerwise_setting,
    split_layers,
    why_uncached,
)
from flexcache.integration.vllm.groups import GroupHooks, cached_group_ids
from flexcache.integration.vllm.scheduler import (
    FlexCachePromMetrics,
    FlexCacheScheduler,
    FlexCacheStats,
)
from flexcache.integration.vllm.worker import FlexCacheMetadata, FlexCacheWorker, LoadedAdapters
from flexcache.logs import log_event

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)


class FlexCacheConnectorV1(KVConnectorBase_V1, GroupHooks):  # type: ignore[misc]
    """Delegates to the scheduler's or the worker's side; each process has one of them.

    For a model whose KV is of no use, both sides are an `UncachedConnector`.
    """

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        _log_where_vllm_does()
        check_no_twin(vllm_config)
        # Asked before either side exists: the worker's is made first, and would lend no tensors.
        reason = why_uncached(vllm_config, len(cached_group_ids(kv_cache_config)))
        if reason is None:
            return super().__new__(cls)
        if role is KVConnectorRole.SCHEDULER:  # one line for all ranks
            log_event(
                logger, logging.WARNING, "cache_not_used",
                model=vllm_config.model_config.model, reason=reason,
                effect="runs without a cache",
            )  # fmt: skip
        return UncachedConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = FlexCacheScheduler(vllm_config, kv_cache_config)
        else:
            self._worker = FlexCacheWorker(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache is best effort, and no request has to wait for its KV to be stored."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True with loads by layer: a graph of the whole model does not wait for its layers."""
        return read_layerwise_setting(extra_config) == "on"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that FlexCache prefers; vLLM drops it with a warning if a backend does
        not support it."""
        return preferred_layout(vllm_config)

    # -- scheduler -------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler.gets.arrived(request)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.gets.num_matched_tokens(request, num_computed_tokens)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether a load brings the states that vLLM lacks where its full attention's hit ends.
        Asked before vLLM looks a request up."""
        return self._scheduler.gets.completes_hit()

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.take_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        adapters = connector_output.kv_connector_worker_meta
        if isinstance(adapters, LoadedAdapters):
            self._scheduler.adapters_loaded(adapters.digests)
        self._scheduler.transfers_ended(
            connector_output.finished_recving or (), connector_output.invalid_block_ids
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with any number of groups. Called by vLLM 0.32 and later."""
        self._scheduler.finished(request, block_ids)
        return False, None  # a put refers to its blocks by itself

    def has_pending_push_work(self) -> bool:
        """Return whether blocks are pinned: vLLM then steps on, though no request is left."""
        return self._scheduler.puts.is_pinning

    def has_pending_block_frees(self) -> bool:
        """Return whether vLLM waits for pinned blocks instead of preempting."""
        return self._scheduler.puts.is_worth_waiting(time.monotonic())

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return hits by tier. Called by vLLM 0.32 and later."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {
            TierName.CPU: CacheHitSource.HOST,
            TierName.SSD: CacheHitSource.DISK,
            TierName.PEER: CacheHitSource.P2P,
            TierName.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
        }
        sources = self._scheduler.hit_sources(request.request_id)
        return {names[tier]: count for tier, count in sources.items()}

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # -- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether all layers shall be in one tensor. Asked by vLLM before 0.32."""
        return prefers_one_tensor(self._vllm_config)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Register that tensor. Called by vLLM before 0.32 instead of `register_kv_caches`."""
        config = self._vllm_config
        layers = split_layers(kv_cache, attn_backend, config, self._kv_cache_config)
        self._worker.register(layers)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: copies end in `unregister_kv_caches`. Called by vLLM 0.33 and later."""
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin copies while vLLM prepares the inputs of the step, if they may. Called at the
        beginning of a step by vLLM 0.32 and later."""
        metadata = kv_connector_metadata
        if isinstance(metadata, FlexCacheMetadata) and not metadata.begins_late:
            self._worker.begin_step(metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, FlexCacheMetadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.step_loads.before_step()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.step_loads.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: a put covers all layers of blocks that are complete."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are pinned until their put has ended."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the ended loads and those of them that failed. Called by vLLM 0.32 and later."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_adapters()

    # -- both ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FlexCacheStats | None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return None  # one report per engine: the scheduler's side sees every rank
        return self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FlexCacheStats | None:
        return FlexCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> FlexCachePromMetrics:
        return FlexCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        (self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker).shutdown()


def _do_nothing(self: Any, *arguments: Any, **options: Any) -> None: ...


class UncachedConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Stores and loads nothing, for an engine that FlexCache is configured for in vain.

    Any vLLM takes it for one that moves groups: others must have exactly one.
    """

    requires_kv_delivery = False
    update_state_after_alloc = start_load_kv = wait_for_layer_load = _do_nothing
    save_kv_layer = wait_for_save = unregister_kv_caches = restore_kv_caches = _do_nothing

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def _log_where_vllm_does() -> None:
    """Use vLLM's log handlers: it configures only its own logger, so ours would stay silent."""
    ours, vllms = logging.getLogger("flexcache"), logging.getLogger("vllm")
    if vllms.handlers and not ours.handlers:
        ours.handlers = list(vllms.handlers)
        ours.propagate = False
