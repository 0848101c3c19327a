"""The workers' half of vLLM's KV connector interface, without policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexcache.integration.vllm.kv_layout import prefers_one_tensor, split_layers
from flexcache.integration.vllm.metadata import FlexCacheMetadata
from flexcache.integration.vllm.worker import FlexCacheWorker


class WorkerHooks(KVConnectorBase_V1):  # type: ignore[misc]
    """Hooks that vLLM calls in each worker process, around the model's steps."""

    _worker: FlexCacheWorker

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
