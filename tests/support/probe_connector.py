"""FlexCacheConnectorV1 that also records a digest of every block it stores and loads.

Equal tokens do not prove equal KV: attention does not notice two blocks of a prompt that changed
places. With this connector the bytes in vLLM's own paged tensors are compared, layer by layer.

Each rank appends JSON lines to ``$KV_PROBE_DIR/rank-<r>.jsonl``:
``{"event": "stored" | "loaded" | "loaded by layer", "key": <block hash>, "digest": <of all layers'
pages>}``, with ``$KV_PROBE_HEADS`` also ``"heads"``: a digest for each KV head.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from flexcache.integration.vllm.connector import FlexCacheConnectorV1 as _Connector

Pairs = list[tuple[str, int]]  # block hash, GPU block


class ProbeConnector(_Connector):  # type: ignore[misc]
    """The connector whose scheduler side names blocks and whose worker side digests them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._note_puts(self._scheduler._cache)
        self._stored: dict[int, Pairs] = {}
        self._loading: dict[str, Pairs] = {}
        self._by_layer: list[str] = []
        self._num_computed: dict[str, int] = {}
        self._layers: dict[str, torch.Tensor] = {}

    # -- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._num_computed[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and self._scheduler.hit_sources(request.request_id):
            first = self._num_computed[request.request_id] // self._block_size
            last = first + num_external_tokens // self._block_size
            ids = blocks.get_block_ids()[0]
            self._loading[request.request_id] = [
                (request.block_hashes[i].hex(), ids[i]) for i in range(first, last)
            ]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.probe = ([self._stored.pop(task) for task in metadata.stores], self._loading)
        self._loading = {}
        return metadata

    def _note_puts(self, cache: Any) -> None:
        """Keep which block of which key each put will copy."""
        match_put, launch_all = cache.match_put, cache.launch_all
        keys: dict[int, list[str]] = {}

        def noted_match(request: Any, first: int, stop: int, has_tail: bool) -> Any:
            found = match_put(request, first, stop, has_tail)
            if found is not None:
                keys[found[0]] = [request.block_hashes[i].hex() for i in found[1]]
            return found

        def noted_launch_all(blocks: Mapping[int, list[list[int]]], gated: bool = True) -> Any:
            for task_id in blocks.keys() & keys.keys():
                self._stored[task_id] = list(zip(keys[task_id], blocks[task_id][0], strict=True))
            return launch_all(blocks, gated)

        cache.match_put, cache.launch_all = noted_match, noted_launch_all

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        stored, loading = connector_metadata.probe
        for pairs in stored:
            self._write("stored", pairs)
        super().bind_connector_metadata(connector_metadata)
        self._loading.update(loading)
        self._by_layer = [load.request_id for load in connector_metadata.loads if load.promised]

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        bad = self._worker._bad_blocks
        by_layer, self._by_layer = self._by_layer, []
        for request_id in (*(received or ()), *by_layer):
            pairs = self._loading.pop(request_id, [])
            event = "loaded by layer" if request_id in by_layer else "loaded"
            self._write(event, [pair for pair in pairs if pair[1] not in bad])
        return sent, received

    def _write(self, event: str, pairs: Pairs) -> None:
        assert self._worker.client is not None
        path = Path(os.environ["KV_PROBE_DIR"]) / f"rank-{self._worker.client.rank}.jsonl"
        with path.open("a") as file:
            for key, block in pairs:
                row = {"event": event, "key": key, "digest": digest_block(self._layers, block)}
                if os.environ.get("KV_PROBE_HEADS"):  # tensors are [block, head, token, content]
                    num_heads = next(iter(self._layers.values())).shape[1]
                    row["heads"] = [
                        digest_block({n: t[:, head] for n, t in self._layers.items()}, block)
                        for head in range(num_heads)
                    ]
                file.write(json.dumps(row) + "\n")


def digest_block(layers: dict[str, torch.Tensor], block: int) -> str:
    """Return a digest of one GPU block's bytes over all layers."""
    hasher = xxhash.xxh3_128()
    for tensor in layers.values():
        hasher.update(tensor[block].contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def compare_probes(directory: Path) -> dict[str, Any]:
    """Return how many loaded blocks were seen, and which differ from what was stored."""
    result: dict[str, Any] = {"ranks": 0, "loaded": 0, "by_layer": 0, "different": []}
    for path in sorted(directory.glob("rank-*.jsonl")):
        result["ranks"] += 1
        stored: dict[str, set[str]] = defaultdict(set)
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["event"] == "stored":
                stored[row["key"]].add(row["digest"])
                continue
            result["loaded"] += 1
            result["by_layer"] += row["event"] == "loaded by layer"
            if row["digest"] not in stored[row["key"]]:
                result["different"].append((path.stem, row["key"]))
    return result
