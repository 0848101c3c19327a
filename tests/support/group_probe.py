"""FlexCacheConnectorV1 that also records digests of the blocks of each KV cache group.

As `probe_connector`, for models with groups: a row's key names the group and the tokens up to the
end of the block, its digest covers the group's layers. What belongs to a block is read from vLLM's
description of its memory, not from FlexCache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

from flexcache.integration.vllm.calls import Get
from flexcache.integration.vllm.connector import FlexCacheConnectorV1 as _Connector
from flexcache.integration.vllm.groups import cached_group_ids

Pairs = list[tuple[int, str, int]]  # group, block hash, GPU block


class GroupProbe(_Connector):  # type: ignore[misc]
    """The connector whose scheduler side names blocks and whose worker side digests them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = kv_cache_config
        self._stored: dict[int, Pairs] = {}
        self._loading: dict[str, Pairs] = {}
        if role is KVConnectorRole.SCHEDULER:
            self._note_tasks(self._scheduler._cache)

    # -- scheduler

    def _note_tasks(self, cache: Any) -> None:
        """Keep which block of which group and key each task will copy."""
        match, match_put, launch_all = cache.match, cache.match_put, cache.launch_all
        extents: dict[int, tuple[Any, bool, int, int]] = {}

        def noted_match(request: Any, num_computed: int, num_tokens: int, *terms: Any) -> Any:
            found = match(request, num_computed, num_tokens, *terms)
            if isinstance(found, Get):
                stop = num_computed + found.num_tokens
                extents[found.task_id] = (request, True, num_computed, stop)
            return found

        def noted_match_put(request: Any, first: int, stop: int, has_tail: bool) -> Any:
            found = match_put(request, first, stop, has_tail)
            if found is not None:
                size = cache._block_size
                extents[found[0]] = (request, False, found[1].start * size, stop * size)
            return found

        def noted_launch_all(blocks: Mapping[int, list[list[int]]], gated: bool = True) -> Any:
            for task_id, of_task in blocks.items():
                request, is_get, start, stop = extents[task_id]  # again if others are refused
                pairs = self._pairs(request, of_task, start, stop)
                if is_get:
                    self._loading[request.request_id] = pairs
                else:
                    self._stored[task_id] = pairs
            return launch_all(blocks, gated)

        cache.match, cache.match_put = noted_match, noted_match_put
        cache.launch_all = noted_launch_all

    def _pairs(self, request: Any, blocks: list[list[int]], start: int, stop: int) -> Pairs:
        """Name the blocks of a task over tokens ``[start, stop)``, except those not wanted."""
        pairs: Pairs = []
        hash_size = self._config.hash_block_size
        for number, of_group in zip(cached_group_ids(self._config), blocks, strict=True):
            size = self._config.kv_cache_groups[number].kv_cache_spec.block_size
            last = stop // size  # a dense group has its blocks from `start` on, others their last
            for index, block in zip(range(last - len(of_group), last), of_group, strict=True):
                key = request.block_hashes[(index + 1) * size // hash_size - 1]
                if block >= 0:
                    pairs.append((number, key.hex(), block))
        return pairs

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.probe = ([self._stored.pop(task) for task in metadata.stores], self._loading)
        self._loading = {}
        return metadata

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = read_layers(self._config, kv_caches)
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        stored, loading = connector_metadata.probe
        for pairs in stored:
            self._write("stored", pairs)
        super().bind_connector_metadata(connector_metadata)
        self._loading.update(loading)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        for request_id in received or ():
            pairs = self._loading.pop(request_id, [])
            if request_id not in self._worker._failed:
                self._write("loaded", pairs)
        return sent, received

    def _write(self, event: str, pairs: Pairs) -> None:
        assert self._worker.client is not None
        path = Path(os.environ["KV_PROBE_DIR"]) / f"rank-{self._worker.client.rank}.jsonl"
        with path.open("a") as file:
            for group, key, block in pairs:
                for number, layer in enumerate(self._layers[group]):
                    digest = xxhash.xxh3_128_hexdigest(layer[block].numpy())
                    name = f"{key[:24]}/{group}/{number}"
                    row = {"event": event, "key": name, "digest": digest}
                    file.write(json.dumps(row) + "\n")


def read_layers(config: Any, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the layers' memory for each group, as bytes: (GPU block, bytes that it uses)."""
    places: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            if name not in kv_caches:
                continue
            raw = torch.empty(0, dtype=torch.int8).set_(kv_caches[name].untyped_storage())
            offset = tensor.offset + number * tensor.layer_stride
            places[name] = raw.as_strided(
                (config.num_blocks, tensor.block_stride), (tensor.block_stride, 1), offset
            )
    groups = []
    for group in config.kv_cache_groups:
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        is_padded = isinstance(spec, MambaSpec)
        used = spec.state_content_size_bytes if is_padded else spec.unpadded_page_size_bytes
        groups.append([places[name][:, :used] for name in group.layer_names if name in places])
    return groups
